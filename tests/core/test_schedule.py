"""Schedule: the object, its text, and reading and writing CSV."""

import copy
import dataclasses
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import legal_schedules, mutated_schedules, often

import ppedu as pp
from ppedu import Action, B, F, Op, ParseError, PipelineError, Placement, Schedule, ScheduleError, SettingError

TWO = Schedule("two", Placement.make("loop", 2), 1, ((F(0, 0), B(0, 0)), (F(1, 0), B(1, 0))))


@pytest.fixture
def written(tmp_path):
    """Write text to a CSV file and return its path."""

    def write(text):
        path = tmp_path / "mine.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# --- the object -------------------------------------------------------------------------------------------------


def test_the_size_is_the_size_of_the_placement():
    schedule = Schedule("x", Placement.make("loop", 2, 3), 5, ((), ()))
    assert (schedule.ranks, schedule.stages, schedule.chunks, schedule.microbatches) == (2, 6, 3, 5)
    assert repr(schedule) == "Schedule('x', ranks=2, stages=6, microbatches=5)"


def test_schedules_with_equal_fields_are_equal():
    again = Schedule("two", Placement.make("loop", 2), 1, ((F(0, 0), B(0, 0)), (F(1, 0), B(1, 0))))
    assert again == TWO and hash(again) == hash(TWO)
    assert dataclasses.replace(TWO, name="other") != TWO


def test_a_schedule_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TWO.microbatches = 2


@given(legal_schedules(pairs=0.2), st.data())
@often(60)
def test_changing_the_arguments_later_does_not_change_the_schedule(schedule, data):
    """Lists, texts and iterators are copied into tuples of actions, and the schedule equals one made of tuples."""
    forms = st.sampled_from(
        [lambda action: action, str, lambda action: Action(*action[:1], action.op.value, *action[2:])]
    )
    lists = [[data.draw(forms)(action) for action in order] for order in schedule.orders]
    holders = [list(copy) for copy in schedule.placement.holders]
    passed = Schedule("drawn", Placement("loop", schedule.ranks, holders), schedule.microbatches, iter(lists))
    if data.draw(st.booleans()):
        assert pp.check(passed) == []
    for order in lists:
        order.reverse()
        order.append("0F0")
    holders[0].reverse()
    assert passed == schedule and hash(passed) == hash(schedule) and pp.check(passed) == []
    assert all(type(action) is Action and type(action.op) is Op for order in passed.orders for action in order)


@pytest.mark.parametrize("name", pp.schedules())
def test_a_schedule_is_pickled_and_copied_without_cached_properties(name):
    schedule = pp.schedule(name, 4, 8)
    alone = pickle.dumps(schedule)
    assert schedule.problems == () and not schedule.lowered and schedule.placement.links and schedule.chunks
    assert pickle.dumps(schedule) == alone
    for again in (pickle.loads(alone), copy.copy(schedule), copy.deepcopy(schedule)):
        assert again == schedule and hash(again) == hash(schedule) and again.problems == ()


class Index:
    """An integer type of another library."""

    def __index__(self):
        return 0


JUNK = st.one_of(
    *[st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3)],
    st.builds(Action, *3 * [st.sampled_from([None, -1, 0, 0.5, "F", "0", Op.F, Op.UNSHARD, Op.OVERLAP_F_B, Index()])]),
    st.builds(Action, st.just(-1), st.just(Op.OVERLAP_F_B), st.just(-1), st.lists(st.sampled_from(["0F0", "0B0", 3]))),
    st.sampled_from([F(0, 0), B(0, 0), "0F0", "0UNSHARD", "0UNSHARD1", Op.F, [F(0, 0)], {}, object, Index()]),
)


@given(st.lists(st.lists(JUNK, max_size=3), min_size=1, max_size=2))
@often(400)
def test_junk_in_the_orders_is_refused_with_its_place(orders):
    try:
        schedule = Schedule("junk", Placement.make("loop", len(orders)), 1, orders)
    except SettingError as error:
        place = re.match(r"rank (\d), position (\d): .* is not an action", str(error), re.DOTALL)
        rank, index = map(int, place.groups())
        with pytest.raises(ParseError):
            Action.of(orders[rank][index])
    else:
        assert hash(schedule) == hash(dataclasses.replace(schedule))
        pp.check(schedule)


@pytest.mark.parametrize(
    "orders", [None, 3, "0F0", {0: [F(0, 0)]}, {F(0, 0)}, [F(0, 0)], ["0F0"], [None], [{"0F0"}]], ids=repr
)
def test_orders_are_sequences_of_actions(orders):
    with pytest.raises(SettingError, match="must be a sequence of actions"):
        Schedule("x", Placement.make("loop", 1), 1, orders)


@pytest.mark.parametrize("name", [None, 3, b"x", "a\x00b", "a\rb", "\x1b[1m", "\ud800", "\x85", "\uffff"], ids=repr)
def test_a_name_is_text_that_can_be_written(name):
    with pytest.raises(SettingError, match="name must be text without control characters; got "):
        Schedule(name, Placement.make("loop", 1), 1, [[]])


@pytest.mark.parametrize("name", ["1f1b", "größer als 1", "流水线", "👩‍🚀", "$\\frac{$", ""])
def test_any_other_name_is_drawn_and_saved(name, tmp_path):
    dataclasses.replace(TWO, name=name).to_csv(tmp_path / "x.csv")
    assert str(dataclasses.replace(TWO, name=name)).startswith(name)


@pytest.mark.parametrize("placement", [None, "loop", [0, 1], 2])
def test_the_placement_must_be_a_placement(placement):
    with pytest.raises(SettingError, match="a schedule has a placement, such as"):
        Schedule("x", placement, 1, [[], []])


@pytest.mark.parametrize("orders", [(), ((F(0, 0),),), ((), (), ())])
def test_there_is_one_order_for_each_rank(orders):
    with pytest.raises(SettingError, match=f"2 ranks needs 2 orders; got {len(orders)}"):
        Schedule("x", Placement.make("loop", 2), 1, orders)


@pytest.mark.parametrize("microbatches", [0, -1, True, "2", 2.0, None])
def test_microbatches_must_be_a_whole_number_above_0(microbatches):
    with pytest.raises(SettingError, match="microbatches must be"):
        Schedule("x", Placement.make("loop", 1), microbatches, ((),))


def test_validate_lists_the_problems_of_an_illegal_schedule():
    TWO.validate()
    schedule = Schedule("bad", Placement.make("loop", 1), 4, ((),))
    with pytest.raises(ScheduleError, match=r"'bad'.* is not legal") as caught:
        schedule.validate()
    assert list(caught.value.problems) == pp.check(schedule)
    assert len(caught.value.problems) == 8
    assert str(caught.value).count("is never run") == 5 and "… and 3 more problems" in str(caught.value)


def test_printing_an_illegal_schedule_lists_its_problems():
    assert str(TWO) == pp.simulate(TWO).text()
    assert "0B0 is never run" in str(dataclasses.replace(TWO, orders=((F(0, 0),), TWO.orders[1])))


# --- CSV --------------------------------------------------------------------------------------------------------


def test_csv_has_a_line_for_each_rank_and_an_action_in_each_cell(tmp_path):
    assert TWO.to_csv() == "0F0,0B0\n1F0,1B0\n"
    assert TWO.to_csv(tmp_path / "two.csv") == (tmp_path / "two.csv").read_text()


@given(legal_schedules(pairs=0.3))
@often(40)
def test_a_legal_schedule_survives_csv(tmp_path_factory, schedule):
    path = tmp_path_factory.mktemp("csv") / f"{schedule.name}.csv"
    schedule.to_csv(path)
    assert Schedule.from_csv(path) == schedule


@given(mutated_schedules("double", "swap", "split", "unfuse"))
@often(40)
def test_an_illegal_schedule_survives_csv_too(tmp_path_factory, schedule):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    schedule.to_csv(path)
    assert Schedule.from_csv(path, name=schedule.name) == schedule


@given(legal_schedules(pairs=0.3), st.data())
@often(40)
def test_empty_cells_are_idle_steps_and_are_dropped(tmp_path_factory, schedule, data):
    lines = []
    for order in schedule.orders:
        cells = [str(action) for action in order]
        for _ in range(data.draw(st.integers(0, 4))):
            cells.insert(data.draw(st.integers(0, len(cells))), data.draw(st.sampled_from(["", " "])))
        lines.append(",".join(cells))
    path = tmp_path_factory.mktemp("csv") / "idle.csv"
    path.write_text("\n".join(lines))
    assert Schedule.from_csv(path).orders == schedule.orders


def test_a_byte_order_mark_is_not_part_of_the_first_cell(tmp_path):
    """Spreadsheets write one, and pad lines with empty cells."""
    (tmp_path / "two.csv").write_bytes(b"\xef\xbb\xbf0F0,,,0B0\r\n,1F0,1B0,\r\n")
    assert Schedule.from_csv(tmp_path / "two.csv") == TWO


def test_a_file_whose_name_cannot_be_written_is_read(tmp_path):
    path = tmp_path / "bold\x1b.csv"
    TWO.to_csv(path)
    assert Schedule.from_csv(path).name == "bold�"
    assert Schedule.from_csv(path, name="") == dataclasses.replace(TWO, name="")


@pytest.mark.parametrize("end", ["\n", "\r\n", "", "\n\n\n"])
def test_any_line_ending_will_do(written, end):
    text = TWO.to_csv().replace("\n", "\r\n") if end == "\r\n" else TWO.to_csv().removesuffix("\n") + end
    assert Schedule.from_csv(written(text), name="two") == TWO


def test_the_name_is_the_files_unless_one_is_given(written):
    path = written(TWO.to_csv())
    assert Schedule.from_csv(path).name == "mine"
    assert Schedule.from_csv(str(path), name="yours").name == "yours"


def test_stages_are_counted_and_divided_among_the_ranks(written):
    schedule = Schedule.from_csv(written("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n"))
    assert (schedule.ranks, schedule.stages, schedule.chunks) == (2, 4, 2)
    assert pp.check(schedule) == []


def test_messages_and_sharding_are_read_and_kept(written):
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    schedule = Schedule.from_csv(written(text))
    assert schedule.to_csv() == text
    assert pp.check(schedule) == []


@pytest.mark.parametrize("line", ["0F0,,0SEND_F0", "0F0,0SEND_F0,", ",0RECV_B0"])
def test_a_line_with_messages_has_no_empty_cells(written, line):
    with pytest.raises(ParseError, match=r"mine.csv', line 2: .*communication has no empty cells"):
        Schedule.from_csv(written(f"1F0\n{line}\n"))


@pytest.mark.parametrize(
    "text, line, cell, shown",
    [
        ("0F0,0B0\n1F0,1Bx\n", 2, 2, "1Bx"),
        ("2F0x\n", 1, 1, "2F0x"),
        ("0F0,,B0\n", 1, 3, "B0"),
        ("\n0F0;0B0\n", 2, 1, "0F0;0B0"),
        ("rank,order\n", 1, 1, "rank"),
    ],
)
def test_a_cell_that_is_not_an_action_is_reported_with_its_place(written, text, line, cell, shown):
    with pytest.raises(ParseError) as caught:
        Schedule.from_csv(written(text))
    assert f"mine.csv', line {line}, cell {cell}: {shown!r} is not an action" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", ",,\n,,\n", " ", "0UNSHARD\n"])
def test_a_file_without_actions_is_refused(written, text):
    with pytest.raises(ParseError, match="holds no actions"):
        Schedule.from_csv(written(text))


def test_stages_that_cannot_be_divided_evenly_are_refused(written):
    with pytest.raises(ParseError, match=r"2 ranks \(lines\) and 3 stages; every rank must hold the same number"):
        Schedule.from_csv(written("0F0,2F0,2B0,0B0\n1F0,1B0\n"))


@pytest.mark.parametrize("microbatches", [0, 2, 99])
def test_given_microbatches_are_checked(written, microbatches):
    path = written(TWO.to_csv())
    assert Schedule.from_csv(path, microbatches=1).microbatches == 1
    with pytest.raises(ParseError, match=f"which is 1, not {microbatches}"):
        Schedule.from_csv(path, microbatches=microbatches)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    for path in (tmp_path / "nowhere.csv", tmp_path, tmp_path / "bytes.csv"):
        with pytest.raises(PipelineError, match="cannot read") as caught:
            Schedule.from_csv(path)
        assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    for path in (tmp_path / "nowhere" / "x.csv", tmp_path):
        with pytest.raises(
            PipelineError, match=r"cannot write .* name a file in a folder that you may write to"
        ) as caught:
            TWO.to_csv(path)
        assert str(path) in str(caught.value)


def test_an_unknown_placement_is_refused(written):
    with pytest.raises(SettingError, match="unknown placement 'ring'; available: loop"):
        Schedule.from_csv(written(TWO.to_csv()), placement="ring")


def test_a_cell_too_long_for_csv_is_a_parse_error(written):
    with pytest.raises(PipelineError):
        Schedule.from_csv(written("x" * 200_000))
