"""Exchange messages between neighboring ranks; an assertion fails if one arrives that differs from the one sent."""

import numpy
import torch
import torch.distributed as dist

from ppedu.run import bidirectional_communicate, communicate

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
SHAPES = [(), (1,), (3, 5), (2, 0, 3), (2, 1, 2, 1, 2, 1, 2, 3)]


def tensor_of(rank, shape=(3, 5), dtype=torch.float32):
    """Return the tensor that `rank` sends, the same on every rank that makes it."""
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)
    return numbers > 0.5 if dtype == torch.bool else (numbers * 100).to(dtype)


def activations_go_to_the_next_rank_and_require_grad():
    x = communicate("recv_forward", shapes=(3, 5))
    assert communicate("send_forward", tensor_of(rank)) is None
    if rank == 0:
        assert x is None
    else:
        assert torch.equal(x, tensor_of(rank - 1)) and x.dtype == torch.float32 and x.requires_grad and x.is_leaf


def gradients_go_to_the_rank_before_and_do_not_require_grad():
    dy = communicate("recv_backward", shapes=(3, 5))
    assert communicate("send_backward", tensor_of(rank)) is None
    if rank == size - 1:
        assert dy is None
    else:
        assert torch.equal(dy, tensor_of(rank + 1)) and not dy.requires_grad


def a_swap_moves_activations_down_and_gradients_up_at_once():
    for first in (0, 1):  # every pair of neighbors once
        if rank % 2 == first:
            dy = bidirectional_communicate("send_fwd_recv_bwd", tensor_of(rank), (3, 5))
            assert dy is None if rank == size - 1 else torch.equal(dy, tensor_of(rank + 1)) and not dy.requires_grad
        else:
            x = bidirectional_communicate("send_bwd_recv_fwd", tensor_of(rank), (3, 5))
            assert x is None if rank == 0 else torch.equal(x, tensor_of(rank - 1)) and x.requires_grad


def every_dtype_arrives_in_every_shape_as_it_was_sent():
    for shape in SHAPES:
        for dtype in DTYPES:
            sent = tensor_of(0, shape, dtype)
            if rank == 0:
                communicate("send_forward", sent)
            else:
                x = communicate("recv_forward", shapes=shape, dtype=dtype)
                assert torch.equal(x, sent) and x.dtype == dtype and x.shape == shape
                assert x.requires_grad == dtype.is_floating_point


def a_shape_is_any_sequence_of_whole_numbers():
    for shape in ([3, 5], torch.Size([3, 5]), tuple(numpy.array([3, 5]))):
        if rank == 0:
            communicate("send_forward", tensor_of(0))
        else:
            assert torch.equal(communicate("recv_forward", shapes=shape), tensor_of(0))


def a_tensor_need_not_be_contiguous():
    x = tensor_of(0)
    for sent in (x.T, x[:, ::2], x[1:, 3], x[0].expand(4, 5)):
        assert not sent.is_contiguous()
        if rank == 0:
            communicate("send_forward", sent)
        else:
            assert torch.equal(communicate("recv_forward", shapes=sent.shape), sent)


def the_expected_dtype_is_torchs_default():
    torch.set_default_dtype(torch.float64)
    if rank == 0:
        communicate("send_forward", tensor_of(0, dtype=torch.float64))
    else:
        assert communicate("recv_forward", shapes=(3, 5)).dtype == torch.float64
    torch.set_default_dtype(torch.float32)


def a_backward_across_two_ranks_gives_autograds_gradients():
    w, v = tensor_of(7, (5, 4)).requires_grad_(), tensor_of(8, (4, 2)).requires_grad_()
    (((tensor_of(0) @ w).relu() @ v) ** 2).sum().backward()  # on one process
    expected = w.grad, v.grad
    w.grad = v.grad = None
    if rank == 0:
        y = (tensor_of(0) @ w).relu()
        communicate("send_forward", y)
        y.backward(communicate("recv_backward", shapes=(3, 4)))
        assert torch.equal(w.grad, expected[0])
    else:
        x = communicate("recv_forward", shapes=(3, 4))
        ((x @ v) ** 2).sum().backward()
        communicate("send_backward", x.grad)
        assert torch.equal(v.grad, expected[1])


def nothing_is_sent_where_there_is_no_neighbour():
    if rank == 0:
        assert communicate("send_backward", tensor_of(5)) is None
        assert bidirectional_communicate("send_bwd_recv_fwd", tensor_of(6), (3, 5)) is None
        communicate("send_forward", tensor_of(0))
    else:
        assert communicate("send_forward", tensor_of(5)) is None
        assert bidirectional_communicate("send_fwd_recv_bwd", tensor_of(6), (3, 5)) is None
        assert torch.equal(communicate("recv_forward", shapes=(3, 5)), tensor_of(0))


def big_tensors_are_swapped_without_waiting_for_each_other():
    shape = (4, 1024, 1024)  # 16 MB each way: more than any socket takes before the other side reads
    operation = "send_fwd_recv_bwd" if rank == 0 else "send_bwd_recv_fwd"
    assert torch.equal(bidirectional_communicate(operation, tensor_of(rank, shape), shape), tensor_of(1 - rank, shape))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
activations_go_to_the_next_rank_and_require_grad()
gradients_go_to_the_rank_before_and_do_not_require_grad()
a_swap_moves_activations_down_and_gradients_up_at_once()
if size == 2:
    every_dtype_arrives_in_every_shape_as_it_was_sent()
    a_shape_is_any_sequence_of_whole_numbers()
    a_tensor_need_not_be_contiguous()
    the_expected_dtype_is_torchs_default()
    a_backward_across_two_ranks_gives_autograds_gradients()
    nothing_is_sent_where_there_is_no_neighbour()
    big_tensors_are_swapped_without_waiting_for_each_other()
dist.barrier()  # rank 0 hosts the rendezvous, so it stays until all have ended
