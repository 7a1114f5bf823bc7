"""What a notebook adds: `%%torchrun`, the pool of ranks behind it, predictions and exercises for the lessons.

The top floor: it may import everything below. Reading order: rank (what a rank does), waits (who waits for whom),
zygote and agent (the processes that start ranks), pool (asks them to, and listens), exchange and figures (what goes in
and comes back), output (what is shown), magic (the cell), rehearsal (ranks that only play), exercises.
"""

from ppedu.notebook.exercises import check_answer, is_right, outcome, predict, progress
from ppedu.notebook.pool import RankPool
from ppedu.notebook.rehearsal import rehearse

__all__ = ["RankPool", "check_answer", "is_right", "outcome", "predict", "progress", "rehearse"]
