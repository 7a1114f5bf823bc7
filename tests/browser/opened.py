"""What is done on an open page of JupyterLab."""

import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

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
    """Run every cell of the notebook on the page; what they then hold."""
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    page.evaluate("() => { void window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    deadline = time.monotonic() + seconds
    while (state := page.evaluate(STATE))["waiting"] or state["kernel"] != "idle":
        assert time.monotonic() < deadline, state
        time.sleep(0.3)
    return state["cells"]


def picture(page, name):
    """Keep what is to be looked at."""
    folder = ROOT / "artifacts"
    folder.mkdir(exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")
