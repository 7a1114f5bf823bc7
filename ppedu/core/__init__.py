"""What a schedule is: actions, placement, orders; whether it is legal; how long it takes.

The ground floor. It imports the standard library and nothing else, so that it loads in milliseconds
and runs wherever Python runs. Read it in this order: actions, placement, schedule, check, simulate,
timeline; then, for the puzzle, board and levels.
"""
