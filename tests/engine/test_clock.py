"""All ranks share one clock, even if their machines' clocks differ."""

from cases import BEGIN


def test_a_rank_on_another_machine_uses_the_clock_of_rank_0(ranks):
    program = """
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
"""
    ranks(BEGIN + program, 3)


def test_the_latency_is_that_of_one_way(ranks):
    """Each message leaves 50 ms late, so a round trip takes 100 ms."""
    program = """
send = dist.isend
dist.isend = lambda *message: (time.sleep(0.05), send(*message))[1]
found = pp.run.latency()
assert found.keys() == {(0, 1), (1, 0)} and found[0, 1] == found[1, 0]
assert 0.05 <= found[0, 1] < 0.1
dist.barrier()
"""
    ranks(BEGIN + program, 2)
