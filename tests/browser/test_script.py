"""The script of the widgets, loaded in an empty page and compared with Python."""

import json
import math
import random
import re
from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

import ppedu as pp
from ppedu.core.numeric import pretty
from ppedu.course.exercises.lesson_04 import lineup
from ppedu.view.look import COLORS, DARKER, LOOK, NAMES
from ppedu.view.model import Panel, Stack
from ppedu.view.script import script, style

LOAD = """async script => {
  window.script = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
}"""
QUARTER = Fraction(1, 4)  # so that all times are exact as floats
CASES = [
    pp.simulate(pp.schedule("1f1b", 4, 6), pp.Costs(latency=QUARTER)),
    pp.simulate(pp.schedule("zb-v", 3, 6), pp.Costs(latency=QUARTER)),
    pp.simulate(pp.lower(pp.schedule("interleaved", 2, 4)), pp.Costs(forward=2500, backward=6250, unit="ms")),
    pp.simulate(pp.schedule("dualpipe", 4, 8), pp.Costs(overlap=Fraction(5, 2))),
    pp.simulate(pp.schedule("gpipe", 2, 3), pp.Costs(forward=0.25, backward=0.5, unit="s", activation=[2, [1, 3, 2]])),
    pp.simulate(pp.schedule("pipedream", 3, 5), pp.Costs(update=QUARTER)),
    pp.simulate(pp.schedule("1f1b-vocab", 3, 5), pp.Costs(head=QUARTER)),
]
each_case = pytest.mark.parametrize("timeline", CASES, ids=lambda t: t.schedule.name)


@pytest.fixture(scope="module")
def page(chromium):
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    page.set_content(f"<style>{style('widgets')}</style><main></main>")
    page.evaluate(LOAD, script())
    yield page
    page.close()
    assert not errors


def stack(*timelines):
    return Stack([Panel(each) for each in timelines]).state()


def panel(timeline):
    (data,) = stack(timeline)["panels"]
    return data


def spans(timeline):
    """Yield rank, action or half of a pair, start and end, in the order of the boxes."""
    factor, _ = timeline.readable
    for rank in range(timeline.schedule.ranks):
        for action, start, end in timeline.spans(rank):
            if action.computes:
                for single in action.singles:
                    yield rank, single, float(start * factor), float(end * factor)


def moments(timeline, draw):
    """Return each start and end, and random times between, before and after them."""
    edges = sorted({time for _, _, *times in spans(timeline) for time in times})
    return edges + [draw.uniform(-0.1, 1.1) * edges[-1] for _ in range(100)]


@each_case
def test_the_script_looks_up_what_each_rank_runs_and_holds_at_any_time(page, timeline):
    asked = [(rank, time) for rank in range(timeline.schedule.ranks) for time in moments(timeline, random.Random(1))]
    found = page.evaluate(
        """([data, asked]) => {
          const timeline = new script.Timeline(data);
          const name = i => i < 0 ? null : timeline.label(i);
          return asked.map(([rank, time]) => {
            const next = timeline.after(rank, time);
            return [name(timeline.at(rank, time)), name(timeline.at(rank, time, false)),
              next < timeline.rows[rank + 1] ? name(next) : null, timeline.held(rank, time)];
          });
        }""",
        [panel(timeline), asked],
    )
    factor, _ = timeline.readable
    every = list(spans(timeline))
    for (rank, time), (upper, lower, following, held) in zip(asked, found, strict=True):
        own = [(str(single), start, end) for at, single, start, end in every if at == rank]
        now = [name for name, start, end in own if start <= time < end] or [None]
        assert [upper, lower] == [now[0], now[-1]]
        assert following == next((name for name, _, end in own if end > time), None)
        times, values = zip(*timeline.memory(rank), strict=True)
        steps = bisect_right([float(each * factor) for each in times], time)
        assert held == (float(values[steps - 1]) if steps else 0)


@each_case
def test_the_script_finds_the_journey_of_each_microbatch(page, timeline):
    found = page.evaluate(
        """data => {
          const timeline = new script.Timeline(data);
          return [...Array(data.microbatches).keys()].map(m => timeline.journey(m).map(i => timeline.label(i)));
        }""",
        panel(timeline),
    )
    for m, journey in enumerate(found):
        times = {str(single): (start, end) for _, single, start, end in spans(timeline) if single.microbatch == m}
        assert sorted(journey) == sorted(times) and len(journey) == len(times)
        assert all(times[before] <= times[after] for before, after in pairwise(journey))


SENTENCE = re.compile(
    r"(?P<name>\w+): (?P<what>.+) of microbatch (?P<m>\d+) in stage (?P<stage>\d+), on rank (?P<rank>\d+), "
    r"(?P<start>\S+)–(?P<end>\S+?)(?P<unit> m?s)?(?P<half>, overlapped)?\. "
    r"Requires (?P<needs>.+); required by (?P<users>.+)\. While it runs, rank (?P=rank) holds (?P<held>\S+)\."
)


@each_case
def test_the_description_of_an_action_is_correct(page, timeline):
    sentences = page.evaluate(
        """([data, names]) => {
          const timeline = new script.Timeline(data);
          return [...Array(timeline.count).keys()].map(i => timeline.describe(i, names));
        }""",
        [panel(timeline), NAMES],
    )
    last, ranks = timeline.schedule.stages - 1, {str(single): rank for rank, single, *_ in spans(timeline)}
    needs = {}
    for name in ranks:
        stage, op, m = re.match(r"(\d+)([FBIWUST])(\d+)", name).groups()
        above = f"{int(stage) + 1}I{m}" if f"{int(stage) + 1}I{m}" in ranks else f"{int(stage) + 1}B{m}"
        needs[name] = {
            "F": {f"{int(stage) - 1}F{m}"} if stage != "0" else set(),
            "W": {f"{stage}I{m}"},
            "U": {f"{stage}B{m}"},
            "S": {f"{last}F{m}"},
            "T": {f"{first}S{m}" for first in range(3)},
        }.get(op, {f"{stage}F{m}"} | ({above} if int(stage) < last else set()))
        if op == "B" and int(stage) == last and timeline.schedule.placement.barriers:
            needs[name] |= {f"{first}S{m}" for first in range(3)}

    def names(text, here, none):
        """Return the listed actions; each action of another rank must be followed by that rank."""
        listed = [] if text == none else text.split(", ")
        found = {each.split(" ")[0] for each in listed}
        assert listed == [
            each if ranks[each] == here else f"{each} (rank {ranks[each]})" for each in map(first, listed)
        ]
        return found

    def first(text):
        return text.split(" ")[0]

    for (rank, single, start, end), sentence in zip(spans(timeline), sentences, strict=True):
        said = SENTENCE.fullmatch(sentence)
        assert said, sentence
        name, unit = str(single), timeline.readable[1]
        assert (said["name"], said["what"]) == (name, NAMES[single.op])
        assert [int(said[key]) for key in ("m", "stage", "rank")] == [single.microbatch, single.stage, rank]
        assert (said["start"], said["end"], (said["unit"] or "").strip()) == (pretty(start), pretty(end), unit)
        paired = any(name in map(str, action.parts or ()) for action, *_ in timeline.spans(rank))
        assert bool(said["half"]) == paired
        assert names(said["needs"], rank, "nothing") == needs[name]
        assert names(said["users"], rank, "nothing") == {user for user, wants in needs.items() if name in wants}
        factor, middle = timeline.readable[0], (start + end) / 2
        held = [value for time, value in timeline.memory(rank) if float(time * factor) <= middle][-1]
        assert said["held"] == pretty(held)


def test_ticks_are_steps_of_one_two_or_five_that_fill_their_range(page):
    draw = random.Random(2)
    ranges = [(0, 33), (0, 1), (0, 957), (0, 0.35), (3, 3.0001)]
    for _ in range(500):
        width = 10 ** draw.uniform(-4, 6)
        left = draw.choice([0, draw.uniform(0, 1000) * width])
        ranges.append((left, left + width))
    every = page.evaluate("all => all.map(([left, right]) => script.ticks(left, right))", ranges)
    for (left, right), found in zip(ranges, every, strict=True):
        width = right - left
        step = (found[-1] - found[0]) / (len(found) - 1)
        assert 4 <= len(found) <= 11
        assert all(after - before == pytest.approx(step, rel=1e-5) for before, after in pairwise(found))
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-5), 3) in (1, 2, 5)
        # No tick is outside, and there is no space for another one at either end.
        assert left - 1e-6 * width <= found[0] < left + step * (1 + 1e-5)
        assert right - step * (1 + 1e-5) < found[-1] <= right + 1e-6 * width


PICTURES = """([data, width, views, look, part = "whole"]) => {
  const timeline = new script.Timeline(JSON.parse(data));
  const palette = new script.Palette(timeline.data, "op");
  const most = Math.max(...timeline.data.peaks.keys().toArray().flatMap(rank => timeline.memory(rank)[1]));
  const main = document.querySelector("main");
  const all = views.map(view => {
    const layout = new script.Layout(timeline, look, width, view ?? { left: 0, right: timeline.data.makespan }, part);
    const context = new script.SvgContext(width, layout.height);
    script.atOnce(script.paint(context, layout, { palette, look, ink: "#000", paper: "#fff", most }));
    main.innerHTML = context.text();
    main.querySelector("g").remove(); // what is clipped: the boxes and their numbers
    return [layout.height, [...main.querySelectorAll("text")].map(each => {
      const { x, y, width, height } = each.getBBox();
      return { text: each.textContent, left: x, right: x + width, top: y, bottom: y + height };
    })];
  });
  main.replaceChildren();
  return all;
}"""


def cover(one, other):
    """Return whether two texts overlap, apart from the space above and below their letters."""
    return (
        one["left"] < other["right"]
        and other["left"] < one["right"]
        and one["top"] + 3 < other["bottom"] - 3
        and other["top"] + 3 < one["bottom"] - 3
    )


LONG = pp.simulate(pp.schedule("interleaved-overlap", 16, 64, chunks=2), pp.Costs(forward=0.01234, unit="s"))


@pytest.mark.parametrize("width", [1232, 752, 420])
@pytest.mark.parametrize("timeline", [CASES[2], CASES[3], LONG], ids=lambda t: t.schedule.name)
def test_no_text_of_a_picture_is_covered_or_cut_off(page, timeline, width):
    data = panel(timeline)
    draw = random.Random(3)
    tick = 10 ** math.floor(math.log10(data["makespan"]))
    views = [None, *({"left": tick * (1 - part), "right": tick} for part in (0.2, 0.01))]  # a tick next to the unit
    for _ in range(8):
        left, wide = draw.random() * data["makespan"], data["makespan"] * 10 ** draw.uniform(-3.5, 0)
        left = min(left, data["makespan"] - wide)
        views.append({"left": left, "right": left + wide})
    for height, texts in page.evaluate(PICTURES, [json.dumps(data), width, views, LOOK]):
        assert not [(a["text"], b["text"]) for a, b in combinations(texts, 2) if cover(a, b)]
        for text in texts:
            assert text["left"] >= 0 and text["right"] <= width and text["bottom"] <= height, text
        axis = [text["text"] for text in texts if text["top"] > height - 26]
        times = [text for text in axis if re.fullmatch(r"[-\d.e]+", text)]
        assert len(set(times)) == len(times) >= 2, "ticks have different labels"


TWO = replace(pp.simulate(CASES[0].schedule, pp.Costs(forward=1.3, latency=QUARTER)), source="measured")
MANY = pp.simulate(pp.schedule("1f1b", 32, 8), pp.Costs(forward=0.01234, unit="s"))


@pytest.mark.parametrize("width", [1232, 976, 752, 420])
@pytest.mark.parametrize(
    "upper, lower",
    [(TWO, CASES[0]), (replace(MANY, source="measured"), MANY), (CASES[0], pp.simulate(pp.schedule("gpipe", 4, 8)))],
    ids=["measured", "32 ranks", "two schedules"],
)
def test_no_text_of_two_lanes_is_covered_or_cut_off(page, upper, lower, width):
    (data,) = upper.show(outline=lower).state()["panels"]
    views = [None, {"left": data["makespan"] / 2, "right": data["makespan"]}]
    for height, texts in page.evaluate(PICTURES, [json.dumps(data), width, views, LOOK, "upper"]):
        assert not [(a["text"], b["text"]) for a, b in combinations(texts, 2) if cover(a, b)]
        for text in texts:
            assert text["left"] >= 0 and text["right"] <= width and text["bottom"] <= height, text
        words = [text["text"] for text in texts]
        assert len([each for each in words if each.startswith("makespan ")]) == 2
        many = [words.count(name) for name in data["pair"]["names"]]
        assert min(many) >= data["ranks"], "each lane has its name"


LABELS = """([data, look, width]) => {
  const timeline = new script.Timeline(data);
  const palette = new script.Palette(data, "op");
  const layout = new script.Layout(timeline, look, width, { left: 0, right: data.makespan });
  const context = new script.SvgContext(width, layout.height);
  script.atOnce(script.paint(context, layout, { palette, look, ink: "#000", paper: "#fff", most: 4 }));
  const svg = new DOMParser().parseFromString(context.text(), "image/svg+xml");
  return [...svg.querySelectorAll("g text")].map(each => each.textContent);
}"""


def test_a_box_carries_its_name_or_its_microbatch_or_nothing_depending_on_its_own_width(page):
    def texts(width, backward):
        timeline = pp.simulate(pp.schedule("1f1b", 4, 16), pp.Costs(backward=backward))
        return sorted(page.evaluate(LABELS, [panel(timeline), LOOK, width]))

    forwards = sorted(4 * list(map(str, range(16))))
    backwards = [f"{stage}B{m}" for stage in range(4) for m in range(16)]
    assert texts(1200, 2) == sorted([*forwards, *backwards])
    assert texts(1100, 1) == sorted(2 * forwards)
    assert texts(1200, 9) == sorted(backwards), "a forward's microbatch would be too small to read"
    assert texts(420, 1) == []


def test_the_number_on_a_box_can_be_read_on_its_colour(page):
    pairs = page.evaluate(
        """data => ["op", "microbatch", "stage"].flatMap(by => [..."FBIWRUOLST"].flatMap(op => {
          const palette = new script.Palette(data, by);
          const of = k => palette.of(op, k % 32, k % 32, k >> 5);
          return [...Array(128).keys()].map(k => [of(k).fill, of(k).ink]);
        }))""",
        panel(pp.simulate(pp.schedule("interleaved", 8, 8, chunks=4))),
    )

    def luminance(colour):
        """Return the relative luminance, as WCAG 2 defines it."""
        whole = re.findall(r"\d+", colour) if colour[0] == "r" else [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
        channels = [int(c) / 255 for c in whole]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for fill, ink in {tuple(pair) for pair in pairs}:
        dark, light = sorted((luminance(fill), luminance(ink)))
        assert (light + 0.05) / (dark + 0.05) >= 4.45, (fill, ink)


CHARTS = """sets => sets.map(points => {
  const [x, y] = ["peak activations", "bubble"].map(label => ({ label, format: String }));
  const svg = script.chart(points, { x, y });
  document.querySelector("main").replaceChildren(svg);
  const placed = (node, ...names) => names.map(name => +node.getAttribute(name));
  const texts = [...svg.querySelectorAll("text")].map(each => {
    const { x: left, y: top, width, height } = each.getBBox();
    const [x, y] = placed(each, "x", "y");
    return { text: each.textContent, left, right: left + width, top, bottom: top + height, x, y };
  });
  document.querySelector("main").replaceChildren();
  return { texts, circles: [...svg.querySelectorAll("circle")].map(each => placed(each, "cx", "cy")) };
})"""


def test_points_of_a_chart_match_its_axes_and_labels_do_not_overlap(page):
    draw = random.Random(4)
    names = pp.schedules()
    sets = [[{"name": "1f1b", "x": 4, "y": 0}], [{"name": "a", "x": 4, "y": 0.2}, {"name": "b", "x": 4, "y": 0.2}]]
    for count in (3, 6, 9, 12, 17) * 6:
        spread = draw.choice([1, 0.05])
        points = [(8 - spread * draw.uniform(0, 8), 0.3 - spread * draw.uniform(0, 0.3)) for _ in range(count)]
        sets.append([{"name": n, "x": x, "y": y} for n, (x, y) in zip(draw.sample(names, count), points, strict=True)])
    for points, found in zip(sets, page.evaluate(CHARTS, sets), strict=True):
        texts = found["texts"]
        numbers = [text for text in texts if re.fullmatch(r"[\d.]+", text["text"])]
        floor = max(text["y"] for text in numbers)
        across = {float(text["text"]): text["x"] for text in numbers if text["y"] == floor}
        up = {float(text["text"]): text["y"] - 4 for text in numbers if text["y"] != floor}  # to the middle of a letter

        def at(value, axis):
            (low, start), (high, end) = min(axis.items()), max(axis.items())
            return start + (end - start) * (value - low) / (high - low)

        expected = {(at(p["x"], across), at(p["y"], up)) for p in points}
        for circle in found["circles"]:
            assert min(math.dist(circle, each) for each in expected) < 0.1
        for each in expected:
            assert min(math.dist(circle, each) for circle in found["circles"]) < 6, "close points share a circle"
        assert not [(a["text"], b["text"]) for a, b in combinations(texts, 2) if cover(a, b)]
        for text in texts:
            for x, y in found["circles"]:
                assert not (text["left"] < x < text["right"] and text["top"] < y < text["bottom"]), text
            assert text["left"] >= 0 and text["right"] <= 420 and text["top"] >= -3 and text["bottom"] <= 222, text
        labels = {name for text in texts if text not in numbers for name in text["text"].split(", ")}
        assert len(points) > 6 or {p["name"] for p in points} <= labels


FIGURE = """([data, does]) => {
  const figure = new script.Figure(document.querySelector("main"), data.look);
  figure.update(data);
  const seen = does.map(([what, ...given]) => {
    figure[what](...given);
    return [figure.view.left, figure.view.right, figure.time];
  });
  figure.destroy();
  document.querySelector("main").replaceChildren();
  return seen;
}"""


def test_zooming_and_moving_stay_within_the_timeline(page):
    timeline = CASES[3]
    end, draw = float(timeline.makespan), random.Random(5)
    does = [["zoom", 0.1]] * 5
    for _ in range(400):
        does.append(
            draw.choice([
                ["zoom", 10 ** draw.uniform(-1, 1), draw.uniform(0, end)],
                ["zoom", draw.choice([0.5, 2])],
                ["lookAt", draw.uniform(-end, 2 * end)],
                ["lookAt", draw.uniform(-end, 2 * end), draw.uniform(0.001, 2) * end],
            ])
        )  # fmt: skip
    left, right = 0, end
    views = page.evaluate(FIGURE, [stack(timeline), does])
    for (what, *given), (now, until, _) in zip(does, views, strict=True):
        assert -1e-9 <= now < until <= end + 1e-9
        width = until - now
        if what == "zoom":
            around = given[1] if len(given) > 1 else (left + right) / 2
            assert width == pytest.approx(min(end, max(end / 5000, (right - left) * given[0])))
            if now > 1e-9 and until < end - 1e-9:  # the time under the pointer stays in place
                assert (around - now) / width == pytest.approx((around - left) / (right - left), abs=1e-6)
        else:
            assert width == pytest.approx(min(end, given[1] if len(given) > 1 else right - left))
            assert now == pytest.approx(max(0, min(given[0], end - width)), abs=1e-9)
        left, right = now, until


def test_a_step_goes_to_the_next_start_or_end_of_an_action(page):
    pair = CASES[0], CASES[1]  # stacked, on one axis
    times = sorted({time for timeline in pair for *_, start, end in spans(timeline) for time in (start, end)})
    forth = page.evaluate(FIGURE, [stack(*pair), [["step", 1]] * (len(times) + 1)])
    assert [time for *_, time in forth] == [*times, times[-1]]
    back = page.evaluate(FIGURE, [stack(*pair), [["step", -1]] * len(times)])
    assert [time for *_, time in back] == [*times[-2::-1], 0]


MOUNT = """async ([states, times]) => {
  const frame = () => new Promise(requestAnimationFrame);
  for (let k = 0; k < times; k++) {
    const holder = document.createElement("div");
    document.querySelector("main").append(holder);
    const built = script.mount(holder, states[k % states.length]);
    await frame();
    built.update(states[k % states.length]);
    built.figure.play();
    await frame();
    built.figure.destroy();
    const painted = holder.firstChild.dataset.painted;
    await frame();
    if (holder.firstChild.dataset.painted !== painted) throw Error("painted after it was destroyed");
    holder.remove();
  }
  await frame();
}"""


RENDER = """([state, lanes]) => {
  const main = document.querySelector("main"), kept = { state: JSON.stringify(state), lanes }, listeners = {};
  let saved = 0;
  const model = {
    get: name => kept[name],
    set: (name, value) => { kept[name] = value; },
    save_changes: () => saved++,
    send: () => {},
    on: (name, listener) => { listeners[name] = listener; },
    off: name => { delete listeners[name]; },
  };
  const close = script.default.render({ model, el: main });
  const menu = main.querySelector("[aria-label='show the second timeline as']");
  const seen = [menu.value];
  menu.value = "outline";
  menu.dispatchEvent(new Event("change"));
  seen.push(kept.lanes, saved);
  kept.lanes = true; // another view of the same widget
  listeners["change:lanes"]();
  seen.push(menu.value);
  close();
  return [...seen, Object.keys(listeners).length];
}"""


def test_a_widget_remembers_whether_it_shows_two_lanes(page):
    state = TWO.show(outline=CASES[0]).state()
    assert page.evaluate(RENDER, [state, True]) == ["lanes", False, 1, "lanes", 0]


def test_removed_widgets_leave_no_nodes_or_listeners_behind(page):
    shown = [pp.compare("gpipe", "1f1b"), pp.explore(), pp.puzzle(), CASES[3].show(), TWO.show(CASES[0], lanes=True)]
    live = {**CASES[0].show().state(), "kind": "live", "losses": [3, 2], "steps": 9}
    states = [*(each.state() for each in shown), live]
    session = page.context.new_cdp_session(page)

    def counted():
        session.send("HeapProfiler.collectGarbage")
        found = session.send("Memory.getDOMCounters")
        return found["nodes"], found["jsEventListeners"]

    page.evaluate(MOUNT, [states, 5])
    before = counted()
    page.evaluate(MOUNT, [states, 50])
    nodes, listeners = counted()
    assert nodes <= before[0] and listeners <= before[1]


@pytest.mark.slow
def test_a_widget_of_131072_boxes_is_painted(page):
    """A call with that many arguments would overflow the stack."""
    state = pp.simulate(pp.schedule("gpipe", 64, 1024)).show().state()
    (panel_,) = state["panels"]
    assert len(panel_["boxes"]["op"]) == 131_072
    forward, backward = page.evaluate(PIXELS, [json.dumps(state), [(0, 500.5), (31, 2500.5)]])
    assert forward[2] > forward[0] + 50 and backward[1] > backward[0] + 50, "blue and green"


def test_a_hundred_chunks_have_the_shades_that_the_static_picture_gives_them(page):
    found = page.evaluate(
        """data => {
          const palette = new script.Palette(data, "op");
          return [..."FBIWRUOLST"].flatMap(op => [0, 1].flatMap(m =>
            [...Array(100).keys()].map(chunk => palette.of(op, 0, m, chunk).rgb)));
        }""",
        panel(pp.simulate(pp.schedule("interleaved", 1, 1, chunks=100))),
    )
    expected = []
    for color in COLORS.values():
        channels = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
        for _ in (0, 1):  # with several chunks, microbatches of both kinds have one color
            for dark in ([c * (1 - DARKER * k / 99) for c in channels] for k in range(100)):
                expected.append(dark)
    assert len({tuple(each) for each in found}) == len(expected) / 2
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=0.01)


OVER = """async ([data, view, time, places]) => {
  const figure = new script.Figure(document.querySelector("main"), data.look);
  figure.update(data);
  Object.assign(figure, { view, time });
  figure.paint();
  const layout = figure.layout(0), context = figure.panels[0].over.getContext("2d");
  const found = places.map(x => context.getImageData(layout.x(x), layout.y(0, 0.3), 1, 1).data[3]);
  figure.destroy();
  document.querySelector("main").replaceChildren();
  return found;
}"""


@pytest.mark.parametrize("left, right", [(0, 33), (10, 20), (20, 33), (30, 33), (3, 4)])
def test_everything_after_the_moment_of_playing_is_faded_in_every_view(page, left, right):
    data = stack(pp.simulate(pp.schedule("1f1b", 4, 8)))
    places = [left + (right - left) * (k + 0.5) / 40 for k in range(40)]
    found = page.evaluate(OVER, [data, {"left": left, "right": right}, 12, places])
    for place, alpha in zip(places, found, strict=True):
        if abs(place - 12) > (right - left) / 100:
            assert bool(alpha) == (place > 12), place


def test_new_timelines_are_shown_whole_and_not_played(page):
    states = [stack(pp.simulate(pp.schedule(name, 4, 8))) for name in ("1f1b", "zb-v")]
    playing = page.evaluate(
        """([first, second]) => {
          const figure = new script.Figure(document.querySelector("main"), first.look);
          figure.update(first);
          figure.step(1);
          figure.play();
          figure.update(second);
          const found = [figure.time, figure.playing];
          figure.destroy();
          document.querySelector("main").replaceChildren();
          return found;
        }""",
        states,
    )
    assert playing == [None, None]


def test_any_name_fits_into_a_well_formed_svg(page):
    odd = "a\0 \x1b <b>& \ud800 $\\frac{$ " + "x" * 200
    (data,) = Stack([Panel(CASES[0], title=odd)]).state()["panels"]
    data["axis"] = "time, <b>& $\\frac{$ " + "x" * 200
    (drawn,) = page.evaluate(
        """([data, look]) => {
          const timeline = new script.Timeline(JSON.parse(data));
          const palette = new script.Palette(timeline.data, "op");
          const layout = new script.Layout(timeline, look, 1200, { left: 0, right: timeline.data.makespan });
          const context = new script.SvgContext(1200, layout.height);
          script.atOnce(script.paint(context, layout, { palette, look, ink: "#000", paper: "#fff", most: 4 }));
          return [context.text()];
        }""",
        [json.dumps(data), LOOK],
    )
    texts = [each.text for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert sum(each.startswith("a\N{REPLACEMENT CHARACTER} ") for each in texts) == 1
    assert sum(each.startswith("time, <b>& $") for each in texts) == 1


CLICKS = """([before, after]) => {
  const sent = [];
  const built = script.mount(document.querySelector("main"), before, message => sent.push(message.place));
  const { left, top, width, height } = document.querySelector("[data-place='0F1']").getBoundingClientRect();
  const click = () => document.elementFromPoint(left + width / 2, top + height / 2).click();
  click();
  click(); // before the answer
  built.update(after);
  click();
  built.figure.destroy();
  document.querySelector("main").replaceChildren();
  return sent;
}"""


def test_several_clicks_at_one_place_place_one_action(page):
    board = pp.puzzle("gpipe")
    board.handle({"place": "0F0"})
    before = board.state()
    board.handle({"place": "0F1"})
    assert page.evaluate(CLICKS, [before, board.state()]) == ["0F1"]


MARKED = """([state]) => {
  const sent = [];
  const built = script.mount(document.querySelector("main"), state, message => sent.push(message));
  const { figure } = built, layout = figure.layout(0), { holder } = figure.panels[0];
  holder.setPointerCapture = () => {};
  const { left, top } = holder.getBoundingClientRect();
  const mouse = (type, time, rank) => holder.dispatchEvent(new PointerEvent(type, {
    clientX: left + layout.x(time), clientY: top + layout.y(rank, 0.3), shiftKey: true, bubbles: true, buttons: 1 }));
  mouse("pointerdown", 0.2, 0);
  mouse("pointermove", 2.3, 1); // the middles of 0F0 and 0F1 on rank 0, and of 1F0 on rank 1
  const said = figure.line.textContent;
  mouse("pointerup", 2.3, 1);
  for (const [key, shiftKey] of [["Right"], ["Right", true], ["Right", true], ["Down", true], ["r"]])
    holder.dispatchEvent(
      new KeyboardEvent("keydown", { key: key.replace(/^[A-Z]/, "Arrow$&"), shiftKey, bubbles: true }));
  built.figure.destroy();
  document.querySelector("main").replaceChildren();
  return [said, ...sent];
}"""


def test_a_block_is_marked_and_repeated_with_the_mouse_or_the_keyboard(page):
    board = pp.puzzle("gpipe")
    for action in ("0F0", "0F1", "0F2", "1F0", "1F1", "2F0"):
        board.handle({"place": action})
    said, dragged, marked = page.evaluate(MARKED, [board.state()])
    assert said.startswith("3 actions marked: 0F0, 0F1, 1F0. R repeats the block")
    assert dragged == {"repeat": ["0F0", "0F1", "1F0"]}
    assert marked == {"repeat": ["0F0", "0F1", "0F2", "1F0", "1F1"]}


FORECAST = """async ([state, action]) => {
  const built = script.mount(document.querySelector("main"), state);
  const { figure } = built, layout = figure.layout(0);
  const ink = async () => {
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const context = figure.panels[0].over.getContext("2d");
    return [3.8, 4.8].map(time => context.getImageData(layout.x(time), layout.y(3, 0.2), 1, 1).data[3]);
  };
  const button = document.querySelector(`[data-place="${action}"]`);
  button.focus();
  const words = document.querySelector(".ppedu-cost").textContent;
  const shown = [await ink(), words, button.getAttribute("aria-description")];
  button.blur();
  shown.push(await ink());
  built.figure.destroy();
  document.querySelector("main").replaceChildren();
  return shown;
}"""


def test_a_move_is_shown_before_it_is_made(page):
    board = pp.puzzle("repeat")
    for action in ("0F0", "1F0", "2F0"):
        board.handle({"place": action})
    inside, words, described, after = page.evaluate(FORECAST, [board.state(), "3F0"])
    assert words == described
    assert words == (
        "3F0 would run 3–4 on rank 3. With the rest after it, at least: makespan 33, bubble 27.3%, peak 1."
    )
    assert inside[0] and not inside[1] and after == [0, 0]
    _, words, *_ = page.evaluate(FORECAST, [board.state(), "3B0"])
    assert words == "3B0 needs 3F0, which has not been placed yet (rank 3)."


PIXELS = """async ([state, places]) => {
  const built = script.mount(document.querySelector('main'), JSON.parse(state));
  const { figure } = built, layout = figure.layout(0);
  while (!figure.root.dataset.painted) await new Promise(requestAnimationFrame);
  const context = figure.panels[0].base.getContext('2d');
  const found = places.map(([rank, time]) =>
    [...context.getImageData(layout.x(time), layout.y(rank, 0.36), 1, 1).data].slice(0, 3));
  built.figure.destroy();
  document.querySelector('main').replaceChildren();
  return found;
}"""


LARGE = """async ([small, large]) => {
  const [first, second] = [small, large].map(JSON.parse);
  const built = script.mount(document.querySelector('main'), first), { figure } = built, [place] = figure.panels;
  const next = () => new Promise(requestAnimationFrame);
  while (!figure.root.dataset.painted) await next();
  const [base, painted] = [place.base, figure.root.dataset.painted];
  const stays = () => place.base === base && figure.root.dataset.painted === painted;
  built.update(second);
  const found = [stays()];
  while (figure.root.dataset.painted === painted) await next();
  found.push(place.base !== base && place.holder.firstChild === place.base && place.shown === figure.timelines[0]);
  built.update(second);
  built.update(first);
  for (let frame = 0; frame < 20; frame++) await next();
  found.push(place.shown === figure.timelines[0] && figure.timelines[0].count < 100);
  figure.destroy();
  document.querySelector('main').replaceChildren();
  return found;
}"""


def test_a_large_picture_replaces_the_one_before_once_it_is_complete(page):
    small, large = (json.dumps(pp.simulate(pp.schedule("gpipe", 4, m)).show().state()) for m in (8, 1600))
    assert page.evaluate(LARGE, [small, large]) == [True, True, True]


def test_a_pixel_has_the_mean_colour_of_very_many_boxes(page):
    timeline = pp.simulate(pp.schedule("gpipe", 4, 800))
    state = timeline.show().state()
    assert len(state["panels"][0]["boxes"]["op"]) == 6400, "too many to be drawn as rectangles"
    gaps = [(gap.rank, (gap.start + gap.end) / 2) for gap in timeline.gaps() if gap.end - gap.start > 8]
    places = [(0, 400.5), (3, 400.5), (0, 2000.5), (3, 1500.5)]
    assert gaps
    found = page.evaluate(PIXELS, [json.dumps(state), [*places, *gaps]])
    shades = {
        op: page.evaluate(
            "([data, op]) => [0, 1].map(m => new script.Palette(data, 'op').of(op, 0, m, 0).rgb)",
            [state["panels"][0], op],
        )
        for op in "FB"
    }
    for op, colour in zip("FFBB", found[:4], strict=True):
        for channel, (one, other) in zip(colour, zip(*shades[op], strict=True), strict=True):
            assert min(one, other) - 2 <= channel <= max(one, other) + 2, "the mean of neighbors"
    assert all(min(colour) > 200 for colour in found[4:]), "the page, perhaps with a line of the grid"


def test_a_message_waits_for_the_answer_to_the_one_before(page):
    """So that they arrive in order, whichever of a kernel's threads they come to."""
    sent = page.evaluate(
        """state => {
          const sent = [], on = {}, el = document.body.appendChild(document.createElement("div"));
          const model = {
            get: name => (name === "state" ? state : false), on: (name, call) => { on[name] = call; }, off: () => {},
            send: message => sent.push(message.case ?? message),
          };
          const remove = window.script.default.render({ model, el });
          const steps = [];
          for (const button of el.querySelectorAll(".ppedu-case button")) button.click();
          for (let n = 0; n < 5; n++) {
            steps.push([...sent]);
            on["msg:custom"]({ answer: null });
          }
          remove();
          el.remove();
          return [...steps, sent];
        }""",
        json.dumps(lineup().state()),
    )
    assert sent == [[*range(n)] for n in range(1, 6)] + [[0, 1, 2, 3, 4, {"gone": True}]]
