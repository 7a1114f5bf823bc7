"""The playground's Python, as the worker runs it, and links to it."""

import json
import re
import sys
import time
from dataclasses import replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import often

import ppedu as pp
from ppedu.core import Placement
from ppedu.view import link
from ppedu.view.why import PLAYGROUND
from ppedu.zoo import registry
from ppedu.zoo.registry import published

sys.path.insert(0, str(Path(__file__).parents[2] / "site"))
import playground
from examples import EXAMPLES
from playground import VIEWS, Playground

NAMES = [name for name, entry in published().items() if not entry.forward_only]


def ask(page, **question):
    """Return the answer to a question, through the text that the page and the worker exchange.

    If it is the form of a view whose answer takes long, the page asks again.
    """
    answer = json.loads(page.ask(json.dumps(question)))
    again = answer.get("again") or {}
    return ask(page, **again) if "view" in again else answer


@often(1000)
@given(st.text(max_size=20), st.dictionaries(st.text(max_size=9), st.text(max_size=200), max_size=9))
def test_links_survive(view, inputs):
    fragment = urlsplit(f"{PLAYGROUND}#{link.encode(view, inputs)}").fragment
    assert set(fragment) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert link.decode(fragment) == link.decode(f"#{fragment}") == (view, inputs)


@given(st.text(max_size=60) | st.text(alphabet="abcdefgh0123456789-_", max_size=60))
def test_damaged_links_are_refused_in_a_sentence(fragment):
    answer = ask(Playground(), open=fragment)
    assert "wrong" in answer or not fragment.strip("#")
    assert answer.get("wrong", "").count("\n") == 0


def test_a_link_that_holds_too_much_is_refused():
    with pytest.raises(pp.ParseError, match="damaged"):
        link.decode(link.encode("write", {"text": "0" * (link.LARGEST + 1)}))
    with pytest.raises(pp.ParseError, match="damaged"):
        link.decode(link.encode("write", {"text": "0F0"})[:-4])


@pytest.mark.parametrize("name", NAMES)
def test_a_link_opens_the_same_picture(name):
    for costs in (
        pp.Costs(),
        pp.Costs(forward=1, backward=3, latency=Fraction(1, 2)),
        pp.Costs(latency=0.25, weight_memory=0.5, unit="ms"),
    ):
        timeline = pp.simulate(pp.schedule(name, 4, 8), costs)
        address = timeline.link("https://example.org/#old")
        assert address.startswith("https://example.org/#")
        page = Playground()
        answer = ask(page, open=address.partition("#")[2])
        assert "wrong" not in answer
        assert page.widget.panels()[0].timeline.rows == timeline.rows
        again = ask(Playground(), open=answer["link"])
        assert again["link"] == answer["link"] and again["state"]["panels"] == answer["state"]["panels"]


def test_a_link_opens_a_prefill():
    for options in ({}, {"decode": 0.125, "mixed": False}, {"placement": "v"}):
        timeline = pp.prefill(2, 128, [64, 32, 32], pp.Costs(attention=0.5), **options)
        page = Playground()
        answer = ask(page, open=timeline.link().partition("#")[2])
        assert answer["report"][0] == "The schedule is legal." and "forward_only=True" in answer["code"]
        assert page.widget.panels()[0].timeline.rows == timeline.rows


def test_links_to_ones_own():
    placement = Placement.custom([0, 1, 1, 0])
    orders = [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    own = pp.Schedule("mine", placement, 1, [[pp.Action.parse(each) for each in order] for order in orders])
    latency = {(0, 1): 1, (1, 0): 2}
    timeline = pp.simulate(own, pp.Costs(forward=[1, 2, 3, 4], latency=latency, recompute=True))
    page = Playground()
    answer = ask(page, open=timeline.link().partition("#")[2])
    assert answer["view"] == "write" and page.widget.panels()[0].timeline.rows == timeline.rows
    with pytest.raises(pp.SettingError, match="functions"):
        replace(timeline, costs=pp.Costs(forward=lambda stage, microbatch: 1)).link()
    assert PLAYGROUND in Path(__file__).parents[2].joinpath("pyproject.toml").read_text()


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_and_its_link_opens_it_again(view, monkeypatch):
    monkeypatch.setattr(playground, "EFFORT", 0)
    first = ask(Playground(), view=view, inputs={})
    assert "wrong" not in first and first["view"] == view and first["state"]
    compile(first["code"], "code", "exec")
    monkeypatch.setattr(time, "monotonic", count(0, 1000).__next__)  # on a slow machine, a plan is the same
    again = ask(Playground(), open=first["link"])
    for part in ("view", "inputs", "code", "link", "report"):
        assert again[part] == first[part]


def test_the_link_and_the_code_of_a_puzzle_restore_what_is_placed():
    page = Playground()
    ask(page, view="puzzle", inputs={"level": "repeat"})
    for message in ({"walk": "0F0"}, {"place": "0F1"}, {"level": "first"}, {"place": "0F0"}, {"level": "repeat"}):
        answer = ask(page, widget=message)
    orders = page.widget.schedule.orders
    again = Playground()
    assert ask(again, open=answer["link"])["state"]["trays"] == answer["state"]["trays"]
    assert again.widget.schedule.orders == orders == eval(answer["code"].splitlines()[-1]).schedule.orders
    assert answer["inputs"] == [] and page.widget.link().partition("#")[2] == answer["link"]
    assert "1F0 needs 0F0" in ask(Playground(), view="puzzle", inputs={"placed": "1F0"})["wrong"]


def test_the_code_makes_what_is_shown():
    page = Playground()
    for inputs in ({}, {"text": "0F0 · 0B0\n1F0 1B0"}, {"text": "0F0,0B0\n1F0,1B0", "costs": "forward=[1, 3]"}):
        answer = ask(page, view="write", inputs=inputs)
        scope = {}
        exec(answer["code"].replace("\nt.show()", ""), scope)
        assert scope["t"].rows == page.widget.panels()[0].timeline.rows


def test_an_illegal_schedule_is_drawn_as_far_as_it_goes_with_the_reasons():
    answer = ask(Playground(), view="write", inputs={"text": "0F0 0B0 0F1 0B1\n1B0 1F0 1F1 1B1"})
    assert answer["report"][0].startswith("The schedule is not legal") and answer["state"]
    assert "1B0" in " ".join(answer["report"])
    assert answer["verdict"].startswith("The schedule is not legal. Rank 1, position 0: 1B0 needs 1F0")
    assert not re.search("makespan [0-9]|bubble", json.dumps(answer["state"])), "a run that does not end has neither"
    wrong = ask(Playground(), view="write", inputs={"text": "0X0"})
    assert wrong["view"] == "write" and wrong["inputs"][0]["value"] == "0X0", "a link to it shows the text"


def test_the_verdict_names_a_published_schedule_and_the_size_of_typed_orders():
    def verdict(schedule, **inputs):
        text = "\n".join(" ".join(map(str, order)) for order in schedule.orders)
        return ask(Playground(), view="write", inputs={"text": text, **inputs})["verdict"]

    legal = "The schedule is legal."
    assert ask(Playground(), view="write", inputs={})["verdict"] == f"{legal} This is gpipe."
    assert verdict(pp.schedule("1f1b", 4, 8)) == f"{legal} This is 1f1b."
    assert verdict(pp.schedule("zb-v", 3, 6), placement="v", microbatches="6") == (
        f"{legal} This is zb-v. 3 ranks and 6 microbatches, as typed."
    )
    own = pp.Schedule.read("0F0 0B0 0F1 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    assert verdict(own, ranks="2", microbatches="3") == legal


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"text": "0F0 0B0 1X1"}, "'1X1'"),
        ({"text": ""}, "holds no actions"),
        ({"text": "def f(rank, ranks, microbatches):\n    yield 1 / 0"}, "line 2: ZeroDivisionError"),
        ({"text": "def f(rank:\n"}, "line 1: SyntaxError"),
        ({"text": "x = 'def '"}, "defines no function"),
        ({"text": "def f(rank, ranks, microbatches):\n    yield 7"}, "7"),
        ({"costs": "forward=print(1)"}, "costs are written as"),
        ({"costs": "1"}, "costs are written as"),
        ({"costs": "forward=-1"}, "forward"),
        ({"ranks": "two"}, "ranks must be a whole number; got 'two'"),
        ({"placement": "w"}, "unknown placement 'w'"),
        ({"placement": "[0,"}, "a placement is a name"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(inputs, says):
    answer = ask(Playground(), view="write", inputs=inputs)
    assert says in answer["wrong"] and "\n" not in answer["wrong"] and "Traceback" not in answer["wrong"]


@pytest.fixture(scope="module")
def examples():
    """The answer to each example's link, by its words; but for those that open as the view does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playground, "EFFORT", 0)
        patch.setattr(registry, "_entries", dict(registry._entries))  # some examples register schedules
        changed = [(view, words) for view, each in EXAMPLES.items() for words, inputs in each.items() if inputs]
        return {words: ask(Playground(), open=link.encode(view, EXAMPLES[view][words])) for view, words in changed}


def test_every_example_opens_in_its_view(examples):
    assert EXAMPLES.keys() == VIEWS.keys() and all(2 <= len(each) <= 5 for each in EXAMPLES.values())
    for view, inputs in EXAMPLES.items():
        for words, answer in ((words, examples[words]) for words in inputs if inputs[words]):
            assert answer["view"] == view and answer["state"], answer
            assert [words, link.encode(view, inputs[words])] in answer["examples"]
            fields = {each.name for each in VIEWS[view][1]}
            assert not fields or inputs[words].keys() <= fields


def test_the_examples_show_what_their_words_say(examples):
    def shown(words):
        """Return makespan, bubble and peak activations of each timeline as numbers."""
        panels = examples[words]["state"]["panels"]
        return [[float(re.search(r"[\d.]+", text)[0]) for text, *_ in panel["numbers"]] for panel in panels]

    assert shown("a bubble of 75%")[0][1] == 75
    assert shown("interleaving halves the bubble")[0][0] - 24 == 9 / 2  # 1F1B waits for 9
    assert shown("what GPipe holds")[0][2] == 16
    (_, gpipe, most), (_, one_f_one_b, least) = shown("GPipe and 1F1B: the same bubble, less memory")
    assert gpipe == one_f_one_b and most > least
    times, _, memories = zip(*shown("the V schedules: time for memory"), strict=True)
    assert [*times] == sorted(times, reverse=True) and [*memories] == sorted(memories)
    ((makespan, _, held),) = shown("faster than 1F1B, in less memory")
    rival = pp.simulate(pp.schedule("1f1b", 4, 8))
    assert makespan < rival.makespan and held < max(rival.peak_activations)
    assert examples["1F1B by hand"]["report"][0] == "The schedule is legal."
    assert examples["a deadlock"]["report"][0] == "The schedule is not legal: 1 problem."


def test_the_numbers_of_a_plan_say_where_they_come_from(examples):
    answer = examples["Llama 3 70B on 4 × 8 H100"]
    rows = answer["report"][1]["rows"]
    rank, held = re.search(r"rank, (\d+),.* activations ([\d.]+)", " ".join(rows[1][-1][1])).groups()
    peak, *_ = answer["state"]["panels"][0]["peaks"][int(rank)]
    assert float(peak.removeprefix("peak ")) == pytest.approx(float(held), abs=0.01), "in GB, as in the table"
    assert len(rows) > 2
    for row in rows[1:]:
        cells = dict(zip(rows[0], row, strict=True))
        sizes, total = re.search(r"In GB: (.*) = ([\d.]+)\.", cells["GB"][1][1]).groups()
        assert sum(map(float, re.findall(r"\d+\.\d+", sizes))) == pytest.approx(float(total), abs=0.06)
        length, idle = re.search(r"4 ranks × ([\d.]+) s = .*They wait for ([\d.]+) s", cells["bubble"][1][1]).groups()
        assert float(idle) / 4 / float(length) == pytest.approx(float(cells["bubble"][0][:-1]) / 100, abs=1e-3)
        gpus, peak, seconds = map(
            float, re.search(r"/ \((\d+) GPUs × (\S+) per second × (\S+) s", cells["MFU"][1][1]).groups()
        )
        flops = float(re.search(r"32 × (\S+) /", cells["MFU"][1][1])[1])
        assert 32 * flops / (gpus * peak * seconds) == pytest.approx(float(cells["MFU"][0][:-1]) / 100, rel=2e-3)
        assert 8192 * 32 / seconds == pytest.approx(float(cells["tokens/s"][0].replace(",", "")), rel=1e-3)


def test_a_large_picture_comes_before_its_reasons():
    page = Playground()
    answer = ask(page, view="compare", inputs={"schedules": "gpipe", "ranks": "32", "microbatches": "160"})
    (brief,), (row,) = answer["state"]["panels"], answer["state"]["table"][1:]
    assert answer["again"] == {"more": True} and not brief["gaps"] and not brief["path"]
    state = ask(page, more=True)["more"]
    (full,), timeline = state["panels"], page.widget.panels()[0].timeline
    assert [gap[3] for gap in full["gaps"]] == [gap.why for gap in timeline.gaps()]
    assert len(full["path"]) == len(timeline.critical_path())
    assert brief["numbers"] == [text for text, *_ in full["numbers"]] and row[1:4] == [
        each[0] for each in state["table"][1][1:4]
    ]
    assert brief["peaks"] == [text for text, *_ in full["peaks"]] and brief["boxes"] == full["boxes"]
    assert not ask(page, view="compare", inputs={"schedules": "gpipe"})["again"]


def test_questions_that_the_page_does_not_ask():
    page = Playground()
    for question in ({}, {"view": 1, "inputs": {}}, {"view": "none", "inputs": {}}, {"widget": {"set": {"ranks": 3}}}):
        assert "wrong" in ask(page, **question)


def test_the_controls_change_the_link():
    page = Playground()
    before = ask(page, open="")
    after = ask(page, widget={"set": {"ranks": "3"}})
    assert after["link"] != before["link"] and "ranks=3" in after["code"]
    assert "ranks=3" in ask(Playground(), open=after["link"])["code"]


def numbers_of_megatron(ranks, microbatches, chunks, rank):
    """Return a rank's order as `convert_schedule_table_to_order` of Megatron-LM makes it for groups of `ranks`."""
    groups = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    table = [chunk for group in groups for chunk in range(chunks) for _ in group]
    forwards, backwards = [chunk + 1 for chunk in table], [chunk - chunks for chunk in table]
    warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(table))
    order = forwards[:warmup]
    for index in range(warmup, len(table)):
        order += [forwards[index], backwards[index - warmup]]
    return order + backwards[len(table) - warmup :]


@pytest.mark.parametrize("ranks, microbatches, chunks", [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_megatrons_numbers_are_its_interleaved_schedule(ranks, microbatches, chunks):
    text = "\n".join(str(numbers_of_megatron(ranks, microbatches, chunks, rank)) for rank in range(ranks))
    page = Playground()
    answer = ask(page, view="write", inputs={"text": text})
    assert answer["report"][0] == "The schedule is legal."
    assert (
        page.widget.panels()[0].timeline.schedule.orders
        == pp.schedule("interleaved", ranks, microbatches, chunks=chunks).orders
    )


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipev"])
def test_what_torch_prints_of_its_orders(name):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    made = pp.schedule(name, 4, 8)
    orders = {
        rank: [None, *(schedules._Action.from_str(str(each)) for each in order)]
        for rank, order in enumerate(made.orders)
    }
    page = Playground()
    answer = ask(page, view="write", inputs={"text": str(orders), "placement": made.placement.name})
    assert "wrong" not in answer and page.widget.panels()[0].timeline.schedule.orders == made.orders


@pytest.mark.parametrize(
    "text, says", [("{1: [0F0]}", "ranks 0, 1, 2 …; got 1"), ("{}", "holds no actions"), ("1 0\n1 -1", "got 0")]
)
def test_orders_that_are_not_whole(text, says):
    assert says in ask(Playground(), view="write", inputs={"text": text})["wrong"]


def test_the_readmes_picture_opens_what_it_shows():
    [target] = re.findall(r"docs/widget.gif\)\]\((.*?)\)", (Path(__file__).parents[2] / "README.md").read_text())
    page = Playground()
    ask(page, open=target.partition("#")[2])
    assert target.startswith(PLAYGROUND)
    assert [each.timeline.schedule for each in page.widget.panels()] == [
        pp.schedule(name, 4, 8) for name in ("gpipe", "1f1b")
    ]
