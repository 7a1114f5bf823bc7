"""The step with pointers: it gives the gradients of the engine and of one process, and reports work left in a queue."""

import pytest

EVERY_STEP = """
import sys
import torch, torch.distributed as dist
import ppedu as pp
from ppedu.run import GPT, GPTConfig, Pipeline, next_token_loss
from ppedu.course.by_hand.pointer import Pending, PipelineBlock, pointer_step

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
config = GPTConfig(vocabulary=11, context=8, layers=8, heads=2, width=16)

def grads(module):
    return {name: weight.grad for name, weight in module.named_parameters()}

for microbatches in map(int, sys.argv[1:]):
    tokens = torch.randint(11, (2 * microbatches, 9), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1].split(2), tokens[:, 1:].split(2)

    whole, loss = GPT(config), torch.zeros(())
    for x, y in zip(inputs, targets, strict=True):  # on one process, one microbatch after the other
        one = next_token_loss(whole(x), y) / microbatches
        one.backward()
        loss += one.detach()
    expected = grads(whole)

    for order, name in (("afab", "gpipe"), ("1f1b", "1f1b")):
        engine = GPT.stage(config, rank, size)
        Pipeline(pp.schedule(name, size, microbatches), {rank: engine}, next_token_loss).step(
            tokens[:, :-1], tokens[:, 1:]
        )
        pending = Pending((2, 8, 16))
        pieces = range(2 * size)  # two blocks on each rank
        mine = {p: GPT.stage(config, p, len(pieces)) for p in pieces if p // 2 == rank}
        blocks = [PipelineBlock(mine.get(p), p // 2, pending) for p in pieces]
        for _ in range(2):  # twice: nothing of the first step is left in the second
            for piece in mine.values():
                piece.zero_grad()
            result = pointer_step(blocks, next_token_loss, inputs, targets, pending, order)
            found = {name: grad for piece in mine.values() for name, grad in grads(piece).items()}
            assert found.keys() == grads(engine).keys() and len(found) > 10
            for name, grad in found.items():
                assert torch.equal(grad, expected[name]), (order, name)
                assert torch.equal(grad, engine.get_parameter(name).grad), (order, name)
            assert result.item() == (loss.item() if rank == size - 1 else 0)
dist.barrier()
"""


@pytest.mark.parametrize(("size", "microbatches"), [(1, (2,)), (2, (1, 5)), (4, (1, 2, 4, 9))])
def test_gradients_equal_those_of_one_process_and_of_the_engine(ranks, size, microbatches):
    ranks(EVERY_STEP, size, *map(str, microbatches))


def test_work_left_in_a_queue_at_the_end_of_a_step_is_reported(ranks):
    output = ranks(
        """
        import torch, torch.distributed as dist
        from torch import nn
        from ppedu import PipelineError
        from ppedu.course.by_hand.pointer import Pending, PipelineBlock, pointer_step

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        pending = Pending((1, 3))
        blocks = [PipelineBlock(nn.Linear(3, 3) if rank == place else None, place, pending) for place in (0, 1)]
        if rank == 0:
            pending.backward = lambda: None  # as in a loop that forgets its backwards
        else:
            pending.do_all = lambda operation: None  # as in a loop that forgets to send the last gradients
        x = torch.ones(2, 1, 3)
        try:
            pointer_step(blocks, nn.functional.mse_loss, x, x, pending, "afab")
        except PipelineError as error:
            print(error)
        """,
        2,
    )
    assert [text.strip() for text in output] == [
        "rank 0 ends a step with work left to do: recv_backward of microbatch 0, recv_backward of microbatch 1, "
        "the backward of microbatch 0, the backward of microbatch 1; run it within the step",
        "rank 1 ends a step with work left to do: send_backward of microbatch 0, send_backward of microbatch 1; "
        "run it within the step",
    ]


REFUSED = [
    "unknown order 'gpipe'; available: afab, 1f1b",
    "the ranks of the blocks must go from 0 to 1 without a gap; got [1, 0]",
    "the ranks of the blocks must go from 0 to 1 without a gap; got [0]",
    "there is no rank 2; the ranks are 0 to 1",
]


def test_wrong_blocks_orders_and_inputs_are_refused(ranks):
    output = ranks(
        """
        import torch, torch.distributed as dist
        from torch import nn
        from ppedu import PipelineError
        from ppedu.course.by_hand.pointer import Pending, PipelineBlock, pointer_step

        dist.init_process_group("gloo")
        rank, pending, x = dist.get_rank(), Pending((1, 3)), torch.ones(1, 3)

        def block(place):
            return PipelineBlock(nn.Linear(3, 3) if rank == place else None, place, pending)

        for wrong in (
            lambda: pointer_step([block(0), block(1)], None, [x], [x], pending, "gpipe"),
            lambda: pointer_step([block(1), block(0)], None, [x], [x], pending),
            lambda: pointer_step([block(0)], None, [x], [x], pending),
            lambda: block(2),
            lambda: PipelineBlock(None, rank, pending),
            lambda: block(1 - rank)(x),
        ):
            try:
                print(wrong())
            except PipelineError as error:
                print(error)
        """,
        2,
    )
    for rank, text in enumerate(output):
        assert text.splitlines() == [
            *REFUSED,
            f"the block runs on rank {rank}, which is this one: pass its module here",
            f"the tensor for rank {1 - rank} does not require grad; every rank must have weights to train",
        ]
