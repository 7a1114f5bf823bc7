"""A backward in two halves: I, for the inputs, which another rank waits for, and W, for the weights, at any time.

Autograd knows one backward, for everything. Here is how it comes apart. The graph of a stage has a main path, the
nodes between its outputs and its inputs, and off it the weights. Where a weight joins the path stands a node with
two sides, a matrix product for instance, whose backward is two products: one for its input, one for its weight.

I runs along the main path and asks each such node for the one side only, and keeps the gradient that came to it
(autograd computes just what it is asked for). W goes back to each node with that gradient and asks for the other.
Nothing is computed twice, and the results are those of a full backward to the last bit.

The idea of running autograd twice with a gradient caught at the joint is that of the Zero Bubble paper (arXiv
2401.10241, §5) as torch.distributed.pipelining carries it out; what is kept, and when it is not safe to wait, is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = Sequence[torch.Tensor | None]
Joint = tuple[Node, list[GradientEdge]]  # a node of the main path, and its edges to the weights


def backward_input(
    outputs: Sequence[GradientEdge], grads: Grads, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """The gradients of `inputs`, and what is left to do: to be called once, it adds the weights' gradients to `.grad`.

    outputs: the edges at which `grads`, the gradients of what a stage has computed, enter its graph.
    inputs: leaves that require grad. With none there is nothing that anybody waits for, and all is left for later.

    A weight's gradient is computed at once, and only added later, where waiting would mean computing something again:
    the weight joins the path in several places, its joint is somebody's own autograd function, or the joint's
    saved tensors are made when asked for (a checkpointed block, which so is run again once).
    """
    if not outputs:  # wholly frozen, and of what comes in nothing goes out
        return [torch.zeros_like(x) for x in inputs], lambda: None
    if not inputs:
        return [], partial(torch.autograd.backward, list(outputs), list(grads))
    edges = [get_gradient_edge(x) for x in inputs]
    joints, at_once, reentrant = _joints([edge.node for edge in outputs], [edge.node for edge in edges])
    if reentrant:  # torch.utils.checkpoint(use_reentrant=True) runs in a whole backward only
        torch.autograd.backward(list(outputs), list(grads))
        return [taken(x) for x in inputs], lambda: None

    caught: list[tuple[Joint, Grads]] = []
    hooks = [joint[0].register_prehook(partial(_catch, caught, joint)) for joint in joints]
    try:
        found = torch.autograd.grad(
            list(outputs), [*edges, *at_once], list(grads), retain_graph=bool(joints), allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    own, weights = found[: len(inputs)], found[len(inputs) :]
    known = [(edge, grad) for edge, grad in zip(at_once, weights, strict=True) if grad is not None]
    return (
        [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, own, strict=True)],
        partial(_backward_weight, caught, known),
    )


def _backward_weight(caught: list[tuple[Joint, Grads]], known: list[tuple[GradientEdge, torch.Tensor]]) -> None:
    """The other side of each joint; then from there to the weights themselves, all together, as autograd adds them."""
    while caught:
        (node, edges), grads = caught.pop(0)
        enter = [(GradientEdge(node, place), grad) for place, grad in enumerate(grads) if grad is not None]
        if enter:
            roots, values = zip(*enter, strict=True)
            found = torch.autograd.grad(roots, edges, values, allow_unused=True)
            known += [(edge, grad) for edge, grad in zip(edges, found, strict=True) if grad is not None]
    if known:
        roots, values = zip(*known, strict=True)
        torch.autograd.backward(roots, values)


def _catch(caught: list[tuple[Joint, Grads]], joint: Joint, grads: Grads) -> None:
    caught.append((joint, grads))


def _joints(outputs: list[Node], inputs: list[Node]) -> tuple[list[Joint], list[GradientEdge], bool]:
    """Where the weights join the path from `outputs` to `inputs`: the joints, and the weights that cannot wait.

    Last: is there a reentrant checkpoint on the way?
    """
    users: defaultdict[Node, set[Node]] = defaultdict(set)

    def onward(node: Node) -> list[Node]:
        found = [other for other, _ in node.next_functions if other is not None]
        for other in found:
            users[other].add(node)
        return found

    seen = _reached(outputs, onward)
    path = _reached([node for node in inputs if node in seen], lambda node: users[node])
    beside = seen - path

    sides: defaultdict[Node, list[GradientEdge]] = defaultdict(list)
    at_once: list[GradientEdge] = []
    while beside:  # the weights beside the path, with what is computed from them alone, one connected piece at a time
        piece = _reached([next(iter(beside))], lambda node: (users[node] | set(onward(node))) - path)
        beside -= piece
        used = {node: users[node] & path for node in piece}
        # What one joint alone uses can be asked of that joint without running through others.
        alone = all(len(users[node]) == 1 for node in piece if used[node])
        if alone and not any(map(_lazy, piece)) and all(map(_has_sides, set().union(*used.values()))):
            for node, joints in used.items():
                for joint in joints:
                    places = {place for other, place in joint.next_functions if other is node}
                    sides[joint] += [GradientEdge(node, place) for place in places]
        else:
            at_once += [GradientEdge(node, 0) for node in piece if not node.next_functions]
    return list(sides.items()), at_once, any(node.name() == "CheckpointFunctionBackward" for node in seen)


def _reached(start: list[Node], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    seen, left = set(start), list(start)
    while left:
        fresh = set(onward(left.pop())) - seen
        seen |= fresh
        left += fresh
    return seen


def _has_sides(node: Any) -> bool:
    """Does autograd compute one side of it without the other, and again the other later?"""
    return not isinstance(node, torch.autograd.function.BackwardCFunction) and not _lazy(node)


def _lazy(node: Any) -> bool:
    """Are some of the node's saved tensors made when asked for (checkpointing), or brought back from elsewhere?"""
    kind: type = type(node)
    for name in _saved(kind):
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            if getattr(each, "unpack_hook", None) is not None:
                return True
    return False


@cache
def _saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def taken(x: torch.Tensor) -> torch.Tensor:
    """The gradient that a backward has left at the leaf `x`; zeros where there is none."""
    grad, x.grad = x.grad, None
    return torch.zeros_like(x) if grad is None else grad
