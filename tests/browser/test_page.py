"""A saved page in a real browser, offline: pointer, clicks, keyboard, narrow windows and the dark theme."""

import base64
import io
import json
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from axe_playwright_python.sync_playwright import Axe
from opened import picture, save_picture
from PIL import Image
from playwright.sync_api import expect

import ppedu as pp
from ppedu.core.numeric import pretty
from ppedu.course.exercises.lesson_04 import lineup
from ppedu.view.look import COLORS, DARKER, LIGHTER, PALE, PATH
from ppedu.view.script import script, style

F1B = pp.simulate(pp.schedule("1f1b", 4, 8))
DUAL = pp.simulate(pp.schedule("dualpipe", 4, 8), pp.Costs(overlap=Fraction(5, 2), latency=Fraction(1, 4)))
ZB = pp.simulate(pp.schedule("zb-v", 4, 8), pp.Costs(forward=0.01, unit="s"))
BOTH = pp.simulate(DUAL.schedule, pp.Costs(forward=0.02, overlap=0.05, latency=0.005, unit="s"))
RUN = replace(pp.simulate(F1B.schedule, pp.Costs(forward=1.25, backward=2.5, latency=0.25)), source="measured")
LEFT, RIGHT, TOP, BOTTOM = 62, 66, 26, 26  # the margins of a panel
NAMES, LINE = 66, 16  # what two lanes add at the left and at the top
FOOT = 26  # of a saved picture, with a legend in one line


@pytest.fixture
def visit(chromium, tmp_path):
    """`visit(timeline)` opens the page that it saves, `visit(states)` a page with these widgets, both offline."""
    contexts, wrong = [], []

    def open_(what, scheme="light"):
        file = tmp_path / "x.html"
        if hasattr(what, "save"):
            what.save(file)
        else:
            file.write_text(bare(what))
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(error))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda request: request.url == file.as_uri() or wrong.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_function(
            "() => { const all = [...document.querySelectorAll('.ppedu')];"
            " return all.length && all.every(each => each.dataset.painted); }"
        )
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not wrong


def bare(states):
    css = ":root { color-scheme: light dark; } body { background: Canvas; font-family: sans-serif; }" + style("widgets")
    return f"""<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>widgets</title><style>{css}</style>
<main><h1>widgets</h1></main>
<script type="module">{script()}
for (const state of {json.dumps(states)}) mount(document.querySelector("main"), state);</script></html>"""


def widgets():
    """Return states of every kind of widget."""
    refused, solved = pp.puzzle("1f1b"), pp.puzzle("dualpipe")
    for action in ("0F0", "2B0"):
        refused.handle({"place": action})
    solved.handle({"do": "finish"})
    impossible = pp.explore("zb-h1", latency=0.2, memory=2)
    impossible.handle({"set": {"schedule": "dualpipe", "ranks": "5"}})
    suspects = lineup()
    for message in ({"case": 0, "missing": "0B1"}, {"case": 1, "box": 7}, {"case": 2, "legal": True}):
        suspects.handle(message)
    live = {**F1B.show().state(), "kind": "live", "losses": [3.1, 2.7, 2.5], "steps": 10}
    shown = [
        pp.compare("gpipe", "1f1b", "zb-v"), pp.explore("dualpipe"), impossible, refused, solved, suspects,
        pp.differences(pp.schedule("1f1b", 4, 6), pp.schedule("gpipe", 4, 6)), F1B.show(outline=F1B),
        RUN.show(outline=F1B, lanes=True),
    ]  # fmt: skip
    return [*(each.state() for each in shown), live]


def spans(timeline):
    """Yield rank, action or half of a pair, start, end, and 1 or 2 for the half, otherwise 0."""
    for rank in range(timeline.schedule.ranks):
        for action, start, end in timeline.spans(rank):
            for half, single in enumerate(action.singles, 1):
                yield rank, single, start, end, half if action.parts else 0


def place(box, timeline, rank, time, half=0, axis=None):
    """Return the position of a rank and a time on a panel of this size."""
    across = LEFT + (box["width"] - LEFT - RIGHT) * float(time / (axis or timeline.makespan))
    row = {0: 0.3, 1: 0.2, 2: 0.5}[half]
    return {"x": across, "y": TOP + (rank + row) * (box["height"] - TOP - BOTTOM) / timeline.schedule.ranks}


def journey(timeline, microbatch):
    own = sorted(
        (start, end, str(single)) for _, single, start, end, _ in spans(timeline) if single.microbatch == microbatch
    )
    ends = f"{pretty(own[0][0])}–{pretty(max(end for _, end, _ in own))}"
    return f"Microbatch {microbatch}, {ends}: {' → '.join(name for *_, name in own)}"


HOVER = """([panel, places]) => {
  const { left, top } = panel.getBoundingClientRect();
  return places.map(({ x, y }) => {
    panel.dispatchEvent(new PointerEvent("pointermove", { clientX: left + x, clientY: top + y }));
    return document.querySelector(".ppedu-line").textContent;
  });
}"""


PLAIN = pytest.param(F1B, marks=pytest.mark.slow, id="1f1b")  # whose page has nothing that DUAL's lacks


@pytest.mark.parametrize("timeline", [PLAIN, pytest.param(DUAL, id="dualpipe")])
def test_every_action_and_every_gap_is_explained_under_the_pointer(visit, timeline):
    page = visit(timeline)
    panel, line = page.locator(".ppedu-panel"), page.locator(".ppedu-line")
    actions, gaps, box = list(spans(timeline)), timeline.gaps(), panel.bounding_box()
    places = [place(box, timeline, rank, (start + end) / 2, half) for rank, _, start, end, half in actions]
    places += [place(box, timeline, rank, (start + end) / 2) for rank, start, end, _ in gaps]
    said = page.evaluate(HOVER, [panel.element_handle(), places])
    for (rank, single, start, end, _), words in zip(actions, said, strict=False):
        assert words.startswith(f"{single}: ") and f"on rank {rank}, {pretty(start)}–{pretty(end)}" in words
    for (rank, start, end, why), words in zip(gaps, said[len(actions) :], strict=True):
        assert words == f"{timeline.why_idle(rank, (start + end) / 2)}." == f"{why}."
    for at in (0, len(actions)):  # with the real mouse
        panel.hover(position=places[at])
        assert line.text_content() == said[at]
    page.mouse.move(2, 2)
    assert line.text_content().startswith("Point at an action or a gap")


def test_a_click_shows_the_journey_of_a_microbatch_in_that_timeline(visit):
    pair = [pp.simulate(pp.schedule(name, 4, many)) for name, many in (("gpipe", 4), ("zb-h1", 6))]
    page = visit([pp.compare(*pair).state()])
    line = page.locator(".ppedu-line")
    axis = max(each.makespan for each in pair)
    for panel, timeline in zip(page.locator(".ppedu-panel").all(), pair, strict=True):
        for microbatch in (0, timeline.schedule.microbatches - 1):
            own = [each for each in spans(timeline) if each[0] == 1 and each[1].microbatch == microbatch]
            _, _, start, end, _ = own[0]
            panel.click(position=place(panel.bounding_box(), timeline, 1, (start + end) / 2, axis=axis))
            page.mouse.move(2, 2)
            assert line.text_content() == journey(timeline, microbatch)


def luminance(pixel):
    """As WCAG 2 defines it."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in pixel[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_on_faded_boxes_can_be_read(visit, scheme):
    page = visit(F1B, scheme)
    panel = page.locator(".ppedu-panel")
    box = panel.bounding_box()
    panel.click(position=place(box, F1B, 2, 2.5))
    page.mouse.move(2, 2)
    page.wait_for_timeout(100)
    shot = Image.open(io.BytesIO(panel.screenshot())).convert("RGB")
    for rank, time in ((0, 14), (1, 15), (2, 3.5), (3, 11)):  # 0B1, 1B2, 2F1 and 3B2
        x, y = place(box, F1B, rank, time).values()
        pixels = [luminance(shot.getpixel((int(x) + dx, int(y) + dy))) for dx in range(-8, 9) for dy in range(-6, 7)]
        assert (max(pixels) + 0.05) / (min(pixels) + 0.05) >= 4.5


def test_the_tooltip_of_a_gap_covers_neither_of_the_ranks_that_it_is_about(visit):
    page = visit(F1B)
    panel, tip = page.locator(".ppedu-panel"), page.locator(".ppedu-tip")
    box = panel.bounding_box()
    height = (box["height"] - TOP - BOTTOM) / 4
    for rank, start, end, why in F1B.gaps():
        panel.hover(position=place(box, F1B, rank, (start + end) / 2))
        shown = tip.bounding_box()
        for each in {rank, *map(int, re.findall(r"from rank (\d)", why))}:
            top = box["y"] + TOP + each * height
            assert shown["y"] >= top + height or shown["y"] + shown["height"] <= top, why


def test_an_arrow_key_ends_the_journey_that_a_click_has_shown(visit):
    page = visit(F1B)
    panel, line = page.locator(".ppedu-panel"), page.locator(".ppedu-line")
    panel.click(position=place(panel.bounding_box(), F1B, 2, 2.5))
    panel.press("ArrowRight")
    page.mouse.move(2, 2)
    assert not line.text_content().startswith("Microbatch")


LANE = {"measured": 0.2, "simulated": 0.55}  # the middles of the lanes within a rank's row


def in_lane(box, lane, rank, time):
    """Return the position of a rank and a time in one of two lanes."""
    left, top = LEFT + NAMES, TOP + LINE
    across = left + (box["width"] - left - RIGHT) * float(time / RUN.makespan)
    return {"x": across, "y": top + (rank + LANE[lane]) * (box["height"] - top - BOTTOM) / 4}


def test_every_action_and_gap_of_two_lanes_is_explained_beside_the_same_action_of_the_other(visit):
    page = visit(RUN.show(outline=F1B, lanes=True))
    panel, both = page.locator(".ppedu-panel"), {"measured": RUN, "simulated": F1B}
    own = {lane: {str(single): (start, end) for _, single, start, end, _ in spans(each)} for lane, each in both.items()}
    for lane, other in (("measured", "simulated"), ("simulated", "measured")):
        actions, gaps, box = list(spans(both[lane])), both[lane].gaps(), panel.bounding_box()
        places = [in_lane(box, lane, rank, (start + end) / 2) for rank, _, start, end, _ in actions]
        places += [in_lane(box, lane, gap.rank, (gap.start + gap.end) / 2) for gap in gaps]
        said = page.evaluate(HOVER, [panel.element_handle(), places])
        for (rank, single, start, end, _), words in zip(actions, said, strict=False):
            assert words.startswith(f"{single}, {lane}: ")
            assert f"on rank {rank}, {pretty(start)}–{pretty(end)}." in words
            there = "–".join(map(pretty, own[other][str(single)]))
            assert f"The same action, {other}: {there}. Requires" in words
        assert said[len(actions) :] == [f"{gap.why} ({lane})." for gap in gaps]
    assert f"in a lane below it, simulated: {F1B.summary()}" in panel.get_attribute("aria-label")
    page.locator("main summary").click()
    words = page.locator(".ppedu-words pre")
    expect(words).not_to_be_empty()  # the text is written when the details are opened
    assert words.text_content().count("rank 3: ") == 2


def test_the_numbers_of_a_page_without_python_say_where_they_come_from(visit):
    page = visit(pp.compare("gpipe", "1f1b"))
    words = page.locator(".ppedu-reason:popover-open")
    page.locator(".ppedu-panel").nth(1).focus()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="makespan 33").nth(1)).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(words).to_contain_text("36 / 132 = 3 / 11 = 27.3%")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="peak 3").click()
    expect(words).to_contain_text("Rank 1 first holds 3 at 3, with 3 F begun.")
    page.get_by_role("button", name="zoom in").click()
    expect(words).to_have_count(0)


def test_the_menu_switches_between_an_outline_and_two_lanes(visit):
    page = visit(RUN.show(outline=F1B))
    panel, line = page.locator(".ppedu-panel"), page.locator(".ppedu-line")
    height = panel.bounding_box()["height"]
    panel.focus()
    page.keyboard.press("ArrowRight")
    assert line.text_content().startswith("0F0: ")
    page.get_by_label("show the second timeline as").select_option("two lanes")
    page.wait_for_function("height => document.querySelector('.ppedu-panel').offsetHeight > 1.3 * height", arg=height)
    assert line.text_content().startswith("0F0, measured: "), "the focus stays"
    panel.focus()
    for key, start in (
        ("ArrowRight", "0F1, measured: "),
        ("ArrowDown", "0F1, simulated: "),
        ("ArrowDown", "1F0, measured: "),
        ("ArrowUp", "0F1, simulated: "),
        ("ArrowUp", "0F1, measured: "),
    ):
        page.keyboard.press(key)
        assert line.text_content().startswith(start), key
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="go to the start").click()
    page.get_by_role("button", name="step forward").click()
    assert re.match(r"At 1, measured: rank 0 0F0, .*\. At 1, simulated: rank 0 0F1, ", line.text_content())
    page.get_by_label("show the second timeline as").select_option("outline")
    page.wait_for_function("height => document.querySelector('.ppedu-panel').offsetHeight === height", arg=height)
    assert page.get_by_label("show the second timeline as").count() == 1
    assert not visit(RUN).get_by_label("show the second timeline as").count(), "there is no second timeline"


@pytest.mark.parametrize("scheme, paper", [("light", (255, 255, 255)), ("dark", (18, 18, 18))])
def test_two_lanes_and_the_critical_path_have_their_colours_on_the_page(visit, scheme, paper):
    page = visit(RUN.show(outline=F1B, lanes=True), scheme)
    page.get_by_label("critical path").check()
    page.locator(".ppedu-legend").get_by_text("critical path").wait_for()
    for width in (1280, 1024):  # to look at
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(PAINTED)
        picture(page, f"lanes_{width}_{scheme}")
    base, over = (
        Image.open(io.BytesIO(base64.b64decode(drawn.split(",")[1])))
        for drawn in page.evaluate("() => [...document.querySelectorAll('canvas')].map(each => each.toDataURL())")
    )
    box = {"width": base.size[0], "height": base.size[1]}

    def at(image, lane, rank, time, down=0):
        place = in_lane(box, lane, rank, time)
        return image.getpixel((round(place["x"]), round(place["y"]) + down))

    for rank, single, start, end, _ in spans(RUN):
        assert close(at(base, "measured", rank, start + (end - start) / 5, -9)[:3], colour(RUN, single))
    for rank, single, start, end, _ in spans(F1B):
        pale = [fill * (1 - PALE) + back * PALE for fill, back in zip(colour(F1B, single), paper, strict=True)]
        assert close(at(base, "simulated", rank, start + (end - start) / 5, -9)[:3], pale)
    for lane, timeline in (("measured", RUN), ("simulated", F1B)):
        for rank, span in timeline.critical_path():
            times = [
                span.start + (span.end - span.start) * part for part in (0.3, 0.5, 0.7)
            ]  # a line may cross the edge
            column = [at(over, lane, rank, time, down) for time in times for down in range(-16, -9)]
            red, green, blue = (int(PATH[k : k + 2], 16) for k in (1, 3, 5))
            assert any(close(pixel[:3], (red, green, blue), 60) and pixel[3] > 200 for pixel in column)


def test_everything_works_with_the_keyboard(visit):
    page = visit(DUAL)
    line = page.locator(".ppedu-line")
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        name, ring = page.evaluate(
            "() => { const at = document.activeElement; const box = getComputedStyle(at);"
            " return [at.className || at.tagName, box.outlineStyle !== 'none' && parseFloat(box.outlineWidth) > 0]; }"
        )
        if name == "BODY":
            break
        assert ring, f"the focus must be visible: {name}"
        reached.append(name)
    counts = Counter(reached)
    every = page.evaluate(
        "() => document.querySelectorAll('button:not([tabindex=\"-1\"]), select, input, summary, .ppedu-panel').length"
    )
    assert len(reached) == every and counts["ppedu-panel"] == 1 and counts["SUMMARY"] == 3

    page.locator(".ppedu-panel").focus()
    own = [str(single) for rank, single, *_ in spans(DUAL) if rank == 0]
    for expected in own:
        page.keyboard.press("ArrowRight")
        assert line.text_content().startswith(f"{expected}: ")
    page.keyboard.press("ArrowRight")
    assert line.text_content().startswith(f"{own[-1]}: "), "the focus stays on the rank"
    page.keyboard.press("ArrowDown")
    assert ", on rank 1, " in line.text_content()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert line.text_content().startswith("Point at")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.mouse.move(2, 2)
    page.keyboard.press("Space")
    page.get_by_role("button", name="pause").wait_for()
    page.keyboard.press("Space")
    page.get_by_role("button", name="play").wait_for()
    page.keyboard.press("Home")
    assert line.text_content().startswith("0F0: "), "the whole timeline is shown, and the focus is where it was"


LINES = """pre => {
  const range = document.createRange(), text = pre.firstChild, tops = [];
  for (let k = 0; k < text.length; k++) {
    range.setStart(text, k);
    range.setEnd(text, k + 1);
    tops.push(Math.round(range.getClientRects()[0]?.top ?? -1));
  }
  return tops;
}"""


def test_no_entry_of_the_orders_as_text_breaks_across_lines(visit):
    page = visit(ZB)
    page.add_style_tag(content="pre { word-break: break-all; }")  # as JupyterLab has it
    page.set_viewport_size({"width": 420, "height": 900})
    page.locator("main summary").click()
    words = page.locator(".ppedu-words pre")
    expect(words).not_to_be_empty()  # the text is written when the details are opened
    text, tops = words.text_content(), page.evaluate(LINES, words.element_handle())
    entries = list(re.finditer(r"\d+[FBIW]\d+\W\S+–\S+", text))
    assert len(entries) == sum(1 for _ in spans(ZB)) and len(set(tops)) > 50
    for entry in entries:
        assert len(set(tops[entry.start() : entry.end()]) - {-1}) == 1, entry[0]


CUT = """() => [...document.querySelectorAll("body *:not(script, style, option, pre)")].filter(each => {
  const { left, right, width } = each.getBoundingClientRect();
  return width && (left < 0 || right > innerWidth || (each.clientWidth && each.scrollWidth > each.clientWidth + 1));
}).map(each => each.outerHTML.slice(0, 80))"""
PAINTED = """() => [...document.querySelectorAll("canvas")].every(each => {
  return each.offsetWidth === each.closest(".ppedu").clientWidth;
})"""
BOXES = """() => {
  const all = "h1, button:not(.ppedu-why), select, .ppedu-panel, .ppedu-line, .ppedu-legend, summary, table";
  return [...document.querySelectorAll(all)].map(each => {
    const { left, right, top, bottom } = each.getBoundingClientRect();
    return [each.outerHTML.slice(0, 60), left, right, top, bottom];
  });
}"""


@pytest.mark.parametrize("name, what", [("page", DUAL), ("widgets", None)], ids=["page", "widgets"])
def test_nothing_is_cut_off_or_covered_at_any_width(visit, name, what):
    page = visit(what or widgets())
    page.locator("summary").first.click()
    for width in (1280, 800):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(PAINTED)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width and not page.evaluate(CUT)
        for (one, *a), (other, *b) in combinations(page.evaluate(BOXES), 2):
            assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], f"{one} covers {other}"
        for scheme in ("light", "dark"):  # to look at
            page.emulate_media(color_scheme=scheme)
            picture(page, f"{name}_{width}_{scheme}")


@pytest.mark.parametrize("what", [PLAIN, pytest.param(DUAL, id="dualpipe"), pytest.param(None, id="widgets")])
def test_axe_finds_no_accessibility_violations(visit, what):
    page = visit(what or widgets())
    for words in page.locator("summary").all():
        words.click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        checked = Axe().run(page)
        assert checked.violations_count == 0, checked.generate_report()


def colour(timeline, single):
    """Return the color of an action's box, computed from the numbers in look.py."""
    channels = [int(COLORS[single.op][at : at + 2], 16) for at in (1, 3, 5)]
    chunk = timeline.schedule.placement.chunk(single.stage, single.microbatch)
    darker = DARKER * chunk / max(1, timeline.schedule.chunks - 1)
    lighter = LIGHTER * (single.microbatch % 2) if timeline.schedule.chunks == 1 else 0
    return tuple(round(c + (255 - c) * lighter) for c in (c * (1 - darker) for c in channels))


def close(one, other, by=2):
    return all(abs(a - b) <= by for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("timeline, scheme", [(DUAL, "light"), (ZB, "dark")], ids=["light", "dark"])
def test_actions_have_their_colours_and_gaps_that_of_the_page(visit, timeline, scheme):
    page = visit(timeline, scheme)
    drawn = page.evaluate("() => document.querySelector('canvas').toDataURL()")
    shot = Image.open(io.BytesIO(base64.b64decode(drawn.split(",")[1]))).convert("RGB")
    width, height = shot.size
    png = Image.open(save_picture(page, "PNG").path()).convert("RGB")
    assert png.size == (2 * width, 2 * (height + FOOT)), "twice the resolution, for slides"
    paper = (255, 255, 255) if scheme == "light" else (18, 18, 18)

    def at(rank, time, row):
        """Return the color on the page, which must be the same in the saved picture."""
        across = LEFT + (width - LEFT - RIGHT) * float(time / timeline.makespan)
        down = TOP + (rank + row) * (height - TOP - BOTTOM) / timeline.schedule.ranks
        found = shot.getpixel((int(across), int(down)))
        assert close(found, png.getpixel((int(2 * across), int(2 * down))))
        return found

    for rank, single, start, end, half in spans(timeline):
        # A fifth into the box and near its upper edge, where the number does not reach.
        found = at(rank, start + (end - start) / 5, 0.45 if half == 2 else 0.14)
        assert close(found, colour(timeline, single)), (single, found)
    wide = [gap for gap in timeline.gaps() if gap.end - gap.start > timeline.makespan / 50]
    for rank, start, end, _ in wide:
        assert close(at(rank, start + (end - start) * 0.37, 0.3), paper), (rank, start, end)
    assert wide


SPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("timelines", [[DUAL], [ZB, BOTH]], ids=["one", "two stacked"])
def test_a_saved_svg_has_a_box_for_each_action_at_its_time_and_in_its_colour(visit, timelines):
    odd = [replace(each, schedule=replace(each.schedule, name=f"c1 & <{each.schedule.name}>")) for each in timelines]
    page = visit([pp.compare(*odd).state()]) if len(odd) > 1 else visit(odd[0])
    root = ElementTree.parse(save_picture(page, "SVG").path()).getroot()
    whole = max(float(each.makespan) * each.readable[0] for each in odd)
    *parts, foot = root.findall(f"{SPACE}svg")
    assert len(parts) == len(odd)
    most = max(max(each.peak_activations) for each in odd)
    assert {"F: forward", f"activations held, 0 to {most}"} < {each.text for each in foot.iter(f"{SPACE}text")}
    down, clips = 0.0, set()
    for part, timeline in zip(parts, odd, strict=True):
        assert float(part.get("y")) == down
        down += float(part.get("height"))
        texts = [each.text for each in part.findall(f"{SPACE}text")]
        assert any(text.startswith(f"{timeline.schedule.name}, 4 ranks") for text in texts)
        clips |= {each.get("id") for each in part.iter(f"{SPACE}clipPath")}
        (inside,) = part.findall(f"{SPACE}g")
        wide, row = float(part.get("width")) - LEFT - RIGHT, (float(part.get("height")) - TOP - BOTTOM) / 4
        found = []
        for box in inside.findall(f"{SPACE}rect"):
            if box.get("fill") != "none":
                x, y = float(box.get("x")), float(box.get("y"))
                fill = tuple(map(int, re.findall(r"\d+", box.get("fill"))))
                found.append((int((y - TOP) // row), round((x - LEFT) / wide * whole, 1), fill))
        factor = timeline.readable[0]
        expected = [
            (rank, round(float(start) * factor, 1), colour(timeline, single))
            for rank, single, start, _, _ in spans(timeline)
        ]
        assert len(found) == len(expected)
        for one, other in zip(sorted(found), sorted(expected), strict=True):
            assert one[0] == other[0] and one[1] == pytest.approx(other[1], abs=0.11) and close(one[2], other[2])
    assert float(root.get("height")) == down + float(foot.get("height"))
    assert len(clips) == len(odd), "each part has its own clip path"


def test_a_saved_picture_shows_the_critical_path_and_the_journey_that_the_page_shows(visit):
    page = visit(F1B)
    path = f"rgb{tuple(int(PATH[at : at + 2], 16) for at in (1, 3, 5))}", PATH
    for shown in (False, True):
        text = save_picture(page, "SVG").path().read_text()
        root = ElementTree.fromstring(text)
        lines = [each for each in root.iter(f"{SPACE}path") if each.get("stroke") in path]
        rings = [each for each in root.iter(f"{SPACE}rect") if each.get("stroke") in path and each.get("x") != "62.75"]
        hops = sum(one[0] != other[0] for one, other in pairwise(F1B.critical_path()))
        assert (len(lines), ">critical path</text>" in text) == ((hops, True) if shown else (0, False))
        assert (len(rings) >= len(F1B.critical_path())) == shown
        page.get_by_label("critical path").check()
    before = save_picture(page, "PNG").path().read_bytes()
    page.locator(".ppedu-panel").focus()
    for key in ("ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert save_picture(page, "PNG").path().read_bytes() != before


def test_a_saved_animation_begins_faded_and_ends_as_the_saved_picture(visit):
    small = pp.simulate(pp.schedule("1f1b", 2, 3))
    page = visit(small, "dark")
    png = Image.open(save_picture(page, "PNG").path()).convert("RGB")
    saved = save_picture(page, "GIF")
    assert saved.suggested_filename == "1f1b-2x3.gif"
    gif = Image.open(saved.path())
    assert gif.size == png.size and gif.n_frames > 40 and gif.info["loop"] == 0
    paper = png.getpixel((1, 1))
    across, down = png.width / 2 - LEFT - RIGHT, (png.height / 2 - FOOT - TOP - BOTTOM) / 2
    inside = []  # a fifth into each box and near its upper edge, where the number does not reach
    for rank, _, start, end, _ in spans(small):
        time = (start + (end - start) / 5) / small.makespan
        inside.append((int(2 * (LEFT + across * float(time))), int(2 * (TOP + down * (rank + 0.14))), time))
    frames = gif.n_frames - 1
    for frame in (0, frames // 2, frames):
        gif.seek(frame)
        shown = gif.convert("RGB")
        for *spot, time in inside:
            if abs(time - frame / frames) < 0.02:
                continue  # near the line that moves
            full, found = png.getpixel(tuple(spot)), shown.getpixel(tuple(spot))
            if frame == frames or time < frame / frames:
                assert close(found, full)
            else:
                assert close(found, [0.22 * c + 0.78 * p for c, p in zip(full, paper, strict=True)], by=8)


def test_the_menu_of_pictures_works_by_keyboard_and_stays_on_a_narrow_page(visit):
    page = visit(F1B)
    opener, items = page.get_by_role("button", name="save a picture"), page.get_by_role("menuitem")
    opener.focus()
    page.keyboard.press("Enter")
    expect(items.first).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(items.last).to_be_focused()
    page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    assert items.count() == 0 and opener.get_attribute("aria-expanded") == "false"
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name="go to the start")).to_be_focused()
    page.set_viewport_size({"width": 360, "height": 700})
    opener.click()
    box = page.get_by_role("menu").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    page.keyboard.press("Tab")
    assert items.count() == 0, "what has lost the focus is closed"
    png = Image.open(save_picture(page, "PNG").path())
    assert png.width >= 1600, "a picture from a phone has space for its heading"
