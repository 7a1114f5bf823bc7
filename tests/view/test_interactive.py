"""Interactive timelines without a browser: what controls and clicks do, and what is displayed without a kernel."""

import base64
import json
import random
import sys
from types import SimpleNamespace

import pytest
from strategies import slow

import ppedu as pp
from ppedu.core import SEND
from ppedu.course.board import puzzle, results
from ppedu.course.board.levels import LEVELS
from ppedu.view import interactive
from ppedu.zoo.registry import published


def made_by(code):
    names = {"pp": pp}
    exec(code.replace("t.show()", ""), names)
    return names


def test_without_a_kernel_a_picture_and_text_are_displayed():
    compared = pp.compare("gpipe", "1f1b", ranks=2, microbatches=2)
    for each in (pp.simulate(pp.schedule("1f1b", 2, 2)), pp.explore("1f1b", 2, 2), compared, pp.puzzle()):
        data, _ = each._repr_mimebundle_()
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG") and "rank 1" in data["text/plain"]
        assert set(data) == {"text/plain", "image/png"}


def test_a_timeline_too_large_for_a_picture_is_displayed_as_text():
    data, _ = pp.simulate(pp.schedule("1f1b", 32, 128)).show()._repr_mimebundle_()
    assert set(data) == {"text/plain"}


def test_without_anywidget_a_timeline_is_a_picture_and_widgets_raise(monkeypatch):
    monkeypatch.setattr(interactive, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    interactive._widget_class.cache_clear()
    timeline = pp.simulate(pp.schedule("1f1b", 2, 2))
    with pytest.raises(
        pp.SettingError, match=r"widgets need anywidget, which is not installed; pip install 'ppedu\[lab\]'"
    ):
        timeline.show()._repr_mimebundle_()
    assert "image/png" in timeline._repr_mimebundle_()[0]


def test_without_matplotlib_only_pictures_raise(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "ppedu.view.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    timeline = pp.simulate(pp.schedule("1f1b", 2, 2))
    for call in (timeline.plot, lambda: timeline.save(tmp_path / "x.svg"), lambda: timeline.save(tmp_path / "x.png")):
        with pytest.raises(pp.SettingError, match=r"pictures need matplotlib, .*; pip install 'ppedu\[plot\]'"):
            call()
    assert set(timeline._repr_mimebundle_()[0]) == {"text/plain"}
    for ending in ("html", "json"):
        timeline.save(tmp_path / f"x.{ending}")
    monkeypatch.setattr(interactive, "in_notebook", lambda: True)
    data, _ = timeline.show()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data and "image/png" not in data


def test_an_outline_is_sent_beside_its_timeline():
    timeline = pp.simulate(pp.schedule("1f1b", 2, 2))
    assert len(timeline.show(outline=timeline).state()["panels"][0]["outline"]["boxes"]["op"]) == 8


def test_lanes_that_a_reader_chooses_are_remembered(monkeypatch, tmp_path):
    timeline = pp.simulate(pp.schedule("1f1b", 2, 2))
    shown_ = timeline.show(outline=timeline)
    monkeypatch.setattr(interactive, "in_notebook", lambda: True)
    shown_._repr_mimebundle_()
    (widget,) = shown_._widgets
    assert not widget.lanes and not shown_.state()["lanes"]
    widget.lanes = True  # as the browser sets it
    assert shown_.state()["lanes"] and shown_.text().count("rank 1") == 2
    shown_._repr_mimebundle_()
    assert shown_._widgets[1].lanes, "in the next cell"
    shown_.save(tmp_path / "x.html")
    assert '"lanes": true' in (tmp_path / "x.html").read_text()
    assert timeline.show(outline=timeline, lanes=True).state()["lanes"]


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


def test_the_code_shown_by_explore_reproduces_its_timeline():
    for name in pp.schedules():
        controls = pp.explore(name, 4, 8, latency=0.2, forward=1.5, memory=3 if name == "v-adaptive" else 0)
        controls.set(overlap="0.25", weight="0.3")
        made = made_by(controls.code())["t"]
        assert made.schedule == controls.schedule
        assert float(made.makespan) == pytest.approx(float(controls.timeline.makespan))


def test_invalid_settings_are_explained_and_the_nearest_valid_ones_offered():
    controls = pp.explore("dualpipe", 4, 8)
    controls.handle({"set": {"ranks": "5"}})
    state = controls.state()
    assert state["wrong"] and state["note"].startswith("dualpipe needs an even number of ranks; got 5")
    assert controls.schedule.ranks == 4 and made_by(controls.code())["s"] == controls.schedule, "what is shown stays"
    assert dict(controls.offers) == {"4 ranks": {"ranks": 4}}
    for _, change in state["offers"]:
        controls.handle({"set": change})
        assert not controls.wrong


@pytest.mark.parametrize(
    "name, sizes",
    [("dualpipe", {"microbatches": "13"}), ("chimera", {"ranks": "7"}), ("dualpipev", {"microbatches": "5"})],
)
def test_every_offer_is_valid(name, sizes):
    controls = pp.explore(name, 4, 8)
    controls.handle({"set": sizes})
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
        ({"name": "zb-9"}, "unknown schedule 'zb-9'; available: naive"),
        ({"ranks": 0}, "ranks must be a whole number from 1 to 16; got 0"),
        ({"ranks": 2.5}, "ranks must be a whole number from 1 to 16; got 2.5"),
        ({"latency": "much"}, "latency must be a number from 0 to 2; got 'much'"),
        ({"colour": 1}, "unknown control 'colour'; available: schedule, ranks"),
    ],
)
def test_unknown_controls_and_values_outside_the_range_raise(settings, message):
    with pytest.raises(pp.SettingError, match=f"^{message}"):
        pp.explore(**settings)


def test_a_peak_above_the_memory_limit_is_reported():
    controls = pp.explore("gpipe", 4, 8, memory=6)
    said, most, limit = controls.state()["over"]
    assert said + most.text + limit == "Rank 0 holds 8 activations, over the limit of 6."
    assert most.words[0].startswith("Rank 0 first holds 8 at")
    controls.set(schedule="1f1b")
    assert controls.state()["over"] == [] and controls.state()["most"] == 8, "the scale stays"


def test_the_slider_of_the_memory_limit_ends_at_what_the_hungriest_schedule_holds():
    def end(controls):
        return next(each["max"] for each in controls.state()["controls"] if each["name"] == "memory")

    costs = pp.Costs(activation=[2.5, 2, 1.5, 1])
    for name in ("1f1b", "zb-v", "dualpipe"):
        assert end(pp.explore(name, 4, 8)) == "8"
    assert end(pp.explore("1f1b", 4, 50)) == "50"
    hungriest = max(pp.simulate(pp.schedule("gpipe", 4, 6), costs).peak_activations)
    assert end(pp.explore("1f1b", 4, 6, costs=costs)) == f"{hungriest:g}" == "15"
    assert end(pp.explore("1f1b", 4, 6, memory=100)) == "100", "a limit that is set stays"


def test_only_controls_that_affect_the_schedule_are_shown():
    def names(name):
        return {control["name"] for control in pp.explore(name).state()["controls"]}

    always = {"schedule", "ranks", "microbatches", "forward", "backward", "latency", "memory"}
    assert names("1f1b") == always
    assert names("interleaved") == always | {"chunks"}
    assert names("zb-v") == always | {"weight"}
    assert names("dualpipe") == always | {"weight", "overlap"}


def test_a_comparison_counts_the_messages_of_the_lowered_schedules():
    rows = {
        name: rest for name, *rest in pp.compare("gpipe", "interleaved", "dualpipe", ranks=4, microbatches=8).rows()
    }
    # Each pair of neighbors exchanges a message in each direction; with two chunks, so do the last and the first rank.
    assert rows["gpipe"] == [33, pytest.approx(3 / 11), 8, 2 * 3 * 8]
    assert rows["interleaved"][3] == 2 * 7 * 8 and rows["dualpipe"][3] == 2 * 3 * 8
    for name in published():
        made = pp.schedule(name, 4, 8)
        *_, messages = pp.compare(pp.simulate(made)).rows()[0]
        lowered = pp.lower(made)
        assert messages == sum(action.op in SEND for order in lowered.orders for action in order), name
        assert pp.compare(pp.simulate(lowered)).rows()[0][-1] == messages


S = pp.schedule("1f1b", 2, 3)
WRONG = {
    "compare": [(), (7,), ("1f1b", None), (["1f1b", "gpipe"],)],
    "differences": [("1f1b", "gpipe"), (S, 3), (S, None), (S, pp.schedule("1f1b", 3, 3)), (S, S, 3)],
    "explore": [("nonsense", "4"), (3,), (None,), (S,), (["1f1b"],), ("1f1b", None), ("1f1b", [4]), ("1f1b", 2, "x")],
    "puzzle": [(3,), (None,), (S,), (["first"],), ("no",)],
}


def test_wrong_arguments_raise():
    for name, all_ in WRONG.items():
        for wrong in all_:
            with pytest.raises(pp.SettingError):
                getattr(pp, name)(*wrong)


def test_machines_without_a_model_are_refused():
    with pytest.raises(pp.SettingError, match="machine is for the messages of a model; give compare a model, too"):
        pp.compare("1f1b", machine="h100")


def test_costs_that_fit_only_one_of_the_compared_schedules_raise_with_advice():
    costs = pp.Costs(forward=[1, 2, 3, 4])
    with pytest.raises(
        pp.SettingError, match=r"^zb-v: 4 costs for 8 stages; .*compare timelines, simulated with costs of their own"
    ) as e:
        pp.compare("1f1b", "zb-v", costs=costs)
    assert "a single number" in str(e.value)
    own = {"1f1b": costs, "zb-v": pp.Costs(forward=[0.5] * 8)}
    shown = pp.compare(*(pp.simulate(pp.schedule(name, 4, 8), costs) for name, costs in own.items()))
    assert [name for name, *_ in shown.rows()] == list(own)


def test_given_costs_stay_while_the_sizes_change():
    costs = pp.Costs(forward=[1, 2, 3, 4], latency=0.5, activation=[4, 3, 2, 1], unit="ms")
    controls = pp.explore("1f1b", 4, 8, costs=costs)
    assert controls.timeline == pp.simulate(pp.schedule("1f1b", 4, 8), costs)
    names = {control["name"] for control in controls.state()["controls"]}
    assert names == {"schedule", "ranks", "microbatches", "memory"}
    controls.handle({"set": {"microbatches": "6", "schedule": "gpipe"}})
    assert controls.timeline == pp.simulate(pp.schedule("gpipe", 4, 6), costs)
    made = made_by(controls.code())["t"]
    assert made.schedule == controls.schedule and made.makespan == pytest.approx(float(controls.timeline.makespan))


def test_sizes_that_do_not_fit_the_costs_are_explained_and_fitting_ones_offered():
    controls = pp.explore("zb-v", 4, 8, costs=pp.Costs(forward=[1] * 8, overlap=[2] * 8, activation=[1] * 8))
    for change, offer in (({"ranks": "6"}, {"ranks": 4}), ({"schedule": "1f1b", "ranks": "4"}, {"ranks": 8})):
        controls.handle({"set": change})
        assert "8 costs for" in controls.wrong and [each for _, each in controls.offers] == [offer]
        controls.set(**offer)
        assert not controls.wrong and controls.schedule.stages == 8
    for field in ("activation", "overlap"):
        with pytest.raises(pp.SettingError, match="3 costs for 4 stages"):
            pp.explore(costs=pp.Costs(**{field: [1, 2, 3]}))
    with pytest.raises(pp.SettingError, match="costs already determines latency; set it in costs only"):
        pp.explore(costs=pp.Costs(), latency=1)


NONSENSE = [
    None, 3, "set", [], {}, {"set": None}, {"set": [1]}, {"set": {"self": 1}}, {"set": {"colour": 1}},
    {"set": {"ranks": {}}}, {"set": {"costs": "{}"}}, {"ahead": 3}, {"ahead": {"self": "1"}},
    {"level": 3}, {"level": ["first"]}, {"level": "no"}, {"place": None}, {"place": ["0F0"]},
    {"do": {}}, {"do": "fly"}, {"do": "_open"}, {"state": "{}"},
]  # fmt: skip


@pytest.mark.parametrize("shown_", [pp.explore(), pp.puzzle(), pp.compare("1f1b")], ids=lambda each: each.kind)
def test_malformed_messages_change_nothing(shown_):
    def state():
        return {name: each for name, each in shown_.state().items() if name not in ("turn", "note", "tone")}

    before, answers = state(), []
    for message in NONSENSE:
        shown_._receive(SimpleNamespace(send=answers.append), message, [])
        assert state() == before, message
    assert answers == [{"answer": None}] * sum(isinstance(each, dict) for each in NONSENSE)


@pytest.mark.parametrize("one, other", [("1f1b", "gpipe"), ("1f1b", "zb-h1"), ("gpipe", "gpipe")])
def test_without_the_marked_actions_two_schedules_are_equal(one, other):
    pair = [pp.schedule(name, 4, 6) for name in (one, other)]
    found = pp.differences(*pair)
    left = [
        [[a for at, a in enumerate(order) if (rank, at) not in marks] for rank, order in enumerate(made.orders)]
        for made, marks in zip(pair, (found.first, found.second), strict=True)
    ]
    assert left[0] == left[1] and bool(found.first) == (one != other)


def test_an_illegal_schedule_is_shown_up_to_its_deadlock():
    right = pp.schedule("gpipe", 2, 2)
    orders = (right.orders[0], (pp.F(1, 0), pp.B(1, 1), pp.F(1, 1), pp.B(1, 0)))
    attempt = pp.Schedule("attempt", right.placement, 2, orders)
    found = pp.differences(right, attempt)
    first, second = found.state()["panels"]
    assert len(first["boxes"]["op"]) == 8 and len(second["boxes"]["op"]) == 3 and found.second


def test_each_level_is_solved_by_its_par_and_its_code_is_a_legal_schedule():
    for name, level in LEVELS.items():
        board = pp.puzzle(name)
        par = level.par.schedule
        for rank, index in par.replay.steps:
            if index >= (level.given or [0] * par.ranks)[rank]:
                action = str(par.orders[rank][index])
                assert any(slot[0] == action and slot[3] for slot in slots(board.state())[rank].values())
                board.handle({"place": action})
                assert board.state()["tone"] != "no", board.state()["note"]
        state = board.state()
        assert state["tone"] == "done" and "that is par" in state["note"] and "★★★" in state["note"]
        assert not any(free for tray in slots(state) for _, _, _, free, *_ in tray.values())
        made = made_by(state["code"])["s"]
        assert made.orders == par.orders and pp.check(made) == [] and pp.lower(made)


def slots(state):
    """Return the buttons of each rank of a board by block and place; empty slots are left out."""
    return [
        {(n, place): slot for n, block in enumerate(tray) for place, slot in enumerate(block) if slot}
        for tray in state["trays"]
    ]


def shape(state):
    return [[len(block) for block in tray] for tray in state["trays"]]


@pytest.mark.parametrize(
    ("name", "moves"), [("two-ranks", 12), ("1f1b", 12), ("dualpipe", 3), *slow([("dualpipe", 12)])]
)
def test_every_button_keeps_its_place(name, moves):
    board, draw = pp.puzzle(name), random.Random(name)
    for _ in range(moves):
        before = board.state()
        rank, place = draw.choice(
            [(rank, place) for rank, tray in enumerate(slots(before)) for place, slot in tray.items() if slot[3]]
        )
        action, placed = slots(before)[rank][place][0], board.board.moves
        board.handle({"place": action})
        refused = board.board.moves == placed
        if refused:
            board.handle({"do": "hint"})
            board.handle({"place": board.state()["note"].split()[0]})
        after = board.state()
        assert shape(after) == shape(before), "no slot appears or disappears"
        for tray, old in zip(slots(after), slots(before), strict=True):
            for where, button in old.items():
                assert tray.get(where, button)[0] == button[0] or not button[3], "what could be clicked stays"
                assert "+" in button[2] or tray[where][0] == button[0]
        if not refused:
            assert not slots(after)[rank][place][3], "a second click there does nothing"


def test_a_board_shows_every_action_in_a_slot_of_its_own():
    for name, level in LEVELS.items():
        for rank, tray in enumerate(slots(pp.puzzle(name).state())):
            singles = [slot[0] for slot in tray.values() if "+" not in slot[2]]
            assert sorted(singles) == sorted(map(str, level.board().actions(rank))) and len(set(singles)) == len(
                singles
            )


def test_an_illegal_move_is_refused_and_changes_nothing():
    board = pp.puzzle("two-ranks")
    board.handle({"place": "0F0"})
    before = board.schedule
    board.handle({"place": "0B0"})
    assert board.state()["tone"] == "no" and "0B0 needs 1B0, which has not been placed yet" in board.state()["note"]
    for nonsense in ({"place": "x"}, {"do": "fly"}, {"level": "no"}, {"place": "9F9"}):
        board.handle(nonsense)
        assert board.schedule == before


def test_undo_redo_reset_hint_and_finish():
    board = pp.puzzle("1f1b")
    board.handle({"do": "hint"})
    hint = board.state()["note"].split()[0]
    board.handle({"place": hint})
    assert board.state()["tone"] == "ok"
    board.handle({"do": "undo"})
    assert not any(board.schedule.orders)
    board.handle({"do": "redo"})
    assert str(board.schedule.orders[0][0]) == hint
    board.handle({"do": "finish"})
    assert board.state()["note"].startswith("Finished for you, without a star: 24 slots: that is par.")
    assert pp.check(board.schedule) == [] and board.state()["can"] == ["undo", "redo", "reset"]
    board.handle({"do": "reset"})
    board.handle({"level": "first"})
    assert board.level.name == "first" and json.dumps(board.state())


@pytest.fixture
def kept(monkeypatch):
    """Results of its own for a test."""
    own = results.Keeper()
    monkeypatch.setattr(puzzle, "KEEPER", own)
    return own


def solve(board, orders=None):
    """Place the rest of par, or of these orders."""
    par = orders or board.level.par.schedule
    for rank, index in par.replay.steps:
        if par.orders[rank][index] not in board.board.moves:
            board.handle({"place": str(par.orders[rank][index])})


def test_stars_depend_on_par_and_on_help(kept):
    assert kept.best("two-ranks") is None
    board, slow = pp.puzzle("two-ranks"), pp.schedule("naive", 2, 3)
    solve(board, slow)
    assert kept.best("two-ranks") == (1, 18) and "★☆☆" in board.state()["note"]
    board.handle({"do": "reset"})
    board.handle({"do": "hint"})
    solve(board)
    assert kept.best("two-ranks") == (2, 12) and "That earns ★★☆, as you asked for a hint." in board.state()["note"]
    board.handle({"do": "reset"})
    solve(board)
    assert kept.best("two-ranks") == (3, 12) and "★★★" in board.state()["note"]
    assert "★★★" in dict(board.state()["levels"])["two-ranks"] and board.state()["best"] == "★★★ your best: 12"
    board.handle({"do": "reset"})
    solve(board, slow)
    assert kept.best("two-ranks") == (3, 12), "the best stays"


@pytest.mark.parametrize("undone", [("undo",), ("undo", "hint"), ("reset", "redo", "undo"), ("reset", "redo")])
def test_a_board_that_was_finished_for_the_learner_earns_no_star(kept, undone):
    board = pp.puzzle("two-ranks")
    board.handle({"place": "0F0"})
    board.handle({"do": "finish"})
    assert "★" not in board.state()["note"] and board.state()["tone"] != "done"
    for command in undone:
        board.handle({"do": command})
    solve(board)
    assert kept.best("two-ranks") is None and "★" not in board.state()["note"]
    board.handle({"do": "reset"})
    solve(board)
    assert kept.best("two-ranks") == (3, 12), "a new attempt"


def test_a_level_keeps_its_board_while_another_one_is_open(kept):
    board = pp.puzzle("first")
    board.handle({"do": "finish"})
    finished = board.schedule
    board.handle({"level": "two-ranks"})
    solve(board)
    assert kept.best("two-ranks").stars == 3, "the help was for the other level"
    board.handle({"level": "first"})
    assert board.schedule == finished and not board.state()["best"].startswith("★")
    board.handle({"do": "reset"})
    solve(board)
    assert kept.best("first").stars == 3
