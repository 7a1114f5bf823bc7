"""The names for programs on real processes, `pp.run`: from `ppedu.engine` and from the course."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppedu.core import PipelineError

if TYPE_CHECKING:
    from ppedu.course.training.train import TrainConfig, TrainResult, train_gpt
    from ppedu.engine.stages.checkpoint import Checkpoints

try:
    from ppedu.course.by_hand.bugs import MUSEUM
    from ppedu.course.by_hand.loops import LOOPS, gpipe_step, measured, naive_step, one_f_one_b_step
    from ppedu.course.by_hand.pointer import Pending, PipelineBlock, TensorPointer, pointer_step
    from ppedu.course.by_hand.tiny import run_schedule
    from ppedu.course.training.gpt import GPT, GPTConfig, next_token_loss
    from ppedu.engine.basis_rotation import BasisRotation
    from ppedu.engine.batch import Batching
    from ppedu.engine.clock import latency
    from ppedu.engine.emulate import Emulation, emulate
    from ppedu.engine.error_feedback import error_feedback
    from ppedu.engine.interpreter import Step
    from ppedu.engine.memory import Memory
    from ppedu.engine.pipeline import Pipeline
    from ppedu.engine.post_validation import PostValidation
    from ppedu.engine.precision import LossScale, MasterWeights
    from ppedu.engine.ranks.comm import PipelineGroup, bidirectional_communicate, communicate, place
    from ppedu.engine.recording.record import record
    from ppedu.engine.stages.cut import cut
    from ppedu.engine.stages.head import SharedHead
    from ppedu.engine.stages.local import local_stages
    from ppedu.engine.stages.past import Past
    from ppedu.engine.stages.stage import Stage
    from ppedu.engine.torchs import to_torch, verified
except ModuleNotFoundError as error:
    if error.name in ("torch", "numpy"):
        raise PipelineError(
            f"ppedu.run needs {error.name}: pip install 'ppedu[run]' (in a clone: make lab, then .venv/bin/python)"
        ) from error
    raise

__all__ = ["Batching", "Pipeline", "PipelineGroup", "Stage", "Step", "cut", "local_stages", "place", "run_schedule"]
__all__ += ["LOOPS", "bidirectional_communicate", "communicate", "gpipe_step", "measured", "naive_step"]
__all__ += ["Emulation", "LossScale", "MasterWeights", "Memory", "Past", "PostValidation", "emulate", "latency"]
__all__ += ["GPT", "Checkpoints", "GPTConfig", "TrainConfig", "TrainResult", "next_token_loss", "train_gpt"]
__all__ += ["MUSEUM", "Pending", "PipelineBlock", "TensorPointer", "one_f_one_b_step", "pointer_step", "record"]
__all__ += ["BasisRotation", "SharedHead", "error_feedback", "to_torch", "verified"]

# Imported when first used, because the parts of torch that `checkpoint` imports take a second to load.
LAZY = dict.fromkeys(["TrainConfig", "TrainResult", "train_gpt"], "ppedu.course.training.train")
LAZY |= {"Checkpoints": "ppedu.engine.stages.checkpoint"}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module 'ppedu.run' has no attribute {name!r}")
