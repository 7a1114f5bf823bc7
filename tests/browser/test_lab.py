"""Lessons as a learner opens them: in JupyterLab in a real browser, with every cell run."""

from pathlib import Path

import pytest
from opened import ROOT, picture, run_all

LESSONS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
FIRST = (
    "00",
    "05",
)  # with every kind of widget but the puzzle, which test_widgets covers


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
    await moved('colour', () => turn(all('[aria-label="colour by"]')[0], by, 'change'));
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


@pytest.mark.parametrize(
    "lesson", [name if name.startswith(FIRST) else pytest.param(name, marks=pytest.mark.slow) for name in LESSONS]
)
def test_lesson_runs_in_jupyterlab(open_page, lesson):
    page = open_page(lesson)
    cells = run_all(page)

    for cell in cells:
        assert any(output["output_type"] == "error" for output in cell["outputs"]) == cell["fails"], cell
    visible = [o for cell in cells if not cell["hidden"] for o in cell["outputs"]]
    bundles = [output.get("data", {}) for output in visible]
    widgets = [data for data in bundles if "application/vnd.jupyter.widget-view+json" in data]
    page.wait_for_function("n => document.querySelectorAll('.ppedu[data-painted]').length === n", arg=len(widgets))
    for place in range(len(widgets)):
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
