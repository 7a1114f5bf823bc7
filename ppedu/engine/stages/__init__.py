"""A rank's pieces of the model: a module comes in, and stages that run forwards and backwards come out.

`stage` runs them, `split_backward` runs a backward in two halves, and `watch` sees changes in place. `local` are the
stages of a rank. `cut` makes stages of a whole model, `count` counts its FLOPs and bytes, and `checkpoint` saves and
loads them, in a `folder`.
"""
