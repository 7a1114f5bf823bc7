"""Messages between ranks. Oracles: a judge that executes schedules with values, and torch."""

import itertools
import re
from fractions import Fraction
from types import SimpleNamespace

import judge
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from strategies import often, read, with_orders

import ppedu as pp
from ppedu import Action, Costs, Schedule, ScheduleError, SettingError, check, simulate
from ppedu.core import align, label, lower, merge_backward, strip, table
from ppedu.core.export import to_torch
from ppedu.zoo.registry import options_of, published

ZOO = [(name, {}, 4, 8) for name in published() if "slices" not in options_of(name)] + [
    ("gpipe", {"lifo": True}, 3, 4),
    ("1f1b", {}, 1, 3),
    ("1f1b", {}, 2, 1),
    ("interleaved", {"chunks": 3}, 2, 5),
    ("looped-bfs", {"chunks": 3}, 3, 4),
    ("zb-interleaved", {"chunks": 3}, 3, 7),
    ("zb-v", {}, 2, 3),
    ("interleaved-overlap", {"backward_first": True}, 2, 5),
    ("dualpipe", {}, 2, 4),
    ("dualpipev", {}, 3, 7),
]
MADE = [pp.schedule(name, p, m, **options) for name, options, p, m in ZOO]
MADE = [each for each in MADE if not each.placement.barriers]  # see test_shared_head
randoms = st.randoms(use_true_random=True)  # one seed per example, because an example draws often


def zoo(torchs=False):
    """Return every published schedule, or those that torch can run."""
    return [each for each in MADE if not torchs or (each.placement.copies == 1 and not any(each.words.values()))]


def ways(schedule):
    """Yield the schedule lowered with early and with late receives, with and without sharding if possible."""
    sharded = [] if schedule.updated else [{"fsdp": True, "resident": 2}]
    for receive, options in itertools.product(("early", "late"), ({}, *sharded)):
        yield lower(schedule, receive, **options)


TRANSPORT = ("buffered", "rendezvous")


def agree(schedule, **how):
    """Assert that `check` and the judge agree about the schedule, and return whether it is legal."""
    legal = judge.legal(schedule, **how)
    found = check(schedule, transport=TRANSPORT[how.get("rendezvous", False)])
    assert (found == []) == legal, f"{schedule.placement} {how}\n{schedule.to_csv()}"
    return legal


def is_message(action):
    return action.op in judge.MESSAGES


def is_receive(action):
    return action.op.startswith("RECV")


def is_compute(action):
    return action.op not in (*judge.MESSAGES, *judge.SHARDING)


# --- legality ------------------------------------------------------------------------------------------------

KINDS = {
    "compute": {"lowered": False},
    "buffered": {},
    "together": {"together": True},
    "sharded": {"together": True, "sharded": True},
    "apart": {"together": True, "apart": True},
    "apart, compute": {"lowered": False, "apart": True},
}


@pytest.mark.parametrize("kind", KINDS)
@given(randoms)
@often(50)
def test_the_judge_agrees_about_random_and_mutated_schedules(kind, random):
    schedule = judge.draw(random, **KINDS[kind])
    assert judge.legal(schedule), "what the judge draws is legal"
    assert kind == "buffered" or judge.legal(schedule, rendezvous=True)
    for each in [schedule, *(judge.mutate(random, schedule) for _ in range(5))]:
        event("legal" if agree(each) else "illegal")
        agree(each, rendezvous=True)


@given(st.sampled_from(zoo()), randoms)
@often(300)
def test_the_judge_agrees_about_mutated_schedules_of_the_zoo(schedule, random):
    lowered = lower(schedule, random.choice(["early", "late"]), random.random() < 0.5 and not schedule.updated)
    for each in (schedule, lowered):
        agree(judge.mutate(random, each), rendezvous=random.random() < 0.5)


@pytest.mark.parametrize("kind", ["buffered", "together"])
@given(randoms)
@often(1000)
def test_the_judge_agrees_about_waits_and_batches(kind, random):
    schedule = judge.loosen(random, judge.draw(random, **KINDS[kind]))
    mutations = random.choice([judge.LOOSE, judge.MUTATIONS])
    for each in [schedule, *(judge.mutate(random, schedule, mutations) for _ in range(3))]:
        event("legal" if agree(each) else "illegal")
        agree(each, rendezvous=True)


@given(randoms)
@often(80)
def test_a_problem_gives_its_place_and_its_sentence_names_it(random):
    schedule = judge.mutate(random, judge.draw(random, **random.choice([*KINDS.values()])))
    for problem in check(schedule, transport=random.choice(TRANSPORT)):
        if problem.index is None:
            assert problem.message.startswith(f"rank {problem.rank}: {problem.action} is never run")
        else:
            there = schedule.orders[problem.rank][problem.index]
            assert problem.action == there or problem.action in there.parts
            assert problem.kind == "deadlock" or problem.message.startswith(
                f"rank {problem.rank}, position {problem.index}: {problem.action}"
            )


@given(randoms)
@often(80)
def test_a_receive_of_another_message_is_reported_with_that_message_and_its_rank(random):
    schedule = judge.draw(random, most_ranks=3)
    orders = [list(order) for order in schedule.orders]
    for order in orders:  # swap some messages
        spots = [index for index, action in enumerate(order) if is_message(action)]
        some = [spot for spot in spots if random.random() < 0.3]
        for spot, action in zip(some, random.sample([order[spot] for spot in some], len(some)), strict=True):
            order[spot] = action
    schedule = with_orders(schedule, orders)
    expected = set()
    for (source, target), (sent, received) in routes(schedule).items():
        for number, ((index, wanted), (at, got)) in enumerate(zip(received, sent, strict=True)):
            if judge.message(wanted) != judge.message(got):
                expected.add((target, index, wanted, str(got), str(number + 1), str(source), str(at)))
    found = set()
    for problem in check(schedule):
        if problem.kind == "message":
            told = r"would get what (\S+) sends: .* that one is message (\d+) from rank (\d+) \(position (\d+)\)"
            found.add((*problem[:3], *re.search(told, str(problem)).groups()))
    assert found == expected


def routes(schedule):
    """Return, for each pair of ranks, the messages sent and received, in order, with their positions."""
    found = {}
    for rank, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            if is_message(action):
                logs = found.setdefault(judge.ends(action, schedule.placement), ([], []))
                logs[is_receive(action)].append((index, action))
                assert judge.ends(action, schedule.placement)[is_receive(action)] == rank
    return found


NOWHERE = [*map(Action.parse, ["5F0", "5B0", "5I0", "5W0", "5SEND_F0", "5RECV_B0", "5UNSHARD", "(0F0;5B0)OVERLAP_F_B"])]


def test_messages_of_a_nonexistent_stage_are_out_of_range():
    for action in [*NOWHERE, pp.F(-3, 0), pp.B(-3, 0)]:
        lowered = lower(pp.schedule("1f1b", 2, 2))
        problems = check(with_orders(lowered, ((*lowered.orders[0], action), lowered.orders[1])))
        assert "range" in {problem.kind for problem in problems}


def test_ranks_that_both_send_first_wait_for_each_other_unless_sends_are_buffered():
    schedule = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    assert check(schedule) == []
    assert [str(problem) for problem in check(schedule, transport="rendezvous")] == [
        "deadlock: rank 0 waits at position 3 (0SEND_F1) for 1RECV_F1 of rank 1, "
        "rank 1 waits at position 3 (1SEND_B0) for 0RECV_B0 of rank 0"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0F0 1F0 0SEND_F0 1B0 0B0", "2: 0SEND_F0: rank 0 itself holds stage 1; nothing has to be sent"),
        ("0F0 1F0 1RECV_F0 1B0 0B0", "2: 1RECV_F0: rank 0 itself holds stage 0; nothing has to be sent"),
        ("0SEND_B0 0F0 1F0 1B0 0B0", "0: 0SEND_B0: stage 0 is the first; it has no stage to send to"),
        ("1RECV_B0 0F0 1F0 1B0 0B0", "0: 1RECV_B0: stage 1 is the last; it has no stage to receive from"),
        ("0UNSHARD 0F0 1F0 1B0 0B0", "2: 1F0 computes with sharded weights; 1UNSHARD must come first"),
        (
            "0UNSHARD 1UNSHARD 0F0 0RESHARD (1F0;0B0)OVERLAP_F_B 1B0",
            "4: (1F0;0B0)OVERLAP_F_B computes with sharded weights; 0UNSHARD must come first",
        ),
        ("0UNSHARD 0UNSHARD 0F0 0B0", "1: 0UNSHARD is needless: the weights are gathered already"),
        ("0RESHARD 0UNSHARD 0F0 0B0", "0: 0RESHARD is needless: the weights are sharded already"),
        (
            "0F0 1F0 1B0 0B0 0REDUCE_GRAD 0REDUCE_GRAD",
            "5: 0REDUCE_GRAD is needless: the gradients are summed already",
        ),
        ("0F0 1F0 1B0 0REDUCE_GRAD 0B0", "3: 0REDUCE_GRAD is too early: 0B0 comes after it, at position 4"),
    ],
)
def test_the_sentence_for_each_needless_message_and_for_sharded_weights(line, message):
    assert f"rank 0, position {message}" in [str(problem) for problem in check(read(line, chunks=2))]


def test_a_stage_whose_gradients_are_never_summed_is_found():
    """As in pytorch #144530 and picotron #5, where some ranks never had a last backward."""
    schedule = lower(pp.schedule("1f1b", 2, 2), fsdp=True)
    orders = [[action for action in order if str(action) != "1REDUCE_GRAD"] for order in schedule.orders]
    problems = check(with_orders(schedule, orders))
    assert [str(problem) for problem in problems] == ["rank 1: 1REDUCE_GRAD is never run, and other stages have theirs"]
    without = [[action for action in order if action.op != "REDUCE_GRAD"] for order in schedule.orders]
    assert check(with_orders(schedule, without)) == []


# --- lowering ---------------------------------------------------------------------------------------------------


def test_a_lowered_schedule_is_legal_and_computes_the_same():
    for schedule in zoo():
        for lowered in ways(schedule):
            for rendezvous in (False, True):
                assert judge.legal(lowered, rendezvous=rendezvous)
                assert check(lowered, transport=TRANSPORT[rendezvous]) == []
            assert strip(lowered) == schedule
            assert with_orders(lowered, schedule.orders) == schedule


@given(randoms)
@often(40)
def test_a_lowered_random_schedule_is_legal_and_computes_the_same(random):
    schedule = judge.draw(random, lowered=False, apart=random.random() < 0.3)
    for lowered in ways(schedule):
        for rendezvous in (False, True):
            assert judge.legal(lowered, rendezvous=rendezvous), schedule.to_csv()
            assert check(lowered, transport=TRANSPORT[rendezvous]) == []
        assert strip(lowered) == schedule


def test_results_are_sent_right_after_their_action_part_by_part():
    for schedule in zoo():
        for lowered in ways(schedule):
            for rank, order in enumerate(lowered.orders):
                sent = {action: [] for action in order if is_compute(action)}
                for action in order:
                    if not is_message(action):
                        last = action
                    elif action.op.startswith("SEND"):
                        sent[last].append(judge.message(action)[0])
                crossing = {
                    judge.message(action)[0] for action in judge.wanted_messages(lowered, rank) if "SEND" in action.op
                }
                away = judge.parted(schedule.placement)
                for action, values in sent.items():
                    made = [value for single in action.singles for value in judge.gives(single, away)]
                    assert values == [value for value in made if value in crossing]


def test_late_receives_are_posted_only_when_they_must_be():
    for schedule in zoo():
        early, late = lower(schedule), lower(schedule, "late")
        for soon, deferred in zip(early.orders, late.orders, strict=True):
            assert [*filter(is_message, soon)] == [*filter(is_message, deferred)]
            assert all(early <= late for early, late in zip(before(soon), before(deferred), strict=True))
            for action, after in itertools.pairwise(deferred):
                if is_receive(action) and not is_receive(after) and not after.op.startswith("SEND"):
                    size = schedule.stages, judge.parted(schedule.placement)
                    needed = [value for single in after.singles for value in judge.needs(single, *size)]
                    assert judge.message(action)[0] in needed
            assert not is_receive(deferred[-1])


def before(order):
    """Return the number of compute actions before each receive."""
    return [sum(map(is_compute, order[:index])) for index, action in enumerate(order) if is_receive(action)]


def test_a_message_has_a_unique_label_for_both_ranks():
    for schedule in zoo():
        labels = {}
        for action in itertools.chain(*lower(schedule).orders):
            if is_message(action):
                (what, stage, m), *_ = judge.message(action)
                source, target = judge.ends(action, schedule.placement)
                of = f"stage {stage}'s " if schedule.stages > schedule.ranks else ""
                kind = {"activation": "F", "gradient": "B", "input": "R"}[what]
                expected = f"rank {source} → {target}: {of}{kind} of microbatch {m}"
                assert label(action, schedule.placement) == expected
                labels.setdefault(expected, []).append(action)
        assert all(len(actions) == 2 for actions in labels.values())


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_at_most_resident_stages_are_gathered_at_once(resident):
    for schedule in zoo():
        if not schedule.updated:
            require_at_most_gathered(schedule, resident)


def require_at_most_gathered(schedule, resident):
    if any(
        len({single.stage for single in action.singles}) > resident for order in schedule.orders for action in order
    ):
        with pytest.raises(SettingError, match="resident must be at least 2"):
            lower(schedule, fsdp=True, resident=resident)
        return
    for order in lower(schedule, fsdp=True, resident=resident).orders:
        gathered, most = set(), 0
        for action in order:
            if action.op == "UNSHARD":
                gathered.add(action.stage)
            elif action.op == "RESHARD":
                gathered.remove(action.stage)
            most = max(most, len(gathered))
        held = {action.stage for action in order if action.op == "UNSHARD"}
        assert most == min(resident, len(held)) and not gathered
        trained = {single.stage for action in order for single in action.singles if single.op in ("B", "I")}
        assert sorted(action.stage for action in order if action.op == "REDUCE_GRAD") == sorted(trained)


@given(randoms)
@often(60)
def test_forwards_alone_are_lowered_too(random):
    schedule = judge.draw(random, lowered=False)
    forwards = [[F for action in order for F in action.singles if F.op == "F"] for order in schedule.orders]
    for receive in ("early", "late"):
        lowered = lower(with_orders(schedule, forwards), receive)
        assert all(judge.plays(lowered, range(schedule.ranks), rendezvous) for rendezvous in (False, True))
        assert {problem.kind for problem in check(lowered)} == {"missing"}
        assert {problem.action.op for problem in check(lowered)} <= {"B", "SEND_B", "RECV_B"}


@pytest.mark.parametrize("receive", ["early", "late"])
def test_results_without_a_consumer_are_still_received(receive):
    lowered = lower(read("0F0", "1F0 1B0"), receive)
    assert [str(problem) for problem in check(lowered)] == ["rank 0: 0B0 is never run"]


def test_schedules_that_cannot_be_lowered_are_refused_with_the_reason():
    schedule = pp.schedule("1f1b", 2, 2)
    for again in (lower(schedule), lower(pp.schedule("1f1b", 1, 1), fsdp=True)):
        with pytest.raises(SettingError, match="is lowered already"):
            lower(again)
    with pytest.raises(SettingError, match='receive must be "early" or "late"; got \'soon\''):
        lower(schedule, "soon")
    with pytest.raises(SettingError, match="resident must be at least 1; got 0"):
        lower(schedule, fsdp=True, resident=0)
    with pytest.raises(ScheduleError, match="0B0 needs 0F0, which only comes at position 1"):
        lower(read("0B0 0F0"))
    with pytest.raises(SettingError, match="0F0> is not a message"):
        label(pp.F(0, 0), schedule.placement)


# --- times --------------------------------------------------------------------------------------------------


def test_messages_change_no_times():
    for schedule in zoo():
        stages = range(schedule.stages)
        costs = Costs([1 + stage % 3 for stage in stages], [3 + stage % 2 for stage in stages], latency=Fraction(2, 3))
        bare = simulate(schedule, costs)
        for lowered in ways(schedule):
            timeline = simulate(lowered, costs)
            rows = tuple(tuple(span for span in row if is_compute(span.action)) for row in timeline.rows)
            assert rows == bare.rows
            assert (timeline.makespan, timeline.span, timeline.idle) == (bare.makespan, bare.span, bare.idle)
            assert timeline.peak_activations == bare.peak_activations


# --- merged backwards -------------------------------------------------------------------------------------------


@given(randoms)
@often(80)
def test_adjacent_halves_of_a_backward_are_merged(random):
    schedule = judge.draw(random, lowered=random.random() < 0.5)
    merged = merge_backward(schedule)
    for before, after in zip(schedule.orders, merged.orders, strict=True):
        words = " ".join(map(str, before))
        joined = re.sub(r"(?<!\S)([0-9]+)I([0-9]+) \1W\2(?!\S)", r"\1B\2", words)
        assert " ".join(map(str, after)) == joined
    assert judge.legal(merged) and check(merged) == []


# --- the lockstep grid ------------------------------------------------------------------------------------------

# By hand from the rule of arXiv 2006.09503, with forwards as long as backwards.
PICTURE = """
F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
.  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
.  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
.  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
"""


def test_the_grid_of_1f1b():
    grid = align(pp.schedule("1f1b", 4, 4))
    words = [[str(action)[1:] if action else "." for action in row] for row in grid]
    assert words == [line.split() for line in PICTURE.strip().splitlines()]


@given(randoms)
@often(80)
def test_actions_in_the_grid_start_as_early_as_they_can(random):
    schedule = judge.draw(random, lowered=False, apart=random.random() < 0.3)
    grid = align(schedule)
    assert tuple(tuple(filter(None, row)) for row in grid) == schedule.orders
    assert len({len(row) for row in grid}) == 1 and any(row[-1] for row in grid)
    expected = judge.clock(schedule, lambda action: 1, 0)
    found = [[(action, step, step + 1) for step, action in enumerate(row) if action] for row in grid]
    assert found == expected


def test_a_grid_has_no_messages():
    with pytest.raises(SettingError, match="align takes a schedule with compute actions only"):
        align(lower(pp.schedule("1f1b", 2, 2)))
    with pytest.raises(SettingError, match="align takes a schedule with compute actions only"):
        align(lower(pp.schedule("1f1b", 1, 2), fsdp=True))


def test_the_table_of_a_legal_schedule():
    assert table(pp.schedule("1f1b", 2, 2)) == (
        "slot  rank 0  rank 1\n"
        "0     0F0     ·\n"
        "1     0F1     1F0\n"
        "2     ·       1B0\n"
        "3     0B0     1F1\n"
        "4     ·       1B1\n"
        "5     0B1     ·"
    )


def test_the_table_of_an_illegal_schedule_marks_stuck_actions_and_lists_problems():
    schedule = read("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", "2F0 2B0 2F1 2B1", microbatches=2)
    assert table(schedule) == (
        "slot  rank 0  rank 1  rank 2\n"
        "0     0F0     ·       ·\n"
        "1     ✗ 0B0   ✗ 1F1   ✗ 2F0\n"
        "deadlock: rank 0 waits at position 1 (0B0) for 1B0 of rank 1, rank 1 waits at position 0 (1F1) for\n"
        "0F1 of rank 0"
    )


@given(randoms)
@often(60)
def test_the_table_marks_each_stuck_rank_and_ends_with_the_problems(random):
    schedule = judge.mutate(random, judge.draw(random, lowered=False))
    if not all(action.computes for order in schedule.orders for action in order):  # a message was inserted
        return
    problems = [str(problem) for problem in check(schedule)]
    lines = table(schedule).splitlines()
    assert " ".join(lines).endswith(" ".join(problems)) and max(map(len, lines)) <= 100
    got_through = map(len, align_without_idle(schedule))
    stuck = [order[done] for order, done in zip(schedule.orders, got_through, strict=True) if done < len(order)]
    crossed = [line for line in lines if "✗" in line]
    assert re.findall(r"✗ (\S+)", "".join(crossed)) == [str(action) for action in stuck]
    assert len(crossed) == bool(stuck)


def align_without_idle(schedule):
    return [[action for action in row if action] for row in align(schedule)]


# --- torch ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchs():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.fixture
def runtime(torchs):
    """Return torch's runtime for a schedule, which loads, lowers and simulates without a process group."""

    def make(schedule, **options):
        stage = SimpleNamespace(num_stages=schedule.stages, group_size=schedule.ranks, group_rank=0)
        return torchs._PipelineScheduleRuntime([stage], schedule.microbatches, **options)

    return make


def texts(orders):
    """Return torch's or our orders as text."""
    return [[str(action) for action in order] for order in (orders.values() if isinstance(orders, dict) else orders)]


def in_torch_words(schedule):
    """Return the orders as torch loads them: without OVERLAP_B_F."""
    orders = [[p for a in order for p in (a.parts if a.op == "OVERLAP_B_F" else (a,))] for order in schedule.orders]
    return with_orders(schedule, orders)


def test_torch_loads_our_lowered_schedules_and_steps_through_their_messages(runtime, tmp_path):
    for schedule in zoo(torchs=True):
        for lowered in ways(schedule):
            to_torch(lowered, tmp_path / "ours.csv")
            loaded = runtime(lowered)
            loaded._load_csv(tmp_path / "ours.csv", format="compute_comms")
            found, expected = texts(loaded.pipeline_order_with_comms), texts(in_torch_words(lowered).orders)
            for rank, (row, order) in enumerate(zip(found, expected, strict=True)):
                if not lowered.lowered:  # a single rank has no messages
                    assert row == order
                    continue
                reduced = [f"{stage}REDUCE_GRAD" for stage in schedule.placement.stages_of(rank)]
                # There torch divides by the number of microbatches, which it must do once for each stage.
                assert sorted(text for text in row if "REDUCE_GRAD" in text) == sorted(reduced)
                assert row == order if reduced[0] in order else row[: len(order)] == order
            # torch's simulation supports neither pairs nor sharding
            loaded.pipeline_order_with_comms = {
                rank: [
                    a for action in row for a in (action.sub_actions or (action,)) if str(a)[1:] not in judge.SHARDING
                ]
                for rank, row in loaded.pipeline_order_with_comms.items()
            }
            stepped = loaded._simulate()
            compute = {rank: [a for a in row if a is not None and a.is_compute_op] for rank, row in stepped.items()}
            assert texts(compute) == [[str(s) for action in order for s in action.singles] for order in schedule.orders]


def test_schedules_lowered_by_torch_are_legal(runtime, tmp_path):
    for schedule in zoo(torchs=True):
        to_torch(schedule, tmp_path / "ours.csv")
        for late in (False, True):
            theirs = runtime(schedule, defer_pp_recv=late)
            theirs._load_csv(tmp_path / "ours.csv")
            theirs._dump_csv(tmp_path / "bare.csv", format="compute_only")
            theirs._dump_csv(tmp_path / "lowered.csv")
            bare, lowered = (
                Schedule.from_csv(tmp_path / f"{name}.csv", schedule.placement, schedule.microbatches)
                for name in ("bare", "lowered")
            )
            assert bare.orders == strip(lowered).orders == in_torch_words(schedule).orders
            for rendezvous in (False, True):
                agree(lowered, rendezvous=rendezvous)
                assert late or check(lowered, transport=TRANSPORT[rendezvous]) == []


def test_weights_are_gathered_and_freed_where_torch_gathers_and_frees_them(torchs):
    for schedule, resident in itertools.product(zoo(torchs=True), (1, 2, 3)):
        if any(action.parts for order in schedule.orders for action in order):
            continue  # for a pair torch may gather one stage too many
        for order, ours in zip(schedule.orders, lower(schedule, fsdp=True, resident=resident).orders, strict=True):
            theirs = torchs._add_unshard_reshard([torchs._Action.from_str(str(a)) for a in order], resident)
            kept = [str(action) for action in ours if not is_message(action) and action.op != "REDUCE_GRAD"]
            assert kept == [str(action) for action in theirs]


def test_backwards_are_joined_where_torch_joins_them(torchs):
    for schedule in zoo(torchs=True):
        for order, ours in zip(in_torch_words(schedule).orders, merge_backward(schedule).orders, strict=True):
            theirs = torchs._merge_bw([torchs._Action.from_str(str(action)) for action in order])
            assert texts([theirs]) == texts(in_torch_words(with_orders(schedule, [ours] * schedule.ranks)).orders[:1])


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 2), (4, 2, 8), (4, 3, 4), (8, 2, 16)])
def test_the_grid_of_looped_bfs_is_torchs_idle_steps_and_all(torchs, ranks, chunks, microbatches):
    """torch's idle steps assume F = B and more microbatches than ranks."""
    settings = SimpleNamespace(_stages=[None] * chunks, pp_group_size=ranks, _n_microbatches=microbatches)
    for rank, row in enumerate(align(pp.schedule("looped-bfs", ranks, microbatches, chunks=chunks))):
        theirs = torchs.ScheduleLoopedBFS._calculate_single_rank_operations(settings, rank)
        ours = [str(action) if action else None for action in row]
        theirs = [str(action) if action else None for action in theirs]
        assert ours == theirs + [None] * (len(ours) - len(theirs))


@pytest.mark.parametrize("transport", ["rendezvous", "pair", "rank"])
def test_a_deadlock_names_the_places_that_wait(transport):
    schedule = read(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    [problem] = check(schedule, transport=transport)
    assert [str(schedule.orders[rank][index]) for rank, index in problem.cycle] == ["0SEND_F1", "1SEND_B0"]
