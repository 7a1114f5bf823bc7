"""All ranks share one clock, even if their machines' clocks differ."""


def test_a_rank_on_another_machine_uses_the_clock_of_rank_0(ranks):
    ranks(
        """
        import time
        import torch, torch.distributed as dist
        import ppedu as pp
        from ppedu.engine import clock
        from ppedu.run import GPT, GPTConfig, Pipeline, next_token_loss

        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        real = time.monotonic
        if rank:  # as on machines that booted at different times
            time.monotonic = lambda: real() + 1000 * rank
            clock.machine = lambda: rank
        config = GPTConfig(vocabulary=11, context=64, layers=6, heads=2, width=32)
        tokens = torch.randint(11, (16, 65))
        pipeline = Pipeline(pp.schedule("1f1b", size, 4), {rank: GPT.stage(config, rank, size)}, next_token_loss)
        for _ in range(2):
            pipeline.step(tokens[:, :-1], tokens[:, 1:])
        timeline = pipeline.timeline
        assert timeline.makespan < 60
        end = {span.action: span.end for row in timeline.rows for span in row}
        start = {span.action: span.start for row in timeline.rows for span in row}
        for m in range(4):
            for stage in range(1, size):
                assert start[pp.F(stage, m)] > end[pp.F(stage - 1, m)] - 0.05
                assert start[pp.B(stage - 1, m)] > end[pp.B(stage, m)] - 0.05
        dist.barrier()
        """,
        3,
    )
