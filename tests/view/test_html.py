"""A saved page, parsed as a browser parses it: its content, and that it makes no requests."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

import ppedu as pp
from ppedu import Costs, Schedule, simulate


class Page(HTMLParser):
    """A page's text by tag, and all attributes."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.texts, self.attributes, self.tags = {}, [], []
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.texts.setdefault(tag, []).append("")
        self.attributes += attributes

    def handle_data(self, data):
        if self.tags:
            self.texts[self.tags[-1]][-1] += data


@pytest.fixture
def page(tmp_path):
    def save(timeline):
        timeline.save(tmp_path / "x.html")
        return Page(tmp_path / "x.html")

    return save


def test_the_page_contains_the_title_the_numbers_and_the_boxes(page):
    found = page(simulate(pp.schedule("1f1b", 4, 8)))
    assert found.texts["title"] == found.texts["h1"]
    assert found.texts["h1"][0].strip() == "1f1b, 4 ranks, 8 microbatches, simulated"
    cells = [text.strip() for text in found.texts["td"]]
    assert cells[:8:2] == ["33", "27.3%", "37.5%", "33"], "makespan, bubble, overhead, span"
    assert cells[8:] == ["9", "4", "9", "3", "9", "2", "9", "1"], "idle and peak of each rank"
    (shown,) = _state(found)["panels"]
    assert len(shown["boxes"]["op"]) == 4 * 8 * 2 and shown["makespan"] == 33


def test_the_page_has_the_numbers_of_an_outline_too(tmp_path):
    run = dataclasses.replace(simulate(pp.schedule("1f1b", 2, 2), Costs(forward=2)), source="measured")
    run.show(outline=simulate(run.schedule), lanes=True).save(tmp_path / "x.html")
    found = Page(tmp_path / "x.html")
    assert found.texts["h1"][0].strip() == "1f1b, 2 ranks, 2 microbatches, measured and simulated"
    headings = [text.strip() for text in found.texts["h2"]]
    assert headings == [f"1f1b, 2 ranks, 2 microbatches, {source}" for source in ("measured", "simulated")]
    assert _state(found)["lanes"]


def test_the_overhead_of_uneven_stages_is_computed_and_explained(page):
    """It equals neither idle over busy time nor a closed form there."""
    timeline = simulate(pp.schedule("1f1b", 4, 8), Costs(forward=[1, 1, 1, 3], backward=[2, 2, 2, 6]))
    busiest = max(sum(end - start for _, start, end in timeline.spans(rank)) for rank in range(4))
    overhead = page(timeline).texts["td"][4:6]
    assert overhead == [f"{timeline.makespan / busiest - 1:.1%}", "makespan / busiest rank’s busy time − 1"]


def test_the_page_of_a_comparison_contains_the_numbers_and_orders_of_each_timeline(tmp_path):
    compared = pp.compare("gpipe", "zb-v")
    compared.save(tmp_path / "x.html")
    found = Page(tmp_path / "x.html")
    assert found.texts["h1"][0].strip() == "gpipe, zb-v" and _state(found)["kind"] == "compare"
    timelines = [panel.timeline for panel in compared.panels()]
    assert [text.strip() for text in found.texts["h2"]] == [
        f"{each.schedule.name}, {each.schedule.size}, simulated" for each in timelines
    ]
    texts = [text for each in timelines for text in (each.text(300), each.schedule.to_csv())]
    assert [text.strip() for text in found.texts["pre"]] == [text.strip() for text in texts]


def test_controls_that_need_a_kernel_are_left_out_of_a_page(tmp_path):
    for shown in (
        pp.explore("zb-v"),
        pp.puzzle("1f1b"),
        pp.differences(*[pp.schedule(n, 2, 3) for n in ("1f1b", "gpipe")]),
    ):
        shown.save(tmp_path / "x.html")
        state = _state(Page(tmp_path / "x.html"))
        assert state["kind"] == "show" and state["panels"][0]["boxes"] == shown.state()["panels"][0]["boxes"]


def _state(found):
    """Return the state that the page passes to its script."""
    return json.loads(re.search(r'^mount\(document.querySelector\("main"\), (.*)\);$', found.source, re.MULTILINE)[1])


def test_the_page_makes_no_requests(page):
    found = page(simulate(pp.schedule("zb-v", 4, 8)))
    assert not [name for name, _ in found.attributes if name in ("src", "href", "xlink:href", "data", "action")]
    assert not {"link", "iframe", "img", "object", "base"} & set(found.tags)
    assert set(re.findall(r"https?://[\w./]+", found.source)) == {"http://www.w3.org/2000/svg"}, "a name, no address"
    assert not re.search(r"@import|fetch\(|XMLHttpRequest|WebSocket|import\(", found.source)


def test_the_orders_can_be_copied_from_the_page(page, tmp_path):
    timeline = simulate(pp.schedule("zb-v", 4, 8))
    *_, orders = page(timeline).texts["pre"]
    (tmp_path / "zb-v.csv").write_text(orders)
    assert Schedule.from_csv(tmp_path / "zb-v.csv", placement="v") == timeline.schedule


def test_names_and_units_are_escaped(page):
    odd = dataclasses.replace(pp.schedule("gpipe", 2, 2), name="<i>mine</i> & yours</script><b>")
    found = page(simulate(odd, Costs(unit="<b>")))
    assert found.texts["h1"][0].startswith("<i>mine</i> & yours</script><b>, 2 ranks")
    assert not {"i", "b"} & set(found.tags)
    (shown,) = _state(found)["panels"]
    assert shown["heading"].startswith("<i>mine</i> & yours</script><b>, 2 ranks") and shown["unit"] == "<b>"
