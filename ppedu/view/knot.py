"""The mistake in an order as a picture: the ranks that wait for each other, or the messages that are mixed up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from ppedu.core import COMMUNICATION, SEND, WAITS, Action, Op, Problem, Schedule, requires
from ppedu.core.placement import other_end
from ppedu.sim.shrink import shrink
from ppedu.sim.verify import problems_of
from ppedu.view.look import COLORS, MARK, ink_on

Place = tuple[int, int]  # a rank, and the position of an action in its order
Arrow = tuple[Place, Place, bool]  # from what sends or waits, to what receives or is waited for; whether it is wrong

LETTER, HEIGHT, ROW, EDGE = 7.3, 26, 78, 62  # pixels: of a letter, a box, from row to row, and left of the boxes
MOST = 14  # actions of a rank that are drawn
SHOWN = 5  # problems in words


def figure(schedule: Schedule, transport: str = "buffered", buffers: int | None = None) -> str:
    """Return the problems of a schedule as HTML, with a picture; nothing if it is legal."""
    _, problems = problems_of(schedule, transport, buffers)
    lines = [str(problem) for problem in problems[:SHOWN]]
    lines += [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    drawn = picture(schedule, transport, buffers) if problems else ""
    return "".join(f"<p>{escape(line)}</p>" for line in lines) + drawn


def picture(schedule: Schedule, transport: str = "buffered", buffers: int | None = None) -> str:
    """Return a picture of the smallest part of an illegal schedule that fails in the same way, as HTML."""
    part = shrink(schedule, transport=transport, buffers=buffers)
    whole, problems = problems_of(part, transport, buffers)
    smaller = (part.stages, part.microbatches) != (schedule.stages, schedule.microbatches)
    same = f"<p>The same on {escape(part.size)} ({escape(part.name)}, numbered from 0):</p>" if smaller else ""
    return same + draw(whole, problems)


def draw(schedule: Schedule, problems: Sequence[Problem]) -> str:
    """Return the first problems as SVG, or nothing if they have no place in an order.

    Of a deadlock, the action at which each rank waits, with an arrow to what it waits for. Of messages that are
    received in another order than sent, each send with an arrow to the receive that gets it. Of anything else, the
    actions in question.
    """
    first = problems[0]
    if first.cycle:
        arrows = list(_waits(schedule, first))
    elif first.kind == "message" and "would get" in first.message:
        arrows = list(_deliveries(schedule, first))
    else:
        arrows = []
    marked = {*first.cycle} or {place for *ends, wrong in arrows if wrong for place in ends}
    if not marked and first.index is not None:
        marked = {(first.rank, first.index)}
    return _svg(schedule, marked, arrows) if marked else ""


def _waits(schedule: Schedule, problem: Problem) -> Iterator[Arrow]:
    """Yield an arrow from each action that waits in a cycle to the action that the next rank has not reached."""
    for (rank, index), (peer, reached) in pairwise((*problem.cycle, problem.cycle[0])):
        wanted = _awaited(schedule, schedule.orders[rank][index])
        for at, action in enumerate(schedule.orders[peer][reached:], reached):
            if not wanted.isdisjoint((action, *action.singles)):
                yield (rank, index), (peer, at), True
                break


def _awaited(schedule: Schedule, action: Action) -> set[Action]:
    """Return the actions of other ranks that an action may wait for."""
    found = set()
    for single in action.singles:
        message = single._replace(op=WAITS[single.op]) if single.op in WAITS else single
        if message.op in COMMUNICATION:
            found.add(other_end(message))
            continue
        for kind, stage, microbatch in requires(single, schedule.placement, schedule.lowered):
            kinds = ("B", "I") if kind == "B" else (kind,)
            needed = [Action(stage, Op(each), microbatch) for each in kinds]
            found |= {other_end(each) if each.op in COMMUNICATION else each for each in needed}
    return found


def _deliveries(schedule: Schedule, problem: Problem) -> Iterator[Arrow]:
    """Yield an arrow from each send to the receive that gets it, between the ranks of a problem, near it."""
    route = schedule.placement.route(problem.action)
    ends: defaultdict[bool, list[tuple[Place, Action]]] = defaultdict(list)  # sends, and the sends that receives want
    for rank in route:
        for index, action in enumerate(schedule.orders[rank]):
            for single in action.singles:
                if single.op in COMMUNICATION and schedule.placement.route(single) == route:
                    sends = single.op in SEND
                    ends[sends].append(((rank, index), single if sends else other_end(single)))
    pairs = [(sent, got) for sent, got in zip(ends[True], ends[False], strict=False)]
    wrong = next(number for number, (sent, got) in enumerate(pairs) if sent[1] != got[1])
    for (start, sent), (end, wanted) in pairs[max(0, wrong - 1) : wrong + 3]:
        yield start, end, sent != wanted


def _svg(schedule: Schedule, marked: set[Place], arrows: Sequence[Arrow]) -> str:
    keys: defaultdict[int, set[int]] = defaultdict(set)  # by rank, the positions to draw
    for rank, index in marked | {place for start, end, _ in arrows for place in (start, end)}:
        keys[rank].add(index)
    parts, middles, width = [], {}, 0.0
    for row, rank in enumerate(sorted(keys)):
        x, y, before = float(EDGE), 18 + row * ROW, -1
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        order = schedule.orders[rank]
        near = sorted({at + step for at in keys[rank] for step in (-2, -1, 0, 1, 2)} & {*range(len(order))})
        for index in near[:MOST]:
            if index != before + 1:
                parts.append(f'<text x="{x}" y="{y + 17}">…</text>')
                x += 20
            text, before = str(order[index]).removesuffix(Op.BATCH_P2P), index
            wide = LETTER * len(text) + 14
            fill = COLORS.get(order[index].op)
            ink = ink_on(tuple(int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))) if fill else "currentColor"  # type: ignore[arg-type]
            stroke = (
                f'stroke="{MARK}" stroke-width="3"'
                if (rank, index) in marked
                else 'stroke="currentColor" stroke-opacity=".35"'
            )
            parts.append(
                f'<rect x="{x}" y="{y}" width="{wide:.0f}" height="{HEIGHT}" rx="4" fill="{fill or "none"}" {stroke}/>'
                f'<text x="{x + wide / 2:.0f}" y="{y + 17}" text-anchor="middle" fill="{ink}">{escape(text)}</text>'
            )
            middles[rank, index] = x + wide / 2, y
            x += wide + 6
        if before + 1 < len(order):
            parts.append(f'<text x="{x}" y="{y + 17}">…</text>')
        width = max(width, x + 20)
    for start, end, wrong in arrows:
        if start in middles and end in middles:
            parts.append(_curve(middles[start], middles[end], wrong))
    height = 18 + len(keys) * ROW - (ROW - HEIGHT) + 14
    return (
        f'<svg viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" style="max-width:100%" role="img" '
        'aria-label="the actions that wait or are wrong" font-family="ui-monospace, monospace" font-size="12" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


def _curve(start: tuple[float, float], end: tuple[float, float], wrong: bool) -> str:
    """Return an arrow between two boxes, given by the middle of their upper edges."""
    (x, y), (to_x, to_y) = start, end
    down = to_y > y
    y, to_y = (y + HEIGHT, to_y) if down else (y, to_y + HEIGHT)
    bend = (to_y - y) / 2
    color, tip, opacity = (MARK if wrong else "currentColor"), (-6 if down else 6), (1 if wrong else 0.45)
    return (
        f'<path d="M{x:.0f} {y}C{x:.0f} {y + bend} {to_x:.0f} {to_y - bend} {to_x:.0f} {to_y}" fill="none" '
        f'stroke="{color}" stroke-width="2" stroke-opacity="{opacity}"/>'
        f'<path d="M{to_x - 4:.0f} {to_y + tip}L{to_x:.0f} {to_y}L{to_x + 4:.0f} {to_y + tip}" fill="none" '
        f'stroke="{color}" stroke-width="2" stroke-opacity="{opacity}"/>'
    )
