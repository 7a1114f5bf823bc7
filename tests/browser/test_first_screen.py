"""Each page opens with a picture: it is visible at 1280 × 900 without scrolling, also without a kernel."""

import nbformat
import pytest
from nbconvert import HTMLExporter
from opened import ROOT

PAGES = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [path for path in PAGES if path.stem[:2] == "00" or "*New here?*" in path.read_text(encoding="utf-8")]
SEEN = 150  # pixels of the picture within the first screen


@pytest.fixture(scope="module")
def blank(chromium):
    page = chromium.new_page(viewport={"width": 1280, "height": 900}, offline=True)
    yield page
    page.close()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_first_screen_shows_a_picture(blank, path):
    opening = nbformat.read(path, as_version=4)
    opening.cells = opening.cells[:4]
    html, _ = HTMLExporter().from_notebook_node(opening)
    blank.set_content(html, wait_until="domcontentloaded")
    picture = blank.locator("img, svg.ppedu").first
    picture.wait_for()
    assert picture.bounding_box()["y"] < 900 - SEEN
    assert blank.evaluate("() => document.documentElement.scrollWidth") <= 1280
