"""Messages that occupy their links: compared with ranks that have queues and are simulated tick by tick."""

import re
from itertools import permutations

import judge
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often, read, with_orders

import ppedu as pp
from ppedu import Action, Costs, Op, ScheduleError, SettingError, Timeline, simulate
from ppedu.course.board.board import Board
from ppedu.sim.reorder import reorder
from ppedu.zoo import theory


def play(schedule, length, transfer, latency, links):
    """Return `rows[rank]` as [(action, start, end)], or None if the ranks get stuck. All times are whole ticks.

    The actions of a row are sorted by their text; waits are not among them, and those of a batch are.

    transfer, latency: dicts from (source, target) to a number.
    """
    orders = [list(order) for order in schedule.orders]
    rows = [[] for _ in orders]
    at, busy, away = [0] * len(orders), [0] * len(orders), judge.parted(schedule.placement)
    queues = {}  # by rank and peer: groups of {value: (index, source, target)} in the order posted
    moving, here, sent = {}, {}, {}  # value -> end of its transfer; (value, rank) -> its arrival; value -> that end
    standing = set()  # the ranks whose batch is posted
    waited = [{judge.unwaited(action) for action in order if judge.is_wait(action)} for order in orders]

    def queue(rank, peer, sends):
        return queues.setdefault((rank, None if links == "rank" else peer, links == "direction" and sends), [])

    now = 0
    while True:
        changed = True
        while changed:
            changed = False
            for value, (end, source, target) in list(moving.items()):
                if end == now:
                    for one in (queue(source, target, True), queue(target, source, False)):
                        del one[0][value]
                        if not one[0]:
                            del one[0]
                    here[value, target], sent[value] = now + latency[source, target], now
                    del moving[value]
                    changed = True
            for rank, order in enumerate(orders):
                if at[rank] == len(order) or busy[rank] > now:
                    continue
                action, index = order[at[rank]], at[rank]

                def is_over(message, rank=rank, now=now):
                    value = judge.message(message)[0]
                    when = sent.get(value) if message.op.startswith("SEND") else here.get((value, rank))
                    return when is not None and when <= now

                if judge.is_wait(action):
                    if not is_over(judge.unwaited(action)):
                        continue
                elif action.op in judge.MESSAGES or action.op == "BATCH_P2P":
                    if rank not in standing:
                        groups = {}
                        for part in action.singles:
                            source, target = judge.ends(part, schedule.placement)
                            place = id(queue(rank, target if rank == source else source, rank == source))
                            groups.setdefault(place, {})[judge.message(part)[0]] = index, source, target
                        for one in queues.values():
                            one += [groups[id(one)]] if id(one) in groups else []
                        standing.add(rank)
                        changed = True
                    if action.parts and not all(is_over(each) for each in action.parts if each not in waited[rank]):
                        continue
                    standing.remove(rank)
                else:
                    singles = [each for each in action.singles if each.op in judge.COMPUTE]
                    wanted = [value for each in singles for value in judge.needs(each, schedule.stages, away)]
                    if any(here.get((value, rank), now + 1) > now for value in wanted):
                        continue
                    busy[rank] = now + (length(action) if singles else 0)
                    rows[rank].append((action, now, busy[rank]))
                    for each in singles:
                        here.update(dict.fromkeys([(value, rank) for value in judge.gives(each, away)], busy[rank]))
                at[rank] += 1
                changed = True
            for waiting in list(queues.values()):
                for value, (_, source, target) in [*waiting[0].items()] if waiting else []:
                    firsts = [(queue(*ends) or [{}])[0] for ends in ((source, target, True), (target, source, False))]
                    if value not in moving and all(value in first for first in firsts):
                        end = now + transfer[source, target]
                        moving[value] = end, source, target
                        for rank, first in zip((source, target), firsts, strict=True):
                            index, what = first[value][0], value
                            single = next(
                                each for each in orders[rank][index].singles if judge.message(each)[0] == what
                            )
                            rows[rank].append((single, now, end))
                        changed = True
        if not moving and all(time <= now for time in [*busy, *here.values()]):
            return [*map(by_text, rows)] if at == [*map(len, orders)] else None
        now += 1


def by_text(row):
    """Return the spans of a row, except those of waits, sorted by the text of their actions."""
    return sorted((tuple(span) for span in row if not judge.is_wait(span[0])), key=lambda span: (str(span[0]), span[1]))


def draw(chance, loose=False, **options):
    """Return a lowered schedule, its costs without `links`, and the arguments of `play` without `links`."""
    schedule = judge.draw(chance, sharded=chance.random() < 0.2, **options)
    if loose and judge.legal(other := judge.loosen(chance, schedule)):
        schedule = other
    times = {op: [chance.randint(0, 4) for _ in range(schedule.stages)] for op in "FBIW"}
    links = [*permutations(range(schedule.ranks), 2)]
    latency = {link: chance.randint(0, 2) for link in links}
    most = chance.choice([0, 1, 4])
    transfer = {link: chance.randint(0, most) for link in links}
    costs = {"forward": times["F"], "backward": times["B"], "input": times["I"], "weight": times["W"]}

    def length(action):
        return sum(times[each.op][each.stage] for each in action.singles)

    return schedule, {**costs, "latency": latency, "transfer": transfer}, (schedule, length, transfer, latency)


LINKS = st.sampled_from(["direction", "pair", "rank"])
WAITS = re.compile(r"rank (\d+) waits at position (\d+) \((.+)\) (?:for (\w+) of rank (\d+)|until (\w+) is received)")
MESSAGE = re.compile(
    r"rank (?P<rank>\d+)'s (?P<kind>send|receive|batch) (?P<first>\S+) "
    r"(waits for rank (?P<peer>\d+) to (?P<does>send|receive))?(, and )?"
    r"(blocks (?P<then>\S+), which was posted after it)?"
)


def require_true(sentence, schedule, links):
    """Assert that what the sentence about a deadlock says of the orders is true."""
    assert sentence.startswith("deadlock: ")
    for clause in sentence.removeprefix("deadlock: ").split("; "):
        if found := WAITS.fullmatch(clause):
            rank, index, action, send, sender, own = found.groups()
            assert str(schedule.orders[int(rank)][int(index)]) == action
            assert Action.parse(send or own) in [
                single for each in schedule.orders[int(sender or rank)] for single in each.singles
            ]
            continue
        found = MESSAGE.fullmatch(clause)
        assert found and (found["peer"] or found["then"]), clause
        order, first = schedule.orders[int(found["rank"])], Action.parse(found["first"])
        if first.op == "BATCH_P2P":
            assert found["kind"] == "batch"
            if found["then"]:
                assert order.index(first) < order.index(Action.parse(found["then"]))
            continue
        assert (found["kind"] == "send") == (first.op in ("SEND_F", "SEND_B"))
        if found["then"]:
            then = Action.parse(found["then"])
            assert order.index(first) < order.index(then)
            if then.op == "BATCH_P2P":
                continue
            assert links == "rank" or {*judge.ends(first, schedule.placement)} == {
                *judge.ends(then, schedule.placement)
            }
        if found["peer"]:
            assert {int(found["rank"]), int(found["peer"])} == {*judge.ends(first, schedule.placement)}
            assert found["does"] != found["kind"]


@pytest.mark.parametrize("loose", [False, True])
@given(st.randoms(use_true_random=False), LINKS)
@often(200)
def test_the_queues_give_the_same_times_and_the_same_deadlocks(loose, chance, links):
    schedule, costs, arguments = draw(chance, loose, together=chance.random() < 0.5)
    expected = play(*arguments, links)
    problems = pp.check(schedule, transport=links)
    assert bool(problems) == (expected is None)
    if expected is None:
        assert {problem.kind for problem in problems} == {"deadlock"}
        with pytest.raises(ScheduleError, match=f"gets stuck with transport='{links}'") as caught:
            simulate(schedule, Costs(**costs, transport=links))
        assert list(caught.value.problems) == problems
        for rank, index, action, _, message, cycle in problems:
            assert schedule.orders[rank][index] == action and str(action) in message
            assert (rank, index) in cycle
            assert all(str(schedule.orders[at][position]) in message for at, position in cycle)
            require_true(message, schedule, links)
    else:
        assert [*map(by_text, simulate(schedule, Costs(**costs, transport=links)).rows)] == expected


@given(st.randoms(use_true_random=False))
@often(60)
def test_links_that_are_used_in_turn_are_never_faster(chance):
    schedule, costs, _ = draw(chance, together=True)
    makespans = [
        simulate(schedule, Costs(**costs, transport=links)).makespan
        for links in ("buffered", "direction", "pair", "rank")
        if links == "buffered" or not pp.check(schedule, transport=links)
    ]
    assert makespans == sorted(makespans)


@given(st.randoms(use_true_random=False), st.booleans())
@often(40)
def test_a_free_transfer_is_latency(chance, lowered):
    schedule = judge.draw(chance, lowered=lowered)
    links = [*permutations(range(schedule.ranks), 2)]
    latency, transfer = ({link: chance.randint(0, 3) for link in links} for _ in range(2))
    both = {link: latency[link] + transfer[link] for link in links}
    found = simulate(schedule, Costs(latency=latency, transfer=transfer))
    assert found.rows == simulate(schedule, Costs(latency=both)).rows


@pytest.mark.parametrize("name", pp.schedules())
def test_lowered_schedules_of_the_zoo_never_get_stuck(name):
    schedule = pp.schedule(name, 4, 8)
    if schedule.placement.barriers:
        return  # refused, see test_shared_head
    compute = simulate(schedule, Costs(latency=2))
    for receive in "early", "late":
        lowered = pp.lower(schedule, receive=receive)
        for links in "direction", "pair", "rank":
            assert pp.check(lowered, transport=links) == []
            timeline = simulate(lowered, Costs(transfer=1, latency=1, transport=links))
            assert timeline.busy == compute.busy and timeline.makespan >= compute.makespan
            if not lowered.offloaded:  # the times of copies decide what is held
                assert timeline.peak_activations == compute.peak_activations


# --- what a timeline shows ----------------------------------------------------------------------------------------


def two_messages(links):
    """Rank 0 posts a receive before it sends its second message."""
    schedule = read(
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    return simulate(schedule, Costs(forward=2, backward=4, transfer=1, latency=3, transport=links))


def test_messages_have_times_of_their_own_and_keep_no_rank_busy():
    timeline = two_messages("pair")
    times = {str(action): (start, end) for row in timeline.rows for action, start, end in row}
    assert times["0SEND_F0"] == times["1RECV_F0"] == (2, 3)
    assert times["1F0"] == (6, 8) and times["1B0"] == (8, 12)
    assert times["1SEND_B0"] == times["0RECV_B0"] == (12, 13)
    assert times["0SEND_F1"] == times["1RECV_F1"] == (13, 14), "made at 4, but posted after 0RECV_B0"
    assert times["0B0"] == (16, 20) and times["1F1"] == (17, 19)
    assert timeline.busy == (12, 12) and timeline.start == 0 and timeline.makespan == times["0B1"][1] == 31
    assert timeline.idle == (19, 19) and timeline.span == 31
    assert "SEND" not in timeline.text() and "RECV" not in timeline.text()


def test_the_reason_names_the_message_that_comes_before():
    timeline = two_messages("pair")
    assert timeline.why_idle(1, 13) == (
        "rank 1 waits 12–17: 1F1 needs 0F1, which ends at 4 on rank 0; its message starts at 13, after 0RECV_B0 of "
        "rank 0"
    )
    assert timeline.why_idle(1, 0) == "rank 1 waits 0–6: 1F0 needs 0F0, which ends at 2 on rank 0"
    path = [str(span.action) for _, span in timeline.critical_path()]
    assert path == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_a_message_whose_link_becomes_free_when_it_is_posted_has_not_waited():
    """That of 0F1 is posted at 4, when that of 0F0 has left the link: the path leads through 0F1."""
    schedule = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        microbatches=2,
    )
    timeline = simulate(schedule, Costs(forward=[2, 1], backward=[4, 2], transfer=2, transport="pair"))
    times = {str(action): (start, end) for row in timeline.rows for action, start, end in row}
    assert (times["0F1"], times["0SEND_F0"], times["0SEND_F1"]) == ((2, 4), (2, 4), (4, 6))
    assert times["1F0"] == (4, 5) and times["1F1"] == (6, 7)
    path = [str(span.action) for _, span in timeline.critical_path()]
    assert path == ["0F0", "0F1", "1F1", "1B0", "0B0", "0B1"]


@given(st.randoms(use_true_random=False), st.sampled_from(["buffered", "direction", "pair", "rank"]))
@often(150)
def test_every_gap_has_a_reason(chance, links):
    schedule, costs, _ = draw(chance, loose=True, together=chance.random() < 0.5)
    if links == "buffered" or not pp.check(schedule, transport=links):
        reasons = [gap.why for gap in simulate(schedule, Costs(**costs, transport=links)).gaps()]
        assert not any("could have started before" in why for why in reasons), reasons


@pytest.mark.parametrize("loose", [False, True])
@given(st.randoms(use_true_random=False), LINKS)
@often(150)
def test_no_action_on_the_critical_path_can_take_longer_without_a_later_end(loose, chance, links):
    schedule, costs, _ = draw(chance, loose, together=chance.random() < 0.5, most_microbatches=5)
    if pp.check(schedule, transport=links):
        return
    timeline = simulate(schedule, Costs(**costs, transport=links))
    path = timeline.critical_path()
    assert path[0][1].start == 0 and path[-1][1].end == timeline.makespan
    list(timeline.gaps())
    assert sum(timeline.causes().values()) == pytest.approx(timeline.bubble, abs=1e-12)
    names = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    _, span = chance.choice(path)
    single = chance.choice(span.action.singles)
    table = [[time] * schedule.microbatches for time in costs[names[single.op]]]
    table[single.stage][single.microbatch] += 7
    slower = simulate(schedule, Costs(**{**costs, names[single.op]: table}, transport=links))
    assert slower.makespan >= timeline.makespan + 7


@pytest.mark.parametrize("links", ["pair", "rank"])
@pytest.mark.parametrize("barrier", [True, False])
def test_several_steps_and_saved_ones(links, barrier, tmp_path):
    schedule = pp.lower(pp.schedule("zb-v", 4, 8))
    times = {"forward": lambda stage, microbatch: 1 + (stage + microbatch) % 3, "transfer": 1, "latency": 1}
    costs = Costs(**times, transport=links)
    one, three = simulate(schedule, costs), simulate(schedule, costs, steps=3, barrier=barrier)
    assert barrier == (three.makespan == 3 * one.makespan) and len(three.steps) == 3
    assert sum(three.causes().values()) == pytest.approx(three.bubble)
    list(three.gaps()), three.critical_path()
    one.save(tmp_path / "x.json")
    loaded = Timeline.load(tmp_path / "x.json")
    assert loaded.costs.transport == links and loaded.costs.transfer == 1 and loaded.busy == one.busy
    assert loaded.makespan == one.makespan and loaded.causes() == pytest.approx(one.causes())
    one.save(tmp_path / "x.html")


# --- deadlocks ----------------------------------------------------------------------------------------------------


def test_two_ranks_that_send_before_they_receive_block_each_other():
    schedule = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    assert pp.check(schedule) == []
    for links in ("pair", "rank"):
        (problem,) = pp.check(schedule, transport=links)
        clauses = [
            "rank 0's send 0SEND_F1 blocks 0RECV_B0, which was posted after it",
            "rank 1's send 1SEND_B0 blocks 1RECV_F1, which was posted after it",
        ]
        assert problem.message.startswith("deadlock: ") and sorted(problem.message[10:].split("; ")) == clauses
        assert str(problem.action) in ("0SEND_F1", "1SEND_B0")
        with pytest.raises(ScheduleError, match=f"gets stuck with transport='{links}':\n  deadlock: "):
            simulate(schedule, Costs(transport=links))


# --- arguments ----------------------------------------------------------------------------------------------------


def test_links_need_messages():
    schedule = pp.schedule("1f1b", 4, 8)
    says = "transport='pair' needs messages, and 1f1b is not lowered; take lower(schedule)"
    for call in (lambda: simulate(schedule, Costs(transport="pair")), lambda: pp.check(schedule, transport="pair")):
        with pytest.raises(SettingError, match=re.escape(says)):
            call()
    alone = pp.schedule("1f1b", 1, 2)
    assert simulate(alone, Costs(transport="rank")).rows == simulate(alone).rows
    assert pp.check(alone, transport="rank") == []


def test_a_batch_does_not_block_itself():
    """Both ranks post a send before the receive that the other waits for."""
    first, second = "0F0 0SEND_F0 0F1 {0} 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 {0} 1F1 1B1 1SEND_B1"
    alone = read(first.format("0SEND_F1 0RECV_B0"), second.format("1SEND_B0 1RECV_F1"), microbatches=2)
    batches = "(0SEND_F1;0RECV_B0)BATCH_P2P", "(1SEND_B0;1RECV_F1)BATCH_P2P"
    together = read(first.format(batches[0]), second.format(batches[1]), microbatches=2)
    for transport in ("rendezvous", "pair", "rank"):
        assert len(pp.check(alone, transport=transport)) == 1 and pp.check(together, transport=transport) == []
    assert [problem.kind for problem in pp.check(alone, transport="any")] == ["unknown"]
    timeline = simulate(together, Costs(forward=1, backward=2, transfer=3, transport="rank"))
    spans = {str(span.action): (span.start, span.end) for rank in (0, 1) for span in timeline.spans(rank)}
    assert spans["1B0"] == (5, 7) and spans["0SEND_F1"] == spans["0RECV_B0"] == (7, 10) == spans["1RECV_F1"]


def test_a_rank_that_waits_for_a_send_goes_on_when_it_is_received():
    schedule = read("0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    assert pp.check(schedule, transport="pair") == []
    assert simulate(schedule, Costs(transfer=2, transport="pair")).span == 1 + 2 + 1 + 2 + 2 + 2


def test_wrong_links_are_refused():
    lowered = pp.lower(pp.schedule("1f1b", 2, 2))
    for value in ("nccl", None, 1, ["pair"]):
        with pytest.raises(SettingError, match="transport must be one of 'buffered', 'direction', 'pair', 'rank'; "):
            Costs(transport=value)
    for value in ("free", 1, ["pair"]):
        with pytest.raises(SettingError, match=r"transport must be one of .*; got "):
            pp.check(lowered, transport=value)
    with pytest.raises(SettingError, match="the transfer has no entry for the link from rank 0 to rank 1"):
        simulate(lowered, Costs(transfer={(1, 0): 1}, transport="pair"))
    illegal = with_orders(lowered, [lowered.orders[0][1:], lowered.orders[1]])
    assert pp.check(illegal, transport="pair") == pp.check(illegal) != []


def test_what_has_no_links_refuses_them():
    costs = Costs(transport="pair")
    for make in (
        lambda: Board(pp.Placement.make("loop", 2), 2, costs),
        lambda: theory.idle("1f1b", 4, 8, costs=costs),
    ):
        with pytest.raises(SettingError, match="leave out transport"):
            make()
    assert reorder(simulate(pp.lower(pp.schedule("1f1b", 2, 2)), costs)).makespan == 9


# --- a stall of torch ---------------------------------------------------------------------------------------------


def in_order_of_time(schedule):
    """Return the schedule with each message posted, by both ranks, in the order in which the results are made."""
    placement, orders = schedule.placement, [[] for _ in schedule.orders]
    spans = [(rank, span) for rank, row in enumerate(simulate(schedule).rows) for span in row]
    events = [(span.start, 1, rank, span.action) for rank, span in spans]
    events += [(span.end, 0, rank, span.action) for rank, span in spans]
    for _, starts, rank, action in sorted(events, key=lambda event: event[:3]):
        if starts:
            orders[rank].append(action)
            continue
        send, receive, step = (Op.SEND_F, Op.RECV_F, 1) if action.op == "F" else (Op.SEND_B, Op.RECV_B, -1)
        if send in placement.links[0][action.stage]:
            orders[rank].append(Action(action.stage, send, action.microbatch))
            peer = placement.rank(action.stage + step)
            orders[peer].append(Action(action.stage + step, receive, action.microbatch))
    return with_orders(schedule, orders)


def test_the_stall_of_warm_up_receives_that_are_posted_early():
    """Interleaved 1F1B on 8 ranks with 2 chunks, as in pytorch/pytorch issues 188833 and 165664.

    The first order posts each receive where its sender is reached when the ranks take turns, so rank 0 waits for
    8RECV_F0, which goes all the way around, before it sends its second message. With one stream per rank, F = 2, B = 4
    and no transfer time at all, the step takes 168 instead of 117. With 0.1 for a transfer, it takes 178.8 instead of
    131.7. With a stream for each peer neither order stalls.

    If rank 0 alone runs its warm-up forwards first, and the other ranks keep their order, then sends that wait for
    their receives deadlock. Only buffers of the network would save them.
    """
    schedule = pp.schedule("interleaved", 8, 16, chunks=2)
    early, timed = pp.lower(schedule), in_order_of_time(schedule)
    first, second = (" ".join(map(str, each.orders[0])) for each in (early, timed))
    assert first.startswith("0F0 0SEND_F0 8RECV_F0 0F1 0SEND_F1 8RECV_F1 0F2 0SEND_F2 8RECV_F2 0F3")
    assert second.startswith("0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3")
    assert second.index("8RECV_F0") > second.index("0SEND_F7")

    def makespan(order, transfer, links):
        return simulate(order, Costs(forward=2, backward=4, transfer=transfer, transport=links)).makespan

    assert makespan(early, 0, "rank") == 168 and makespan(timed, 0, "rank") == makespan(early, 0, "buffered") == 117
    assert makespan(early, 0, "pair") == makespan(timed, 0, "pair") == 117
    assert makespan(early, 0.1, "rank") == pytest.approx(178.8)
    assert makespan(timed, 0.1, "rank") == pytest.approx(131.7)
    assert makespan(early, 0.1, "pair") == pytest.approx(120) and makespan(timed, 0.1, "pair") == pytest.approx(122.5)
    timeline = simulate(early, Costs(forward=2, backward=4, transport="rank"))
    reason = "1F1 needs 0F1, which ends at 2 on rank 0; its message starts at 8, after 8RECV_F0 of rank 0"
    assert timeline.why_idle(1, 2) == f"rank 1 waits 2–8: {reason}"
    path = " ".join(str(span.action) for _, span in timeline.critical_path())
    assert path.startswith("0F0 1F0 2F0 3F0 4F0 5F0 6F0 7F0 1F1 2F1 3F1 4F1 5F1 6F1 7F1 1F2")

    warm_up = [*first[: first.index(" 8F0")].split()]
    receives = [word for word in warm_up if word.startswith("8RECV")]
    order = [word for word in warm_up if word not in receives] + receives + first.split()[len(warm_up) :]
    alone = with_orders(early, [[Action.parse(word) for word in order], *early.orders[1:]])
    assert pp.check(alone) == [] == pp.check(alone, transport="pair")
    (problem,) = pp.check(alone, transport="rank")
    assert "rank 0's send 0SEND_F7 blocks 8RECV_F0, which was posted after it" in problem.message
