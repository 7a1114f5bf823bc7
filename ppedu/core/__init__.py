"""Schedules: their actions, placement and orders; whether they are legal; the messages that they need.

Orders come in, as objects or as CSV, and a checked and lowered schedule goes out. The lowest layer: it imports the
standard library only, so that it loads in milliseconds and runs wherever Python runs. Read it in this order: actions,
placement, dependencies, problems, schedule, check, lower, grid, streams.
"""
