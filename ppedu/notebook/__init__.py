"""The notebook side of ppedu: `%%torchrun`, the rank pool behind it, predictions and exercises for the lessons.

Reading order: rank (what a rank does), launcher, zygote and agent (the processes that start ranks), environment and
resources, hang and failure (error messages), pool (the owner's side); exchange and figures (values and pictures),
screen, output, jobs, part_cell and magic (the cell); hosts (ranks on other machines); rehearsal and stepper (simulated
ranks), exercises, project (the lessons' model and cluster), fits, graph, memory and menu (pictures and controls of the
lessons). May import every package but `cli`.
"""

from ppedu.notebook.certificates import certificate
from ppedu.notebook.exercises import check_answer, hint, is_right, outcome, predict, predictions, progress, record
from ppedu.notebook.exercises.finale import finale
from ppedu.notebook.fits import what_fits
from ppedu.notebook.pool import RankPool
from ppedu.notebook.project import heron
from ppedu.notebook.rehearsal import rehearse

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
