"""The matplotlib backend of ranks: `plt.show()` shows a figure in the notebook, below the output that precedes it.

As in a notebook, figures that are still open at the end of the program are shown then.
"""

import atexit
import io
import os
from itertools import count
from pathlib import Path
from typing import Any

from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from ppedu.launch.exchange import FIGURE, FOLDER, own_number, write_private
from ppedu.view.theme import use_notebook_colors

__all__ = ["FigureCanvas", "show"]

_numbers = count()
use_notebook_colors()


def show(*_: Any, **__: Any) -> None:
    """Save all open figures in the run's folder, print the lines that make the notebook show them, and close them."""
    for manager in Gcf.get_all_fig_managers():
        name = f"{own_number()}-{next(_numbers)}.png"
        picture = io.BytesIO()
        manager.canvas.figure.savefig(picture, format="png", bbox_inches="tight")
        write_private(Path(os.environ[FOLDER], name), picture.getvalue())
        print(FIGURE.format(name), flush=True)
    Gcf.destroy_all()


atexit.register(show)
