"""The lessons as pages without a kernel, as nbconvert and GitHub show them: the first screen, and the dark theme."""

import base64
import io

import nbformat
import pytest
from nbconvert import HTMLExporter
from opened import ROOT
from PIL import Image

LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: path.name)

FIRST = """() => {
  for (const each of document.querySelectorAll('.jp-OutputArea-output img, .jp-OutputArea-output svg')) {
    const { top, bottom, width } = each.getBoundingClientRect();
    if (width > 100) return [top, bottom];
  }
  return null;
}"""


@pytest.fixture(scope="module")
def page(chromium):
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.route("http*://**", lambda route: route.abort())
    yield page
    page.close()


def show(page, lesson):
    html, _ = HTMLExporter(template_name="lab").from_filename(str(lesson))
    page.set_content(html, wait_until="domcontentloaded")


SOME = "00", "10"


@pytest.mark.parametrize(
    "lesson",
    [pytest.param(path, marks=[] if path.stem[:2] in SOME else pytest.mark.slow, id=path.stem[:2]) for path in LESSONS],
)
def test_the_first_screen_of_a_lesson_has_a_picture(page, lesson):
    show(page, lesson)
    assert "model not found" not in page.locator("body").inner_text().lower()
    top, bottom = page.evaluate(FIRST)
    assert min(bottom, 900) - top >= min(100, bottom - top), f"it begins at {top:.0f}"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem[:2])
def test_pictures_of_a_lesson_have_no_background(lesson):
    outputs = [out for cell in nbformat.read(lesson, 4).cells for out in cell.get("outputs", [])]
    pictures = [out["data"]["image/png"] for out in outputs if "image/png" in out.get("data", {})]
    corners = [Image.open(io.BytesIO(base64.b64decode(each))).convert("RGBA").getpixel((1, 1))[3] for each in pictures]
    assert max(corners) == 0
    assert not [out for out in outputs if "needs_background" in out.get("metadata", {})]
