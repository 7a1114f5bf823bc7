"""How far a pipeline is from the whole model in one process."""

import torch

from ppedu.course.training.parity import train_alone


def test_each_fault_shows_in_the_part_that_it_changes(ranks):
    ranks(
        """
        import pytest, torch, torch.distributed as dist
        import ppedu as pp
        from ppedu.run import GPT, GPTConfig, Pipeline, next_token_loss
        from ppedu.course.training.parity import copies_apart, difference

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        config = GPTConfig(20, context=8, layers=2, heads=2, width=8, tied=True)
        module, whole = GPT.stage(config, rank, 2), GPT(config)
        assert difference(module, whole, "weights") == 0 == copies_apart(module, rank, config.ties(2))
        with pytest.raises(pp.SettingError, match="has no gradient; run a backward"):
            difference(module, whole, "gradients")
        with pytest.raises(pp.SettingError, match="'weights' or 'gradients'; got 'loss'"):
            difference(module, whole, "loss")

        x, y = torch.randint(20, (2, 4, 8), generator=torch.Generator().manual_seed(0))
        Pipeline(pp.schedule("1f1b", 2, 2), {rank: module}, next_token_loss, tied=config.ties(2)).step(x, y)
        next_token_loss(whole(x), y).backward()
        assert difference(module, whole, "gradients") < 1e-5
        if rank == 1:  # every rank returns the largest difference
            for weight in module.parameters():
                weight.grad *= 4
        assert difference(module, whole, "gradients") == pytest.approx(3, abs=1e-4)

        with torch.no_grad():
            if rank == 1:
                module.head.linear.weight *= 1.5
        assert copies_apart(module, rank, config.ties(2)) == pytest.approx(0.5)
        assert difference(module, whole, "weights") > 0.01
        assert copies_apart(module, rank, []) == 0
        """,
        2,
    )


def test_losses_that_are_not_divided_hardly_change_the_curve():
    torch.set_num_threads(1)
    right, wrong = train_alone(2), train_alone(2, divide=False)
    assert len(right) == 20 and right[-1] < right[0] - 1
    assert 0 < max(abs(one - other) for one, other in zip(right, wrong, strict=True)) < 0.01
