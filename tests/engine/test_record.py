"""`pp.run.record`: the orders of DeepSeek's DualPipe and DualPipeV, and of classes with their methods."""

import pytest
from torch import nn

import ppedu as pp
from ppedu.core.checking import TRANSPORTS


class DualPipeV(nn.Module):
    """GPipe on a V, with the methods of DeepSeek's class."""

    def step(self, num_chunks, criterion):
        assert num_chunks > 1
        for phase in (0, 1):
            for _ in range(num_chunks):
                self._recv_forward(phase)
                self._commit_and_wait_comm()
                self._forward_compute_chunk(phase)
                self._send_forward(phase)
        for phase in (1, 0):
            for _ in range(num_chunks):
                self._recv_backward(phase)
                self._commit_and_wait_comm()
                self._backward_compute_chunk(phase, enable_zb=phase == 0)
                self._send_backward(phase)
        for _ in range(num_chunks):
            self._weight_chunk()


class Derived(DualPipeV):
    def step(self, **named):
        self.wrong()


class Silent(DualPipeV):
    def _send_forward(self, phase):
        pass


def test_what_a_class_does_is_written_down():
    found = pp.run.record(DualPipeV, 2, 2)
    first, second = (" ".join(map(str, order)) for order in found.orders)
    assert first == (
        "0F0 (0SEND_F0)BATCH_P2P 0F1 (0SEND_F1;3RECV_F0)BATCH_P2P 3F0 (3RECV_F1)BATCH_P2P 3F1 3B0 (3SEND_B0)BATCH_P2P "
        "3B1 (3SEND_B1;0RECV_B0)BATCH_P2P 0I0 (0RECV_B1)BATCH_P2P 0I1 0W0 0W1"
    )
    assert second == (
        "(1RECV_F0)BATCH_P2P 1F0 (1RECV_F1)BATCH_P2P 1F1 2F0 (2SEND_F0)BATCH_P2P 2F1 (2SEND_F1;2RECV_B0)BATCH_P2P 2B0 "
        "(2RECV_B1)BATCH_P2P 2B1 1I0 (1SEND_B0)BATCH_P2P 1I1 (1SEND_B1)BATCH_P2P 1W0 1W1"
    )
    assert found.name == "recorded DualPipeV"
    assert all(pp.check(found, transport=transport) == [] for transport in TRANSPORTS)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((DualPipeV, 2, 1), "DualPipeV cannot be recorded with 2 ranks and 1 microbatches.*rank 0, .* AssertionError"),
        ((Derived, 2, 2), "Derived cannot be recorded .*: 'Recorded' object has no attribute 'wrong'"),
        ((Silent, 2, 2), "Silent has a _send_forward of its own, which is not run: record replaces it"),
        ((nn.Linear, 2, 2), "pipe must be DualPipe, DualPipeV.* Megatron('s|-LM's); got"),
        (("DualPipe", 2, 2), "pipe must be DualPipe, DualPipeV.* Megatron('s|-LM's); got"),
        ((DualPipeV, 0, 2), "ranks must be"),
    ],
)
def test_what_cannot_be_recorded_is_an_error(given, problem):
    with pytest.raises(pp.SettingError, match=problem):
        pp.run.record(*given)


def test_deepseeks_own_code_runs_the_schedules_that_we_have():
    theirs = pytest.importorskip("dualpipe")
    for ranks in (1, 2, 3, 4, 6, 8):
        for microbatches in (2 * ranks, 2 * ranks + 2, 2 * ranks + 8):
            for kind in (theirs.DualPipeV, *[theirs.DualPipe] * (ranks % 2 == 0)):
                found = pp.run.record(kind, ranks, microbatches)
                ours = pp.schedule(kind.__name__.lower(), ranks, microbatches)
                assert not found.lowered or not any(pp.check(found, transport=each) for each in TRANSPORTS)
                assert (pp.strip(found).orders, found.placement) == (ours.orders, ours.placement)
