"""Timelines saved as pictures, and paths and names that cannot be saved."""

from dataclasses import replace
from html import escape
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot

import ppedu as pp
from ppedu import Costs, PipelineError, SettingError, simulate
from ppedu.view.interactive import Interactive
from ppedu.view.label import encodable, label
from ppedu.view.model import Panel

TIMELINE = simulate(pp.schedule("1f1b", 4, 8))
STARTS = {".svg": b"<?xml", ".png": b"\x89PNG\r\n", ".pdf": b"%PDF-"}


@pytest.mark.parametrize("ending", [".svg", ".PNG", ".pdf"])
def test_a_picture_is_written_in_the_format_of_its_ending_and_leaves_no_figure_behind(tmp_path, ending):
    path, mine = tmp_path / f"x{ending}", pyplot.figure()
    TIMELINE.save(path)
    assert path.read_bytes().startswith(STARTS[ending.lower()])
    assert path.stat().st_size > 5000
    assert pyplot.get_fignums() == [mine.number] and pyplot.gcf() is mine


def test_a_comparison_is_a_picture_of_all_its_timelines(tmp_path):
    pp.compare("gpipe", "1f1b", ranks=2, microbatches=2).save(str(tmp_path / "x.svg"))
    titles = {f"{name}, 2 ranks, 2 microbatches" for name in ("gpipe", "1f1b")}
    assert titles <= written((tmp_path / "x.svg").read_text())
    assert pyplot.get_fignums() == []


def test_a_comparison_is_a_trace_of_all_its_timelines(tmp_path):
    compared = pp.compare("gpipe", "1f1b")
    compared.save(tmp_path / "x.json")
    assert [each.schedule for each in pp.view.load_all(tmp_path / "x.json")] == [
        panel.timeline.schedule for panel in compared.panels()
    ]


def test_the_words_and_numbers_of_an_svg_are_text(tmp_path):
    TIMELINE.save(tmp_path / "x.svg")
    drawn = list(ElementTree.parse(tmp_path / "x.svg").iter("{http://www.w3.org/2000/svg}text"))
    texts = [each.text for each in drawn]
    assert {"rank 0", "F: forward", "makespan 33    bubble 27.3%    peak activations 4"} <= set(texts)
    assert {"0F7", "3F7", "0B7", "3B7"} <= set(texts)
    assert {each.get("{http://www.w3.org/XML/1998/namespace}space") for each in drawn} == {"preserve"}


@pytest.mark.parametrize("ending", [".svg", ".html", ".tex"])
def test_saving_twice_writes_the_same_bytes(tmp_path, ending):
    for name in ("a", "b"):
        simulate(TIMELINE.schedule).save(tmp_path / f"{name}{ending}")
    assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()
    assert (tmp_path / f"a{ending}").stat().st_size < 132_000


@pytest.mark.parametrize("name", ["x.txt", "x", "x.jpg", "x.json.gz", "json", ".json", "svg"])
def test_an_unknown_ending_raises_an_error_that_lists_the_known_ones(tmp_path, name):
    with pytest.raises(
        SettingError, match=r"cannot save .*; end it in .json, .html, .svg, .png, .pdf, .tex$"
    ) as caught:
        TIMELINE.save(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["\0.svg", "a\0/x.json", "\ud800.html", 3, b"x.svg"])
def test_a_path_that_cannot_name_a_file_raises(name):
    for call in (TIMELINE.save, pp.compare("1f1b").save, pp.Timeline.load, TIMELINE.schedule.to_csv):
        with pytest.raises(SettingError, match="a file name must be text or a Path; got "):
            call(name)


@pytest.mark.parametrize("ending", [".json", ".html", ".tex", *STARTS])
def test_the_error_names_the_file_that_cannot_be_written(tmp_path, ending):
    (tmp_path / f"folder{ending}").mkdir()
    for path in (tmp_path / "nowhere" / f"x{ending}", tmp_path / f"folder{ending}", tmp_path / f"{'x' * 300}{ending}"):
        with pytest.raises(
            PipelineError, match=r"cannot write .*; name a file in a folder that you may write to"
        ) as caught:
            TIMELINE.save(path)
        assert str(path) in str(caught.value)
    assert pyplot.get_fignums() == []


# --- special characters -------------------------------------------------------------------------------------------

ODD = ["$\\frac{$", "a$b$c 100%", '<b>&"', "\\alpha", "_x", "ü" * 5000]
FORBIDDEN = "$\0 a\x1bb \x0b \ud800 \ufffe"
TINY = pp.schedule("gpipe", 1, 1)


def written(svg):
    """Return the texts of an SVG, which must be well-formed."""
    return {each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


def test_special_characters_in_names_and_units_are_drawn_literally(tmp_path):
    for odd in ODD:
        simulate(replace(TINY, name=odd), Costs(unit=odd)).save(tmp_path / "x.svg")
        expected = {label(f"time, {odd}"), label(f"{odd}, 1 rank, 1 microbatch")}
        assert expected <= written((tmp_path / "x.svg").read_text())


@pytest.mark.parametrize("ending", [".html", *STARTS, None])
def test_no_characters_in_names_units_titles_or_sources_break_a_picture(tmp_path, ending):
    timeline = replace(simulate(replace(TINY, name=ODD[0]), Costs(unit=ODD[0])), source=FORBIDDEN)
    if ending:
        timeline.save(tmp_path / f"x{ending}")
    if ending == ".html":
        assert escape(encodable(FORBIDDEN)) in (tmp_path / "x.html").read_text()
    elif ending == ".svg":
        timeline.plot(title=FORBIDDEN, outline=timeline)
        pyplot.savefig(tmp_path / "y.svg")
        for name in "xy":
            ElementTree.parse(tmp_path / f"{name}.svg")
    elif not ending:
        assert Interactive(Panel(timeline, FORBIDDEN)).static()["image/png"]


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_be_encoded_for_svg_and_keeps_its_printable_characters(text):
    found = ElementTree.fromstring(f"<a>{escape(encodable(text))}</a>".encode()).text or ""
    kept = text.replace("\r\n", "\n").replace("\r", "\n")  # as XML normalizes line ends
    assert len(found) == len(kept)
    for one, other in zip(kept, found, strict=True):
        assert one == other or (other == "\N{REPLACEMENT CHARACTER}" and not (one.isprintable() or one in "\n\t"))
