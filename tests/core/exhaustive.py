"""The best order of a small schedule, found by trying all: an oracle."""

from stepper import parents


def fastest(timeline):
    """Return the least makespan of all orders of the same actions in which no rank exceeds its peak memory."""
    schedule, costs = timeline.schedule, timeline.costs
    weighs = costs.per_stage(costs.activation, schedule.stages, schedule.ranks)
    share = {"B": 1, "I": 1 - costs.weight_memory, "W": costs.weight_memory}
    units = [(rank, *span) for rank, row in enumerate(timeline.rows) for span in row]
    within = {single: unit for unit, (_, action, *_) in enumerate(units) for single in action.singles}
    rank_of = [rank for rank, *_ in units]
    lasts = [end - start for _, _, start, end in units]
    needs = [
        {within[each] for choices in parents(action, schedule.stages) for each in choices if each in within}
        for _, action, *_ in units
    ]
    needed = [{later for later, each in enumerate(needs) if unit in each} for unit in range(len(units))]
    takes = [sum(weighs[each.stage] for each in action.singles if each.op == "F") for _, action, *_ in units]
    gives = [sum(weighs[each.stage] * share.get(each.op, 0) for each in action.singles) for _, action, *_ in units]
    best, seen = timeline.makespan, set()

    def go(left, free, ends, room):
        """Try all orders of `left`. Ranks are free from `free` on, with memory `room`; `ends` are still needed."""
        nonlocal best
        if not left:
            best = min(best, max(free))
        bound = max(now + sum(lasts[unit] for unit in left if rank_of[unit] == rank) for rank, now in enumerate(free))
        state = left, free, tuple(sorted(ends.items()))
        if bound >= best or state in seen:
            return
        seen.add(state)
        for unit in left:
            rank = rank_of[unit]
            if needs[unit] & left or takes[unit] > room[rank]:
                continue
            end = max(free[rank], *(ends[each] for each in needs[unit]), 0) + lasts[unit]
            rest = left - {unit}
            after = {each: time for each, time in {**ends, unit: end}.items() if needed[each] & rest}
            there = room[rank] - takes[unit] + gives[unit]
            go(rest, _with(free, rank, end), after, _with(room, rank, there))

    go(frozenset(range(len(units))), (0,) * schedule.ranks, {}, timeline.peak_activations)
    return best


def _with(values, index, value):
    return (*values[:index], value, *values[index + 1 :])
