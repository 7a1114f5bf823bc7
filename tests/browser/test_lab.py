"""JupyterLab in a real browser: pointing at widgets, clicks, playing, cells that run again, and whole lessons."""

import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from opened import ROOT, picture, run_all, save_picture
from playwright.sync_api import expect

import ppedu as pp

SHOW = "import ppedu as pp\npp.simulate(pp.schedule('1f1b', ranks=4, microbatches=8)).show()"


def painted(page, widget):
    """Return a function that waits until the widget is painted again."""
    before = widget.get_attribute("data-painted")
    return lambda: page.wait_for_function(
        "([node, before]) => node.dataset.painted !== before", arg=[widget.element_handle(), before]
    )


def fits(page):
    """Return whether no widget is wider than the page allows."""
    return page.evaluate("() => [...document.querySelectorAll('.ppedu')].every(e => e.scrollWidth <= e.clientWidth)")


def place(widget, timeline, rank, time):
    """Return the position of a rank and a time on the panel."""
    box = widget.locator(".ppedu-panel").bounding_box()
    across = 62 + (box["width"] - 62 - 66) * time / float(timeline.makespan)
    rows = box["height"] - 26 - 26
    return {"x": across, "y": 26 + (rank + 0.3) * rows / timeline.schedule.ranks}


def test_pointing_explains_actions_and_gaps_without_moving_anything(notebook):
    page = notebook([SHOW])
    timeline = pp.simulate(pp.schedule("1f1b", 4, 8))
    widget, panel, line = (page.locator(each) for each in (".ppedu", ".ppedu-panel", ".ppedu-line"))
    height = widget.bounding_box()["height"]
    for rank in range(4):
        for action, start, end in timeline.spans(rank)[:3]:
            panel.hover(position=place(widget, timeline, rank, float(start + end) / 2))
            said = line.inner_text()
            assert said.startswith(f"{action}: ") and f"{float(start):g}–{float(end):g}" in said
        for _, start, end, why in [gap for gap in timeline.gaps() if gap.rank == rank][:3]:
            panel.hover(position=place(widget, timeline, rank, float(start + end) / 2))
            assert line.inner_text() == f"{why}."
    panel.hover(position=place(widget, timeline, 2, 2.5))
    assert "Requires 1F0 (rank 1); required by 2B0, 3F0 (rank 3)." in line.inner_text()
    picture(page, "show")
    assert widget.bounding_box()["height"] == height and fits(page)

    panel.click(position=place(widget, timeline, 2, 2.5))
    page.mouse.move(5, 5)
    assert line.inner_text() == "Microbatch 0, 0–12: 0F0 → 1F0 → 2F0 → 3F0 → 3B0 → 2B0 → 1B0 → 0B0"
    picture(page, "show_journey")
    assert widget.bounding_box()["height"] == height


def test_a_timeline_is_played_stepped_zoomed_and_used_with_the_keyboard(notebook):
    page = notebook([SHOW])
    widget, panel, line = (page.locator(each) for each in (".ppedu", ".ppedu-panel", ".ppedu-line"))
    page.get_by_role("button", name="go to the start").click()
    page.get_by_role("button", name="step forward").click()
    for key in ("Enter", "Space"):  # these are also shortcuts of the notebook, which must not act
        page.get_by_role("button", name="step forward").press(key)
    assert line.inner_text().startswith(
        "At 3: rank 0 0F3, rank 1 1F2, rank 2 2F1, rank 3 3F0. Activations held: 4, 3, 2, 1."
    )
    page.get_by_role("button", name="step back").click()
    assert line.inner_text().startswith("At 2: rank 0 0F2")
    page.get_by_role("button", name="play").click()
    page.get_by_role("button", name="pause").wait_for()
    page.wait_for_function("() => +document.querySelector('.ppedu-line').textContent.match(/At ([0-9.]+)/)[1] > 3")
    page.get_by_role("button", name="pause").click()
    legend = page.locator(".ppedu-legend")
    assert "critical path" not in legend.inner_text()
    page.get_by_role("checkbox").check()
    legend.get_by_text("critical path").wait_for()
    for colour in ("microbatch", "stage", "op"):
        wait = painted(page, widget)
        page.get_by_label("color by").select_option(colour)
        wait()
    picture(page, "show_played")
    page.get_by_role("button", name="show the whole timeline").click()
    panel.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "+", "+", "Enter"):
        page.keyboard.press(key)
    assert line.inner_text().startswith("1F0: forward of microbatch 0 in stage 1, on rank 1, 1–2")
    picture(page, "show_zoomed")
    page.keyboard.press("Home")
    page.keyboard.press("Escape")
    assert line.inner_text().startswith("Point at an action")
    page.get_by_text("orders as text").click()
    words = page.locator(".ppedu-words pre", has_text="rank 3: ")
    assert "rank 3: 3F0 3–4, 3B0 4–6, " in words.inner_text().replace("\u00a0", " ").replace("\u2060", "")


@pytest.mark.parametrize("kind", ["svg", "png", "gif"])
def test_a_picture_is_saved(notebook, kind, tmp_path):
    page = notebook([SHOW])
    saved = save_picture(page, kind.upper())
    content = (tmp_path / "x").with_suffix(f".{kind}")
    saved.save_as(content)
    assert saved.suggested_filename == f"1f1b-4x8.{kind}"
    if kind == "svg":
        text = content.read_text()
        assert text.count("<rect") > 64
        assert all(f">{each}</text>" in text for each in ("makespan 33", "bubble 27.3%", "peak activations 4"))
        assert "localhost" not in text and "127.0.0.1" not in text, "a notebook has no address to share"
    else:
        start = {"png": b"\x89PNG", "gif": b"GIF89a"}[kind]
        assert content.read_bytes().startswith(start) and content.stat().st_size > 20_000


def test_every_control_of_explore_changes_the_timeline(notebook):
    page = notebook(["import ppedu as pp\ne = pp.explore('dualpipe')\ne"])
    widget, note = page.locator(".ppedu"), page.locator(".ppedu-note")
    for name, value in {
        "forward": "1.5", "backward": "2.5", "weight": "0.4", "latency": "0.3", "overlap": "0.2",
        "microbatches": "12", "memory": "6", "ranks": "6",
    }.items():  # fmt: skip
        wait = painted(page, widget)
        page.locator(f"label[data-name={name}] input").fill(value)
        wait()
    code = "s = pp.schedule('dualpipe', ranks=6, microbatches=12)\nt = pp.simulate(s, pp.Costs(forward=1.5, "
    code += "backward=2.5, weight=1, overlap=3.2, latency=0.3))\nt.show()"
    shown = page.get_by_role("group", name="the code for this timeline")
    assert shown.inner_text() == code
    assert "Rank 0 holds 7 activations, over the limit of 6." in note.inner_text()
    picture(page, "explore")
    page.locator("label[data-name=ranks] input").fill("5")
    page.get_by_text("dualpipe needs an even number of ranks; got 5").wait_for()
    assert shown.inner_text() == code, "the last valid setting stays"
    picture(page, "explore_impossible")
    page.get_by_role("button", name="4 ranks").click()
    page.get_by_text("The bubble (").wait_for()
    assert "ranks=4" in shown.inner_text() and fits(page)
    page.get_by_label("schedule", exact=True).select_option("interleaved")
    page.locator("label[data-name=chunks] input").fill("3")
    page.wait_for_function("() => document.querySelector('.ppedu-code pre').textContent.includes('chunks=3')")
    assert page.locator("label[data-name=overlap]").is_hidden()


COUNT_ANSWERS = """() => {
  const [parse] = [JSON.parse, (window.answers = 0)];
  JSON.parse = (text, ...rest) => {
    window.answers += text.includes?.('"answer": {"ahead": ') ? 1 : 0;
    return parse(text, ...rest);
  };
}"""


def test_the_next_values_of_a_slider_are_known_in_advance(notebook):
    page = notebook(["import os\nimport ppedu as pp\npp.explore('zb-h1', weight=0.3)", "os.getpid()"])
    process = int(run_all(page)[1]["outputs"][0]["data"]["text/plain"])
    widget, panel = page.locator(".ppedu"), page.locator(".ppedu-panel")
    slider = page.locator("label[data-name=weight] input")
    page.evaluate(COUNT_ANSWERS)
    slider.hover()
    page.wait_for_function("() => window.answers === 7")  # 0 to 0.7, without the value that is shown
    os.kill(process, signal.SIGSTOP)  # the kernel cannot answer now
    try:
        for key, value in [("ArrowRight", "0.4"), ("ArrowRight", "0.5"), ("ArrowLeft", "0.4"), ("ArrowLeft", "0.3")]:
            slider.press(key)
            page.locator("label[data-name=weight] output", has_text=value).wait_for()
            if value != "0.3":  # the start value, which is not requested in advance
                costs = pp.Costs(backward=2, weight=2 * float(value))
                summary = pp.simulate(pp.schedule("zb-h1", 4, 8), costs).summary()
                assert panel.get_attribute("aria-label") == summary
        answered = painted(page, widget)
    finally:
        os.kill(process, signal.SIGCONT)
    answered()
    summary = pp.simulate(pp.schedule("zb-h1", 4, 8), pp.Costs(backward=2, weight=0.6)).summary()
    page.wait_for_function("said => document.querySelector('.ppedu-panel').ariaLabel === said", arg=summary)


def test_a_level_is_solved_by_clicking_and_illegal_moves_are_refused(notebook):
    page = notebook(["import ppedu as pp\nboard = pp.puzzle('1f1b')\nboard"])
    note = page.locator(".ppedu-note")

    def place(action, said):
        page.get_by_role("button", name=f"place {action}", exact=True).click()
        page.wait_for_function(
            "said => document.querySelector('.ppedu-note').textContent.startsWith(said)", arg=said, timeout=5000
        )

    page.get_by_role("button", name="place 0F1", exact=True).focus()
    for key, action in (
        ("Down", "1F1"),
        ("Right", "1F2"),
        ("Up", "0F2"),
        ("Left", "0F1"),
        ("Left", "0F0"),
        ("Left", "0F0"),
    ):
        page.keyboard.press(f"Arrow{key}")
        assert page.evaluate("() => document.activeElement.dataset.place") == action
    place("0F0", "0F0 runs 0–1 on rank 0")
    place("2F0", "2F0 needs 1F0, which has not been placed yet (rank 1)")
    place("0F1", "0F1 runs")
    place("0F2", "0F2 runs")
    place("0F3", "With 0F3, rank 0 would hold 4 activations; the limit is 3")
    picture(page, "puzzle_refused")
    for act, said in (
        ("undo", "Undone: 0F2"),
        ("redo", "Redone: 0F2"),
        ("reset", "The board is empty"),
        ("hint", "0F0 can"),
    ):
        page.get_by_role("button", name=act, exact=True).click()
        page.wait_for_function("said => document.querySelector('.ppedu-note').textContent.startsWith(said)", arg=said)
    par = pp.schedule("1f1b", 3, 6)
    for rank, index in par.replay.steps[:-1]:
        place(str(par.orders[rank][index]), f"{par.orders[rank][index]} runs")
    page.keyboard.press("Control+z")
    page.wait_for_function("() => document.querySelector('.ppedu-note').textContent.startsWith('Undone: 1B5')")
    page.keyboard.press("Control+Shift+z")
    page.wait_for_function("() => document.querySelector('.ppedu-note').textContent.startsWith('Redone: 1B5')")
    place(str(par.orders[0][-1]), "24 slots: that is par")
    assert "a schedule like any other" in note.inner_text() and fits(page)
    picture(page, "puzzle_solved")
    assert "pp.check(s)  # []" in page.get_by_role("group", name="the code for this schedule").inner_text()
    page.get_by_role("button", name="reset", exact=True).click()
    first = page.get_by_role("button", name="place 0F0", exact=True)
    page.wait_for_function("() => !document.querySelector('[data-place=\"0F0\"]').disabled")
    first.focus()
    page.keyboard.press("m")
    page.wait_for_function("() => document.querySelector('.ppedu-note').textContent.startsWith('Placed as early')")
    page.keyboard.press("r")
    page.get_by_role("link", name="about 1f1b").wait_for(timeout=5000)
    assert "You have just built 1f1b" in note.inner_text()


def test_comparison_and_differences_show_their_numbers(notebook):
    page = notebook(
        [
            "import ppedu as pp\npp.compare('gpipe', '1f1b', 'zb-v')",
            "pp.differences(*map(pp.schedule, ('1f1b', 'gpipe'), (4, 4), (6, 6)))",
        ]
    )
    rows = page.locator(".ppedu tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [
        ["gpipe", "33", "27.3%", "8", "48"],
        ["1f1b", "33", "27.3%", "4", "48"],
        ["zb-v", "25.5", "5.9%", "4", "96"],
    ]
    names = page.locator(".ppedu-chart text").all_text_contents()
    assert {"gpipe", "1f1b", "zb-v"} <= set(names)
    assert page.get_by_text("differs").is_visible() and fits(page)
    picture(page, "compare")


LIVE = """%%torchrun -n 2
import time, torch.distributed as dist, ppedu as pp
from ppedu.run import TrainConfig, train_gpt
dist.init_process_group("gloo")
config = TrainConfig(steps=8, layers=2, width=16, heads=2, context=8)
seen = lambda result: (pp.show_live(result.losses, result.timeline, config.steps), time.sleep(0.2))
result = train_gpt(config, each=seen)
print(len(result.losses))"""


def test_a_point_of_a_frontier_shows_its_timeline(notebook):
    page = notebook(["import ppedu as pp\npp.search.frontier(2, 3, pp.Costs(2, 4), placement='v', time_limit=10)"])
    points = page.locator(".ppedu-chart circle")
    panel, note = page.locator(".ppedu-panel"), page.locator(".ppedu-note")
    assert "makespan 25, optimal" in note.inner_text() and "makespan 25" in panel.get_attribute("aria-label")
    published = page.get_by_role("button", name=re.compile("^1f1b"))
    published.click()
    expect(note).to_contain_text("1f1b: 24 in a memory of 2; the best in this memory takes 19")
    expect(panel).to_have_attribute("aria-label", re.compile("^1f1b.*makespan 24"))
    points.first.press("Enter")
    expect(note).to_contain_text("memory 1: makespan 25")
    picture(page, "frontier")
    assert fits(page)


def test_a_training_is_watched_while_it_runs(notebook):
    page = notebook(["%load_ext ppedu"])
    page.evaluate(
        """source => { const notebook = window.jupyterapp.shell.currentWidget;
        notebook.model.sharedModel.addCell({cell_type: 'code', source});
        notebook.content.activeCellIndex = notebook.content.widgets.length - 1;
        void window.jupyterapp.commands.execute('notebook:run-cell'); }""",
        LIVE,
    )
    page.locator(".ppedu progress").wait_for(timeout=60_000)
    seen = set()
    while page.get_by_text("step 8 of 8").count() == 0:
        seen.add(page.locator(".ppedu [role=status]").first.inner_text().split(",")[0])
        page.wait_for_timeout(50)
    assert len(seen) > 2, "the timeline was shown during training"
    page.get_by_text("[0] 8").wait_for()
    # It may be drawn again after the last step, so look for both at once.
    page.wait_for_function(
        """() => document.querySelectorAll('.ppedu').length === 1
        && document.querySelector('.ppedu-panel')?.getAttribute('aria-label').includes('measured')"""
    )
    picture(page, "live")


COUNT = "from ipywidgets.widgets.widget import _instances; len(_instances)"


def test_running_cells_again_and_moving_controls_leaves_no_nodes_behind(notebook):
    page = notebook([SHOW, "e = pp.explore()\ne", COUNT])
    session = page.context.new_cdp_session(page)

    def counted():
        session.send("HeapProfiler.collectGarbage")
        found = session.send("Memory.getDOMCounters")
        return found["nodes"], found["jsEventListeners"]

    def kernel():
        cell = run_all(page)[2]
        return cell["outputs"][0]["data"]["text/plain"]

    kernel()
    page.wait_for_timeout(500)
    nodes, listeners = counted()
    known = {kernel() for _ in range(2)}
    page.wait_for_timeout(500)
    again = counted()
    assert len(known) == 1, "the kernel's widgets"
    # JupyterLab adds a few of its own now and then; a widget has dozens.
    assert again[0] < nodes + 100 and again[1] < listeners + 30, "the page's nodes and listeners"

    explore = page.locator(".ppedu").nth(1)

    def move(times):
        for number in range(times):
            wait = painted(page, explore)
            page.locator("label[data-name=microbatches] input").fill(str(3 + number % 9))
            wait()

    move(10)
    used = page.evaluate("() => performance.memory.usedJSHeapSize")
    counts = [counted()]
    for _ in range(2):
        move(30)
        counts.append(counted())
    # JupyterLab once adds a hundred listeners of its own; a widget that keeps some adds them each time.
    grown = [[now - before for before, now in zip(*pair, strict=True)] for pair in pairwise(counts)]
    assert max(map(min, zip(*grown, strict=True))) < 30, "not one more for each move"
    assert page.evaluate("() => performance.memory.usedJSHeapSize") < used + 6e6


def test_a_figure_still_works_after_the_kernel_has_stopped(notebook):
    page = notebook([SHOW])
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.get_by_text(re.compile("No Kernel")).first.wait_for()
    assert page.locator(".ppedu").is_visible()
    page.get_by_role("button", name="step forward").click()
    assert page.locator(".ppedu-line").inner_text().startswith("At 0: rank 0 0F0")


def test_two_lanes_stay_when_a_timeline_is_displayed_again(notebook):
    kept = "if 'kept' not in globals():\n    kept = t.show(outline=t)\nkept"
    page = notebook([SHOW.replace("pp.simulate", "t = pp.simulate").replace(".show()", ""), kept])
    menu = page.get_by_label("show the second timeline as")
    menu.select_option("two lanes")
    page.get_by_label("critical path").check()
    picture(page, "lanes_lab")
    run_all(page)
    expect(menu).to_have_value("lanes")


def test_widgets_follow_the_dark_theme(notebook):
    page = notebook([SHOW, "pp.explore('zb-v')"])
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function(
        "() => Math.max(...document.querySelector('.ppedu canvas').getContext('2d').getImageData(3, 3, 1, 1).data"
        ".slice(0, 3)) < 60"
    )
    picture(page, "dark")
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")


LESSONS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
QUICK = "00_start_here.ipynb"  # with a diagram, ranks and controls; the tests above cover the other kinds of widgets

# Use every control of one widget and return their number. Each must change the picture or the text.
MOVE = """async place => {
  const root = document.querySelectorAll('.ppedu')[place];
  const all = selector => [...root.querySelectorAll(selector)];
  const shown = () => root.dataset.painted + root.textContent;
  const moved = async (name, act) => {
    const before = shown(), end = performance.now() + 20_000;
    act();
    while (shown() === before && performance.now() < end) await new Promise(done => setTimeout(done, 10));
    if (shown() === before) throw new Error(`${name} changes nothing`);
  };
  const turn = (input, value, event) => { input.value = value; input.dispatchEvent(new Event(event)); };
  let controls = 0;
  for (const name of ['zoom in', 'zoom out']) {
    await moved(name, () => all(`[aria-label="${name}"]`)[0].click());
    controls += 1;
  }
  for (const by of ['stage', 'microbatch', 'op'])
    await moved('colour', () => turn(all('[aria-label="color by"]')[0], by, 'change'));
  controls += 1;
  for (const slider of all('input[type=range]')) {
    const old = slider.value;
    const other = +old < +slider.max ? +old + +slider.step : +old - +slider.step;
    await moved(slider.ariaLabel, () => turn(slider, other, 'input'));
    await moved(slider.ariaLabel, () => turn(slider, old, 'input'));
    controls += 1;
  }
  for (const next of all('.ppedu-tray button').slice(0, 1)) {
    await moved('an action', () => next.click());
    controls += 1;
  }
  return controls;
}"""

# Timelines that are painted, and the controls that ask for predictions, give hints or show what fits.
DISPLAYED = """n => {
  const count = selector => document.querySelectorAll(`.jp-OutputArea-output ${selector}`).length;
  return count('.ppedu[data-painted]') + count('> .widget-vbox') === n;
}"""


@pytest.mark.parametrize(
    "lesson", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LESSONS]
)
def test_lesson_runs_in_jupyterlab(open_page, lesson):
    page = open_page(lesson)
    assert not page.evaluate("() => window.jupyterapp.shell.currentWidget.model.dirty"), "opening it changed it"
    cells = run_all(page)

    for cell in cells:
        assert any(output["output_type"] == "error" for output in cell["outputs"]) == cell["fails"], cell
    visible = [o for cell in cells if not cell["hidden"] for o in cell["outputs"]]
    bundles = [output.get("data", {}) for output in visible]
    widgets = [data for data in bundles if "application/vnd.jupyter.widget-view+json" in data]
    page.wait_for_function(DISPLAYED, arg=len(widgets))
    for place in range(page.locator(".ppedu").count()):
        assert page.evaluate(MOVE, place) >= 3
    pictures = page.locator(".jp-OutputArea-output img")
    assert pictures.count() == sum("image/png" in data for data in bundles if data not in widgets)
    assert widgets or pictures.count()
    shown = page.evaluate("() => [...document.querySelectorAll('.jp-OutputArea-output img')].map(i => i.naturalWidth)")
    assert all(shown)

    page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0; }")
    height = page.evaluate("() => document.querySelector('.jp-WindowedPanel-outer').scrollHeight")
    page.set_viewport_size({"width": 1280, "height": min(16_000, height + 150)})
    page.evaluate("() => { document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0; }")
    page.wait_for_timeout(1000)
    picture(page, Path(lesson).stem)


# Open a notebook as a reader who has not started a kernel, and does not trust it: its scripts do not run.
OPEN_UNTRUSTED = """async path => {
  const nothing = { autoStartDefault: false, shouldStart: false };
  const open = { path, factory: 'Notebook', kernelPreference: nothing };
  const notebook = await window.jupyterapp.commands.execute('docmanager:open', open);
  await notebook.revealed;
}"""

# The cells whose saved outputs cannot be seen, and how much of an output is cut off at the right.
SEEN = """() => {
  const { content, node, sessionContext } = window.jupyterapp.shell.currentWidget;
  const code = content.widgets.filter(cell => cell.model.type === 'code');
  const filled = code.filter(cell => cell.model.outputs.length && !cell.outputHidden);
  const outputs = [...node.querySelectorAll('.jp-OutputArea-output')];
  const shown = area => [...area.querySelectorAll('.jp-OutputArea-output')].every(
    each => each.innerText.trim() || each.querySelector('img, svg'));
  return {
    kernel: sessionContext.session?.kernel ?? null,
    trusted: code.filter(cell => cell.model.trusted).length,
    unseen: filled.filter(cell => !shown(cell.outputArea.node)).map(cell => cell.model.sharedModel.source),
    broken: outputs.map(each => each.innerText).filter(text => /model not found|loading widget/i.test(text)),
    cut: Math.max(...outputs.map(each => each.scrollWidth - each.clientWidth)),
    pictures: [...node.querySelectorAll('.jp-OutputArea-output img')].map(image => image.naturalWidth),
    formulas: node.querySelectorAll('.jp-MarkdownOutput mjx-container').length,
  };
}"""


@pytest.fixture(scope="module")
def untrusting(server, context):
    """A narrow page of JupyterLab. ipywidgets raises an error in each page that has a notebook without a kernel."""
    page = context.new_page()
    page.set_viewport_size({"width": 1024, "height": 900})
    page.goto(f"{server[0]}lab?reset")
    page.wait_for_function("() => window.jupyterapp?.shell.currentWidget")
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    yield page
    page.close()


@pytest.mark.parametrize(
    "lesson", [name if name.startswith("06") else pytest.param(name, marks=pytest.mark.slow) for name in LESSONS]
)
def test_a_saved_lesson_is_read_without_a_kernel_and_without_trust(untrusting, lesson):
    page = untrusting
    page.evaluate(OPEN_UNTRUSTED, lesson)
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget.content.widgets.length > 10")
    text = "\n\n".join(
        cell.source for cell in nbformat.read(ROOT / "notebooks" / lesson, 4).cells if cell.cell_type == "markdown"
    )
    formulas = sum(len(re.findall(r"(?<!\\)\$+", paragraph)) // 2 for paragraph in text.split("\n\n"))
    page.wait_for_timeout(1000)
    seen = page.evaluate(SEEN)
    picture(page, f"untrusted_{Path(lesson).stem[:2]}")
    page.evaluate("() => window.jupyterapp.shell.currentWidget.close()")
    pictures, shown = seen.pop("pictures"), seen.pop("formulas")
    assert shown == formulas
    assert seen == {"kernel": None, "trusted": 0, "unseen": [], "broken": [], "cut": 0}
    assert pictures and all(pictures)


def test_the_culprit_is_accused_by_a_click_or_with_the_keyboard(notebook):
    page = notebook(
        [
            "from ppedu.course.exercises.lesson_04 import lineup\nsuspects = lineup()\nsuspects",
            "from ppedu.notebook import check_answer\ncheck_answer('04.1', suspects.verdicts)",
        ]
    )
    assert "a verdict is missing on A, B, C, D, E" in page.locator(".jp-OutputArea-output").last.inner_text()

    def judged(name, words):
        page.wait_for_function(
            "([n, words]) => document.querySelectorAll('.ppedu-case')[n].textContent.includes(words)",
            arg=["ABCDE".index(name), words],
        )

    menu = page.get_by_label("missing in A")
    menu.focus()
    for _ in range(14):  # each answer comes back, and must not move the menu
        page.keyboard.press("ArrowDown")
    assert menu.input_value() == "0B1"
    judged("A", "0B1 is missing on rank 0")
    panels = page.locator(".ppedu-panel")
    box = panels.nth(1).bounding_box()
    scale = (box["width"] - 62 - 66) / 14  # the axis has 14 steps
    panels.nth(1).click(position={"x": 62 + 7.5 * scale, "y": 20})
    judged("B", "1B0 on rank 0 is wrong")
    page.mouse.move(2, 2)  # pointing at a box would move the keyboard's focus
    page.get_by_role("button", name="C runs as drawn").press("Enter")
    judged("C", "runs as drawn")
    for name, right in (("D", 1), ("E", 4)):  # arrows to 0B0 of D, and to 0B1 of E, which is innocent
        panels.nth("ABCDE".index(name)).focus()
        for _ in range(right + 1):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
    judged("D", "0B0 on rank 0 is wrong")
    judged("E", "0B1 on rank 0 is wrong")
    panels.nth(4).hover(position={"x": 62 + 8.5 * scale, "y": 34})
    tip, panel = page.locator(".ppedu-tip:visible").bounding_box(), panels.nth(4).bounding_box()
    assert tip["y"] + tip["height"] <= panel["y"] + 34, "1B2, which 0B2 requires, stays in view"
    assert fits(page)
    picture(page, "lineup")
    page.evaluate(
        """() => {
          window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1;
          void window.jupyterapp.commands.execute('notebook:run-cell');
        }"""
    )
    page.get_by_text("4 of your 5 verdicts are right. In E rank 0 runs 0B1 in slot 7").wait_for()
