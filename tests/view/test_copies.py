"""Copies to the host and back in pictures: a lane of their own, and the same numbers in every front end."""

import pytest

import ppedu as pp
from ppedu import Costs, Timeline, simulate
from ppedu.view.look import COPIES, ends_of
from ppedu.view.model import Panel

TIMELINE = simulate(pp.schedule("po-h", 4, 8), Costs(offload=4))


def test_copies_are_boxes_below_those_of_their_rank():
    panel = Panel(TIMELINE)
    copies = {(box.rank - 4, f"{box.stage}{box.op}{box.microbatch}") for box in panel.boxes if box.rank >= 4}
    orders = enumerate(TIMELINE.schedule.orders)
    assert copies == {(rank, str(each)) for rank, order in orders for each in order if each.op in ("O", "L")}
    named = [f"{each.stage}{each.op}{each.microbatch}" for each in (panel.boxes[index] for index in panel.path)]
    assert named == [str(span.action) for _, span in TIMELINE.critical_path()]
    assert any(name[1] in "OL" for name in named)  # at these times, the copies take longest
    assert panel.needs[0, "I"] == [("F", 0, 0), ("L", 0, 0), ("B", 1, 0)]


def test_heights_of_boxes_do_not_overlap():
    for part in (0, 1, 2):
        assert ends_of(0, 1, part, False, False)[1] <= 1
    (top, above), (below, bottom) = ends_of(0, 1, 0, False, True), ends_of(0, 1, 0, True, True)
    assert (top, bottom) == (0, 1) and above < below == pytest.approx(1 - COPIES)
    assert ends_of(0, 1, 1, False, True)[1] == ends_of(0, 1, 2, False, True)[0] == above / 2


@pytest.mark.parametrize("ending", [".json", ".svg", ".tex", ".html"])
def test_files_have_the_copies(tmp_path, ending):
    path = tmp_path / f"po-h{ending}"
    TIMELINE.save(path)
    if ending == ".json":
        loaded = Timeline.load(path)
        assert (loaded.schedule, loaded.costs, loaded.rows) == (TIMELINE.schedule, TIMELINE.costs, TIMELINE.rows)
    else:
        assert {".svg": "O: offload to the host", ".tex": r"\definecolor{L0}", ".html": "load from the host"}[
            ending
        ] in path.read_text(encoding="utf-8")
