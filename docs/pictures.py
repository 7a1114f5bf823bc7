"""Draw the pictures of the README, the guide and the lessons: `make pictures`. Needs Chromium.

A lesson's picture is the output of its cell with the tag `picture`. A picture that cannot be read in a small size has a
simpler one in its place: a function in SIMPLER.
"""

import base64
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import compare
import nbformat
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from playwright.sync_api import Page, sync_playwright

import ppedu as pp
from ppedu.view import look

HERE = Path(__file__).parent
SMALL = 480, 270  # pixels; shown at half of that
WIDE, HIGH = 860, 664  # pixels of the animation
FRAME = 100  # milliseconds
COLORS = 160

# The mouse pointer, which screenshots leave out.
POINTER = """() => {
  const pointer = document.createElement('div');
  pointer.innerHTML = '<svg width="18" height="24"><path d="M1 1v18l4.5-4 3 7 3-1.3-3-6.7h6z" stroke="#fff" /></svg>';
  pointer.style = 'position: fixed; left: -30px; z-index: 99; pointer-events: none';
  document.body.append(pointer);
  addEventListener('pointermove', event => {
    pointer.style.left = `${event.clientX}px`;
    pointer.style.top = `${event.clientY}px`;
  }, true);
}"""


def timelines() -> None:
    figure, panels = pyplot.subplots(2, 1, figsize=(11, 6.2), layout="constrained", sharex=True)
    for name, ax in zip(("gpipe", "1f1b"), panels, strict=True):
        pp.simulate(pp.schedule(name, ranks=4, microbatches=8)).plot(ax, memory=8)
    figure.savefig(HERE / "timelines.png", dpi=140)


def published() -> None:
    """Every published number against ours, and the errors of each source."""
    cells = [cell for source in compare.SOURCES for cell in source()]
    sources = [*dict.fromkeys(cell.source for cell in cells)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained", width_ratios=(4, 6))
    left.axline((1, 1), (10, 10), color="#bbbbbb", linewidth=1, zorder=0)
    right.axvline(0, color="#bbbbbb", linewidth=1, zorder=0)
    for place, source in enumerate(sources):
        mine = [cell for cell in cells if cell.source == source]
        color = pyplot.get_cmap("tab20")(place)
        left.plot([cell.published for cell in mine], [cell.ours for cell in mine], "o", color=color, ms=4, alpha=0.7)
        right.plot([100 * cell.error for cell in mine], [place] * len(mine), "o", color=color, ms=5, alpha=0.5)
    left.set(xscale="log", yscale="log", xlabel="published", ylabel="ours")
    right.set(xlabel="error, %", yticks=range(len(sources)), yticklabels=sources, xlim=(-25, 25))
    right.invert_yaxis()
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "published.png", dpi=120)


def lessons() -> None:
    for lesson in sorted(HERE.parent.glob("notebooks/*.ipynb")):
        number = lesson.stem[:2]
        if number in SIMPLER:
            with pyplot.rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
                figure = pyplot.figure(figsize=[side / 100 for side in SMALL], dpi=100, layout="constrained")
                SIMPLER[number](figure)
                figure.savefig(HERE / "lessons" / f"{number}.png")
            continue
        for cell in nbformat.read(lesson, as_version=4).cells:
            if "picture" in cell.metadata.get("tags", []):
                [shown] = (output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
                small = ImageOps.pad(
                    Image.open(io.BytesIO(base64.b64decode(shown))).convert("RGB"), SMALL, color="white"
                )
                small.quantize(64).save(HERE / "lessons" / f"{number}.png", optimize=True)


def split_backward(figure: Figure) -> None:
    """Lesson 10: the same work, with the backward whole, and with W in what was idle time."""
    above, below = figure.subplots(2, 1, sharex=True)
    for ax, name, title in ((above, "1f1b", "backward whole"), (below, "zb-h1", "backward split in two")):
        for rank, row in enumerate(pp.simulate(pp.schedule(name, ranks=3, microbatches=5)).rows):
            for action, start, end in row:
                ax.barh(rank, end - start, left=start, height=0.8, color=look.COLORS[action.op], edgecolor="white")
        ax.set_title(title, loc="left", fontsize=15)
        ax.invert_yaxis()
        ax.axis("off")


def two_streams(figure: Figure) -> None:
    """Lesson 12: microbatches that come from above, and those from below; where they meet, they share a box."""
    ax = figure.subplots()
    for rank, row in enumerate(pp.simulate(pp.schedule("dualpipe", ranks=4, microbatches=8)).rows):
        for action, start, end in row:
            height = 0.8 / len(action.singles)
            for place, part in enumerate(action.singles):
                color = "#3b76b8" if part.microbatch < 4 else "#7d4fae"
                ax.barh(rank - 0.4 + (place + 0.5) * height, end - start, height, start, color=color, edgecolor="white")
    ax.set_title("two streams meet", loc="left", fontsize=15)
    ax.invert_yaxis()
    ax.axis("off")


def slices_of_a_sequence(figure: Figure) -> None:
    """Lesson 13: two long sequences, whole, and in slices."""
    above, below = figure.subplots(2, 1, sharex=True)
    for ax, slices, title in ((above, 1, "whole sequences"), (below, 4, "in slices")):
        for rank, row in enumerate(pp.simulate(pp.schedule("seq1f1b", ranks=4, microbatches=2, slices=slices)).rows):
            for action, start, end in row:
                ax.barh(rank, end - start, left=start, height=0.8, color=look.COLORS[action.op], edgecolor="white")
        ax.set_title(title, loc="left", fontsize=15)
        ax.invert_yaxis()
        ax.axis("off")


def bubble_against_memory(figure: Figure) -> None:
    """Lesson 14: schedules by memory and bubble, and a place that is still free."""
    ax = figure.subplots()
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "v-min"):
        timeline = pp.simulate(pp.schedule(name, ranks=4, microbatches=8))
        at = float(max(timeline.peak_activations)), 100 * timeline.bubble
        ax.plot(*at, "o", color="#3b76b8", markersize=9)
        ax.annotate(name, at, xytext=(8, 3), textcoords="offset points")
    ax.plot(6, 3, "*", color="#c2701c", markersize=20)
    ax.annotate("yours?", (6, 3), xytext=(12, -4), textcoords="offset points", color="#c2701c", weight="bold")
    ax.set(xlabel="memory", ylabel="bubble, %", xlim=(0.8, 9.6), ylim=(0, 34), xticks=[2, 4, 6, 8], yticks=[0, 15, 30])


SIMPLER = {"10": split_backward, "12": two_streams, "13": slices_of_a_sequence, "14": bubble_against_memory}


def animation() -> None:
    """Record the widget of two schedules, in a browser whose clock moves from frame to frame."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        pp.compare("gpipe", "1f1b", ranks=4, microbatches=8).save(file)
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDE, "height": HIGH + 100}, color_scheme="light")
        page.clock.install(time=0)
        page.goto(file.as_uri())
        page.clock.run_for(1000)
        page.wait_for_selector(".ppedu[data-painted]")
        page.evaluate(POINTER)
        frames = [Image.open(io.BytesIO(each)).convert("RGB") for each in _film(page)]
        browser.close()
    seen = Image.new("RGB", (WIDE, 3 * HIGH))
    for place, frame in enumerate((frames[0], frames[len(frames) // 3], frames[-1])):
        seen.paste(frame, (0, place * HIGH))
    palette = seen.quantize(COLORS)
    colors = (palette.getpalette()[at : at + 3] for at in range(0, 3 * COLORS, 3))
    white = ([255, 255, 255] if min(color) > 245 else color for color in colors)  # Pillow takes any that is near
    palette.putpalette([part for color in white for part in color])
    drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    drawn[0].save(HERE / "widget.gif", save_all=True, append_images=drawn[1:], duration=FRAME, loop=0, optimize=True)


def _film(page: Page) -> Iterator[bytes]:
    """Yield a screenshot for each FRAME: play, look at a gap, follow a microbatch."""
    box = page.locator(".ppedu").bounding_box()
    clip = {"x": 0, "y": box["y"] - 8, "width": WIDE, "height": HIGH}

    def wait(milliseconds: int) -> Iterator[bytes]:
        for _ in range(milliseconds // FRAME):
            page.clock.run_for(FRAME)
            yield page.screenshot(clip=clip)

    def move(selector: str, across: float, down: float) -> Iterator[bytes]:
        """Move the pointer to a place in an element, given as parts of its width and height."""
        nonlocal at
        goal = page.locator(selector).first.bounding_box()
        end = goal["x"] + across * goal["width"], goal["y"] + down * goal["height"]
        for step in range(1, 7):
            page.mouse.move(*(old + (new - old) * step / 6 for old, new in zip(at, end, strict=True)))
            yield from wait(FRAME)
        at = end

    def click() -> None:
        page.mouse.down()
        page.mouse.up()

    at = (WIDE / 2, HIGH + 40)
    yield from wait(600)
    yield from move("[aria-label=play]", 0.5, 0.5)
    click()
    while page.locator("[aria-label=pause]").count():
        yield from wait(FRAME)
    yield from wait(800)
    yield from move("canvas", 0.4, 0.16)  # a gap
    yield from wait(2500)
    yield from move("canvas", 0.085, 0.16)  # microbatch 0
    click()
    yield from wait(4000)


if __name__ == "__main__":
    timelines()
    published()
    lessons()
    animation()
