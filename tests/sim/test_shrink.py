"""`shrink`: parts of schedules that fail as the whole does, from which nothing more can be left out."""

import random
import re

import pytest

import ppedu as pp
from ppedu.cli.main import main
from ppedu.core.checking import TRANSPORTS

SIZES = [("1f1b", 4, 6), ("gpipe", 3, 5), ("interleaved", 2, 4), ("zb-h1", 4, 5), ("zb-v", 3, 6), ("dualpipe", 4, 8)]


def damaged(name, ranks, microbatches, seed, transport):
    """Return a lowered schedule in which two nearby actions of a rank are swapped, so that it fails."""
    lowered, chance = pp.lower(pp.schedule(name, ranks, microbatches)), random.Random(seed)
    while True:
        orders = [[*order] for order in lowered.orders]
        order = chance.choice(orders)
        place = chance.randrange(len(order) - 8)
        other = place + chance.randrange(1, 8)
        order[place], order[other] = order[other], order[place]
        schedule = pp.Schedule(name, lowered.placement, microbatches, orders)
        if kinds(schedule, transport):
            return schedule


def kinds(schedule, transport):
    problems = pp.check(schedule) or pp.check(schedule, transport=transport)
    return [problem.kind for problem in problems]


def without(schedule, stage=None, microbatch=None):
    """Return the texts of a schedule's orders without a stage or a microbatch, the others renumbered."""
    last, rows = schedule.stages - 1, []

    def less(number, left_out):
        return number - (left_out is not None and number > left_out)

    for order in schedule.orders:
        row = []
        for action in order:
            assert not action.parts
            at, op, number = re.fullmatch(r"(\d+)(\D+)(\d+)", str(action)).groups()
            at, number = int(at), int(number)
            first, final = (at == (stage == 0)), (at == last - (stage == last))
            if at == stage or number == microbatch:
                continue
            if stage is not None and ((first and op in ("RECV_F", "SEND_B")) or (final and op in ("SEND_F", "RECV_B"))):
                continue
            row.append(f"{less(at, stage)}{op}{less(number, microbatch)}")
        rows.append(row)
    return rows


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES[:4])
def test_nothing_can_be_left_out_of_the_part(name, ranks, microbatches, transport):
    for seed in range(4):
        schedule = damaged(name, ranks, microbatches, seed, transport)
        part = pp.shrink(schedule, transport=transport)
        kind = kinds(schedule, transport)[0]
        assert kind in kinds(part, transport)
        if part.ranks != part.stages or any(action.parts for order in part.orders for action in order):
            continue
        for microbatch in range(part.microbatches if part.microbatches > 1 else 0):
            orders = without(part, microbatch=microbatch)
            fewer = pp.Schedule("fewer", part.placement, part.microbatches - 1, orders)
            assert kind not in kinds(fewer, transport), (part, microbatch)
        for stage in range(part.stages if part.stages > 1 else 0):
            orders = [row for row in without(part, stage=stage) if row]
            if len(orders) == part.ranks - 1:
                fewer = pp.Schedule("fewer", pp.Placement.make("loop", len(orders)), part.microbatches, orders)
                assert kind not in kinds(fewer, transport), (part, stage)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_one_swap_needs_few_ranks_and_microbatches(name, ranks, microbatches):
    for seed in range(6):
        schedule = damaged(name, ranks, microbatches, seed, "rendezvous")
        part = pp.shrink(schedule, transport="rendezvous")
        assert kinds(schedule, "rendezvous")[0] in kinds(part, "rendezvous")
        assert part.stages <= 4 and part.microbatches <= 3, part.orders


def test_a_deadlock_of_two_among_eight_ranks(capsys, tmp_path):
    """Rank 5 waits for the first gradient before it sends the second activation; rank 6 waits for this before."""
    lowered = pp.lower(pp.schedule("1f1b", 8, 16))
    orders = [[*map(str, order)] for order in lowered.orders]
    orders[5].remove("5RECV_B0")
    orders[5].insert(orders[5].index("5SEND_F1"), "5RECV_B0")
    schedule = pp.Schedule("1f1b", lowered.placement, 16, orders)
    part = pp.shrink(schedule)
    assert (part.ranks, part.stages, part.microbatches, part.placement.name) == (2, 2, 2, "loop")
    expected = [
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ]
    assert [" ".join(map(str, order)) for order in part.orders] == expected
    (tmp_path / "ours.csv").write_text("\n".join(map(",".join, orders)))
    assert main(["verify", str(tmp_path / "ours.csv")]) == 1
    reason, *shown = capsys.readouterr().out.splitlines()
    assert reason.startswith("deadlock: rank 5 waits")
    assert shown == [
        "",
        "the same on 2 ranks, 2 microbatches (ours: stages 5, 6; microbatches 0, 1, numbered from 0):",
        f"rank 0: {expected[0].replace('0RECV_B0', '[0RECV_B0]')}",
        f"rank 1: {expected[1].replace('1RECV_F1', '[1RECV_F1]')}",
    ]


def test_a_schedule_without_messages_keeps_that_if_it_fails_so():
    """The third forward of rank 1 is the second once more; microbatch 2 is not needed for that, nor is rank 0."""
    part = pp.shrink(pp.Schedule.read("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1B0 1F1 1F1 1B1 1B2"))
    assert not part.lowered and [" ".join(map(str, order)) for order in part.orders] == ["0F0 0F0 0B0"]


def test_a_buffer_too_few_fails_on_one_rank():
    part = pp.shrink(pp.schedule("1f1b", 4, 8), transport="rendezvous", buffers=2)
    assert [" ".join(map(str, order)) for order in part.orders] == ["0F0 0F1 0F2 0B0 0B1 0B2"]


def test_what_is_legal_has_no_such_part():
    with pytest.raises(pp.SettingError, match="is legal for the transport 'rank' and buffers=4; there is nothing"):
        pp.shrink(pp.schedule("1f1b", 4, 8), transport="rank", buffers=4)
    with pytest.raises(pp.SettingError, match="is legal for the transport 'rank'; there is nothing to look for"):
        pp.shrink(pp.schedule("1f1b", 4, 8), transport="rank")
    with pytest.raises(pp.SettingError, match="transport must be one of"):
        pp.shrink(pp.schedule("1f1b", 4, 8), transport="nccl")
    with pytest.raises(pp.SettingError, match="shrink"):
        pp.shrink("1f1b")


@pytest.mark.parametrize(
    ("lowered", "rank", "action", "orders"),
    [
        (False, 2, "2W8", ["0F0 0B0 0W1"]),
        (False, 2, "9F0", ["0F0 0B0 6F0"]),
        (True, 3, "3SEND_F1", ["0F0 0B0 0SEND_F0"]),
        (True, 0, "0RECV_F1", ["0F0 0B0 0RECV_F0"]),
    ],
)
def test_an_action_that_does_not_exist_stays(lowered, rank, action, orders):
    whole = pp.schedule("1f1b", 4, 8)
    rows = [[*map(str, order)] for order in (pp.lower(whole) if lowered else whole).orders]
    rows[rank].append(action)
    part = pp.shrink(pp.Schedule("x", whole.placement, 8, rows))
    assert [" ".join(map(str, order)) for order in part.orders] == orders


@pytest.mark.parametrize(("name", "ranks"), [("chimera", 4), ("gems", 4), ("dualpipe", 2), ("v-min", 3), ("hanayo", 3)])
def test_a_part_has_no_problems_of_another_kind(name, ranks):
    """Two copies, of which one can be left out with what it gathers; a V, whose turn has no messages."""
    for seed, fsdp in enumerate([True, True, False, False]):
        whole, chance = pp.lower(pp.schedule(name, ranks, 4), fsdp=fsdp), random.Random(seed)
        rows = [[*order] for order in whole.orders]
        sends = [action for row in rows for action in row if action.op == "SEND_F"]
        rows[chance.randrange(ranks)].append(chance.choice(sends))
        schedule = pp.Schedule(name, whole.placement, 4, rows)
        found, of_part = ({each.kind for each in pp.check(each)} for each in (schedule, pp.shrink(schedule)))
        assert schedule.problems[0].kind in of_part <= found
        shown = [str(action) for row in pp.shrink(schedule).orders for action in row]
        assert len(set(shown)) < len(shown) or "rank" in of_part


def test_too_few_buffers_are_found_in_a_stage_of_a_large_schedule():
    for name in ("1f1b", "zb-v"):
        part = pp.shrink(pp.schedule(name, 32, 64), buffers=20)
        assert part.stages == 1 and {problem.kind for problem in pp.check(part, buffers=20)} == {"buffer"}
