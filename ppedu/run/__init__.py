"""The schedule on real processes, with torch.distributed. May import core, zoo and torch.

Read it in this order: comm (60 lines of messages), stage (a piece of a model), loops (the training steps written out
by hand), pointer (the same, nanotron's way), bugs (the same, each wrong in one thing); engine, which runs any schedule,
with backward (one in two halves), batch, messages, gradients, sharded and clock; emulate (the same with sleep in place
of work); gpt and data (what is trained), train and checkpoint (the whole thing).
"""

from typing import Any

from ppedu.core.errors import PipelineError

try:
    from ppedu.run.bugs import MUSEUM
    from ppedu.run.comm import PipelineGroup, bidirectional_communicate, communicate, place
    from ppedu.run.emulate import Emulation, emulate
    from ppedu.run.engine import Pipeline, Step, local_stages
    from ppedu.run.gpt import GPT, GPTConfig, next_token_loss
    from ppedu.run.loops import LOOPS, gpipe_step, measured, naive_step, one_f_one_b_step
    from ppedu.run.pointer import Pending, PipelineBlock, TensorPointer, pointer_step
    from ppedu.run.stage import Stage
except ModuleNotFoundError as error:
    if error.name in ("torch", "numpy", "tqdm"):
        raise PipelineError(
            f"ppedu.run needs {error.name}: pip install 'ppedu[run]' (in a clone: make lab, then .venv/bin/python)"
        ) from error
    raise

__all__ = [
    "GPT",
    "LOOPS",
    "MUSEUM",
    "Checkpoints",
    "Emulation",
    "GPTConfig",
    "Pending",
    "Pipeline",
    "PipelineBlock",
    "PipelineGroup",
    "Stage",
    "Step",
    "TensorPointer",
    "TrainConfig",
    "TrainResult",
    "bidirectional_communicate",
    "communicate",
    "emulate",
    "gpipe_step",
    "local_stages",
    "measured",
    "naive_step",
    "next_token_loss",
    "one_f_one_b_step",
    "place",
    "pointer_step",
    "train_gpt",
]


def __getattr__(name: str) -> Any:
    # Not imported above: `python -m ppedu.run.train` must find that module fresh.
    if name in ("TrainConfig", "TrainResult", "train_gpt"):
        from ppedu.run import train

        return getattr(train, name)
    if name == "Checkpoints":  # what it needs of torch takes a second to load
        from ppedu.run.checkpoint import Checkpoints

        return Checkpoints
    raise AttributeError(f"module 'ppedu.run' has no attribute {name!r}")
