"""JupyterLab in a real browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import nbformat
import pytest
from opened import ROOT, run_all
from playwright.sync_api import sync_playwright

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


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A JupyterLab server on copies of the lessons, with settings of its own; its address, and its folder."""
    tmp_path = tmp_path_factory.mktemp("lab")
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
    yield address, folder
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(20)


@pytest.fixture
def open_page(server, chromium):
    """`open_page(name)` opens a notebook of the server's folder in JupyterLab and returns the page."""
    address, _ = server
    pages = []

    def open_(name):
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        errors = []
        page.on("pageerror", lambda error: errors.append(error))
        pages.append((page, errors))
        page.goto(f"{address}lab/tree/{name}?reset")
        page.get_by_text(re.compile(r"\| Idle")).wait_for(timeout=60_000)
        page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
        return page

    yield open_
    for page, errors in pages:
        page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        page.close()
        assert not errors


@pytest.fixture
def notebook(server, open_page):
    """`notebook(cells)` opens a notebook of these cells, runs all, and returns the page."""
    _, folder = server

    def open_(cells):
        made = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        nbformat.write(made, folder / "x.ipynb")
        page = open_page("x.ipynb")
        run_all(page)
        return page

    return open_
