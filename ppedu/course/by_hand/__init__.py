"""Training steps written by hand, to be read before the engine: a schedule and stages come in, gradients come out.

`loops` has three schedules, `tiny` runs any of them in fifty lines, and `try_tiny` tests it. `pointer` has the steps of
`loops` in the style of nanotron. `bugs` is a museum of steps with typical mistakes.
"""
