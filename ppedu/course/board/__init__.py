"""The puzzle: a board on which a schedule is made by hand, its levels, and the widget that shows them.

Actions come in, one by one; a schedule and stars go out.
"""
