"""A JupyterLab server, and actions on its pages."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells are on the page, also those out of sight
}


@contextlib.contextmanager
def jupyter_lab(home: Path) -> Iterator[tuple[str, Path]]:
    """Run a JupyterLab server with settings in `home`; yield its address and the folder of its notebooks."""
    folder = home / "notebooks"
    folder.mkdir()
    for name, settings in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
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
    log = home / "log"
    with log.open("wb") as out:  # a full pipe would block the server
        server = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0", "--allow-root",
                "--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={folder}",
            ],
            env=os.environ | {name: str(home / where) for name, where in own.items()},
            stderr=out, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"http://(localhost|127\.0\.0\.1):\d+/", log.read_text())):
            assert time.monotonic() < end and server.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found[0], folder
    finally:
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


def run_all(page, seconds=180):
    """Run every cell of the notebook on the page, and return the state of the cells."""
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    page.evaluate("() => { void window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    deadline = time.monotonic() + seconds
    while (state := page.evaluate(STATE))["waiting"] or state["kernel"] != "idle":
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state["cells"]


def save_picture(page, form):
    """Save the first widget's picture in a form of its menu, such as "PNG", and return the download."""
    page.get_by_role("button", name="save a picture").click()
    with page.expect_download() as saved:
        page.get_by_role("menuitem", name=form).click()
    return saved.value


def picture(page, name):
    """Save a screenshot to look at, if there is a folder `artifacts`: drawing it takes up to seconds."""
    if (ROOT / "artifacts").is_dir():
        page.screenshot(path=ROOT / "artifacts" / f"{name}.png")
