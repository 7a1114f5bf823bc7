"""A wrong argument of a function of `pp.run` works, or raises an error of this package."""

from pathlib import Path

import numpy as np
import pytest
import torch

import ppedu as pp
from ppedu import run

SCHEDULE = pp.schedule("1f1b", 1, 2)
LAYER = torch.nn.Linear(2, 2)
X = torch.ones(4, 2)
CONFIG = run.GPTConfig(vocabulary=5)
WRONG = [
    *[None, "abc", "4", b"x", Path("x"), 3, -1, 2.5, True, float("nan"), object(), print],
    *[[], [1, 2], (1,), {}, {"a": 1}, np.array([1, 2]), np.int64(3), torch.ones(2), torch.tensor(2), torch.float32],
    *[SCHEDULE, pp.simulate(SCHEDULE), LAYER, CONFIG],
]


def pipeline(**given):
    return run.Pipeline(SCHEDULE, {0: LAYER}, torch.nn.functional.mse_loss, **given)


def with_handler(op, handler):
    made = pipeline()
    made.on(op, handler)
    made.step(X, X)


CALLS = {
    "communicate, operation": lambda wrong: run.communicate(wrong),
    "communicate, tensor": lambda wrong: run.communicate("send_forward", wrong),
    "communicate, shapes": lambda wrong: run.communicate("recv_forward", shapes=wrong),
    "communicate, group": lambda wrong: run.communicate("recv_forward", shapes=(1,), group=wrong),
    "bidirectional_communicate": lambda wrong: run.bidirectional_communicate("send_fwd_recv_bwd", wrong, wrong),
    "emulate, schedule": lambda wrong: run.emulate(wrong, pp.Costs(0.001, 0.001)),
    "emulate, costs": lambda wrong: run.emulate(SCHEDULE, wrong),
    "GPT": lambda wrong: run.GPT(wrong),
    "GPT.stage": lambda wrong: run.GPT.stage(CONFIG, wrong, 2),
    "GPTConfig": lambda wrong: run.GPTConfig(wrong),
    "local_stages, schedule": lambda wrong: run.local_stages(wrong, 0),
    "local_stages, rank": lambda wrong: run.local_stages(SCHEDULE, wrong),
    "MUSEUM": lambda wrong: run.MUSEUM[wrong],
    "Pipeline.clip_grad_norm": lambda wrong: pipeline().clip_grad_norm(wrong),
    "Pipeline.eval": lambda wrong: pipeline().eval(wrong, wrong),
    "Pipeline.forward": lambda wrong: pipeline().forward(wrong),
    "Pipeline.on, handler": lambda wrong: with_handler("F", wrong),
    "Pipeline.on, op": lambda wrong: with_handler(wrong, print),
    "Pipeline.step, inputs": lambda wrong: pipeline().step(wrong, X),
    "Pipeline.step, loss_kwargs": lambda wrong: pipeline().step(X, X, loss_kwargs=wrong),
    "Pipeline.step, targets": lambda wrong: pipeline().step(X, wrong),
    "PipelineGroup, process_group": lambda wrong: run.PipelineGroup(0, 1, wrong),
    "PipelineGroup, rank": lambda wrong: run.PipelineGroup(wrong, 1),
    "PipelineGroup, size": lambda wrong: run.PipelineGroup(0, wrong),
    "Stage": lambda wrong: run.Stage(wrong, 0),
    "train_gpt": lambda wrong: None if wrong is None else run.train_gpt(wrong),
    "TrainConfig": lambda wrong: run.TrainConfig(schedule=wrong, steps=wrong, lr=wrong),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_raises_an_error_of_this_package(name):
    for wrong in WRONG:
        try:
            CALLS[name](wrong)
        except pp.PipelineError as error:
            assert str(error)
        except Exception as error:
            raise AssertionError(f"{wrong!r} ends in {type(error).__name__}: {error}") from error
