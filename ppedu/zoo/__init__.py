"""Published schedules, each a generator that yields one rank's compute actions in order.

A generator has the signature `(rank, ranks, microbatches, **options)`. It yields neither idle steps nor messages: idle
time appears in the simulation, and lowering adds the messages. Its docstring tells what to look for in a timeline, and
uses the letters of the papers for times: F is a forward, B a full backward, and I and W its two halves, for the inputs
and for the weights. The option `chunks` is the number of stages on each rank. The package imports `core` and `sim`.
"""

from importlib import import_module

from ppedu.zoo.facts import Facts
from ppedu.zoo.registry import register, require_even, schedule, schedules

__all__ = ["Facts", "register", "require_even", "schedule", "schedules"]

# Each family registers its schedules when imported; `schedules` lists them in this order, from the simplest on.
FAMILIES = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zero_bubble",
    "v_shaped",
    "hanayo",
    "overlap",
    "dualpipe",
    "chimera",
    "sliced",
    "mario",
    "offload",
    "asynchronous",
    "vocabulary",
    "roundpipe",
)
for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
