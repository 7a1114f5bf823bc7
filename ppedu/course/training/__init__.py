"""A toy GPT and its training: settings come in; losses, a timeline and a checkpoint come out.

`gpt` is the model, `data` its text, `train` the run, `report` its figures, and `parity` tells how far a pipeline is
from the whole model in one process.
"""
