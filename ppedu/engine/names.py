"""Which parameters of a pipeline are one weight of the model.

One weight can be several parameters: one in each copy of the model if the schedule has two (dualpipe), and one at each
end of a tie, as of a language model's embedding to its head. On the other hand, several stages of a rank can share one
parameter. Names that stand for one weight, for any of these reasons, form a class, and each class is added up once.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ppedu.core import Placement, SettingError
from ppedu.engine.ranks.messages import checksum
from ppedu.engine.sharded import local_part
from ppedu.engine.stages.stage import Stage

Name = tuple[int, str]  # of a parameter: its stage, and its name there
Tie = tuple[Name, Name]  # two names of one weight
Exchange = Callable[[torch.Tensor], torch.Tensor]  # from a row of numbers to the rows of all ranks of the pipeline


class Names:
    """The names of one rank's parameters, in classes, on which the ranks agree in their first call.

    Args:
        stages: all stages of the rank, by number.
        ties: pairs of weights, each named by its stage and its name there.

    Raises:
        SettingError: `ties` are not pairs of weights of the model.
    """

    def __init__(self, placement: Placement, stages: Mapping[int, Stage], ties: Sequence[Tie], rank: int):
        if not isinstance(ties, (tuple, list)) or not all(map(_is_tie, ties)):
            raise SettingError(
                "tied must be pairs of weights, such as [((0, 'embedding.weight'), (3, 'head.weight'))], each named by "
                f"its stage and its name there; got {ties!r}"
            )
        self.placement, self.stages, self.rank = placement, stages, rank
        self.ties = [((one, name), (other, partner)) for (one, name), (other, partner) in ties]
        self._classes: list[tuple[Sequence[int], list[list[Name]]]] = []  # by the ranks that hold them
        self._agreed: dict[Name, int] = {}  # the class of each name, as of the first call
        for stage, name in chain(*ties):
            if stage in stages or not 0 <= stage < placement.stages:
                self._weight(stage, name)

    def of_parameters(self) -> dict[nn.Parameter, list[Name]]:
        """Return all names of each parameter of this rank, in any of its stages."""
        named = {
            (number, name): parameter
            for number, stage in sorted(self.stages.items())
            for name, parameter in stage.module.named_parameters(remove_duplicate=False)
        }
        for stage, name in chain(*self.ties):
            if stage in self.stages:  # a compiled module also knows its weights by names that it does not list
                named.setdefault((stage, name), self._weight(stage, name))
        found: dict[nn.Parameter, list[Name]] = {}
        for place, parameter in named.items():
            found.setdefault(parameter, []).append(place)
        return found

    def shared(self) -> list[tuple[Sequence[int], list[list[nn.Parameter]]]]:
        """Return the trained weights that are several parameters: for each, those of this rank.

        They come in groups, each after the ranks of the pipeline that hold its weights.
        """
        if not self._classes:
            return []
        parameters = self.of_parameters().items()
        named = {name: weight for weight, names in parameters for name in names if weight.requires_grad}
        found = []
        for ranks, classes in self._classes:
            weights = [list(dict.fromkeys(named[name] for name in names if name in named)) for names in classes]
            if several := [same for same in weights if len(same) > 1 or (same and len(ranks) > 1)]:
                found.append((ranks, several))
        return found

    def require_agreed(self) -> None:
        """Raise SettingError if weights of this rank have other names than those agreed on, or two have become one."""
        if not self._agreed:
            return
        groups = [*self.of_parameters().values()]
        names, agreed = {*chain(*groups)}, {name for name in self._agreed if name[0] in self.stages}
        changes = [(name, "was added") for name in sorted(names - agreed)]
        changes += [(name, "was removed") for name in sorted(agreed - names)]
        if not changes:
            for group in groups:
                if len({self._agreed[name] for name in group}) > 1:
                    stage, name = group[-1]
                    changes.append((group[0], f"became that of stage {stage}, {name!r},"))
        for (stage, name), change in changes:
            raise SettingError(
                f"the weight {name!r} of stage {stage} {change} after the pipeline's first call, in which the ranks "
                "agreed on the weights that several of them hold; make a new Pipeline after such a change, on all ranks"
            )

    def agree(self, exchange: Exchange, replicated: bool) -> list[str]:
        """Agree with the other ranks on the classes; return a sentence for each that is not one weight on all ranks.

        Args:
            replicated: there are other replicas of the pipeline, which need the same names.
        """
        names = self.of_parameters()
        found = self._find_classes(names, exchange) if self.ties or not self.placement.alone else []
        classes = [*chain(*(several for _, several in self._classes))] or [[*chain(*names.values())]] * replicated
        self._agreed = {each: number for number, members in enumerate(classes) for each in members}
        return found

    def _find_classes(self, names: Mapping[nn.Parameter, list[Name]], exchange: Exchange) -> list[str]:
        """Find the classes, and return a sentence for each that is not the same weight here as on another rank.

        A rank cannot see which parameters the stages of another rank share, so each reports its own. Say rank 0 has the
        weight (0, "token"), which is tied to (1, "head") on rank 1. If that parameter is also (2, "head") there, rank 1
        reports both names. The class is (0, "token"), (1, "head"), (2, "head"), on the ranks (0, 1).
        """
        tied = set(chain(*self.ties))
        told = {weight: each for weight, each in names.items() if len(each) > 1 or not tied.isdisjoint(each)}
        report = json.dumps([(aliases, _digest(weight)) for weight, aliases in told.items()])
        parameters = [  # of all ranks: the rank, the parameter's names there, and its digest
            (rank, {(stage, name) for stage, name in aliases}, digest)
            for rank, text in enumerate(_exchange_texts(report, exchange))
            for aliases, digest in json.loads(text)
        ]
        joined = _joined([*map(set, self.ties), *(aliases for _, aliases, _ in parameters)])
        alone = [[aliases[0]] for aliases in names.values() if not any(aliases[0] in each for each in joined)]
        classes: defaultdict[tuple[int, Sequence[int]], list[list[Name]]] = defaultdict(list)
        found = []
        for each in sorted([*map(sorted, joined), *alone]):
            stages = {stage for stage, _ in each}
            ranks = tuple(sorted({rank for stage in stages for rank in self.placement.holders_of(stage)}))
            if self.rank not in ranks:
                continue
            classes[min(stages), ranks].append(each)
            digests = [(rank, digest) for rank, aliases, digest in parameters if not aliases.isdisjoint(each)]
            mine = next((digest for rank, digest in digests if rank == self.rank), None)
            for rank, digest in digests:
                if mine not in (None, digest):
                    found.append(
                        f"the tied weights on rank {self.rank} and rank {rank} are not the same in shape, "
                        "dtype, requires_grad or values"
                    )
        # In the same order on all ranks, so that none waits for another in a cycle; stage by stage, to save memory.
        self._classes = [(ranks, each) for (_, ranks), each in sorted(classes.items())]
        return found

    def _weight(self, stage: int, name: str) -> nn.Parameter:
        module = self.stages[stage].module if stage in self.stages else nn.Module()
        try:
            return module.get_parameter(name)
        except AttributeError:
            known = ", ".join(name for name, _ in module.named_parameters()) or "none"
            raise SettingError(
                f"cannot tie {name!r} of stage {stage}, which has no such weight; its weights are: {known}"
            ) from None


def _is_tie(tie: Any) -> bool:
    """Return whether `tie` has the form of a `Tie`."""
    match tie:
        case [[int(), str()], [int(), str()]]:
            return True
    return False


def _joined(groups: Iterable[set[Name]]) -> list[set[Name]]:
    """Join groups that have a name in common, until no two have: {a, b}, {c}, {b, d} become {c}, {a, b, d}."""
    joined: list[set[Name]] = []
    for group in groups:
        touching = [each for each in joined if not each.isdisjoint(group)]
        joined = [each for each in joined if each.isdisjoint(group)] + [group.union(*touching)]
    return joined


def _exchange_texts(text: str, exchange: Exchange) -> list[str]:
    """Return the texts of all ranks, each followed by spaces."""
    own = text.encode()
    longest = int(exchange(torch.tensor([len(own)])).max())
    rows = exchange(torch.tensor(list(own.ljust(longest)), dtype=torch.uint8))
    return [bytes(row).decode() for row in rows.tolist()]


def _digest(weight: nn.Parameter) -> int:
    """Return a number that stands for all that must be equal in two parameters that are one weight."""
    look = tuple(local_part(weight).shape), str(weight.dtype), weight.requires_grad, checksum(local_part(weight))
    return zlib.crc32(repr(look).encode())
