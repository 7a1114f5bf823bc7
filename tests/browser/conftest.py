"""JupyterLab in a real browser."""

import contextlib
import os
import re

import nbformat
import pytest
from opened import CHROMIUM, QUIET, jupyter_lab, run_all
from playwright.sync_api import sync_playwright

from ppedu.cli.lessons import copy_lessons


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
        copy_lessons(folder)
        yield address, folder


@pytest.fixture(scope="session")
def context(chromium):
    """One context for all pages of JupyterLab, so that they share a cache."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield context
    context.close()


@contextlib.contextmanager
def lab_page(context, address, name):
    """Open a notebook of the server's folder in JupyterLab, and yield the page."""
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(f"{address}lab/tree/{name}?reset")
    page.get_by_text(re.compile(r"\| Idle")).wait_for(timeout=60_000)
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    yield page
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()
    # JupyterLab may remove its splash screen twice if the machine is busy.
    ours = [error.stack for error in errors if "removeChild" not in error.message or "jlab_core" not in error.stack]
    assert not ours


@pytest.fixture
def open_page(server, context):
    """`open_page(name)` opens a notebook of the server's folder in JupyterLab and returns the page."""
    with contextlib.ExitStack() as pages:
        yield lambda name: pages.enter_context(lab_page(context, server[0], name))


FILL = """async sources => {
  const { sessionContext, model } = window.jupyterapp.shell.currentWidget, shared = model.sharedModel;
  if (!sessionContext.session?.kernel) await sessionContext.changeKernel({ name: 'python3' });
  const before = shared.cells.length;
  shared.insertCells(before, sources.map(source => ({ cell_type: 'code', metadata: {}, source })));
  shared.deleteCellRange(0, before);
}"""


@pytest.fixture(scope="session")
def shared_page(server, context):
    """A notebook in JupyterLab, one for all tests, since JupyterLab takes long to start."""
    address, folder = server
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(metadata={"kernelspec": kernel}), folder / "x.ipynb")
    with lab_page(context, address, "x.ipynb") as page:
        yield page


@pytest.fixture
def notebook(shared_page):
    """`notebook(cells)` replaces the cells of the shared page's notebook, runs them all, and returns the page."""

    def fill(cells):
        shared_page.evaluate(FILL, cells)
        run_all(shared_page)
        return shared_page

    return fill
