"""JupyterLab in a real browser."""

import os
import re
import shutil

import nbformat
import pytest
from opened import CHROMIUM, QUIET, ROOT, jupyter_lab, run_all
from playwright.sync_api import sync_playwright


@pytest.fixture(scope="session")
def chromium():
    if not CHROMIUM:
        if os.environ.get("CI"):
            pytest.fail("no chromium; .ci/run installs it")
        pytest.skip("no chromium here; install it to run the browser tests")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The address and the folder of a JupyterLab server on copies of the lessons."""
    with jupyter_lab(tmp_path_factory.mktemp("lab")) as (address, folder):
        shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns("*.json", ".*"), dirs_exist_ok=True)
        yield address, folder


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
    """`notebook(cells)` opens a notebook with these cells, runs them all, and returns the page."""
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
