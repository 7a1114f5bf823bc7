"""How fast timelines are shown and moved, in Chromium with software rendering: `make bench`.

Beside it, the same picture of the same timeline as matplotlib's SVG, opened in the same browser; and beside what a
slider takes, a widget that does nothing but send a number to the kernel and back.
"""

import statistics
import tempfile
import time
from pathlib import Path

import nbformat
from opened import CHROMIUM, QUIET, jupyter_lab, run_all
from playwright.sync_api import sync_playwright

import ppedu as pp
from ppedu.view.html import page as html_page
from ppedu.view.plot import picture

ROUNDS = 40

PAN = """async () => {
  const panel = document.querySelector('.ppedu-panel'), root = document.querySelector('.ppedu');
  const place = panel.getBoundingClientRect(), frames = [];
  const move = (kind, x, buttons) => panel.dispatchEvent(new PointerEvent(kind,
    {clientX: place.left + x, clientY: place.top + 80, buttons, pointerId: 1, bubbles: true}));
  panel.setPointerCapture = () => {};
  document.querySelector('[aria-label="zoom in"]').click();
  await new Promise(requestAnimationFrame);
  move('pointerdown', 900, 1);
  for (let x = 880; x > 300; x -= 10) {
    const before = root.dataset.painted, begun = performance.now();
    move('pointermove', x, 1);
    while (root.dataset.painted === before) await new Promise(done => requestAnimationFrame(() => done()));
    frames.push(performance.now() - begun);
  }
  return frames;
}"""

SLIDE = """async rounds => {
  const root = document.querySelector('.ppedu'), input = root.querySelector('label[data-name=latency] input');
  input.dispatchEvent(new PointerEvent('pointerenter'));
  await new Promise(done => setTimeout(done, 1000));
  const times = [];
  for (let k = 0; k < rounds; k++) {
    let before = root.dataset.painted;
    const begun = performance.now(), painted = [];
    input.stepUp(k % 40 < 20 ? 1 : -1);
    input.dispatchEvent(new Event('input'));
    while (performance.now() < begun + 200) {
      if (root.dataset.painted !== before) painted.push(performance.now() - begun);
      before = root.dataset.painted;
      await new Promise(done => setTimeout(done, 0));
    }
    times.push([painted[0], painted[painted.length - 1]]);
  }
  return times;
}"""

ECHO = '''
import anywidget, traitlets

class Echo(anywidget.AnyWidget):
    _esm = """export default { render({ model }) {
      window.echo = number => new Promise(done => {
        const back = () => { model.off("change:back", back); done(); };
        model.on("change:back", back);
        model.set("there", number);
        model.save_changes();
      });
    }}"""
    there, back = traitlets.Int().tag(sync=True), traitlets.Int().tag(sync=True)

    @traitlets.observe("there")
    def _answer(self, change):
        self.back = change.new

Echo()'''

SEND = """async rounds => {
  const times = [];
  for (let k = 1; k <= rounds; k++) {
    const begun = performance.now();
    await window.echo(k);
    times.push(performance.now() - begun);
    await new Promise(done => setTimeout(done, 60));
  }
  return times;
}"""


def main() -> None:
    large = pp.simulate(pp.schedule("1f1b", 64, 256))
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        begun = time.perf_counter()
        text = html_page(large.show())
        made = time.perf_counter() - begun
        (folder / "ours.html").write_text(text, encoding="utf-8")
        begun = time.perf_counter()
        (folder / "peer.svg").write_bytes(picture(large.show().stack, "svg"))
        peer_made = time.perf_counter() - begun
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        begun = time.perf_counter()
        opened.goto((folder / "ours.html").as_uri())
        opened.wait_for_function("() => document.querySelector('.ppedu')?.dataset.painted")
        shown = time.perf_counter() - begun
        frames = opened.evaluate(PAN)
        begun = time.perf_counter()
        opened.goto((folder / "peer.svg").as_uri())
        opened.screenshot()
        peer_shown = time.perf_counter() - begun
        print("64 ranks, 256 microbatches, 32,768 actions; matplotlib's SVG in brackets, and the ratio")
        print(f"  a page is made in {made:.2f} s ({peer_made:.2f} s, {made / peer_made:.2f})")
        print(f"  and shown in {shown:.2f} s ({peer_shown:.2f} s, {shown / peer_shown:.2f})")
        print(f"  a frame of moving it takes {statistics.median(frames):.0f} ms (the longest {max(frames):.0f} ms)")
        moved, answered, echoed = slider(browser, folder)
        print(
            f"8 ranks, 32 microbatches, from slider to picture in JupyterLab: {moved:.0f} ms, medians of {ROUNDS} steps"
        )
        print(f"  and to the picture that the kernel makes when asked: {answered:.0f} ms")
        print(f"  (an empty widget's way to the kernel and back: {echoed:.0f} ms, ratio {answered / echoed:.1f})")
        browser.close()


def slider(browser, folder: Path) -> tuple[float, ...]:
    """Milliseconds from a slider's step to the picture; to the kernel's answer; for the way there and back alone."""
    with jupyter_lab(folder) as (address, root):
        cells = map(nbformat.v4.new_code_cell, ("import ppedu as pp\npp.explore(ranks=8, microbatches=32)", ECHO))
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        made = nbformat.v4.new_notebook(cells=[*cells], metadata={"kernelspec": kernel})
        nbformat.write(made, root / "x.ipynb")
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.goto(f"{address}lab/tree/x.ipynb?reset")
        opened.get_by_text("| Idle").wait_for(timeout=60_000)
        run_all(opened)
        opened.locator(".ppedu[data-painted]").wait_for()
        opened.wait_for_timeout(2000)
        times = [*zip(*opened.evaluate(SLIDE, ROUNDS), strict=True), opened.evaluate(SEND, ROUNDS)]
        return tuple(map(statistics.median, times))


if __name__ == "__main__":
    main()
