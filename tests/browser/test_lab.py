"""The lesson as a learner opens it: JupyterLab in a real browser, every cell run, nothing wrong on the page."""

from pathlib import Path

import pytest
from opened import ROOT, picture, run_all

LESSONS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
FIRST = ("00", "04", "05")  # these three have one of everything; nbval runs the others, too


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
