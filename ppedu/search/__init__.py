"""Search: the best schedule for a size, by constraint solving, and how far a schedule is from it.

Searching needs OR-tools: `pip install "ppedu[search]"`. The atlas of small sizes does not.
"""

from ppedu.search.atlas import Entry, atlas
from ppedu.search.frontier import Frontier, frontier
from ppedu.search.optimal import Found, optimal
from ppedu.search.steady import Pattern, steady

__all__ = ["Entry", "Found", "Frontier", "Pattern", "atlas", "frontier", "optimal", "steady"]
