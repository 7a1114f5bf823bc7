"""What a notebook adds: `%%torchrun`, the pool of ranks behind it, predictions and exercises for the lessons.

The top floor: it may import everything below. Reading order: zygote (the process that ranks are forked
from), pool (starts them and listens to them), magic (the cell), exercises.
"""

from ppedu.notebook.exercises import check_answer, outcome, predict
from ppedu.notebook.pool import RankPool

__all__ = ["RankPool", "check_answer", "outcome", "predict"]
