"""The names for lessons and notebooks, `pp.notebook`: predictions, exercises, and the pool of ranks."""

from ppedu.course.certificates import certificate
from ppedu.course.exercises import check_answer, hint, is_right, outcome, predict, predictions, progress, record
from ppedu.course.exercises.finale import finale
from ppedu.course.fits import what_fits
from ppedu.course.project import heron
from ppedu.course.rehearsal import rehearse
from ppedu.launch.pool import RankPool

__all__ = [
    "RankPool",
    "certificate",
    "check_answer",
    "finale",
    "heron",
    "hint",
    "is_right",
    "outcome",
    "predict",
    "predictions",
    "progress",
    "record",
    "rehearse",
    "what_fits",
]
