"""Stages made from a whole module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import nn

from ppedu.core import PipelineError, Schedule, SettingError
from ppedu.core.numeric import plural
from ppedu.core.validate import require_instance
from ppedu.engine.ranks.versions import has_hooks, keep_buffers, tree_leaves, tree_map_only
from ppedu.engine.stages.local import local_stages
from ppedu.sim.partition import by_cost, evenly

BY_HAND = "write the stages by hand, each an nn.Module that takes what the one before returns"


@dataclass(frozen=True)
class Chain:
    """The modules of a model whose forward calls one after the other.

    Args:
        begin, end: Modules before and after the layers, such as the embedding, and the last norm and the head.
        rotary: Computes the keyword `position_embeddings` of each layer from the positions.
    """

    begin: dict[str, nn.Module]
    layers: list[nn.Module]
    end: dict[str, nn.Module]
    rotary: nn.Module | None = None

    @property
    def pieces(self) -> int:
        """The number of pieces: the begin, each layer, and the end. An `nn.Sequential` has only layers."""
        has_ends = bool(self.begin or self.end)
        return len(self.layers) + (2 if has_ends else 0)

    @property
    def parts(self) -> str:
        """The names of the modules that the forward calls, in order, for errors."""
        return ", ".join([*self.begin, "the layers", *self.end])

    def stage(self, pieces: range) -> CutStage:
        """Return the stage that holds these pieces."""
        if not (self.begin or self.end):
            return CutStage({}, {str(number): self.layers[number] for number in pieces}, {}, None)
        last = self.pieces - 1
        layers = {str(number - 1): self.layers[number - 1] for number in pieces if 0 < number < last}
        begin = self.begin if 0 in pieces else {}
        end = self.end if last in pieces else {}
        return CutStage(begin, layers, end, self.rotary if layers else None)


class CutStage(nn.Module):
    """Consecutive pieces of a model. Its parameters are the model's own."""

    def __init__(
        self,
        begin: dict[str, nn.Module],
        layers: dict[str, nn.Module],
        end: dict[str, nn.Module],
        rotary: nn.Module | None,
    ):
        super().__init__()
        self.begin, self.layers, self.end = (nn.ModuleDict(part) for part in (begin, layers, end))
        self.rotary = rotary

    def forward(self, x: Any) -> Any:
        for module in self.begin.values():
            x = module(x)
        keywords = {}
        if self.rotary is not None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            keywords["position_embeddings"] = self.rotary(x, positions)
        for module in self.layers.values():
            x = module(x, **keywords)
            x = x[0] if keywords and isinstance(x, tuple) else x
        for module in self.end.values():
            x = module(x)
        if not self.begin and not self.layers and not self.end:  # a stage without pieces
            return x.view_as(x)
        return x


def cut(
    module: nn.Module,
    schedule: Schedule,
    rank: int,
    costs: Sequence[float] | Iterable[range] | None = None,
    example: Any = None,
) -> dict[int, nn.Module]:
    """Return the stages of a rank, made from the parts of a whole model.

    Their parameters are those of `module`, which each rank must have created with equal values; the rest of it can be
    deleted afterwards. Models of three kinds can be cut:

    - an `nn.Sequential`, whose pieces are its modules;
    - a `pp.run.GPT`;
    - a model with one `nn.ModuleList` of layers, whose forward calls the modules before the list, each layer, and the
      modules after it, in the order in which they were registered. That includes decoders of transformers such as
      Llama's (`LlamaForCausalLM`), whose layers get rotary embeddings as a keyword. Sequences must not be padded,
      since masks are not passed on. The pieces are the modules before the layers, each layer, and the modules after.

    Stages on different ranks must not share a weight, which would get only a part of its gradient on each of them.

    Args:
        costs: One number for each piece, such as its time: the pieces are cut so that the heaviest stage is as light as
            possible. Or the pieces of each stage, such as `Choice.partition` of a plan. By default, the layers are
            divided evenly.
        example: An input of the model, such as a batch of one short sequence. The third kind needs it, and so does a
            subclass with a forward of its own: in training and in evaluation, the stages must return what the model
            returns, bit for bit, computed from the same weights.

    Raises:
        SettingError: The model is not of these kinds, its forward is not such a chain, it has weights, buffers or hooks
            that belong to none of its pieces, stages on different ranks share a weight, or `costs` does not fit.
    """
    require_instance("module", module, nn.Module, "an nn.Module")
    mine = local_stages(schedule, rank)
    whole = find_chain(module)
    partition = _partition(whole, schedule.stages, costs)
    _require_complete(module, whole)
    _require_unshared(whole, partition, schedule)
    if not _is_chain(module):
        _compare(module, whole, example)
    return {stage: whole.stage(partition[stage]) for stage in mine}


def _is_chain(module: nn.Module) -> bool:
    """Return whether the forward of a model is that of `nn.Sequential`, or of a class that says `chained = True`."""
    forward = getattr(module.forward, "__func__", None)
    # The class that defines the forward: a subclass with a forward of its own may not be a chain.
    owner = next((each for each in type(module).__mro__ if vars(each).get("forward") is forward), None)
    return owner is nn.Sequential or (owner is not None and vars(owner).get("chained", False))


def find_chain(module: nn.Module) -> Chain:
    """Return the chain of a model; raise SettingError if it does not have one."""
    if isinstance(module, nn.Sequential):
        return Chain({}, [*module], {})
    lists = (nn.ModuleList, nn.ModuleDict) if getattr(module, "chained", False) else (nn.ModuleList,)
    # The owner of the layers is the model, or the first module in it.
    owners = [module]
    first = next(module.children(), None)
    if first is not None and not isinstance(first, nn.ModuleList):
        owners.append(first)
    found = [
        (owner, name, each) for owner in owners for name, each in owner.named_children() if isinstance(each, lists)
    ]
    if len(found) != 1:
        raise SettingError(
            f"{type(module).__name__} has {plural(len(found), 'nn.ModuleList')} of its own or in its first module, and "
            f"cut needs one, the layers; {BY_HAND}"
        )
    owner, name, layers = found[0]
    rotary = [each for each in owner.children() if "Rotary" in type(each).__name__]
    own = [(key, each) for key, each in owner.named_children() if each not in rotary]
    place = [key for key, _ in own].index(name)
    after = own[place + 1 :]
    if owner is not module:
        after += [(key, each) for key, each in module.named_children() if each is not owner]
    listed = [*layers.values()] if isinstance(layers, nn.ModuleDict) else [*layers]
    return Chain(dict(own[:place]), listed, dict(after), rotary[0] if rotary else None)


def _partition(whole: Chain, stages: int, costs: Any) -> list[range]:
    """Return the pieces of each stage."""
    ends = bool(whole.begin or whole.end)
    if costs is None:
        pieces = evenly(len(whole.layers), stages)
        return with_ends(pieces) if ends else pieces
    if hasattr(costs, "tolist"):
        costs = costs.tolist()
    given = [*costs] if isinstance(costs, Iterable) else []
    if given and all(isinstance(each, range) for each in given):
        if len(given) != stages or [*chain(*given)] != [*range(whole.pieces)]:
            raise SettingError(
                f"the partition must divide the pieces 0 to {whole.pieces - 1} among {plural(stages, 'stage')}, in "
                f"order; got {given}"
            )
        return given
    if len(given) != whole.pieces or not all(isinstance(each, Real) for each in given):
        parts = (
            f"the modules before the layers, {len(whole.layers)} layers, and the modules after" if ends else "modules"
        )
        raise SettingError(f"costs must have a number for each of the {whole.pieces} pieces ({parts}); got {costs!r}")
    return by_cost(given, stages)


def with_ends(layers: Sequence[range]) -> list[range]:
    """Return the pieces of each stage, given its layers: piece 0 is the embedding, the last one is the head.

    For the layers [range(0, 2), range(2, 4)] they are [range(0, 3), range(3, 6)].
    """
    found = []
    for stage, each in enumerate(layers):
        start, stop = each.start + 1, each.stop + 1  # of its layers, counted after the embedding
        if stage == 0:
            start -= 1
        if stage == len(layers) - 1:
            stop += 1
        found.append(range(start, stop))
    return found


def _require_complete(module: nn.Module, whole: Chain) -> None:
    """Raise SettingError if a weight, a buffer or a hook of the model is in none of its pieces."""
    stage = whole.stage(range(whole.pieces))
    pieces = {*stage.modules()}
    tensors = {id(tensor) for tensor in chain(stage.parameters(), stage.buffers())}
    for path, part in module.named_modules():
        if part in pieces:
            continue
        for name, tensor in chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False)):
            if id(tensor) not in tensors:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise SettingError(
                    f"the {kind} {f'{path}.{name}'.lstrip('.')!r} would be in no stage, since stages are made of "
                    f"{whole.parts}; move it into one of these modules, or {BY_HAND}"
                )
        if has_hooks(part):
            raise SettingError(
                f"a hook on {path or 'the model'} ({type(part).__name__}) would run in no stage, since stages are made "
                f"of {whole.parts}; register it on one of these modules, or remove it"
            )


def _require_unshared(whole: Chain, partition: Sequence[range], schedule: Schedule) -> None:
    """Raise SettingError if stages that are not on the same ranks share a weight."""
    places: dict[nn.Parameter, dict[int, str]] = {}  # by stage, the first name of the weight there
    for stage, pieces in enumerate(partition):
        for name, weight in whole.stage(pieces).named_parameters():
            places.setdefault(weight, {})[stage] = name
    apart = []  # pairs of names of one weight, each a stage and the name there
    for names in places.values():
        ranks = {stage: {*schedule.placement.holders_of(stage)} for stage in names}
        first, *others = names
        for other in others:
            if ranks[other] != ranks[first]:
                apart.append(((first, names[first]), (other, names[other])))
    if apart:
        stages = sorted({stage for tie in apart for stage, _ in tie})
        more = f", and {plural(len(apart) - 1, 'more pair')} like this" if len(apart) > 1 else ""
        raise SettingError(
            f"the stages {', '.join(map(str, stages))} share weights, but are on different ranks, where each would get "
            f"a part of the gradient. Give each of these stages a copy of its own (nn.Parameter(weight.detach()"
            f".clone()); transformers: tie_word_embeddings=False), and tie them: Pipeline(tied=[{apart[0]}]){more}. "
            "Or choose a schedule or a partition in which one rank holds all of them"
        )


def _compare(module: nn.Module, whole: Chain, example: Any) -> None:
    """Raise SettingError unless the chain returns what the model returns for the example, from the same weights."""
    name = type(module).__name__
    if example is None:
        raise SettingError(f"give an example, an input of {name}, so that its stages can be compared with the whole")
    stage = whole.stage(range(whole.pieces))
    for training in (False, True):
        mode = "in training" if training else "in evaluation"
        try:
            with _rehearsal(module, training):
                wanted = module(tree_map_only(torch.Tensor, torch.clone, example))
        except Exception as error:
            raise SettingError(
                f"{name} fails for the example, which is the first argument of its forward, {mode}: "
                f"{type(error).__name__}: {error}"
            ) from error
        try:
            with _rehearsal(module, training):
                got = stage(tree_map_only(torch.Tensor, torch.clone, example))
        except PipelineError:
            raise
        except Exception as error:
            raise SettingError(
                f"{name}'s forward is not a chain of {whole.parts}: calling them one after the other fails with "
                f"{type(error).__name__}: {error}; {BY_HAND}"
            ) from error
        wanted = next(iter(tree_leaves(getattr(wanted, "logits", wanted))), None)
        if not (isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor) and torch.equal(got, wanted)):
            raise SettingError(
                f"{name}'s forward is more than a chain of {whole.parts}: its stages return other numbers {mode}. (A "
                'mask? For transformers, take attn_implementation="sdpa" and sequences without padding.) Otherwise '
                f"{BY_HAND}"
            )
        in_stages, in_whole = _trained_by(got), _trained_by(wanted)
        for path, weight in module.named_parameters():
            if (weight in in_stages) != (weight in in_whole):
                one = "its stages" if weight in in_stages else "the whole"
                raise SettingError(
                    f"{name}'s forward is more than a chain of {whole.parts}: only {one} would train {path} (detach? "
                    f"torch.no_grad()?). Freeze such weights with requires_grad_(False), or {BY_HAND}"
                )


@contextmanager
def _rehearsal(module: nn.Module, training: bool) -> Iterator[None]:
    """Run the model in a mode; leave its modes, its buffers and the state of the random numbers as they were."""
    modes = [(part, part.training) for part in module.modules()]
    restore_buffers = keep_buffers(module)
    devices = {weight.get_device() for weight in module.parameters() if weight.is_cuda}
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            module.train(training)
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        restore_buffers()


def _trained_by(output: torch.Tensor) -> set[torch.Tensor]:
    """Return the weights that get a gradient from the output."""
    found: set[torch.Tensor] = set()
    seen, left = {None}, [output.grad_fn]
    while left:
        node: Any = left.pop()
        if node not in seen:
            seen.add(node)
            left += [other for other, _ in node.next_functions]
            if hasattr(node, "variable"):
                found.add(node.variable)
    return found
