"""Hang reports: which ranks wait for which, in words."""

import pytest

from ppedu.core import waiting
from ppedu.core.waiting import Wait
from ppedu.launch.hang import Location, describe_hang, locate


def at(rank, kind="", peer=None, doing=""):
    return Location(rank, 3, "x", doing or kind, kind, peer)


REASONS = {
    "deadlock: rank 1 waits for rank 2, and rank 2 waits for rank 1: all receive, none sends": (
        [at(0, "receive", 1), at(1, "receive", 2), at(2, "receive", 1)],
        [],
    ),
    "deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0": ([at(0, "receive", 1), at(1, "send", 0)], []),
    "rank 0 waits for rank 1, which has ended": ([at(0, "receive", 1)], [1]),
    "rank 0 waits for rank 1, which is not waiting": ([at(0, "receive", 1), at(1)], []),
    "rank 1 waits for rank 0 to reach barrier\nrank 0 waits for rank 1, which waits in barrier": (
        [at(0, "receive", 1), at(1, "all", doing="barrier")],
        [],
    ),
    "rank 0 waits for rank 1 to reach barrier": ([at(0, "all", doing="barrier"), at(1)], []),
    "ranks 0, 2 wait for rank 1 to reach barrier, but it has ended": (
        [at(0, "all", doing="barrier"), at(2, "all", doing="barrier")],
        [1],
    ),
    "all ranks must make the same call, but rank 0 is in barrier, rank 1 is in all_reduce": (
        [at(0, "all", doing="barrier"), at(1, "all", doing="all_reduce")],
        [],
    ),
}


@pytest.mark.parametrize(("reason", "hang"), REASONS.items())
def test_the_reason_of_a_hang_is_put_into_words(reason, hang):
    locations, ended = hang
    assert describe_hang(locations, ended).splitlines()[len(locations) :] == reason.splitlines()


def test_running_ranks_are_not_reported_as_waiting():
    assert describe_hang([at(0), at(1)], []) == "rank 0 is at line 3: x\nrank 1 is at line 3: x"


def test_a_published_wait_is_part_of_the_location(monkeypatch):
    assert locate(0, __file__)[3:] == ("", "", None)
    monkeypatch.setattr(waiting, "current", lambda: Wait("0B0, for 0RECV_B0 from rank 1", "receive", 1))
    location = locate(0, __file__)
    assert location[3:] == ("0B0, for 0RECV_B0 from rank 1", "receive", 1)
    assert location.source.startswith("location = locate(")
