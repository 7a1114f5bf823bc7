"""Check a part of `my_pipeline.py` on real ranks, beside one process: the program that each rank runs.

Arguments: the number of the exercise; a folder with `cell.py`, the part, and `my_pipeline.py`, all other parts; and the
seconds that one case may take. A rank gives back {} if it has finished; {"time", "fault"} if something is wrong, where
the fault is a sentence; and {"waits"}, its `Location`, if a case takes longer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from traceback import extract_tb
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ppedu.core import PipelineError, Schedule, SettingError, lower
from ppedu.core.numeric import plural
from ppedu.course.exercises.common import learner_schedule, multiple_of, not_legal, with_sizes
from ppedu.launch.exchange import give_back
from ppedu.launch.hang import locate
from ppedu.zoo import schedule
from ppedu.zoo.registry import published

if TYPE_CHECKING:  # the package must import without torch
    from torch import Tensor
    from torch.nn import Module

SHAPE = (3, 4)  # of a microbatch, and of each message

_begun = time.monotonic()  # when the current case began
_report = threading.Lock()  # held by the thread that reports, so that the first report stays


Check = Callable[[Any, int, int], Iterator[str]]  # of the learner's program, rank and ranks; the first fault counts


class Trial(NamedTuple):
    """A model, a batch in microbatches, and the gradients that one process finds."""

    name: str
    stages: Sequence[Module]
    inputs: Tensor
    targets: Tensor
    gradients: list[list[list[Tensor]]]  # by microbatch and by stage, of each of the stage's weights

    def total(self, stage: int, weight: int, order: Sequence[int]) -> Tensor:
        """Return the gradient of a stage's weight over these microbatches, added up in this order."""
        first, *others = (self.gradients[m][stage][weight] for m in order)
        return sum(others, first.clone())


def case(ranks: int, microbatches: int, stages: int | None = None, name: str = "") -> Trial:
    """Return a case whose numbers depend on the sizes alone, so that all ranks have the same."""
    import torch
    from torch.nn import Linear, Sequential, Tanh
    from torch.nn.functional import mse_loss

    global _begun
    _begun = time.monotonic()
    torch.manual_seed(microbatches)
    model = Sequential(*[Sequential(Linear(4, 4), Tanh()) for _ in range(stages or ranks)])
    inputs, targets = torch.randn(2, microbatches, *SHAPE)
    gradients = []
    for x, target in zip(inputs, targets, strict=True):
        found = torch.autograd.grad(mse_loss(model(x), target), list(model.parameters()))
        gradients.append([list(found[2 * stage : 2 * stage + 2]) for stage in range(len(model))])
    return Trial(f"{name}{with_sizes(ranks, microbatches)}", list(model), inputs, targets, gradients)


def wrong_gradients(each: Trial, stage: int, order: Sequence[int]) -> Iterator[str]:
    """Yield how the gradients of a stage's weights differ from those of one process, which they equal bit for bit.

    Args:
        order: of the microbatches, in which the pipeline adds up their gradients.
    """
    import torch

    gradients = f"{each.name} the gradients of stage {stage}"
    for index, weight in enumerate(each.stages[stage].parameters()):
        right = each.total(stage, index, order)
        if weight.grad is None:
            yield f"{each.name} the weights of stage {stage} have no gradients: no backward has reached them"
        elif torch.equal(weight.grad, right):
            continue
        elif torch.allclose(weight.grad, right):
            why = "only up to rounding. Run the backwards in the order of the microbatches, as one process does"
            yield f"{gradients} equal those of one process, but {why}"
        else:
            times = multiple_of(weight.grad, right)
            scaled = f": they are {times} times as large; scale nothing here, not even the loss" if times else ""
            yield f"{gradients} differ from those of one process{scaled}"


def hand_off(my: Any, rank: int, ranks: int) -> Iterator[str]:
    """Take two microbatches down and back up, one after the other."""
    import torch
    from torch.nn.functional import mse_loss

    def named(value: Any) -> str:
        return "another tensor" if torch.is_tensor(value) else f"{value!r}"

    def same(value: Any, right: Tensor) -> bool:
        return torch.is_tensor(value) and torch.equal(value, right)

    each, last = case(ranks, 2), ranks - 1
    stage = each.stages[rank]
    for m in (0, 1):
        activations: list[Any] = [each.inputs[m].clone().requires_grad_()]  # in one process
        for module in deepcopy(list(each.stages)):
            activations.append(module(activations[-1]))
            activations[-1].retain_grad()
        mse_loss(activations[-1], each.targets[m]).backward()
        arrived = my.receive(SHAPE, rank - 1)
        if rank == 0 and arrived is not None:
            yield "on rank 0, `receive(shape, -1)` should return None: no rank comes before it"
        if rank > 0 and not same(arrived, activations[rank]):
            hint = ". That is what dist.recv returns; the message is in the tensor" if isinstance(arrived, int) else ""
            wanted = f"on rank {rank}, `receive` should return what rank {rank - 1} has sent"
            yield f"{wanted}; it returns {named(arrived)}{hint}"
        returned = my.forward(stage, each.inputs[m] if rank == 0 else arrived)
        if not (isinstance(returned, tuple) and len(returned) == 2 and all(map(torch.is_tensor, returned))):
            yield f"`forward` should return two tensors, x and the stage's output; it returns {returned!r}"
        x, y = returned
        if not same(y, activations[rank + 1]):
            yield "the second tensor that `forward` returns should be the stage's output, `stage(x)`"
        if not (x.requires_grad and x.is_leaf):
            yield (
                "the x that `forward` returns should be a leaf that requires grad, or no gradient will arrive in "
                "`x.grad`: make it one before the stage runs"
            )
        my.send(y, rank + 1)
        dy = my.receive(SHAPE, rank + 1)
        dx = my.backward(x, mse_loss(y, each.targets[m]) if rank == last else y, dy)
        if not same(dx, activations[rank].grad):
            yield f"`backward` should return the gradient of x, for the previous rank; it returns {named(dx)}"
        my.send(dx, rank - 1)
    yield from wrong_gradients(each, rank, (0, 1))
    weight = torch.ones(SHAPE, requires_grad=True)
    x, y = my.forward(stage, 2 * weight)
    my.backward(x, y, torch.ones(SHAPE))
    if weight.grad is not None:
        yield (
            "`forward` should cut x off from its history with `detach`: in lesson 9, a stage of the same rank may have "
            "made it"
        )


def loop(name: str, zoo: str, order: str, eager: bool = False) -> Check:
    """Return the check of the learner's loop `name`.

    Args:
        zoo: the schedule that it should follow; order: that schedule's name in prose.
        eager: sends return at once, as over a network that buffers messages.
    """

    def check(my: Any, rank: int, ranks: int) -> Iterator[str]:
        import torch.distributed as dist
        from torch.nn.functional import mse_loss

        sent: list[Any] = []  # requests, each with its tensor, which must live until it has arrived
        seen: list[str] = []
        late: list[int] = []  # microbatches whose activation is sent only after another's backward
        send = dist.send

        def noted(tensor: Tensor, dst: int) -> None:
            if dst == rank + 1 and seen[-1] == "B":
                late.append(seen.count("F") - 1)
            if eager:
                sent.append((dist.isend(tensor, dst), tensor))
            else:
                send(tensor, dst)

        def after(module: Any, inputs: Any, y: Tensor) -> None:
            seen.append("F")
            y.register_hook(lambda _: seen.append("B"))

        dist.send = noted  # type: ignore[assignment]
        for microbatches in (1, 2, 6):
            each = case(ranks, microbatches)
            seen.clear()
            each.stages[rank].register_forward_hook(after)
            getattr(my, name)(each.stages[rank], each.inputs, each.targets, SHAPE, mse_loss)
            while sent:
                sent.pop()[0].wait()
            right = [str(action.op) for action in schedule(zoo, ranks, microbatches).orders[rank]]
            if sorted(seen) != sorted(right):
                runs = f"{plural(seen.count('F'), 'forward')} and {plural(seen.count('B'), 'backward')}"
                yield f"{each.name} rank {rank} runs {runs}; every microbatch needs one of each"
            yield from wrong_gradients(each, rank, range(microbatches))
            if late:
                yield (
                    f"{each.name} nothing hangs, but rank {rank} sends the activation of microbatch {late[0]} only "
                    f"after a backward, and rank {rank + 1} waits for that. Send it before"
                )
            if seen != right:
                runs = f"rank {rank} runs {' '.join(seen)}; {order} is {' '.join(right)}"
                yield f"{each.name} the gradients are right, but {runs}"

    return check


def loss_and_norm(my: Any, rank: int, ranks: int) -> Iterator[str]:
    """Compare the shares of four microbatches with their mean, and the clipped gradients with those of one process."""
    import torch
    from torch.nn.functional import mse_loss

    each = case(ranks, 4)
    shares = [my.mean_loss(x, target, 4) for x, target in zip(each.inputs, each.targets, strict=True)]
    if not all(map(torch.is_tensor, shares)):
        yield f"`mean_loss` should return a microbatch's share, a tensor; got {shares[0]!r}"
    mean = mse_loss(each.inputs, each.targets)
    if not torch.allclose(sum(shares), mean):
        yield (
            "the shares that `mean_loss` returns for the four microbatches of a batch should add up to the mean loss "
            f"of the batch, {mean:.4f}; they add up to {sum(shares):.4f}"
        )
    weights: list[list[Any]] = [list(stage.parameters()) for stage in each.stages]

    def norm_here() -> float:
        return float(torch.stack([weight.grad.norm() for weight in weights[rank]]).norm())

    for most in (0.01, 100.0):
        gradients = [[each.total(stage, index, range(4)) for index in (0, 1)] for stage in range(ranks)]
        norm = float(torch.stack([gradient.norm() for own in gradients for gradient in own]).norm())
        for weight, gradient in zip(weights[rank], gradients[rank], strict=True):
            weight.grad = gradient
        before = norm_here()
        returned = my.clip(weights[rank], most)
        scaled, scale = norm_here() / before, min(1, most / norm)
        if abs(scaled - scale) > 1e-3 * scale:
            fault = (
                f"the norm over all ranks is {norm:.4f}, and {most:g} is allowed, so every gradient should be scaled "
                f"by {scale:.4g}; rank {rank} scales by {scaled:.4g}"
            )
            alone = abs(scaled - min(1, most / before)) < 1e-3 * scale
            yield fault + ". That would be right if its own stage were all" * alone
        if returned is None or abs(float(returned) - norm) > 1e-3 * norm:
            yield f"`clip` should return the norm before clipping, {norm:.4f}; it returns {returned!r}"


def any_schedule(my: Any, rank: int, ranks: int) -> Iterator[str]:
    """Run every published schedule with one copy of the model, whole sequences, no R and no U, at a small size."""
    for name in published():
        for microbatches in (ranks, 2 * ranks, 4 * ranks):
            try:
                found = schedule(name, ranks, microbatches)
            except SettingError:  # it does not exist for this size
                continue
            if found.plain and found.placement.copies == 1:
                yield from follow(my, found, f"{name} ")
            break


def follow(my: Any, found: Schedule, name: str = "") -> Iterator[str]:
    """Let the learner's interpreter run a schedule."""
    import torch.distributed as dist
    from torch.nn.functional import mse_loss

    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = case(ranks, found.microbatches, found.stages, name)
    stages = {stage: module for stage, module in enumerate(each.stages) if found.placement.rank(stage, 0) == rank}
    my.run(lower(found, receive="late").orders, stages, each.inputs, each.targets, SHAPE, mse_loss)
    parts = [part for action in found.orders[rank] for part in action.singles]
    for stage in stages:
        yield from wrong_gradients(each, stage, [m for at, op, m, _ in parts if at == stage and op in ("B", "W")])


def own_schedule(my: Any, rank: int, ranks: int) -> Iterator[str]:
    for size in ((2, 8), (ranks, 2 * ranks)):  # the lesson runs it on two ranks
        found = learner_schedule(my.mine, *size)
        if fault := not_legal(found, with_sizes(*size)):
            yield fault
    yield from follow(my, found)


class PartCheck(NamedTuple):
    """The number of ranks, and the check that runs on each of them."""

    ranks: int
    run: Check


CHECKS = {
    "02.3": PartCheck(3, hand_off),
    "03.3": PartCheck(3, loop("gpipe", "gpipe", "GPipe")),
    "05.4": PartCheck(4, loop("one_f_one_b", "1f1b", "1F1B", eager=True)),
    "06.5": PartCheck(4, loop("one_f_one_b", "1f1b", "1F1B")),
    "07.5": PartCheck(3, loss_and_norm),
    "10.4": PartCheck(4, any_schedule),
    "14.3": PartCheck(4, own_schedule),
}


def main() -> None:
    import torch.distributed as dist

    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the check explains it
    number, folder, limit = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    files = [str(folder / "my_pipeline.py"), str(folder / "cell.py")]
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    threading.Thread(target=watch, args=(rank, files, limit), daemon=True).start()
    try:
        names: dict[str, Any] = {"__name__": "my_pipeline"}
        for file in files:
            exec(compile(Path(file).read_text(encoding="utf-8"), file, "exec"), names)
        for fault in CHECKS[number].run(SimpleNamespace(**names), rank, ranks):
            raise SettingError(fault)
    except Exception as error:
        with _report:
            whose = f"rank {rank}, the last of {ranks}," if rank == ranks - 1 else f"rank {rank}"
            give_back({"time": time.monotonic(), "fault": described(error, whose, files)})
        sys.exit(1)
    give_back({})
    dist.destroy_process_group()


def described(error: Exception, rank: str, files: Sequence[str]) -> str:
    """Return the fault of a rank as a sentence; an error in the learner's code with its line."""
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename in files]
    if isinstance(error, PipelineError) and not frames:
        return str(error)
    text = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
    if not frames:
        return f"{rank} fails: {text}"
    if "Pair is not connected" in text:  # gloo's way to say it
        text = "a rank cannot send to itself, or receive from itself"
    if "only for scalar outputs" in text:
        text += ". A backward needs a gradient to start from, unless it starts from a loss"
    where = ([frame for frame in frames if frame.filename == files[1]] or frames)[-1]
    return f"{rank} fails in `{where.name}`, at `{where.line}`: {text}"


def watch(rank: int, files: Sequence[str], limit: float) -> None:
    """Report the location of the main thread, and end the process, if a case takes longer than `limit` seconds."""
    while time.monotonic() < _begun + limit:
        time.sleep(0.1)
    with _report:
        places = [locate(rank, file) for file in files]
        give_back({"waits": tuple(places[1] if places[1].line else places[0])})
        time.sleep(0.5)  # its end would free the ranks that wait for it, before they have reported
        os._exit(1)


if __name__ == "__main__":
    main()
