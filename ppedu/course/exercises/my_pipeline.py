"""A training step over several processes: `torchrun --standalone --nproc-per-node=4 my_pipeline.py`."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss


# ---- hand-off (exercise 02.3)
def send(tensor, peer):
    """Send a tensor to rank `peer`; beyond the ends of the pipeline, do nothing."""
    if 0 <= peer < dist.get_world_size():
        dist.send(tensor.detach().contiguous(), peer)


def receive(shape, peer):
    """Return the tensor that rank `peer` sends; beyond the ends of the pipeline, None."""
    if 0 <= peer < dist.get_world_size():
        tensor = torch.empty(shape)
        dist.recv(tensor, peer)
        return tensor
    return None


def forward(stage, x):
    """Run a stage. Return two tensors: its input, as a leaf that keeps its gradient, and its output."""
    x = x.detach().requires_grad_()
    return x, stage(x)


def backward(x, y, dy):
    """Run a stage's backward from dy; dy is None if y is a loss. Return the gradient of its input."""
    y.backward(dy)
    return x.grad


# ---- GPipe (exercise 03.3)
def gpipe(stage, inputs, targets, shape, loss_fn):
    """Add up the gradients of all microbatches: all forwards, then all backwards."""
    rank, last, kept = dist.get_rank(), dist.get_world_size() - 1, []
    for m in range(len(inputs)):
        x = inputs[m] if rank == 0 else receive(shape, rank - 1)
        x, y = forward(stage, x)
        send(y, rank + 1)
        if rank == last:
            y = loss_fn(y, targets[m])
        kept.append((x, y))
    for x, y in kept:
        dy = receive(shape, rank + 1)
        send(backward(x, y, dy), rank - 1)


# ---- 1F1B (exercise 05.4)
def one_f_one_b(stage, inputs, targets, shape, loss_fn):
    """Do the same in the order of 1F1B: warm-up, a forward and a backward in turn, cooldown."""
    rank, last, kept = dist.get_rank(), dist.get_world_size() - 1, []
    warmup = min(last - rank, len(inputs))
    for m in range(len(inputs) + warmup):
        if m < len(inputs):
            x = inputs[m] if rank == 0 else receive(shape, rank - 1)
            x, y = forward(stage, x)
            send(y, rank + 1)
            if rank == last:
                y = loss_fn(y, targets[m])
            kept.append((x, y))
        if m >= warmup:
            dy = receive(shape, rank + 1)
            send(backward(*kept.pop(0), dy), rank - 1)


# ---- 1F1B (exercise 06.5)
def one_f_one_b(stage, inputs, targets, shape, loss_fn):
    """Do the same in the order of 1F1B: warm-up, a forward and a backward in turn, cooldown."""
    rank, last, kept = dist.get_rank(), dist.get_world_size() - 1, []
    warmup = min(last - rank, len(inputs))
    for m in range(len(inputs) + warmup):
        if m < len(inputs):
            x = inputs[m] if rank == 0 else receive(shape, rank - 1)
            x, y = forward(stage, x)
            if rank == last:
                y = loss_fn(y, targets[m])
            kept.append((x, y))
        if m >= warmup:
            dy = receive(shape, rank + 1)  # before the send, because the next rank is sending this
        if m < len(inputs):
            send(y, rank + 1)
        if m >= warmup:
            send(backward(*kept.pop(0), dy), rank - 1)


# ---- loss and norm (exercise 07.5)
def mean_loss(y, target, microbatches):
    """Return this microbatch's share of the mean `mse_loss` of all `microbatches`."""
    return mse_loss(y, target) / microbatches


def clip(weights, most):
    """Scale the gradients so that their norm over all ranks is at most `most`. Return the norm."""
    squares = sum(weight.grad.square().sum() for weight in weights)
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for weight in weights:
        weight.grad *= min(1, most / norm)
    return norm


# ---- any schedule (exercise 10.4)
def run(orders, stages, inputs, targets, shape, loss_fn):
    """Do what this rank's order says, whatever it says. stages: the rank's own, by number."""
    parts = [[part for action in order for part in action.singles] for order in orders]
    holder = {stage: rank for rank, order in enumerate(parts) for stage, *_ in order}
    arrived, kept = {}, {}  # what forwards (F) and backwards (B) will start from; what backwards need
    for stage, op, m, _ in parts[dist.get_rank()]:
        match op:
            case "F":
                x = arrived.pop(("F", stage, m)) if stage > 0 else inputs[m]
                x, y = forward(stages[stage], x)
                if stage == max(holder):
                    y = loss_fn(y, targets[m])
                kept[stage, m] = x, y
                arrived["F", stage + 1, m] = y
            case "B":
                dy = arrived.pop(("B", stage, m), None)
                arrived["B", stage - 1, m] = backward(*kept.pop((stage, m)), dy)
            case "I":  # the gradient of x alone
                (x, y), dy = kept[stage, m], arrived.pop(("B", stage, m), None)
                (arrived["B", stage - 1, m],) = torch.autograd.grad(y, x, dy, retain_graph=True)
                kept[stage, m] = y, dy
            case "W":  # the gradients of the weights
                y, dy = kept.pop((stage, m))
                y.backward(dy, inputs=list(stages[stage].parameters()))
            case "SEND_F":
                send(arrived.pop(("F", stage + 1, m)), holder[stage + 1])
            case "RECV_F":
                arrived["F", stage, m] = receive(shape, holder[stage - 1])
            case "SEND_B":
                send(arrived.pop(("B", stage - 1, m)), holder[stage - 1])
            case "RECV_B":
                arrived["B", stage, m] = receive(shape, holder[stage + 1])


# ---- my schedule (exercise 14.3)
import ppedu as pp


def mine(rank, ranks, microbatches):
    """Yield the actions of one rank, in order: further ahead than 1F1B, and with late Ws."""
    lead = ranks - rank + min(ranks // 2, ranks - rank - 1)
    delay = ranks + ranks // 2 - lead
    for m in range(lead):
        yield pp.F(rank, m)
    for m in range(microbatches):
        yield pp.I(rank, m)
        if m >= delay:
            yield pp.W(rank, m - delay)
        if lead + m < microbatches:
            yield pp.F(rank, lead + m)
    for m in range(microbatches - delay, microbatches):
        yield pp.W(rank, m)


# ---- training (exercise 14.3)
def train(steps=8, microbatches=8):
    """Train a small model with one stage on each rank. Print each loss, and the loss of one process beside it."""
    dist.init_process_group("gloo")
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    pp.register("mine")(mine)
    orders = pp.lower(pp.schedule("mine", ranks, microbatches), receive="late").orders

    torch.manual_seed(0)  # on every rank the same model and the same batch
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(ranks)])
    alone, (inputs, targets) = deepcopy(model), torch.randn(2, microbatches, 4, 16)
    weights = list(model[rank].parameters())
    optimizers = torch.optim.AdamW(weights, lr=0.01), torch.optim.AdamW(alone.parameters(), lr=0.01)

    def loss_fn(y, target):
        losses.append(mean_loss(y, target, microbatches))
        return losses[-1]

    for step in range(steps):
        losses.clear()
        run(orders, {rank: model[rank]}, inputs, targets, (4, 16), loss_fn)
        clip(weights, 1.0)
        here = sum(losses)

        losses.clear()
        for x, target in zip(inputs, targets, strict=True):
            loss_fn(alone(x), target).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        if rank == ranks - 1:
            print(f"step {step}: loss {here:.6f}, in one process {sum(losses):.6f}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
