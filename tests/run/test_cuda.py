"""On a GPU: pairs run on two streams, and gradients are those of one process. Skipped without a GPU."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "1f1b-overlap", "interleaved-overlap", "dualpipe", "dualpipev"])
def test_gradients_on_a_gpu_are_those_of_one_process(ranks, name):
    ranks(
        f"""
        import torch, torch.distributed as dist
        from torch import nn
        import ppedu as pp
        from ppedu.run import Pipeline, local_stages, place

        device, backend = place()
        dist.init_process_group(backend)
        schedule = pp.schedule("{name}", 2, 8)

        def layer(stage):
            torch.manual_seed(stage)
            return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)

        held = {{stage: layer(stage) for stage in local_stages(schedule, dist.get_rank())}}
        pipeline = Pipeline(schedule, held, nn.functional.mse_loss)
        numbers = torch.Generator().manual_seed(1)
        x, y = (torch.randn(64, 512, generator=numbers).to(device) for _ in range(2))
        for _ in range(5):  # the allocator gives the same memory out again and again
            judge = [layer(stage) for stage in range(schedule.stages)]
            nn.functional.mse_loss(nn.Sequential(*judge)(x), y).backward()
            for module in held.values():
                module.zero_grad()
            pipeline.step(x, y)
            for stage, module in held.items():
                for ours, theirs in zip(module.parameters(), judge[stage].parameters()):
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
        assert pipeline.timeline.makespan > 0
        """,
        2,
    )
