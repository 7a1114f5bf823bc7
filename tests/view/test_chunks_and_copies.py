"""Chunks differ in their shade, and the second copy of the model in its edge."""

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgba

import ppedu as pp


@pytest.fixture
def drawn():
    """`drawn(name)` returns the boxes of a schedule's picture as (rank, left, color, edge), and its legend."""

    def draw(name, **options):
        axes = pp.simulate(pp.schedule(name, 4, 8, **options)).plot()
        collection = axes.collections[0]
        corners = [path.vertices[0] for path in collection.get_paths()]
        return [
            (int(y), x, tuple(color), tuple(edge))
            for (x, y), color, edge in zip(corners, collection.get_facecolor(), collection.get_edgecolor(), strict=True)
        ], [text.get_text() for text in axes.get_legend().get_texts()]

    yield draw
    pyplot.close("all")


def test_a_later_chunk_is_darker(drawn):
    boxes, legend = drawn("interleaved", chunks=2)
    rank_0 = sorted(box for box in boxes if box[0] == 0)
    first, second = rank_0[0][2], rank_0[4][2]  # F0 of chunk 0, and after F1, F2, F3, of chunk 1
    assert all(dark < light for dark, light in zip(second[:3], first[:3], strict=True))
    assert "darker: later chunk" in legend


def test_the_second_copy_has_an_edge(drawn):
    boxes, legend = drawn("dualpipe")
    first_on = {rank: min(box for box in boxes if box[0] == rank)[3] for rank in (0, 3)}
    assert first_on[0] == to_rgba("white") and first_on[3] == to_rgba("black")
    assert "second copy" in legend


def test_one_chunk_and_one_copy_have_one_shade_and_one_edge(drawn):
    boxes, legend = drawn("1f1b")
    assert {edge for *_, edge in boxes} == {to_rgba("white")}
    assert not {"darker: later chunk", "second copy"} & set(legend)
