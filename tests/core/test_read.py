"""`Schedule.read`: the orders of torch and Megatron-LM, and lines of actions, recognized by their content."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import ppedu as pp
from ppedu import ParseError, PipelineError, Schedule, SettingError
from ppedu.core.grid import strip

ZOO = [
    pp.schedule(name, 4, 8, **options)
    for name, options in [
        ("gpipe", {}),
        ("1f1b", {}),
        ("interleaved", {"chunks": 3}),
        ("zb-h1", {}),
        ("zb-v", {}),
        ("dualpipe", {}),
        ("dualpipev", {}),
    ]
]


def same(found, schedule):
    return (found.orders, found.placement, found.microbatches) == (
        schedule.orders,
        schedule.placement,
        schedule.microbatches,
    )


def test_a_range_is_short_for_actions():
    found = Schedule.read("F0-7 B0-7\n" * 4)
    assert same(found, pp.schedule("gpipe", 4, 8))
    short, long = (
        "F0-1, 2F0-1 2B1-0 B1-0\nF0 F1 3F0-1 3B1-0 B1-0",
        ("0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0\n1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"),
    )
    assert Schedule.read(short).orders == Schedule.read(long).orders
    with pytest.raises(ParseError, match="F0-99999"):
        Schedule.read("F0-99999\n")


@pytest.mark.parametrize("schedule", ZOO, ids=lambda each: each.name)
def test_orders_are_read_in_every_form_with_their_placement(tmp_path, schedule):
    orders = {rank: [None, *order] for rank, order in enumerate(schedule.orders)}
    spaced = "\n".join(" ".join(map(str, order)) for order in schedule.orders)
    printed = ", ".join(f"{rank}: [{', '.join(map(str, order))}]" for rank, order in orders.items())
    for number, source in enumerate([schedule.to_csv(), spaced, f"{{{printed}}}"]):
        path = tmp_path / f"{number}.txt"
        path.write_text(source)
        assert all(same(Schedule.read(each), schedule) for each in (source, path, str(path)))
    for source in (orders, SimpleNamespace(pipeline_order=orders, pipeline_order_with_comms={})):
        assert same(Schedule.read(source), schedule)


@pytest.mark.parametrize(
    ("name", "placement", "chunks"),
    [
        ("Interleaved1F1B", "loop", 2),
        ("LoopedBFS", "loop", 2),
        ("InterleavedZeroBubble", "loop", 2),
        ("ZBVZeroBubble", "v", 2),
        ("DualPipeV", "v", 2),
    ],
)
def test_torchs_schedules_are_read_with_and_without_their_messages(name, placement, chunks):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for with_comms in (False, True):
        orders = visualizer.get_schedule_ops(name, 4, 8, chunks, with_comms=with_comms)
        as_object = SimpleNamespace(pipeline_order_with_comms=dict(enumerate(orders)))
        for source in (orders, dict(enumerate(orders)), as_object):
            found = Schedule.read(source)
            assert (found.placement.name, found.chunks, found.lowered) == (placement, chunks, with_comms)
            assert pp.check(found) == []


def test_megatrons_numbers_are_chunks():
    """Order of get_schedule_table's users: each rank's forwards and backwards, with microbatches counted by chunk."""
    found = Schedule.read("1 1 2 2 -2 -2 -1 -1\n1 1 2 -2 2 -2 -1 -1")
    assert same(Schedule.read([[1, 1, 2, 2, -2, -2, -1, -1], [1, 1, 2, -2, 2, -2, -1, -1]]), found)
    assert [str(action) for action in found.orders[1]] == ["1F0", "1F1", "3F0", "3B0", "3F1", "3B1", "1B0", "1B1"]
    assert pp.check(found) == [] and found.chunks == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{0: [0F0, 0B0], 1: [1F0, 1B0", "not whole: there is '1:1F01B0' beside them"),
        ("{0: [0F0, 0B0] 0B5 junk, 1: [1F0, 1B0]}", "'0B5junk'"),
        ("{0: [0F0], 0: [0F0, 0B0]}", "got 0, 0"),
        ("{0: [0F0, 0B0], 1: [None, None]}", "rank 1 has no actions"),
        ("[[0F0, 0B0], [1F0, 1B0]", None),
        ("1 " + "9" * 5000, "is not an action"),
    ],
)
def test_damaged_text_is_refused(text, problem):
    if problem is None:  # a last bracket more or less loses nothing
        assert pp.check(Schedule.read(text)) == []
        return
    with pytest.raises(ParseError, match=problem):
        Schedule.read(text)


def test_lists_on_one_line_have_a_rank_each():
    for text in ("[[1, 1, -1, -1], [1, -1, 1, -1]]", "[[0F0, 0F1, 0B0, 0B1], [1F0, 1B0, 1F1, 1B1]]"):
        found = Schedule.read(text)
        assert found.ranks == 2 and pp.check(found) == []


def test_a_mistake_does_not_change_the_placement():
    schedule = pp.schedule("zb-v", 4, 8)
    orders = [list(order) for order in schedule.orders]
    orders[0][0], orders[0][1] = orders[0][1], orders[0][0]
    orders[3][0], orders[3][1] = orders[3][1], orders[3][0]
    found = Schedule.read(orders)
    assert found.placement.name == "v" and 0 < len(pp.check(found)) < 4


def test_what_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ParseError, match="the text, line 1, cell 2: '0X0' is not an action"):
        Schedule.read("0F0 0X0\n")
    with pytest.raises(ParseError, match="the text holds no actions"):
        Schedule.read(" ")
    with pytest.raises(ParseError, match="torch's orders are for ranks 0, 1, 2 …; got 0, 2"):
        Schedule.read({0: [], 2: []})
    for source in ({"a": []}, [1, -1], [None, ["0F0"]]):
        with pytest.raises(SettingError, match="a list, or a dict from ranks, with a list of actions for each rank"):
            Schedule.read(source)
    with pytest.raises(SettingError, match="source must be a file, text, or a schedule of torch"):
        Schedule.read(5)
    with pytest.raises(PipelineError, match=r"cannot read '.*none\.txt'"):
        Schedule.read(tmp_path / "none.txt")
    illegal = Schedule.read("0B0 0F0\n1F0 1B0")
    assert illegal.placement.name == "loop" and pp.check(illegal)
    with pytest.raises(ParseError, match="every rank must hold the same number of stages"):
        Schedule.read("0F0 0B0 2F0 2B0\n1F0 1B0", placement="loop")


DEEPSPEED = """
[[LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)], [SendActivation(buffer_id=0)], [LoadMicroBatch(buffer_id=1), ForwardPass(buffer_id=1)], [RecvGrad(buffer_id=0), SendActivation(buffer_id=1), BackwardPass(buffer_id=0)], [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)], [RecvGrad(buffer_id=1), SendActivation(buffer_id=0), BackwardPass(buffer_id=1)], [], [RecvGrad(buffer_id=0), BackwardPass(buffer_id=0), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]]
[[], [RecvActivation(buffer_id=0), LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)], [BackwardPass(buffer_id=0)], [SendGrad(buffer_id=0), RecvActivation(buffer_id=1), LoadMicroBatch(buffer_id=1), ForwardPass(buffer_id=1)], [BackwardPass(buffer_id=1)], [SendGrad(buffer_id=1), RecvActivation(buffer_id=0), LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)], [BackwardPass(buffer_id=0)], [SendGrad(buffer_id=0), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]]
"""  # noqa: E501 (what DeepSpeed 0.19.8 prints of TrainSchedule(3, 2, rank).steps(), a line for each rank)


def test_deepspeeds_instructions_are_actions():
    found = Schedule.read(DEEPSPEED)
    assert " ".join(map(str, found.orders[0])) == (
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2 0REDUCE_GRAD"
    )
    assert pp.check(found) == pp.check(found, transport="rendezvous") == []
    assert strip(found).orders == pp.schedule("1f1b", 2, 3).orders
    lines = DEEPSPEED.strip().splitlines()
    assert same(Schedule.read(f"[{', '.join(lines)}]"), found)
    assert Schedule.read("LoadMicroBatch(0) ForwardPass(0) BackwardPass(0)").ranks == 1
    with pytest.raises(ParseError, match="rank 1 has no instructions"):
        Schedule.read([lines[:1], [], lines[1:]])


def test_a_microbatch_whose_buffer_is_overwritten_has_no_backward():
    found = Schedule.read(DEEPSPEED.replace("buffer_id=1", "buffer_id=0"))
    assert "rank 0: 0B0 is never run" in map(str, pp.check(found))


def test_a_send_takes_what_the_last_forward_has_computed_in_its_buffer():
    """DeepSpeed keeps inputs and outputs apart, so an input may be overwritten once its forward has ended."""
    text = "LoadMicroBatch(0) ForwardPass(0) LoadMicroBatch(0) SendActivation(0) ForwardPass(0) SendActivation(0)"
    found = Schedule.read(
        f"{text}\nRecvActivation(0) ForwardPass(0) RecvActivation(0) ForwardPass(0)", forward_only=True
    )
    assert pp.check(found) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("LoadMicroBatch(buffer_id=1), ", "", r"rank 0: ForwardPass\(buffer_id=1\) finds its buffer empty"),
        ("OptimizerStep()", "OptimizerStep() 0F1", "rank 0: there is '0F1' beside DeepSpeed's instructions"),
        ("OptimizerStep()", "Rest()", r"rank 0: Rest\(\) is not an instruction of DeepSpeed's that ppedu knows"),
        ("ReduceTiedGrads()", "CommitP2P(), SendGrad(buffer_id=0)", "rank 0: no CommitP2P starts 0SEND_B2"),
    ],
)
def test_impossible_instructions_are_refused(old, new, problem):
    text = DEEPSPEED.replace(old, new)
    with pytest.raises(ParseError, match=problem):
        Schedule.read(text)


def test_deepspeeds_schedules_of_all_sizes_are_legal():
    """TrainSchedule is 1F1B; DualPipeVSchedule starts its messages in batches."""
    theirs = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for ranks in range(1, 9):
        for microbatches in range(1, 9):
            found = Schedule.read([theirs.TrainSchedule(microbatches, ranks, rank) for rank in range(ranks)])
            assert pp.check(found) == pp.check(found, transport="rendezvous") == []
            assert strip(found).orders == pp.schedule("1f1b", ranks, microbatches).orders
            batch = 2 * ranks + microbatches - 1
            found = Schedule.read([theirs.DualPipeVSchedule(batch, ranks, rank) for rank in range(ranks)])
            assert pp.check(found) == [] and found.chunks == 2


TRACES = Path(__file__).parents[1] / "trace/h200"  # of torch.profiler, from a GPU


@pytest.mark.parametrize("name", ["zb-h1-ours", "zb-v-ours", "zb-v-torch"])
def test_a_trace_has_the_schedule_of_its_run(name):
    run = pp.Run.load(TRACES / name)
    files = [TRACES / name, str(TRACES / name)]
    if len([*(TRACES / name).iterdir()]) == 1:
        files += [TRACES / name / "rank0.json.gz", str(TRACES / name / "rank0.json.gz")]
    for source in files:
        found = Schedule.read(source)
        assert found == run.schedule and found.name == run.schedule.name and pp.check(found) == []
    assert Schedule.read(TRACES / name, name="mine").name == "mine"
    orders = [each.timeline.schedule.orders for each in run.recorded.values()]
    assert found.orders in orders and orders.count(found.orders) > len(orders) / 2


def test_a_saved_timeline_is_a_trace_too(tmp_path):
    schedule = pp.schedule("zb-v", 4, 8)
    pp.simulate(schedule).save(tmp_path / "RUN.JSON")
    assert Schedule.read(tmp_path / "RUN.JSON") == schedule
    forwards = schedule.forwards
    pp.simulate(forwards).save(tmp_path / "forwards.json")
    assert Schedule.read(str(tmp_path / "forwards.json")).forward_only


def test_what_is_not_a_trace_is_refused(tmp_path):
    with pytest.raises(SettingError, match="has no files that end in"):
        Schedule.read(tmp_path)
    with pytest.raises(PipelineError, match="cannot read"):
        Schedule.read(tmp_path / "none.json")
    (tmp_path / "orders.json").write_text("[[1, -1]]")
    with pytest.raises(ParseError):
        Schedule.read(tmp_path / "orders.json")
    shutil.copytree(TRACES / "zb-v-ours", tmp_path / "traces")
    for options in ({"placement": "v"}, {"microbatches": 4}, {"forward_only": True}):
        with pytest.raises(SettingError, match="has its own placement and microbatches; leave these arguments out"):
            Schedule.read(tmp_path / "traces", **options)


def step(kind, stage=None, microbatch=None, parts=None):
    return SimpleNamespace(type=SimpleNamespace(name=kind), stage_index=stage, micro_index=microbatch, sub_steps=parts)


def test_the_steps_of_hyperparallel_are_actions():
    pair = step("OVERLAP_B_F", parts=(step("BWD_INPUT", 1, 0), step("FWD", 1, 1)))
    batch = step("BATCH_SEND_RECV", parts=(step("BWD_SEND", 1, 0), step("FWD_RECV", 1, 2)))
    made = SimpleNamespace(
        exec_order={0: [step("FWD_SEND", 0, 0), None, step("SWAP_WAIT_LOAD", 0, 0)], 1: [pair, batch]}
    )
    made.exec_order[1] += [step("BWD_WEIGHT", 1, 0), step("FSDP_REDUCE_GRAD", 1), step("FWD_RECV", 1, 0)]
    assert Schedule.read(made).to_csv() == (
        "0SEND_F0\n(1I0;1F1)OVERLAP_B_F,(1SEND_B0;1RECV_F2)BATCH_P2P,1W0,1REDUCE_GRAD,1RECV_F0\n"
    )


def node(kind, stage, microbatch, part=0):
    return SimpleNamespace(type=kind, layer_group_idx=stage, microbatch=microbatch, seq_split_idx=part)


def test_the_nodes_of_zero_bubble_are_actions():
    """Their B is our I, their BW our B; a recompute (R) and post-validation are left out."""
    first = [("F", 0, 0), ("SEND_FORWARD", 0, 0), ("POST_VALIDATION", 0, 0), ("RECV_BACKWARD", 0, 0), ("BW", 0, 0)]
    second = [("RECV_FORWARD", 1, 0), ("F", 1, 0), ("R", 1, 0), ("B", 1, 0), ("SEND_BACKWARD", 1, 0), ("W", 1, 0)]
    found = Schedule.read([[node(*each) for each in order] for order in (first, second)])
    assert [" ".join(map(str, order)) for order in found.orders] == [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]
    assert pp.check(found) == []
    with pytest.raises(ParseError, match="parts of a sequence cannot be read"):
        Schedule.read([[node("F", 0, 0), node("F", 0, 0, 1)]])
