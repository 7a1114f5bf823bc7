"""The picture of a wrong schedule: what the feedback names is outlined."""

import pytest
from answers import in_turn
from matplotlib import colors

from ppedu import B, F
from ppedu.view.look import MARK, ROW


@pytest.fixture
def outlined(told):
    """`outlined(exercise, answer)` returns the feedback, and the outlines in the picture, if there is one.

    Each outline is its rank, start and end, the text in red, and whether it is in the memory strip.
    """
    from matplotlib import pyplot

    def read(exercise, answer):
        message = told(exercise, answer)
        if not pyplot.get_fignums():
            return message, None
        [ax] = pyplot.gcf().axes
        found = []
        for patch in ax.patches:
            assert colors.to_hex(patch.get_edgecolor()) == MARK
            left, top = patch.get_xy()
            text = [each.get_text() for each in ax.texts if each.get_color() == MARK]
            strip = top % 1 == pytest.approx(ROW["strip"])
            found.append((int(top), left, left + patch.get_width(), "".join(text), strip))
        assert ax.get_title(loc="left").startswith("Yours, ")
        return message, found

    return read


def gpipe(rank, ranks, microbatches):
    return [F(rank, m) for m in range(microbatches)] + [B(rank, m) for m in range(microbatches)]


def test_a_slow_schedule_has_its_first_avoidable_wait_outlined_and_the_target_as_a_line(outlined):
    from matplotlib import pyplot

    message, found = outlined("05.1", in_turn(lambda rank, ranks: max(1, ranks - rank - 1)))
    assert "rank 0 runs only 3 forwards before its first backward, and then waits" in message
    assert found == [(0, 3, 7, "", False)]
    [line] = [each for each in pyplot.gca().lines if each.get_linestyle() == "--"]
    assert list(line.get_xdata()) == [22, 22] and "dashed: the mark, 22" in pyplot.gca().get_title(loc="left")


def test_memory_above_the_limit_is_outlined(outlined):
    message, [(rank, start, end, _, strip)] = outlined("05.1", gpipe)
    assert "every rank runs all its forwards" in message
    assert (rank, start, end, strip) == (0, 4, 18, True), "from the 5th forward on, to the end of the 4th backward"


def test_a_named_action_or_wait_is_outlined(outlined):
    message, found = outlined("10.1", in_turn(lambda rank, ranks: ranks - rank, late=lambda *_: 0))
    assert "Each W runs right after its I" in message and found == [(2, 25, 26, "", False)]
    message, found = outlined("14.1", in_turn(lambda rank, ranks: ranks - rank))
    assert "rank 3 waits 9.75–10.25" in message and found == [(3, 9.75, 10.25, "", False)]
    message, found = outlined("09.1", lambda r, p, m, v: [F(c * p + r, k) for c in range(v) for k in range(m)])
    assert "forward number 5 of rank 0 is 0F4" in message and found == [(0, 2, 2.5, "", False)]


def test_an_action_that_cannot_run_has_a_box_where_its_rank_stops(outlined):
    def stuck(rank, ranks, microbatches):
        return [action for m in range(microbatches) for action in (B(rank, m), F(rank, m))]

    def unfinished(rank, ranks, microbatches):
        return [F(rank, m) for m in range(microbatches)]

    message, found = outlined("05.1", stuck)
    assert "0B0 needs 0F0" in message and found == [(0, 0, 1, "0B0", False)]
    message, found = outlined("05.1", unfinished)
    assert "0B0 is never run" in message and found == [(0, 8, 9, "0B0", False)]


@pytest.mark.parametrize("answer", [None, lambda *sizes: None, lambda *sizes: [], lambda *sizes: 1 / 0])
@pytest.mark.parametrize("exercise", ["05.1", "09.1", "10.1", "14.1"])
def test_without_a_schedule_there_is_no_picture(outlined, exercise, answer):
    message, found = outlined(exercise, answer)
    assert message.startswith("Not yet: ") and found is None


def test_in_a_notebook_the_picture_follows_its_sentence(kernel):
    source = "import ppedu as pp\nfrom ppedu.notebook import check_answer\n"
    source += "check_answer('05.1', lambda r, p, m: [pp.F(r, k) for k in range(m)])\nprint('and then')"
    cell = kernel(f"{source}\ncheck_answer('05.1', None)")
    assert cell.text == "and then\n"
    feedback, picture, after = cell.shown
    assert "0B0 is never run" in feedback["text/plain"] and "image/png" in picture
    assert after["text/plain"].startswith("Not yet: ")
