"""The table of schedules and their facts."""

import re
from html.parser import HTMLParser

import pytest

import ppedu as pp
from ppedu import B, F, SettingError
from ppedu.zoo import registry as registered
from ppedu.zoo.facts import Facts

PUBLISHED = pp.schedules()


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Start each test with the published schedules."""
    published = {
        name: entry for name, entry in registered._entries.items() if registered._is_published(entry.generator)
    }
    monkeypatch.setattr(registered, "_entries", published)


class Cells(HTMLParser):
    """The cells of an HTML table, row by row, and the addresses of its links."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.links, self.open, self.inside = [], [], [], False
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.inside = self.inside or tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "a":
            self.links.append(dict(attributes)["href"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


def rows(names):
    """Return the cells of each schedule in the HTML table, by column."""
    head, *body = Cells(names._repr_html_()).rows
    return {row[0]: dict(zip(head, row, strict=True)) for row in body}


def test_schedules_is_a_tuple_of_strings():
    assert isinstance(PUBLISHED, tuple)
    assert PUBLISHED[:3] == ("naive", "gpipe", "1f1b")
    assert "zb-v" in PUBLISHED and [*map(str, PUBLISHED)] == [*PUBLISHED]
    assert repr(PUBLISHED).startswith("('naive', 'gpipe', '1f1b', ")


def test_every_published_schedule_has_a_row_and_a_paper():
    for name in PUBLISHED:
        row = rows(PUBLISHED)[name]
        assert re.search(r"^(arXiv \d{4}\.\d{5}|github\.com/\w+|doi\.org/10\.\d+/\w+)", row["paper"])
        assert row["placement"] in ("loop", "v", "bidirectional, weights twice", "round, weights on the host")
        assert row["idle time of a rank"] != "–"


def test_the_facts_and_the_docstring_cite_the_same_paper():
    for name in PUBLISHED:
        said = set(re.findall(r"\d{4}\.\d{5}", registered._entries[name].generator.__doc__))
        assert not said or said & set(re.findall(r"\d{4}\.\d{5}", registered.facts_of(name).source))


def test_every_published_schedule_has_a_price_and_says_who_uses_it():
    for name in PUBLISHED:
        facts = registered.facts_of(name)
        assert facts.price.endswith(".") and facts.used.endswith("."), name
        assert re.search(r"arXiv \d{4}\.\d{5}|github\.com/[\w-]+/\w+", facts.used), name


def test_what_the_prices_say_of_messages_and_idle_time_is_so():
    def messages(name):
        return sum(action.op.name == "SEND_F" for order in pp.lower(pp.schedule(name, 8, 8)).orders for action in order)

    for name, other in (("zb-v", "zb-h1"), ("hanayo", "1f1b")):
        assert messages(name) == 2 * messages(other)
    for name, other in (("interleaved", "1f1b"), ("looped-bfs", "gpipe"), ("zb-interleaved", "zb-h1")):
        assert 2 <= messages(name) / messages(other) < 2.2
    for ranks in range(3, 12):
        stage = 0.5  # the time of a forward of one of a rank's two stages
        waits = {name: pp.theory.idle(name, ranks, 4 * ranks).value / stage for name in ("zb-v", "v-half", "v-min")}
        assert (waits["zb-v"], waits["v-half"]) == (ranks - 1, 3 * ranks - (4 if ranks % 2 else 7))
        assert waits["v-min"] >= waits["v-half"]


def test_rows_show_the_facts():
    table = rows(PUBLISHED)
    assert [*table["interleaved"].values()] == [
        *("interleaved", "arXiv 2104.04473", "loop", "–", "(p-1)(F+B)/v if m >= p"),
        *("min(pv+p-1-2r, mv)/v if p divides m", "chunks=2, group=None"),
    ]
    assert [*table["zb-h2"].values()][4:] == [
        *(
            "(p-1)max(F, I-F, F+I-2W), (p-1)max(0, I-F, F+I-2W) in span if m >= 2p-1",
            "2p-2r-1 + 2rM_W if m >= 2p-1",
            "–",
        )
    ]
    assert table["dualpipe"]["sizes"] == "p even, m even, m >= 2p"
    assert table["gpipe"]["options"] == "lifo=False"


def test_papers_are_linked():
    links = Cells(PUBLISHED._repr_html_()).links
    assert "https://arxiv.org/abs/2104.04473" in links and "https://github.com/deepseek-ai/DualPipe" in links


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_schedule_exists_exactly_for_the_sizes_in_its_row(name):
    takes = rows(PUBLISHED)[name]["sizes"]
    meaning = {"p even": "p % 2 == 0", "m even": "m % 2 == 0", "v even": "v % 2 == 0", "–": "True"}
    condition = " and ".join(meaning.get(each) or re.sub(r"(\d)([pm])", r"\1*\2", each) for each in takes.split(", "))
    for p in range(1, 7):
        for m in range(1, 3 * p + 3):
            try:
                accepted = pp.schedule(name, p, m) is not None
            except SettingError:
                accepted = False
            assert accepted == eval(condition, {"p": p, "m": m, "v": 2, "s": 8}), (p, m)


def test_a_schedule_of_the_user_is_listed_last():
    @pp.register("mine <b>", placement="v", chunks=2)
    def mine(rank, ranks, microbatches, depth: int = 3, *, name="a & b"):
        for stage in (rank, 2 * ranks - 1 - rank):
            yield from (make(stage, m) for make in (F, B) for m in range(microbatches))

    assert pp.schedules() == (*PUBLISHED, "mine <b>")
    assert [*rows(pp.schedules())["mine <b>"].values()] == [
        *("mine <b>", "–", "v", "–", "–", "–", "depth=3, name='a & b'")
    ]


def test_registering_a_name_again_drops_the_facts_of_the_first_registration():
    pp.register("mine", facts=Facts("arXiv 2401.00000", idle="(p-1)*F"))(lambda rank, ranks, microbatches: [])
    row = rows(pp.schedules())["mine"]
    assert (row["paper"], row["idle time of a rank"]) == ("arXiv 2401.00000", "(p-1)F")
    pp.register("mine")(lambda rank, ranks, microbatches: [])
    row = rows(pp.schedules())["mine"]
    assert (row["paper"], row["idle time of a rank"]) == ("–", "–")


def printed(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    return str(PUBLISHED)


@pytest.mark.parametrize("width", [1, 60, 80, 120, 180])
def test_the_printed_table_fits_the_terminal_and_is_complete_at_any_width(monkeypatch, width):
    text = printed(monkeypatch, width)
    assert max(map(len, text.splitlines())) <= max(60, width)
    facts = {cell for row in rows(PUBLISHED).values() for cell in row.values()} - {"–"}
    assert all(" ".join(text.split()).count(cell) for cell in facts) or width == 180  # at that width cells are wrapped


def test_a_schedule_without_a_paper_is_printed_in_a_narrow_terminal(monkeypatch):
    pp.register("mine")(lambda rank, ranks, microbatches: [])
    monkeypatch.setenv("COLUMNS", "60")
    assert re.search("^mine +placement: loop$", str(pp.schedules()), re.MULTILINE)


def test_columns_of_the_printed_table_are_aligned(monkeypatch):
    table, letters = printed(monkeypatch, 180).split("\n\n")
    head, *body = table.splitlines()
    assert [line.split()[0] for line in body if not line.startswith(" ")] == [*PUBLISHED]
    for column in [*rows(PUBLISHED)["1f1b"]][1:]:
        begin = head.index(column)
        assert all(line[begin - 2 : begin].strip() == "" for line in body)
    assert max(map(len, body)) <= 180
    assert letters.startswith("p ranks, m microbatches")
