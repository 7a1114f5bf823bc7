"""The hand-written training steps, compared with autograd on one process and with torch's own pipelining."""

import functools
import inspect
import json

import pytest
from releases import needs

import ppedu as pp
from ppedu.engine.ranks.versions import TORCHS_STEP
from ppedu.run import LOOPS

LAYERS = 5  # 4 stages of unequal size

EVERY_STEP = """
import json, sys
import torch, torch.distributed as dist
from ppedu.run import GPT, LOOPS, GPTConfig, Stage, next_token_loss

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
config = GPTConfig(vocabulary=11, context=8, layers=int(sys.argv[1]), heads=2, width=16)

for microbatches in map(int, sys.argv[2:]):
    tokens = torch.randint(11, (2 * microbatches, 9), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1].split(2), tokens[:, 1:].split(2)

    whole, loss = GPT(config), torch.zeros(())
    for x, y in zip(inputs, targets, strict=True):  # on one process, one microbatch after the other
        one = next_token_loss(whole(x), y) / microbatches
        one.backward()
        loss += one.detach()
    expected = {name: weight.grad for name, weight in whole.named_parameters()}

    at_once = GPT(config)
    next_token_loss(at_once(tokens[:, :-1]), tokens[:, 1:]).backward()

    for name, step in LOOPS.items():
        stage = Stage(GPT.stage(config, rank, size), rank, next_token_loss if rank == size - 1 else None)
        result = step(stage, inputs, targets, (2, 8, 16))
        grads = {key: weight.grad for key, weight in stage.module.named_parameters()}
        report = {
            "loop": name,
            "microbatches": microbatches,
            "weights": list(grads),
            "wrong": [key for key, grad in grads.items() if not torch.equal(grad, expected[key])],
            "unlike the whole batch": [
                key for key, grad in grads.items()
                if not torch.allclose(grad, at_once.get_parameter(key).grad, rtol=1e-4, atol=1e-7)
            ],
            "loss": result.item(),
            "expected loss": loss.item() if rank == size - 1 else 0,
            "order": [str(span.action) for span in stage.clock.spans()],
            "held": list(stage.held),
        }
        print(json.dumps(report))
dist.barrier()
"""

MICROBATCHES = {1: (1, 3), 2: (1, 2, 5), 4: (1, 2, 3, 4, 6, 9)}
CASES = [(size, loop) for size in MICROBATCHES for loop in LOOPS]


@pytest.fixture(scope="module")
def reports(ranks):
    """`reports(size, loop)` yields numbers of microbatches, and each rank's report. One launch for each size."""

    @functools.cache
    def launched(size):
        output = ranks(EVERY_STEP, size, str(LAYERS), *map(str, MICROBATCHES[size]))
        return [[json.loads(line) for line in text.splitlines()] for text in output]

    def select(size, loop):
        for count in MICROBATCHES[size]:
            wanted = [
                [report for report in rank if (report["loop"], report["microbatches"]) == (loop, count)]
                for rank in launched(size)
            ]
            yield count, [report for (report,) in wanted]

    return select


@pytest.mark.parametrize(("size", "loop"), CASES)
def test_gradients_equal_those_of_one_process_bit_for_bit(reports, size, loop):
    for count, found in reports(size, loop):
        assert [report["wrong"] for report in found] == [[]] * size, count
        # Every weight of the model has been compared, on exactly one rank.
        weights = [name for report in found for name in report["weights"]]
        assert sorted(weights) == sorted(set(weights)) and {name.split(".")[1] for name in weights} >= set("01234")


@pytest.mark.parametrize(("size", "loop"), CASES)
def test_gradients_are_those_of_the_undivided_batch(reports, size, loop):
    for count, found in reports(size, loop):
        assert [report["unlike the whole batch"] for report in found] == [[]] * size, count


@pytest.mark.parametrize(("size", "loop"), CASES)
def test_only_the_last_rank_returns_the_loss(reports, size, loop):
    for count, found in reports(size, loop):
        for rank, report in enumerate(found):
            assert report["loss"] == report["expected loss"], count
            assert (report["loss"] > 0) == (rank == size - 1), count


@pytest.mark.parametrize(("size", "loop"), CASES)
def test_actions_run_in_the_order_of_the_schedule(reports, size, loop):
    for count, found in reports(size, loop):
        orders = [report["order"] for report in found]
        if loop in pp.schedules():
            assert orders == [list(map(str, order)) for order in pp.schedule(loop, size, count).orders]
        if loop == "naive":
            assert orders == [[f"{r}{op}{m}" for m in range(count) for op in "FB"] for r in range(size)]


@pytest.mark.parametrize(("size", "loop"), CASES)
def test_nothing_stays_in_flight(reports, size, loop):
    for count, found in reports(size, loop):
        assert [report["held"] for report in found] == [[]] * size, count


def test_the_loops_have_the_names_used_in_the_lessons():
    assert list(LOOPS) == ["naive", "gpipe", "1f1b"] and {"gpipe", "1f1b"} <= set(pp.schedules())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_fits_on_a_slide(loop):
    assert len(inspect.getsourcelines(LOOPS[loop])[0]) < 40


@needs(TORCHS_STEP)
@pytest.mark.parametrize(("loop", "theirs"), [("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")])
def test_torchs_own_pipelining_gives_the_same_gradients(ranks, loop, theirs):
    ranks(
        f"""
        import torch, torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, {theirs}
        from ppedu.run import GPT, LOOPS, GPTConfig, Stage, next_token_loss

        dist.init_process_group("gloo")
        rank, size, microbatches = dist.get_rank(), dist.get_world_size(), 4
        config = GPTConfig(vocabulary=11, context=8, layers=4, heads=2, width=16)
        tokens = torch.randint(11, (2 * microbatches, 9), generator=torch.Generator().manual_seed(3))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

        theirs = GPT.stage(config, rank, size)
        schedule = {theirs}(
            PipelineStage(theirs, rank, size, torch.device("cpu")), microbatches, loss_fn=next_token_loss
        )
        schedule.step(*[inputs] * (rank == 0), target=targets if rank == size - 1 else None)

        ours = GPT.stage(config, rank, size)
        stage = Stage(ours, rank, next_token_loss if rank == size - 1 else None)
        LOOPS[{loop!r}](stage, inputs.split(2), targets.split(2), (2, 8, 16))
        for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(weight.grad, other.grad, rtol=0, atol=1e-6), name
            assert weight.grad.abs().max() > 1e-4, name
        dist.barrier()
        """,
        2,
    )


def test_two_pipelines_run_side_by_side(ranks):
    ranks(
        """
        import torch, torch.distributed as dist
        from torch import nn
        from ppedu.run import LOOPS, PipelineGroup, Stage

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = PipelineGroup(rank % 2, 2, halves[rank // 2])
        generator = torch.Generator().manual_seed(rank // 2)  # each pipeline has data of its own
        inputs, targets = torch.rand(2, 3, 4, 6, generator=generator)

        def make(stage):
            torch.manual_seed(stage)
            return nn.Linear(6, 6)

        whole = nn.Sequential(make(0), make(1))
        for x, y in zip(inputs, targets, strict=True):
            (nn.functional.mse_loss(whole(x), y) / 3).backward()
        for step in LOOPS.values():
            stage = Stage(make(group.rank), group.rank, nn.functional.mse_loss if group.is_last else None)
            step(stage, inputs, targets, (4, 6), group)
            assert torch.equal(stage.module.weight.grad, whole[group.rank].weight.grad)
        dist.barrier()
        """,
        4,
    )


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_receives_comes_to_the_device_of_its_stage(monkeypatch, name):
    """gloo receives on the CPU. A module on torch's meta device refuses tensors that are elsewhere, as one on a GPU."""
    import torch

    from ppedu.course.by_hand import loops
    from ppedu.run import PipelineGroup, Stage

    def arriving(operation, *given, device=None, **named):
        return torch.ones(4, 8, device=device, requires_grad="recv" in operation)

    monkeypatch.setattr(loops, "communicate", arriving)
    monkeypatch.setattr(loops, "bidirectional_communicate", arriving)
    monkeypatch.setattr(PipelineGroup, "__post_init__", lambda group: None)  # the middle of three ranks, in one process
    stage = Stage(torch.nn.Linear(8, 8, device="meta"), 1)
    LOOPS[name](stage, [None] * 3, [None] * 3, (4, 8), PipelineGroup(1, 3))
    assert stage.module.weight.grad.is_meta and not stage.held
