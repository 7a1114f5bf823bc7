"""Chunks differ in their shade, and the second copy of the model in its edge."""

from matplotlib.colors import to_rgba

import ppedu as pp


def drawn(name, **options):
    """Return a picture's boxes (rank, left, color), the ranks of its dark edges, and its legend."""
    axes = pp.simulate(pp.schedule(name, 4, 8, **options)).plot()
    boxes, *others = axes.collections
    corners = [path.vertices[0] for path in boxes.get_paths()]
    shown = [(int(y), x, tuple(color)) for (x, y), color in zip(corners, boxes.get_facecolor(), strict=True)]
    dark = [other for other in others if [to_rgba("black")] == list(map(tuple, other.get_edgecolor()))]
    edges = [int(path.vertices[0][1]) for other in dark for path in other.get_paths()]
    return shown, edges, [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_later_chunk_is_darker():
    boxes, _, legend = drawn("interleaved", chunks=2)
    rank_0 = sorted(box for box in boxes if box[0] == 0)
    first, second = rank_0[0][2], rank_0[4][2]  # F0 of chunk 0, and after F1, F2, F3, of chunk 1
    assert all(dark < light for dark, light in zip(second[:3], first[:3], strict=True))
    assert "darker: later chunk" in legend and len({color for *_, color in boxes}) == 4


def test_the_second_copy_has_an_edge():
    boxes, edges, legend = drawn("dualpipe")
    assert len(edges) == len(boxes) / 2 and "second stream" in legend


def test_a_single_chunk_and_copy_have_two_shades_and_no_edge():
    boxes, edges, legend = drawn("1f1b")
    assert len({color for *_, color in boxes}) == 4 and not edges
    assert not {"darker: later chunk", "second stream"} & set(legend)
