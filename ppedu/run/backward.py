"""A backward in two halves: I, for the inputs, which another rank waits for, and W, for the weights, at any time.

Autograd knows one backward, for everything. Here is how it comes apart. The graph of a stage has a main path, the
nodes between its outputs and its inputs, and off it the weights. Where a weight joins the path stands a node with
two sides, a matrix product for instance, whose backward is two products: one for its input, one for its weight.

I runs along the main path and asks each such node for the one side only, and keeps the gradient that came to it
(autograd computes just what it is asked for). W goes back to each node with that gradient and asks for the other.
Nothing is computed twice, and the results are those of a full backward to the last bit. (A hook on an activation
may be called by both halves, with the same gradient.)

To split the backward is the Zero Bubble paper's idea (arXiv 2401.10241, §1); to run autograd twice, with the
gradient caught at the joint, is how torch.distributed.pipelining does it. What is kept, and when it is not safe to
wait, is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = Sequence[torch.Tensor | None]
Known = list[tuple[GradientEdge, torch.Tensor]]  # gradients, and where they go in


class Joint(NamedTuple):
    """A node of the main path at which weights join it.

    entries: where gradients come to it. weights: those that join nowhere else. edges: to those that join elsewhere,
    too, each time through a node of its own, such as a transpose.
    """

    entries: list[GradientEdge]
    weights: list[torch.Tensor]
    edges: list[GradientEdge]


def backward_input(
    outputs: Sequence[GradientEdge], grads: Grads, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """The gradients of `inputs`, and what is left to do: to be called once, it adds the weights' gradients to `.grad`.

    outputs: the edges at which `grads`, the gradients of what a stage has computed, enter its graph.
    inputs: leaves that require grad. With none there is nothing that anybody waits for, and all is left for later.

    A weight's gradient is computed at once, and only added later, where waiting would mean computing something again:
    the weight itself is used in several places, or is an output; its joint computes both sides whatever it is asked
    for (somebody's own autograd function, a fused LSTM); or the joint's saved tensors are made when asked for (a
    checkpointed block, which so is run again once).
    """
    if not outputs:  # wholly frozen, and of what comes in nothing goes out
        return [torch.zeros_like(x) for x in inputs], lambda: None
    if not inputs:
        return [], partial(torch.autograd.backward, list(outputs), list(grads))
    edges = [get_gradient_edge(x) for x in inputs]
    joints, at_once, reentrant = _joints(outputs, [edge.node for edge in edges])
    if reentrant:  # torch.utils.checkpoint(use_reentrant=True) runs in a whole backward only
        torch.autograd.backward(list(outputs), list(grads))
        return [taken(x) for x in inputs], lambda: None

    wanted = [*edges, *at_once, *(entry for joint in joints for entry in joint.entries)]
    found = iter(torch.autograd.grad(list(outputs), wanted, list(grads), retain_graph=bool(joints), allow_unused=True))
    own = [torch.zeros_like(x) if (grad := next(found)) is None else grad for x in inputs]
    known = _known(at_once, found)
    return own, partial(_backward_weight, [(joint, _known(joint.entries, found)) for joint in joints], known)


def _backward_weight(joints: list[tuple[Joint, Known]], known: Known) -> None:
    """The other side of each joint, and what is known; the parts of a sum together, as autograd itself adds them."""
    parts: Known = []
    while joints:  # with each, what only it needed of the graph is freed
        joint, caught = joints.pop(0)
        if caught:
            roots, values = zip(*caught, strict=True)
            if joint.edges:
                again = bool(joint.weights)
                found = torch.autograd.grad(roots, joint.edges, values, retain_graph=again, allow_unused=True)
                parts += _known(joint.edges, iter(found))
            if joint.weights:
                torch.autograd.backward(roots, values, inputs=joint.weights)
    if parts:
        roots, values = zip(*parts, strict=True)
        torch.autograd.backward(roots, values)
    with torch.no_grad():
        for edge, grad in known:
            add: Any = edge.node  # to the weight's; its hooks have already been called, when this was computed
            add(grad)


def _known(edges: Iterable[GradientEdge], grads: Iterator[torch.Tensor | None]) -> Known:
    """The next of `grads`, as many as there are edges, without those that are none."""
    return [(edge, grad) for edge in edges if (grad := next(grads)) is not None]


def _joints(outputs: Sequence[GradientEdge], inputs: Sequence[Node]) -> tuple[list[Joint], list[GradientEdge], bool]:
    """Where the weights join the path from `outputs` to `inputs`: the joints, and the weights that cannot wait.

    The joints are in the order of a backward. Last: is there a reentrant checkpoint on the way?
    """
    users: defaultdict[Node, set[Node]] = defaultdict(set)
    uses: dict[Node, set[Node]] = {}
    places: defaultdict[Node, set[int]] = defaultdict(set)  # of a node's results, those that are used
    for edge in outputs:
        places[edge.node].add(edge.output_nr)

    def onward(node: Node) -> set[Node]:
        uses[node] = {other for other, _ in node.next_functions if other is not None}
        for other, place in node.next_functions:
            if other is not None:
                users[other].add(node)
                places[other].add(place)
        return uses[node]

    roots = set(places)
    seen = _reached(roots, onward)
    path = _reached([node for node in inputs if node in seen], lambda node: users[node])
    beside = seen - path

    found: dict[Any, Joint] = {}
    at_once: list[GradientEdge] = []
    while beside:  # the weights beside the path, with what is computed from them alone, one connected piece at a time
        piece: set[Any] = _reached([next(iter(beside))], lambda node: (users[node] | uses[node]) - path)
        beside -= piece
        weights = [node for node in piece if hasattr(node, "variable")]
        used = {node: users[node] & path for node in piece if users[node] & path}
        joints = set().union(*used.values())
        # What one joint alone uses can be asked of that joint without running through others.
        alone = not piece & roots and all(len(users[node]) == 1 for node in used)
        if not alone or any(map(_lazy, piece)) or not all(map(_has_sides, joints)):
            at_once += [GradientEdge(node, 0) for node in weights]
            continue
        for node in joints - set(found):
            found[node] = Joint([GradientEdge(node, place) for place in sorted(places[node])], [], [])
        if len(joints) == 1:
            found[joints.pop()].weights.extend(node.variable for node in weights)
        else:
            for node, (joint,) in used.items():
                across = {place for other, place in joint.next_functions if other is node}
                found[joint].edges.extend(GradientEdge(node, place) for place in across)
    order = sorted(found, key=lambda node: -node._sequence_nr())
    return [found[node] for node in order], at_once, any(node.name() == "CheckpointFunctionBackward" for node in seen)


def _reached(start: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    seen, left = set(start), list(start)
    while left:
        fresh = set(onward(left.pop())) - seen
        seen |= fresh
        left += fresh
    return seen


def _has_sides(node: Any) -> bool:
    """Does autograd compute one side of it without the other, and again the other later?"""
    own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return not own and "Rnn" not in node.name() and not _lazy(node)


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
