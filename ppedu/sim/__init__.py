"""Simulation: when everything happens. A schedule and costs come in; a timeline, and reasons for its length, come out.

Read it in this order: costs, clock, simulate, timeline, links, steps, why, reorder. `fit` gets costs from timelines,
and `partition` divides layers into stages.
"""
