"""Planning: a model, a machine and a batch come in; the fastest schedule, partition and number of microbatches go out.

`model`, `machine` and `question` hold what is given, `pieces` and `memory` what it costs. `planner` tries the choices,
and `plan` is the result. Needs the standard library only.
"""
