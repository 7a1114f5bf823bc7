"""What a cell shows, without a browser: what controls and clicks do, and what is left where there is no kernel."""

import base64
import json
import sys

import pytest

import ppedu as pp
from ppedu.core.levels import LEVELS
from ppedu.view import shown


def made_by(code):
    names = {"pp": pp}
    exec(code.replace("t.show()", ""), names)
    return names


def test_without_a_kernel_a_picture_is_left():
    for each in (pp.simulate(pp.schedule("1f1b", 2, 2)), pp.explore(), pp.compare("gpipe", "1f1b"), pp.puzzle()):
        data, _ = each._repr_mimebundle_()
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG") and "rank 1" in data["text/plain"]
        assert set(data) == {"text/plain", "image/png"}


def test_a_timeline_too_large_for_a_picture_is_left_as_text():
    data, _ = pp.simulate(pp.schedule("1f1b", 32, 128)).show()._repr_mimebundle_()
    assert set(data) == {"text/plain"}


def test_what_is_shown_needs_anywidget_and_a_timeline_does_without(monkeypatch):
    monkeypatch.setattr(shown, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    shown._widget_class.cache_clear()
    timeline = pp.simulate(pp.schedule("1f1b", 2, 2))
    with pytest.raises(pp.SettingError, match=r"this needs anywidget; pip install 'ppedu\[lab\]'"):
        timeline.show()._repr_mimebundle_()
    assert "image/png" in timeline._repr_mimebundle_()[0]


def test_an_outline_is_sent_beside_its_timeline():
    timeline = pp.simulate(pp.schedule("1f1b", 2, 2))
    assert len(timeline.show(outline=timeline).state()["panels"][0]["outline"]["needs"]) == 8


def test_timelines_on_one_axis_have_one_unit():
    short, long = (pp.simulate(pp.schedule("gpipe", 2, 2), pp.Costs(forward=f, unit="s")) for f in (0.1, 0.2))
    assert (short.readable, long.readable) == ((1000, "ms"), (1, "s"))
    for shown_ in (pp.compare(short, long), pp.compare(long, short)):
        assert [(each["unit"], each["makespan"]) for each in shown_.state()["panels"]] in (
            [("s", 0.9), ("s", 1.8)],
            [("s", 1.8), ("s", 0.9)],
        )
    (over,) = short.show(outline=long).state()["panels"]
    assert (over["makespan"], over["outline"]["makespan"]) == (0.9, 1.8)


@pytest.mark.parametrize("name", pp.schedules())
def test_the_code_of_what_is_explored_makes_it(name):
    controls = pp.explore(name, 4, 8, latency=0.2, forward=1.5, memory=3 if name == "v-adaptive" else 0)
    controls.set(overlap="0.25", weight="0.3")
    made = made_by(controls.code())["t"]
    assert made.schedule == controls.schedule
    assert float(made.makespan) == pytest.approx(float(controls.timeline.makespan))


def test_what_is_impossible_is_explained_and_what_is_near_is_offered():
    controls = pp.explore("dualpipe", 4, 8)
    controls.told({"set": {"ranks": "5"}})
    state = controls.state()
    assert state["wrong"] and state["note"].startswith("dualpipe needs an even number of ranks; got 5")
    assert controls.schedule.ranks == 4 and made_by(controls.code())["s"] == controls.schedule, "what is shown stays"
    assert dict(controls.offers) == {"4 ranks": {"ranks": 4}}
    for _, change in state["offers"]:
        controls.told({"set": change})
        assert not controls.wrong


@pytest.mark.parametrize(
    "name, sizes",
    [("dualpipe", {"microbatches": "13"}), ("chimera", {"ranks": "7"}), ("dualpipev", {"microbatches": "5"})],
)
def test_every_offer_is_possible(name, sizes):
    controls = pp.explore(name, 4, 8)
    controls.told({"set": sizes})
    offers = list(controls.offers)
    assert controls.wrong and offers
    for _, change in offers:
        fresh = pp.explore(name, 4, 8)
        fresh.set(**sizes)
        fresh.set(**change)
        assert not fresh.wrong


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": "zb-9"}, "there is no schedule called 'zb-9'; there is: naive"),
        ({"ranks": 0}, "ranks is a whole number from 1 to 16; got 0"),
        ({"ranks": 2.5}, "ranks is a whole number from 1 to 16; got 2.5"),
        ({"latency": "much"}, "latency is a number from 0 to 2; got 'much'"),
        ({"colour": 1}, "there is no control called 'colour'; there is: schedule, ranks"),
    ],
)
def test_a_control_that_cannot_be_is_refused(settings, message):
    with pytest.raises(pp.SettingError, match=f"^{message}"):
        pp.explore(**settings)


def test_a_cap_that_is_passed_is_told():
    controls = pp.explore("gpipe", 4, 8, memory=6)
    assert "Rank 0 holds 8 activations, and 6 are allowed." in controls.state()["note"]
    controls.set(schedule="1f1b")
    assert "allowed" not in controls.state()["note"]


def test_controls_are_those_that_mean_something():
    def names(name):
        return {control["name"] for control in pp.explore(name).state()["controls"]}

    always = {"schedule", "ranks", "microbatches", "forward", "backward", "latency", "memory"}
    assert names("1f1b") == always
    assert names("interleaved") == always | {"chunks"}
    assert names("zb-v") == always | {"weight"}
    assert names("dualpipe") == always | {"weight", "overlap"}


def test_a_comparison_counts_messages_as_the_lowered_schedules_do():
    rows = {
        name: rest for name, *rest in pp.compare("gpipe", "interleaved", "dualpipe", ranks=4, microbatches=8).rows()
    }
    # Between neighbours there and back; two chunks also go from the last rank to the first, once.
    assert rows["gpipe"] == [33, pytest.approx(3 / 11), 8, 2 * 3 * 8]
    assert rows["interleaved"][3] == 2 * 7 * 8 and rows["dualpipe"][3] == 2 * 3 * 8


@pytest.mark.parametrize("wrong", [(), (7,), ("1f1b", None)])
def test_only_schedules_and_timelines_are_compared(wrong):
    with pytest.raises(pp.SettingError, match=r"name what to compare|give a schedule's name, a Schedule or a Timeline"):
        pp.compare(*wrong)


@pytest.mark.parametrize("one, other", [("1f1b", "gpipe"), ("1f1b", "zb-h1"), ("gpipe", "gpipe")])
def test_without_the_marked_actions_two_schedules_are_the_same(one, other):
    pair = [pp.schedule(name, 4, 6) for name in (one, other)]
    found = pp.differences(*pair)
    left = [
        [[a for at, a in enumerate(order) if (rank, at) not in marks] for rank, order in enumerate(made.orders)]
        for made, marks in zip(pair, (found.first, found.second), strict=True)
    ]
    assert left[0] == left[1] and bool(found.first) == (one != other)


def test_of_an_attempt_that_is_not_legal_as_much_is_shown_as_runs():
    right = pp.schedule("gpipe", 2, 2)
    orders = (right.orders[0], (pp.F(1, 0), pp.B(1, 1), pp.F(1, 1), pp.B(1, 0)))
    attempt = pp.Schedule("attempt", right.placement, 2, orders)
    found = pp.differences(right, attempt)
    first, second = found.state()["panels"]
    assert len(first["needs"]) == 8 and len(second["needs"]) == 3 and found.second


def test_a_level_is_solved_by_its_par_and_its_code_is_an_ordinary_schedule():
    for name, level in LEVELS.items():
        board = pp.puzzle(name)
        par = level.par.schedule
        for rank, index, *_ in par.replay.steps:
            if index >= (level.given or [0] * par.ranks)[rank]:
                board.told({"place": str(par.orders[rank][index])})
                assert board.state()["tone"] != "no", board.state()["note"]
        state = board.state()
        assert state["tone"] == "done" and "that is par" in state["note"] and not any(state["trays"])
        made = made_by(state["code"])["s"]
        assert made.orders == par.orders and pp.check(made) == [] and pp.lower(made)


def test_a_wrong_move_is_refused_and_changes_nothing():
    board = pp.puzzle("two-ranks")
    board.told({"place": "0F0"})
    before = board.schedule
    board.told({"place": "0B0"})
    assert board.state()["tone"] == "no" and "0B0 needs 1B0, which has not been placed yet" in board.state()["note"]
    for nonsense in ({"place": "x"}, {"do": "fly"}, {"level": "no"}, {"place": "9F9"}):
        board.told(nonsense)
        assert board.schedule == before


def test_undo_redo_reset_hint_and_finish_do_what_they_say():
    board = pp.puzzle("1f1b")
    board.told({"do": "hint"})
    hint = board.state()["note"].split()[0]
    board.told({"place": hint})
    assert board.state()["tone"] == "ok"
    board.told({"do": "undo"})
    assert not any(board.schedule.orders)
    board.told({"do": "redo"})
    assert str(board.schedule.orders[0][0]) == hint
    board.told({"do": "finish"})
    assert pp.check(board.schedule) == [] and board.state()["can"] == ["undo", "redo", "reset"]
    board.told({"do": "reset"})
    board.told({"level": "first"})
    assert board.level.name == "first" and json.dumps(board.state())
