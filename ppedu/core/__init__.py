"""Schedules: actions, placement and orders; whether they are legal; how long they take.

The lowest layer. It imports the standard library only, so that it loads in milliseconds and runs wherever Python runs.
Read it in this order: actions, placement, dependencies, problems, schedule, costs, timeline, simulate, lower, why.
"""
