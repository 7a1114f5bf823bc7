"""Messages between neighboring ranks: the right tensor arrives, and one of another shape or dtype is refused."""

import json
import re

import pytest
import torch
from cases import BEGIN

from ppedu import CommunicationError, SettingError
from ppedu.run import PipelineGroup, bidirectional_communicate, communicate

START = (
    BEGIN
    + """
from ppedu import PipelineError
from ppedu.run import bidirectional_communicate, communicate

def tensor_of(rank, shape=(3, 5), dtype=torch.float32):
    "The tensor that `rank` sends, the same on every rank that makes it."
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)
    return numbers > 0.5 if dtype == torch.bool else (numbers * 100).to(dtype)

"""
)


def program(text):
    """The program that the ranks run. Rank 0 hosts the rendezvous, so it stays until all have ended."""
    return f"{START}{text}\ndist.barrier()\n"


MESSAGES = """
import numpy

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
SHAPES = [(), (1,), (3, 5), (2, 0, 3), (2, 1, 2, 1, 2, 1, 2, 3)]

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
"""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensors_reach_the_neighbours_unchanged(ranks, size):
    ranks(program(MESSAGES), size)


@pytest.mark.parametrize("operation", ["recv_forward", "send_forward", "recv_backward", "send_backward"])
def test_a_single_process_has_no_neighbours(operation):
    assert communicate(operation, torch.ones(2), shapes=(2,)) is None


MISMATCHES = {
    "shape": ("(3, 4)", "float32", "(4, 3)", "float32"),
    "size": ("(3, 4)", "float32", "(3, 5)", "float32"),
    "dtype": ("(3, 4)", "float32", "(3, 4)", "float64"),
    "kind": ("(3, 4)", "int32", "(3, 4)", "float32"),
    "dtype and shape, of equal size in bytes": ("(4,)", "float64", "(8,)", "float32"),
    "dimensions": ("(6,)", "float32", "(2, 3)", "float32"),
    "scalar": ("()", "float32", "(1,)", "float32"),
}
SWAP = 'bidirectional_communicate("{}", tensor_of(0), {}, group=group)'
FORWARD, BACK = "send_fwd_recv_bwd", "send_bwd_recv_fwd"
EXPECTED = "{} on rank {}, from rank {}: expected torch.{} of shape {}, but"
# The receiver, its call, the sender's call, and the error.
RECEIVED = {
    "recv_backward": (
        0,
        'communicate("recv_backward", shapes=(7,), group=group)',
        'communicate("send_backward", tensor_of(1), group=group)',
        EXPECTED.format("recv_backward", 0, 1, "float32", (7,)),
    ),
    FORWARD: (
        0,
        SWAP.format(FORWARD, (7,)),
        SWAP.format(BACK, (3, 5)),
        EXPECTED.format(FORWARD, 0, 1, "float32", (7,)),
    ),
    BACK: (1, SWAP.format(BACK, (7,)), SWAP.format(FORWARD, (3, 5)), EXPECTED.format(BACK, 1, 0, "float32", (7,))),
}
for name, (shape, dtype, wanted, wanted_dtype) in MISMATCHES.items():
    RECEIVED[name] = (
        1,
        f'communicate("recv_forward", None, {wanted}, torch.{wanted_dtype}, group=group)',
        f'communicate("send_forward", tensor_of(0, {shape}, torch.{dtype}), group=group)',
        f"{EXPECTED.format('recv_forward', 1, 0, wanted_dtype, wanted)} torch.{dtype} of shape {shape} came",
    )


@pytest.fixture(scope="module")
def errors(ranks):
    """The error of each case, on its receiver. Each case has connections of its own, which its sender may wait on."""
    program = """
import threading

for name, (receiver, receive, send) in json.loads(sys.argv[1]).items():
    group = PipelineGroup(rank, size, dist.new_group())
    if rank == receiver:
        try:
            print(json.dumps([name, f"no error: {eval(receive)}"]))
        except PipelineError as error:
            print(json.dumps([name, f"{type(error).__name__}: {error}"]))
    else:
        threading.Thread(target=eval, args=(send, {**globals()}), daemon=True).start()
dist.barrier()
sys.stdout.flush()
os._exit(0)  # without waiting for the senders
"""
    output = ranks(START + program, 2, json.dumps({name: case[:3] for name, case in RECEIVED.items()}))
    return dict(json.loads(line) for text in output for line in text.splitlines() if line.startswith("["))


@pytest.mark.parametrize("case", RECEIVED)
def test_a_message_of_another_shape_or_dtype_is_refused(errors, case):
    assert errors[case].startswith(f"CommunicationError: {RECEIVED[case][3]}")


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


@pytest.fixture(scope="module")
def refusals(ranks):
    """The error that each wrong call gives on rank 0, while rank 1 calls nothing."""
    text = """
for name, call in json.loads(sys.argv[1]).items() if rank == 0 else ():
    try:
        print(json.dumps([name, f"no error: {eval(call)}"]))
    except PipelineError as error:
        print(json.dumps([name, f"{type(error).__name__}: {error}"]))
"""
    output = ranks(program(text), 2, json.dumps({name: call for name, (call, _) in REFUSED.items()}))
    return dict(map(json.loads, output[0].splitlines()))


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_before_anything_is_sent(refusals, case):
    assert re.match(f"SettingError: .*{REFUSED[case][1]}", refusals[case])


def test_several_ranks_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CommunicationError, match="init_process_group"):
        communicate("recv_forward", shapes=(2,))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0.5, 2), ("0", 1)])
def test_a_group_has_the_ranks_0_to_size_minus_1(rank, size):
    with pytest.raises(SettingError):
        PipelineGroup(rank, size)


def test_groups_of_some_ranks_exchange_messages_within_themselves(ranks):
    groups = [[2, 3], [1, 3], [0, 1, 3]]
    text = """
for members in json.loads(sys.argv[1]):
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

# Two groups at once do not mix their messages.
halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
group = PipelineGroup(rank // 2, 2, halves[rank % 2])
if group.is_first:
    dy = bidirectional_communicate("send_fwd_recv_bwd", tensor_of(rank), (3, 5), group=group)
    assert torch.equal(dy, tensor_of(rank + 2))
else:
    x = bidirectional_communicate("send_bwd_recv_fwd", tensor_of(rank), (3, 5), group=group)
    assert torch.equal(x, tensor_of(rank - 2))
"""
    output = ranks(program(text), 4, json.dumps(groups))
    for rank, text in enumerate(output):
        places = [(members.index(rank), len(members)) for members in groups if rank in members]
        assert text.splitlines() == [f"{own} {own == 0} {own == size - 1}" for own, size in places]


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
    os._exit(0)
"""
        ),
        2,
    )
    assert output[1].startswith("recv_forward on rank 1, from rank 0: expected torch.float32 of shape (7,)")
    sender = r"(send_forward on rank 0, to|recv_backward on rank 0, from) rank 1: the connection to rank 1 is lost;"
    assert re.match(sender, output[0]) and output[0].endswith("| RuntimeError\n")


DESTROY = """
lists = [None] * size
for _ in range(12):
    channel = dist.new_group()
    dist.all_gather_object(lists, list(range(500)), channel)
    dist.destroy_process_group(channel)
    del channel
"""


def test_process_groups_can_be_destroyed_right_after_their_last_message(ranks):
    ranks(program(DESTROY), 2)
