"""Run a schedule on real processes, with torch.distributed. May import core, zoo and torch.

Read the modules in this order:

    comm                      messages between neighboring ranks
    stage, split_backward     a piece of the model; its backward in two halves
    loops                     the training step of three schedules, written out by hand
    tiny                      any schedule, in fifty lines
    pipeline, interpreter, control    any schedule, with all that real training needs: the public class, the loop over
                              the actions, and what ranks agree on. program, batch, messages, gradients, sharded,
                              results, clock and post_validation are its parts
    emulate                   a pipeline whose stages sleep instead of computing
    memory                    the bytes that a rank holds, measured
    precision                 mixed precision: a scale for losses, fp32 copies of weights
    gpt, data, train, checkpoint      the toy model, its text, and a training run that can be resumed
    cut                       stages from a whole model
    parity                    how far a pipeline is from the whole model in one process
    pointer                   the steps of loops, in the style of nanotron
    museum, bugs              a museum of steps with typical mistakes
"""

from importlib import import_module
from typing import Any

from ppedu.core.errors import PipelineError

try:
    from ppedu.run.batch import Batching
    from ppedu.run.bugs import MUSEUM
    from ppedu.run.clock import latency
    from ppedu.run.comm import PipelineGroup, bidirectional_communicate, communicate, place
    from ppedu.run.cut import cut
    from ppedu.run.emulate import Emulation, emulate
    from ppedu.run.gpt import GPT, GPTConfig, next_token_loss
    from ppedu.run.interpreter import Step
    from ppedu.run.loops import LOOPS, gpipe_step, measured, naive_step, one_f_one_b_step
    from ppedu.run.memory import Memory
    from ppedu.run.pipeline import Pipeline
    from ppedu.run.pointer import Pending, PipelineBlock, TensorPointer, pointer_step
    from ppedu.run.post_validation import PostValidation
    from ppedu.run.precision import LossScale, MasterWeights
    from ppedu.run.stage import Stage, local_stages
    from ppedu.run.tiny import run_schedule
except ModuleNotFoundError as error:
    if error.name in ("torch", "numpy"):
        raise PipelineError(
            f"ppedu.run needs {error.name}: pip install 'ppedu[run]' (in a clone: make lab, then .venv/bin/python)"
        ) from error
    raise

__all__ = ["Batching", "Pipeline", "PipelineGroup", "Stage", "Step", "cut", "local_stages", "place", "run_schedule"]
__all__ += ["LOOPS", "bidirectional_communicate", "communicate", "gpipe_step", "naive_step", "one_f_one_b_step"]
__all__ += ["Emulation", "LossScale", "MasterWeights", "Memory", "PostValidation", "emulate", "latency", "measured"]
__all__ += ["GPT", "Checkpoints", "GPTConfig", "TrainConfig", "TrainResult", "next_token_loss", "train_gpt"]
__all__ += ["MUSEUM", "Pending", "PipelineBlock", "TensorPointer", "pointer_step"]

# Imported on access, by module: `python -m ppedu.run.train` warns if its module has been imported before it runs, and
# the parts of torch that `checkpoint` imports take a second to load.
LAZY = {"TrainConfig": "train", "TrainResult": "train", "train_gpt": "train", "Checkpoints": "checkpoint"}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(f"ppedu.run.{LAZY[name]}"), name)
    raise AttributeError(f"module 'ppedu.run' has no attribute {name!r}")
