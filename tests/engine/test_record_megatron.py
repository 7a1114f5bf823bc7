"""`pp.run.record`: the orders of Megatron-LM's pipeline loops, and of a loop with the same parameters."""

import pytest
import torch
import torch.distributed as dist

import ppedu as pp


class ModelParallelConfig:
    def __init__(self, **settings):
        vars(self).update(settings)


class ProcessGroupCollection:
    pass


class P2PCommunicator:
    """With three of the methods of Megatron's, and its messages: those with one rank are posted together."""

    def __init__(self, pp_group, config):
        self.rank, self.last, self.dtype = pp_group.rank(), pp_group.size() - 1, config.pipeline_dtype

    def _exchange(self, peer, sent, received):
        tensor = torch.empty(1, 1, 1, dtype=self.dtype, requires_grad=True, device="cuda") if received else None
        calls = [dist.P2POp(dist.isend, sent, peer)] if sent is not None else []
        calls += [dist.P2POp(dist.irecv, tensor, peer)] if received else []
        for handle in dist.batch_isend_irecv(calls):
            handle.wait()
        return tensor

    def with_previous(self, gradient=None, receive=False):
        return self._exchange(self.rank - 1, gradient, receive) if self.rank else None

    def with_next(self, output=None, receive=False):
        return self._exchange(self.rank + 1, output, receive) if self.rank < self.last else None


def loop(*, forward_step_func, data_iterator, model, num_microbatches, p2p_communicator, **_):
    """1F1B, as Megatron's loop without interleaving runs it."""
    config, comm, kept = model[0].config, p2p_communicator, []
    warmup = min(comm.last - comm.rank, num_microbatches)

    def forward(given):
        model[0].set_input_tensor([given])
        output, loss = forward_step_func(data_iterator[0], model[0])
        kept.append((given, loss(output)[0] if comm.rank == comm.last else output))
        return output

    def backward(gradient):
        given, output = kept.pop(0)
        output.backward(gradient)
        return None if given is None else given.grad

    assert config.pipeline_model_parallel_size == comm.last + 1
    for _ in range(warmup):
        comm.with_next(forward(comm.with_previous(receive=True)))
    if warmup < num_microbatches:
        given = comm.with_previous(receive=True)
    for index in range(warmup, num_microbatches):
        result = backward(comm.with_next(forward(given), receive=True))
        given = comm.with_previous(result, receive=index + 1 < num_microbatches)
    for _ in range(warmup):
        comm.with_previous(backward(comm.with_next(receive=True)))


def asynchronous(*, forward_step_func, data_iterator, model, p2p_communicator, **_):
    """One microbatch on two ranks. The receives are posted first, and a send is never waited for."""
    rank = p2p_communicator.rank
    tensor = torch.empty(1, 1, 1, requires_grad=True)
    handle = dist.irecv(tensor=tensor, src=1 - rank)
    if rank:
        handle.wait()
    model[0].set_input_tensor([tensor if rank else None])
    output, _ = forward_step_func(data_iterator[0], model[0])
    if not rank:
        dist.isend(tensor=output, dst=1)
        handle.wait()
    output.backward(None if rank else tensor)
    if rank:
        dist.isend(tensor=tensor.grad, dst=0).wait()


def freed(*, forward_step_func, data_iterator, model, p2p_communicator, **_):
    """As in Megatron-LM 4047: an output is freed while it is sent."""
    model[0].set_input_tensor([None])
    output, _ = forward_step_func(data_iterator[0], model[0])
    handle = dist.isend(tensor=output, dst=1)
    output.data = torch.empty(1, 1, 1)
    handle.wait()


def unused(*, p2p_communicator, **_):
    p2p_communicator.with_next(receive=True)


def unmade(*, p2p_communicator, **_):
    p2p_communicator.with_next(torch.zeros(1, 1, 1))


def twice(*, forward_step_func, data_iterator, model, p2p_communicator, **_):
    given = p2p_communicator.with_previous(receive=True)
    for _ in range(2):
        model[0].set_input_tensor([given])
        forward_step_func(data_iterator[0], model[0])


def texts(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (3, 2), (4, 6)])
def test_a_loop_of_1f1b_computes_as_our_schedule(ranks, microbatches):
    before = dist.isend, dist.is_initialized, torch.cuda.current_device
    assert pp.strip(pp.run.record(loop, ranks, microbatches)).orders == pp.schedule("1f1b", ranks, microbatches).orders
    assert before == (dist.isend, dist.is_initialized, torch.cuda.current_device)


def test_messages_posted_together_are_written_together():
    first, second = texts(pp.run.record(loop, 2, 2))
    assert first == "0F0 0SEND_F0 0WAIT_SEND_F0 0F1 (0SEND_F1;0RECV_B0)BATCH_P2P 0B0 0RECV_B1 0WAIT_RECV_B1 0B1"
    assert second == "1RECV_F0 1WAIT_RECV_F0 1F0 1B0 (1SEND_B0;1RECV_F1)BATCH_P2P 1F1 1B1 1SEND_B1 1WAIT_SEND_B1"


def test_a_message_that_is_waited_for_later_is_written_twice():
    first, second = texts(pp.run.record(asynchronous, 2, 1))
    assert first == "0RECV_B0 0F0 0SEND_F0 0WAIT_RECV_B0 0B0 0WAIT_SEND_F0"
    assert second == "1RECV_F0 1WAIT_RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((unused, 2, 1), r"unused\(ranks=2, .*on rank 0: .* a tensor from rank 1 that no forward or backward uses"),
        ((freed, 2, 1), "on rank 0: .* frees or overwrites the tensor of 0SEND_F0 before it waits for it"),
        ((unmade, 2, 1), "on rank 0: .* sends a tensor that no forward or backward of this rank has returned"),
        ((twice, 2, 2), "on rank 1: .* what it uses as 1RECV_F1 is 1RECV_F0"),
        ((loop, 2, 1, 2), "on rank 1: .* what it uses as 1RECV_B0 is not received"),
        ((print, 2, 1), "pipe must be .* a forward_backward_pipelining_… function of Megatron-LM's; got <built-in"),
        ((None, 2, 1), "pipe must be .* got None"),
        ((loop, 0, 1), "ranks must be"),
        ((loop, 2, 1, 0), "chunks must be"),
    ],
)
def test_what_cannot_be_recorded_is_an_error(given, problem):
    before = dist.isend
    with pytest.raises(pp.SettingError, match=problem):
        pp.run.record(*given[:3], **({"chunks": given[3]} if given[3:] else {}))
    assert dist.isend is before


def idle(**_):
    pass


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"overlap": "no"}, "overlap must be True or False; got 'no'"),
        ({"batch": 2}, "batch must be True or False; got 2"),
        ({"group": "a"}, "group must be a whole number; got 'a'"),
        ({"wrong": 1}, "unknown setting 'wrong'; known: chunks, group, overlap, overlap_all, batch"),
    ],
)
def test_wrong_settings_are_errors(settings, problem):
    with pytest.raises(pp.SettingError, match=problem):
        pp.run.record(loop, 2, 2, **settings)


def test_a_loop_that_does_nothing_is_an_error():
    with pytest.raises(pp.SettingError, match="idle ends without computing anything"):
        pp.run.record(idle, 2, 2)


def test_what_torch_is_set_to_does_not_matter():
    expected = pp.run.record(loop, 2, 300)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.device("meta"):
            assert pp.run.record(loop, 2, 300) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("megatron.core.pipeline_parallel.schedules", exc_type=ImportError)


def test_megatrons_loops_compute_as_our_schedules(theirs):
    for ranks in (1, 2, 4):
        for microbatches in (1, ranks, 2 * ranks + 1):
            found = pp.run.record(theirs.forward_backward_pipelining_without_interleaving, ranks, microbatches)
            assert pp.strip(found).orders == pp.schedule("1f1b", ranks, microbatches).orders
            assert all(pp.check(found, transport=transport) == [] for transport in ("rendezvous", "any"))
    settings = {}, {"batch": False}, {"overlap": True}, {"overlap": True, "overlap_all": True}
    for ranks, microbatches, group in ((2, 4, 2), (3, 6, None), (2, 5, 3), (4, 4, 4)):
        for setting in settings:
            loop = theirs.forward_backward_pipelining_with_interleaving
            found = pp.run.record(loop, ranks, microbatches, chunks=2, group=group, **setting)
            assert (
                pp.strip(found).orders == pp.schedule("interleaved", ranks, microbatches, chunks=2, group=group).orders
            )
            assert bool(pp.check(found, transport="any")) == (ranks == 2 and not setting)


def test_megatrons_messages_are_those_that_it_posts(theirs):
    """Rank 0 posts sends first, rank 1 receives, and only the steady state waits later."""
    first, last = texts(
        pp.run.record(theirs.forward_backward_pipelining_with_interleaving, 2, 4, chunks=2, overlap=True)
    )
    assert first.startswith(
        "0F0 0SEND_F0 0WAIT_SEND_F0 0F1 0SEND_F1 2RECV_F0 0WAIT_SEND_F1 2WAIT_RECV_F0 2F0 2SEND_F0 2RECV_F1 "
    )
    assert " 3F0 3RECV_F1 3B0 3SEND_B0 3WAIT_RECV_F1 3F1 1RECV_F2 3B1 1RECV_B0 3SEND_B1 3WAIT_SEND_B0 " in last
    assert last.endswith(" 1B3 1SEND_B3 1WAIT_SEND_B3 3WAIT_SEND_B3")


def test_a_batch_between_two_ranks_sends_a_gradient_where_an_activation_is_received(theirs):
    """Rank 0 posts a gradient and an activation; rank 1 posts the receives in the other order."""
    found = pp.run.record(theirs.forward_backward_pipelining_with_interleaving, 2, 4, chunks=2)
    first, last = texts(found)
    assert "(2SEND_B1;2RECV_F2;0SEND_F3;0RECV_B0)BATCH_P2P" in first
    assert "(1SEND_B0;1RECV_F3;1SEND_F2;1RECV_B1)BATCH_P2P" in last


def test_what_megatron_refuses_is_an_error(theirs):
    with pytest.raises(pp.SettingError, match=r"on rank 0: RuntimeError: The remainder of M"):
        pp.run.record(theirs.forward_backward_pipelining_with_interleaving, 4, 5, chunks=2)
    with pytest.raises(pp.SettingError, match="does not support overlapping p2p communication"):
        pp.run.record(theirs.forward_backward_pipelining_without_interleaving, 4, 4, overlap=True)
