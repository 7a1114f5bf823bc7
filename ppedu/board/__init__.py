"""The puzzle: a board on which a schedule is made by hand, and its levels.

The package imports `ppedu.core` and `ppedu.zoo` only. The widget that shows a board is `ppedu.view.puzzle`.
"""
