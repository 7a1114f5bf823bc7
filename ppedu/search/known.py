"""Schedules of an instance that are known before a search: the registered ones, and one microbatch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ppedu.core import Action, Op, Schedule
from ppedu.search.instance import Instance, scheduled
from ppedu.zoo import schedule as registered
from ppedu.zoo import schedules
from ppedu.zoo.registry import options_of


def published(instance: Instance) -> Iterator[Schedule]:
    """Yield the registered schedules with this placement, with their backwards split or whole as asked for.

    Those that recompute are left out, unless that is asked for, too.
    """
    placement = instance.placement
    for name in schedules():
        with suppress(Exception):  # it does not exist for this size, or a registered generator is unfinished
            sizes = {"chunks": placement.chunks, "slices": placement.slices}
            options = {option: size for option, size in sizes.items() if option in options_of(name)}
            found = registered(name, placement.ranks, instance.microbatches, **options)
            found.validate()
            again = found.recomputed and not instance.recompute
            others = found.forward_only or found.updated or found.offloaded or found.placement.barriers or again
            if others or (found.placement.holders, found.slices) != (placement.holders, placement.slices):
                continue
            orders = tuple(tuple(_adapted(instance, order)) for order in found.orders)
            has_halves = any(action.op == "W" for order in orders for action in order)
            if instance.split or not has_halves:
                yield replace(found, placement=instance.placement, orders=orders)


def _adapted(instance: Instance, order: Sequence[Action]) -> Iterator[Action]:
    """Yield actions without pairs if there may be none, and with whole backwards in halves if these are split."""
    for action in order:
        for each in [action] if instance.pairs else action.singles:
            if instance.split and each.op == "B":
                yield Action(each.stage, Op.I, each.microbatch)
                yield Action(each.stage, Op.W, each.microbatch)
            else:
                yield each


def one_by_one(instance: Instance) -> Schedule:
    """Return the schedule that needs the least memory: a microbatch at a time."""
    again = [Op.R] if instance.recompute else []
    forwards = [(part, Op.F) for part in range(instance.parts)]
    backwards = [(part, op) for part in reversed(range(instance.parts)) for op in (*again, *instance.ops[1:])]
    keys = forwards + backwards
    actions = [instance.action(*key, microbatch) for microbatch in range(instance.microbatches) for key in keys]
    return scheduled("one by one", instance.placement, instance.microbatches, enumerate(actions))
