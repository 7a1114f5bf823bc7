"""The lesson as a learner opens it: JupyterLab in a real browser, every cell run, nothing wrong on the page."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is on the page, seen or not
}


@pytest.fixture(scope="session")
def chromium():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium; .ci/run installs it")
        pytest.skip("no chromium here; install it to run the browser tests")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab server on copies of the lessons, with settings of its own; its address."""
    folder = tmp_path / "lessons"
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns("*.json", ".*"))
    for name, settings in SETTINGS.items():
        file = tmp_path / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    own = {
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
    }
    server = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0", "--allow-root", "--IdentityProvider.token=",
            "--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={folder}",
        ],
        env=os.environ | {name: str(tmp_path / where) for name, where in own.items()},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    address = None
    for line in server.stderr:
        if match := re.search(r"http://(localhost|127\.0\.0\.1):\d+/", line):
            address = match[0]
            break
    assert address, "the server did not start"
    yield address
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(20)


STATE = """() => {
  const notebook = window.jupyterapp.shell.currentWidget;
  const cells = notebook.content.widgets.filter(cell => cell.model.type === 'code' && cell.model.sharedModel.source);
  return {
    kernel: notebook.sessionContext.session?.kernel?.status,
    waiting: cells.filter(cell => !cell.model.executionCount).length,
    cells: cells.map(cell => ({
      hidden: cell.outputHidden,
      outputs: cell.model.sharedModel.getOutputs(),
      fails: (cell.model.getMetadata('tags') ?? []).includes('raises-exception'),
    })),
  };
}"""


@pytest.mark.parametrize("lesson", sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")))
def test_lesson_runs_in_jupyterlab(lab, chromium, lesson):
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{lab}lab/tree/{lesson}?reset")
    page.get_by_text(re.compile(r"\| Idle")).wait_for(timeout=60_000)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    page.evaluate("() => { void window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    deadline = time.monotonic() + 180
    while (state := page.evaluate(STATE))["waiting"] or state["kernel"] != "idle":
        assert time.monotonic() < deadline, state
        time.sleep(0.5)

    for cell in state["cells"]:
        assert any(output["output_type"] == "error" for output in cell["outputs"]) == cell["fails"], cell
    visible = [o for cell in state["cells"] if not cell["hidden"] for o in cell["outputs"]]
    pictures = page.locator(".jp-OutputArea-output img")
    assert pictures.count() == sum("image/png" in output.get("data", {}) for output in visible) > 0
    shown = page.evaluate("() => [...document.querySelectorAll('.jp-OutputArea-output img')].map(i => i.naturalWidth)")
    assert all(shown)

    artifacts = ROOT / "artifacts"
    artifacts.mkdir(exist_ok=True)
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0; }")
    height = page.evaluate("() => document.querySelector('.jp-WindowedPanel-outer').scrollHeight")
    page.set_viewport_size({"width": 1280, "height": min(16_000, height + 150)})
    page.evaluate("() => { document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0; }")
    page.wait_for_timeout(1000)
    page.screenshot(path=artifacts / f"{Path(lesson).stem}.png")
    page.close()
