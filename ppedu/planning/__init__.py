"""Planning: a model, a machine and a batch come in; the fastest schedule, partition and number of microbatches go out.

`model`, `machine` and `question` hold what is given; `work` turns sizes into `pieces`, `slices` into those of parts of
sequences, and `partition` divides them among ranks, `offload` with activations on the host. `planner` tries the
choices, and `plan` is the result. The package needs the standard library only.
"""
