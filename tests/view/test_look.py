"""The color of the critical path: on light and dark pages, and for readers who see fewer hues."""

import math

import pytest

from ppedu.view.look import COLORS, MARK, MEMORY, PATH
from ppedu.view.script import style

# Red, green and blue as readers without one kind of cone see them (Machado et al. 2009, doi.org/10.1109/TVCG.2009.113).
VISION = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
LIGHT, DARK, FOCUS = "#ffffff", "#121212", "#3b76b8"


def linear(color):
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(color):
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


def lab(color, vision):
    """Return the CIELAB coordinates of a color as a reader with this vision sees it."""
    seen = [min(1, max(0, sum(map(math.prod, zip(row, linear(color), strict=True))))) for row in vision]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    ratios = [
        sum(map(math.prod, zip(row, seen, strict=True))) / white
        for row, white in zip(rows, (0.9505, 1, 1.089), strict=True)
    ]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("page", [LIGHT, DARK])
def test_the_critical_path_can_be_seen_on_light_and_dark_pages(page):
    dark, light = sorted((luminance(PATH), luminance(page)))
    assert (light + 0.05) / (dark + 0.05) >= 3, "as WCAG 2 requires of graphics"


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("other", [*COLORS.values(), MEMORY, MARK, FOCUS, LIGHT, DARK])
def test_the_critical_path_is_told_apart_from_every_other_colour(other, vision):
    assert math.dist(lab(PATH, VISION[vision]), lab(other, VISION[vision])) > 30  # 2 is just noticeable


def test_the_legend_of_the_widgets_has_the_colour_of_the_critical_path():
    assert f".ppedu-path {{ border: 2px solid {PATH}; }}" in style("widgets")
