"""Messages between neighbouring ranks: the right tensor arrives, and one of another shape or dtype is refused."""

import re

import pytest
import torch

from ppedu import CommunicationError, PipelineError, RankError, SettingError
from ppedu.run import PipelineGroup, bidirectional_communicate, communicate

START = """
import torch, torch.distributed as dist
from ppedu import PipelineError
from ppedu.run import PipelineGroup, bidirectional_communicate, communicate

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def tensor_of(rank, shape=(3, 5), dtype=torch.float32):
    "The tensor that `rank` sends, the same on every rank that makes it."
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)
    return numbers > 0.5 if dtype == torch.bool else (numbers * 100).to(dtype)

"""


def program(text):
    """The program that the ranks run. Rank 0 hosts the rendezvous, so it stays until all have ended."""
    return f"{START}{text}\ndist.barrier()\n"


DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
SHAPES = [(), (1,), (3, 5), (2, 0, 3), (2, 1, 2, 1, 2, 1, 2, 3)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_activations_go_to_the_next_rank_and_require_grad(ranks, size):
    ranks(
        program("""
x = communicate("recv_forward", shapes=(3, 5))
assert communicate("send_forward", tensor_of(rank)) is None
if rank == 0:
    assert x is None
else:
    assert torch.equal(x, tensor_of(rank - 1)) and x.dtype == torch.float32 and x.requires_grad and x.is_leaf
"""),
        size,
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_go_to_the_rank_before_and_do_not_require_grad(ranks, size):
    ranks(
        program("""
dy = communicate("recv_backward", shapes=(3, 5))
assert communicate("send_backward", tensor_of(rank)) is None
if rank == size - 1:
    assert dy is None
else:
    assert torch.equal(dy, tensor_of(rank + 1)) and not dy.requires_grad
"""),
        size,
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_swap_moves_activations_down_and_gradients_up_at_once(ranks, size):
    ranks(
        program("""
for first in (0, 1):  # every pair of neighbours once
    if rank % 2 == first:
        dy = bidirectional_communicate("send_fwd_recv_bwd", tensor_of(rank), (3, 5))
        assert dy is None if rank == size - 1 else torch.equal(dy, tensor_of(rank + 1)) and not dy.requires_grad
    else:
        x = bidirectional_communicate("send_bwd_recv_fwd", tensor_of(rank), (3, 5))
        assert x is None if rank == 0 else torch.equal(x, tensor_of(rank - 1)) and x.requires_grad
"""),
        size,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_every_dtype_arrives_as_it_was_sent(ranks, shape):
    ranks(
        program(f"""
for dtype in [{", ".join(f"torch.{dtype}" for dtype in DTYPES)}]:
    sent = tensor_of(0, {shape}, dtype)
    if rank == 0:
        communicate("send_forward", sent)
    else:
        x = communicate("recv_forward", shapes={shape}, dtype=dtype)
        assert torch.equal(x, sent) and x.dtype == dtype and x.shape == {shape}
        assert x.requires_grad == dtype.is_floating_point
"""),
        2,
    )


@pytest.mark.parametrize("shape", ["[3, 5]", "torch.Size([3, 5])", "tuple(numpy.array([3, 5]))"])
def test_a_shape_is_any_sequence_of_whole_numbers(ranks, shape):
    call = f"""
import numpy
if rank == 0:
    communicate("send_forward", tensor_of(0))
else:
    assert torch.equal(communicate("recv_forward", shapes={shape}), tensor_of(0))
"""
    ranks(program(call), 2)


@pytest.mark.parametrize("view", ["x.T", "x[:, ::2]", "x[1:, 3]", "x[0].expand(4, 5)"])
def test_a_tensor_need_not_be_contiguous(ranks, view):
    ranks(
        program(f"""
x = tensor_of(0)
sent = {view}
assert not sent.is_contiguous()
if rank == 0:
    communicate("send_forward", sent)
else:
    assert torch.equal(communicate("recv_forward", shapes=sent.shape), sent)
"""),
        2,
    )


def test_the_expected_dtype_is_torchs_default(ranks):
    ranks(
        program("""
torch.set_default_dtype(torch.float64)
if rank == 0:
    communicate("send_forward", tensor_of(0, dtype=torch.float64))
else:
    assert communicate("recv_forward", shapes=(3, 5)).dtype == torch.float64
"""),
        2,
    )


def test_a_backward_across_two_ranks_gives_autograds_gradients(ranks):
    ranks(
        program("""
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
"""),
        2,
    )


def test_nothing_is_sent_where_there_is_no_neighbour(ranks):
    ranks(
        program("""
if rank == 0:
    assert communicate("send_backward", tensor_of(5)) is None
    assert bidirectional_communicate("send_bwd_recv_fwd", tensor_of(6), (3, 5)) is None
    communicate("send_forward", tensor_of(0))
else:
    assert communicate("send_forward", tensor_of(5)) is None
    assert bidirectional_communicate("send_fwd_recv_bwd", tensor_of(6), (3, 5)) is None
    assert torch.equal(communicate("recv_forward", shapes=(3, 5)), tensor_of(0))
"""),
        2,
    )


@pytest.mark.parametrize("operation", ["recv_forward", "send_forward", "recv_backward", "send_backward"])
def test_a_single_process_has_no_neighbours(operation):
    assert communicate(operation, torch.ones(2), shapes=(2,)) is None


def test_big_tensors_are_swapped_without_waiting_for_each_other(ranks):
    ranks(
        program("""
shape = (4, 1024, 1024)  # 16 MB each way: more than any socket takes before the other side reads
if rank == 0:
    assert torch.equal(bidirectional_communicate("send_fwd_recv_bwd", tensor_of(0, shape), shape), tensor_of(1, shape))
else:
    assert torch.equal(bidirectional_communicate("send_bwd_recv_fwd", tensor_of(1, shape), shape), tensor_of(0, shape))
"""),
        2,
    )


MISMATCHES = {
    "shape": ("(3, 4)", "float32", "(4, 3)", "float32"),
    "size": ("(3, 4)", "float32", "(3, 5)", "float32"),
    "dtype": ("(3, 4)", "float32", "(3, 4)", "float64"),
    "kind": ("(3, 4)", "int32", "(3, 4)", "float32"),
    "dtype and shape, of equal size in bytes": ("(4,)", "float64", "(8,)", "float32"),
    "dimensions": ("(6,)", "float32", "(2, 3)", "float32"),
    "scalar": ("()", "float32", "(1,)", "float32"),
}


@pytest.mark.parametrize(("shape", "dtype", "wanted", "wanted_dtype"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_message_of_another_shape_or_dtype_is_refused(ranks, shape, dtype, wanted, wanted_dtype):
    with pytest.raises(RankError) as caught:
        ranks(
            program(f"""
if rank == 0:
    communicate("send_forward", tensor_of(0, {shape}, torch.{dtype}))
else:
    print("garbage:", communicate("recv_forward", shapes={wanted}, dtype=torch.{wanted_dtype}))
"""),
            2,
        )
    message = str(caught.value)
    assert message.startswith("rank 1 failed")
    assert (
        f"CommunicationError: recv_forward on rank 1, from rank 0: expected torch.{wanted_dtype} of shape {wanted}, "
        f"but torch.{dtype} of shape {shape} came" in message
    )


@pytest.mark.parametrize(
    ("receive", "send", "receiver"),
    [
        ('communicate("recv_backward", shapes=(7,))', 'communicate("send_backward", tensor_of(1))', 0),
        (
            'bidirectional_communicate("send_fwd_recv_bwd", tensor_of(0), (7,))',
            'bidirectional_communicate("send_bwd_recv_fwd", tensor_of(1), (3, 5))',
            0,
        ),
        (
            'bidirectional_communicate("send_bwd_recv_fwd", tensor_of(1), (7,))',
            'bidirectional_communicate("send_fwd_recv_bwd", tensor_of(0), (3, 5))',
            1,
        ),
    ],
)
def test_every_receiving_operation_refuses_another_shape(ranks, receive, send, receiver):
    with pytest.raises(RankError) as caught:
        ranks(program(f"if rank == {receiver}:\n    {receive}\nelse:\n    {send}"), 2)
    expected = f"on rank {receiver}, from rank {1 - receiver}: expected torch.float32 of shape (7,)"
    assert str(caught.value).startswith(f"rank {receiver} failed")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("function", "operation", "instead"),
    [
        (communicate, "recv", "recv_forward, send_forward, recv_backward, send_backward"),
        (communicate, "send_fwd_recv_bwd", "recv_forward"),
        (communicate, None, "recv_forward"),
        (bidirectional_communicate, "send_forward", "send_fwd_recv_bwd, send_bwd_recv_fwd"),
        (bidirectional_communicate, "", "send_fwd_recv_bwd"),
    ],
)
def test_an_unknown_operation_is_refused_and_the_known_ones_are_listed(function, operation, instead):
    with pytest.raises(SettingError, match=f"unknown operation {operation!r}; available: {instead}"):
        function(operation, torch.ones(2), (2,))


REFUSED = {
    "no tensor": ('communicate("send_forward")', "send_forward on rank 0 needs a tensor"),
    "a number": ('communicate("send_forward", 5)', "needs a tensor to send; got 5"),
    "no shape": ('communicate("recv_backward")', "recv_backward on rank 0 needs the shape"),
    "swap, no tensor": ('bidirectional_communicate("send_fwd_recv_bwd", None, (2,))', "needs a tensor"),
    "swap, no shape": ('bidirectional_communicate("send_fwd_recv_bwd", tensor_of(0), None)', "needs the shape"),
    "complex": ('communicate("send_forward", tensor_of(0).to(torch.complex64))', "torch.complex64"),
    "9 dimensions": ('communicate("send_forward", tensor_of(0, (1,) * 9))', "9-dimensional"),
    "negative size": ('communicate("recv_backward", shapes=(-1, 2))', r"shape.*\(-1, 2\)"),
    "fraction": ('communicate("recv_backward", shapes=(2.5,))', r"shape.*\(2\.5,\)"),
    "not a shape": ('communicate("recv_backward", shapes=3)', "shape.*3"),
}


@pytest.mark.parametrize(("call", "says"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused_before_anything_is_sent(ranks, call, says):
    with pytest.raises(RankError, match=f"rank 0 failed(?s:.*)SettingError: .*{says}"):
        ranks(program(f"if rank == 0:\n    {call}"), 2)


def test_several_ranks_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CommunicationError, match="init_process_group"):
        communicate("recv_forward", shapes=(2,))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0.5, 2), ("0", 1)])
def test_a_group_has_the_ranks_0_to_size_minus_1(rank, size):
    with pytest.raises(SettingError):
        PipelineGroup(rank, size)


@pytest.mark.parametrize("members", ["[2, 3]", "[1, 3]", "[0, 1, 3]"])
def test_a_group_of_some_ranks_exchanges_messages_within_itself(ranks, members):
    output = ranks(
        program(f"""
members = {members}
process_group = dist.new_group(members)
if rank in members:
    own = members.index(rank)
    group = PipelineGroup(own, len(members), process_group)
    x = communicate("recv_forward", shapes=(3, 5), group=group)
    communicate("send_forward", tensor_of(rank), group=group)
    dy = communicate("recv_backward", shapes=(3, 5), group=group)
    communicate("send_backward", tensor_of(rank), group=group)
    assert x is None if own == 0 else torch.equal(x, tensor_of(members[own - 1]))
    assert dy is None if own == len(members) - 1 else torch.equal(dy, tensor_of(members[own + 1]))
    print(own, group.is_first, group.is_last)
"""),
        4,
    )
    members = eval(members)
    for rank, text in enumerate(output):
        own = members.index(rank) if rank in members else None
        assert text == (f"{own} {own == 0} {own == len(members) - 1}\n" if rank in members else "")


def test_two_groups_at_once_do_not_mix_their_messages(ranks):
    ranks(
        program("""
halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
group = PipelineGroup(rank // 2, 2, halves[rank % 2])
if group.is_first:
    dy = bidirectional_communicate("send_fwd_recv_bwd", tensor_of(rank), (3, 5), group=group)
    assert torch.equal(dy, tensor_of(rank + 2))
else:
    x = bidirectional_communicate("send_bwd_recv_fwd", tensor_of(rank), (3, 5), group=group)
    assert torch.equal(x, tensor_of(rank - 2))
"""),
        4,
    )


@pytest.mark.parametrize(("rank", "size"), [("1 - rank", 2), ("rank", 4)], ids=["reversed", "too large"])
def test_a_group_that_contradicts_its_process_group_works_or_is_refused(ranks, rank, size):
    call = f"""
try:
    group = PipelineGroup({rank}, {size}, dist.new_group([0, 1]))
    if group.rank == 0:
        communicate("send_forward", tensor_of(0), group=group)
    else:
        assert torch.equal(communicate("recv_forward", shapes=(3, 5), group=group), tensor_of(0))
        communicate("send_forward", tensor_of(0), group=group)
except PipelineError:
    pass
"""
    ranks(program(call), 2)


def test_the_errors_are_pipeline_errors():
    assert issubclass(CommunicationError, PipelineError) and issubclass(SettingError, PipelineError)


def test_the_sender_of_a_refused_message_gets_a_communication_error(ranks):
    output = ranks(
        program(
            """
try:
    if rank == 0:
        communicate("send_forward", torch.ones(3, 50_000))
        communicate("recv_backward", shapes=(3, 50_000))
    else:
        communicate("recv_forward", shapes=(7,))
except PipelineError as error:
    print(f"{error} | {type(error.__cause__).__name__}", flush=True)
    dist.destroy_process_group()
    import os
    os._exit(0)
"""
        ),
        2,
    )
    assert output[1].startswith("recv_forward on rank 1, from rank 0: expected torch.float32 of shape (7,)")
    sender = r"(send_forward on rank 0, to|recv_backward on rank 0, from) rank 1: the connection to rank 1 is lost;"
    assert re.match(sender, output[0]) and output[0].endswith("| RuntimeError\n")
