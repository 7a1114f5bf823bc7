"""Simulation: when everything happens. A schedule and costs come in; a timeline, and reasons for its length, come out.

Read it in this order: costs, lengths, clock, simulation, versions, timeline, steps, why, reorder. `fit` gets costs from
timelines, `braid` the time of a pair from its parts. `partition` divides layers into stages, `microbatches` sequences
into microbatches, `prefill` is for inference, `verify` for continuous integration, and `shrink` explains what it
rejects.
"""

from ppedu.sim.costs import Costs, require_costs
from ppedu.sim.held import Versions, versions
from ppedu.sim.rows import Span
from ppedu.sim.simulation import simulate, simulate_partial
from ppedu.sim.timeline import Gap, Timeline

__all__ = ["Costs", "Gap", "Span", "Timeline", "Versions"]
__all__ += ["require_costs", "simulate", "simulate_partial", "versions"]
