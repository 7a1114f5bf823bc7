"""A backward in two halves: I computes the gradients of the inputs, W those of the weights.

Another rank is waiting for the result of I; W can run at any later time. Autograd only offers one backward for
everything, so this module takes it apart. In a stage's graph, the *main path* consists of the nodes between the
outputs and the inputs. A weight joins that path at a *joint*: a node with two inputs, such as a matrix product,
whose backward is two products, one for the activation and one for the weight.

I runs backward along the main path, asks each joint for the activation's gradient only, and keeps the gradient that
arrived at the joint. (Autograd computes only what it is asked for.) W returns to each joint with the gradient it kept
and asks for the weight's. Nothing is computed twice, and the gradients equal those of a full backward bit for bit.
The one visible difference: a hook on an activation may run in both halves, each time with the same gradient.

The split is an idea of the Zero Bubble paper (arXiv 2401.10241, §1). Running autograd twice, with the gradient caught
at the joint, is also how torch.distributed.pipelining does it. What to keep, and which weights cannot wait, is decided
here independently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ppedu.engine.ranks.versions import holds_graph, saved_names, sequence_number, unpack_hook

Grads = Sequence[torch.Tensor | None]
EdgeGrads = list[tuple[GradientEdge, torch.Tensor]]  # places in the graph, each with the gradient that enters there


class Joint(NamedTuple):
    """A node of the main path at which weights join it.

    Args:
        entries: the edges through which gradients arrive at the node.
        weights: the weights that join the main path only here.
        edges: one to each weight that joins at other nodes as well, each time through a node in between, such as a
            transpose.
    """

    entries: list[GradientEdge]
    weights: list[torch.Tensor]
    edges: list[GradientEdge]


def backward_input(
    outputs: Sequence[GradientEdge], grads: Grads, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Return the gradients of `inputs`, and a function that adds the weights' gradients to `.grad`; call it once.

    Some weights cannot wait, because deferring them would compute something twice. Their gradients are computed at
    once, and the function only adds them. These are weights that are used in several places or are outputs
    themselves; weights of a node that always computes both gradients (a custom autograd function, a fused LSTM); and
    weights of a node whose saved tensors are made on demand (a checkpointed block, which is thus recomputed once).

    Args:
        outputs: the edges through which `grads`, the gradients of the stage's outputs, enter its graph.
        inputs: leaves that require grad. If the list is empty, no rank is waiting for a gradient, and the returned
            function runs the whole backward.
    """
    if not outputs:  # all weights are frozen, and no output depends on an input that requires grad
        return [torch.zeros_like(x) for x in inputs], lambda: None
    if not inputs:
        return [], partial(torch.autograd.backward, list(outputs), list(grads))
    edges = [get_gradient_edge(x) for x in inputs]
    joints, immediate, reentrant = _joints(outputs, [edge.node for edge in edges])
    if reentrant:  # torch.utils.checkpoint(use_reentrant=True) only supports a full backward
        torch.autograd.backward(list(outputs), list(grads))
        return [pop_grad(x) for x in inputs], lambda: None

    wanted = [*edges, *immediate]
    for joint in joints:
        wanted += joint.entries
    # The gradients, in the order of `wanted`, from which each of the following parts takes its own.
    found = iter(torch.autograd.grad(list(outputs), wanted, list(grads), retain_graph=bool(joints), allow_unused=True))
    own = []
    for x in inputs:
        grad = next(found)
        own.append(torch.zeros_like(x) if grad is None else grad)
    computed = _with_grads(immediate, found)
    caught = [(joint, _with_grads(joint.entries, found)) for joint in joints]
    return own, partial(_backward_weight, caught, computed)


def _backward_weight(joints: list[tuple[Joint, EdgeGrads]], computed: EdgeGrads) -> None:
    """Run W: add the weights' gradients to `.grad`.

    Args:
        joints: the nodes at which weights join the main path, each with the gradients that I kept there.
        computed: gradients that I has computed already.
    """
    parts: EdgeGrads = []  # of weights with several joints: backpropagated together, so that autograd sums them
    while joints:  # popping a joint frees the part of the graph that only it needs
        joint, caught = joints.pop(0)
        if caught:
            roots, values = zip(*caught, strict=True)
            if joint.edges:
                again = bool(joint.weights)
                found = torch.autograd.grad(roots, joint.edges, values, retain_graph=again, allow_unused=True)
                parts += _with_grads(joint.edges, iter(found))
            if joint.weights:
                torch.autograd.backward(roots, values, inputs=joint.weights)
    if parts:
        roots, values = zip(*parts, strict=True)
        torch.autograd.backward(roots, values)
    with torch.no_grad():
        for edge, grad in computed:
            accumulate: Any = edge.node  # the weight's own node, called directly: its hooks ran in the first half
            accumulate(grad)


def _with_grads(edges: Iterable[GradientEdge], grads: Iterator[torch.Tensor | None]) -> EdgeGrads:
    """Pair each edge with the next of `grads`, and drop the pairs whose gradient is None."""
    return [(edge, grad) for edge in edges if (grad := next(grads)) is not None]


class Graph:
    """The part of autograd's graph that is reached from the outputs of a stage.

    Attributes:
        roots: the nodes of the outputs.
        uses, users: by node, the nodes whose results it uses, and those that use its results.
        places: by node, the numbers of its results that are used.
    """

    def __init__(self, outputs: Sequence[GradientEdge]):
        self.users: defaultdict[Node, set[Node]] = defaultdict(set)
        self.uses: defaultdict[Node, set[Node]] = defaultdict(set)
        self.places: defaultdict[Node, set[int]] = defaultdict(set)
        for edge in outputs:
            self.places[edge.node].add(edge.output_nr)
        self.roots = set(self.places)
        self.nodes = _reached(self.roots, self._visit)

    def _visit(self, node: Node) -> set[Node]:
        for other, place in node.next_functions:
            if other is not None:
                self.uses[node].add(other)
                self.users[other].add(node)
                self.places[other].add(place)
        return self.uses[node]


def _joints(outputs: Sequence[GradientEdge], inputs: Sequence[Node]) -> tuple[list[Joint], list[GradientEdge], bool]:
    """Find where weights join the main path from `outputs` to `inputs`.

    In relu(x @ a) @ b, the main path is the second product, relu and the first product. The weight b joins it at the
    second product, and a at the first.

    Returns:
        The joints in the order in which a backward visits them, the edges of the weights that cannot wait, and whether
        the graph contains a reentrant checkpoint.
    """
    graph = Graph(outputs)
    users = graph.users
    path = _reached([node for node in inputs if node in graph.nodes], lambda node: users[node])
    beside = graph.nodes - path

    found: dict[Any, Joint] = {}
    immediate: list[GradientEdge] = []
    # Beside the path are the weights and whatever is computed from weights alone. Take one connected piece at a time.
    while beside:
        piece: set[Any] = _reached([next(iter(beside))], lambda node: (users[node] | graph.uses[node]) - path)
        beside -= piece
        weights = [node for node in piece if hasattr(node, "variable")]
        used = {node: users[node] & path for node in piece if users[node] & path}  # nodes that the path uses, and where
        joints = set().union(*used.values())
        # A node with a single user can be differentiated through that user without running any other joint.
        separable = not piece & graph.roots and all(len(users[node]) == 1 and holds_graph(node) for node in used)
        if not separable or any(map(_unpacks, piece)) or not all(map(_separates_inputs, joints)):
            immediate += [GradientEdge(node, 0) for node in weights]
            continue
        for node in joints - set(found):
            found[node] = Joint([GradientEdge(node, place) for place in sorted(graph.places[node])], [], [])
        if len(joints) == 1:
            found[joints.pop()].weights.extend(node.variable for node in weights)
        else:
            for node, (joint,) in used.items():  # each has one user
                across = {place for other, place in joint.next_functions if other is node}
                found[joint].edges.extend(GradientEdge(node, place) for place in across)
    order = sorted(found, key=lambda node: -sequence_number(node))
    reentrant = any(node.name() == "CheckpointFunctionBackward" for node in graph.nodes)
    return [found[node] for node in order], immediate, reentrant


def _reached(start: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    seen, left = set(start), list(start)
    while left:
        fresh = set(onward(left.pop())) - seen
        seen |= fresh
        left += fresh
    return seen


def _separates_inputs(node: Any) -> bool:
    """Whether autograd can compute one of the node's gradients now and another one later, without repeating work."""
    own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return not own and "Rnn" not in node.name() and not _unpacks(node)


def as_saved(kept: Any) -> torch.Tensor:
    """Return the tensor in `kept`: a hook for unpacking that neither recomputes nor fetches."""
    return kept.tensor


def _unpacks(node: Any) -> bool:
    """Whether reading the node's saved tensors runs a hook that recomputes them (checkpointing) or fetches them."""
    kind: type = type(node)
    saved = [getattr(node, name) for name in saved_names(kind)]
    several = [each if isinstance(each, (tuple, list)) else (each,) for each in saved]
    hooks = map(unpack_hook, chain.from_iterable(several))
    return any(hook not in (None, as_saved) for hook in hooks)


def pop_grad(x: torch.Tensor) -> torch.Tensor:
    """Remove and return the gradient of the leaf `x`; zeros if a backward has not reached it."""
    grad, x.grad = x.grad, None
    return torch.zeros_like(x) if grad is None else grad
