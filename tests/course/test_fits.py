"""`what_fits`: the numbers of its bars, its picture, and its controls in a kernel."""

import base64

import pytest

from ppedu.core import SettingError
from ppedu.course.fits import FITS, OVER
from ppedu.course.project import GB
from ppedu.notebook import heron, what_fits
from ppedu.view.theme import GREY


def test_a_model_that_fits_is_told_apart_from_one_over_the_limit():
    shown = what_fits(7, gpus=2)
    assert shown.rows() == [("the whole model", 112), ("1/2 of the model", 56)]
    assert [shown.verdict(amount) for _, amount in shown.rows()] == ["112 GB · over the limit", "56 GB · fits"]
    assert [shown.html().count(f"background:{color}") for color in (FITS, OVER)] == [1, 1]


def test_an_equal_share_is_the_mean_state_of_the_running_example():
    [_, (_, share)] = what_fits(heron.weights / GB, heron.gpus(8) // heron.replicas).rows()
    assert share == pytest.approx(sum(heron.stage_state(stage, 8) for stage in range(8)) / 8 / GB)


def test_a_gpu_that_is_full_to_the_last_byte_fits():
    assert what_fits(5).verdict(80).endswith("fits")


def test_it_is_a_picture_without_a_kernel_and_text_in_a_terminal():
    data, _ = what_fits()._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"].startswith("7 billion weights at 16 bytes on 1 GPU of 80 GB:\n  each GPU holds")
    assert len(data) == 2


def test_the_bars_follow_the_controls():
    shown = what_fits(54, gpus=8)
    billions, gpus, bytes_each, bars, _ = shown.controls().children
    assert "108 GB" in bars.value
    gpus.value = 64
    assert "1/64 of the model</b>" in bars.value and "13.5 GB · fits" in bars.value
    bytes_each.value = 2
    billions.value = 7
    assert "14 GB · fits" in bars.value and "0.219 GB · fits" in bars.value


def test_a_kernel_shows_controls_and_keeps_the_picture(kernel):
    cell = kernel("from ppedu.notebook import what_fits\nwhat_fits(13, gpus=3, bytes_each=12)")
    assert not cell.error
    [shown] = cell.shown
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(shown)


def test_no_page_puts_a_white_block_behind_a_picture_unless_the_learner_has_set_its_colors(kernel):
    kernel("from matplotlib import pyplot as plt")
    drawn = "plt.rcParams['xtick.color'] = {!r}\nplt.plot([1, 2])\nplt.show()"
    [metadata], [own] = (kernel(drawn.format(color)).metadata for color in (GREY, "black"))
    assert "needs_background" not in metadata
    assert own["needs_background"] == "light"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"billions": 0}, "billions must be a positive number; got 0"),
        ({"gpus": 0}, "gpus must be at least 1; got 0"),
        ({"gpus": 1.5}, "gpus must be a whole number; got 1.5"),
        ({"bytes_each": "16"}, "bytes_each must be a positive number; got '16'"),
        ({"memory": -80}, "memory must be a positive number; got -80"),
    ],
)
def test_impossible_sizes_are_refused(given, says):
    with pytest.raises(SettingError) as refused:
        what_fits(**given)
    assert str(refused.value) == says
