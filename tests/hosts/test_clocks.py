"""Measured timelines of ranks on several hosts, whose clocks differ, and the latency of the links between them."""

import json

STEP = """
    import json, os, sys, time, torch, torch.distributed as dist
    import ppedu as pp
    from ppedu.engine import clock

    dist.init_process_group("gloo")
    """


def test_clocks_that_differ_by_an_hour_are_aligned(on_hosts):
    """Beta's clock is an hour ahead. No message arrives before it is sent, give or take the error that is reported."""
    program = f"""{STEP}
    costs = pp.Costs(forward=0.01, backward=0.02)
    emulation = pp.run.Emulation(pp.schedule("1f1b", 4, 4), costs)
    timeline = emulation.step()
    offsets = [0.0] * 4
    dist.all_gather_object(offsets, emulation.pipeline.clocks.offset)
    if dist.get_rank() == 0:
        rows = [[(str(action), start, end) for action, start, end in row] for row in timeline.rows]
        print(json.dumps([offsets, emulation.pipeline.clocks.error, rows]))
    """
    offsets, error, rows = json.loads(on_hosts(program, 4)[0])
    assert offsets[:2] == [0, 0] and all(-3602 < each < -3598 for each in offsets[2:])
    assert 0 < error < 1
    ends = {action: end for row in rows for action, _, end in row}
    for row in rows:
        for action, start, _ in row:
            stage, op, microbatch = int(action[0]), action[1], action[2:]
            before = f"{stage - 1}F{microbatch}" if op == "F" else f"{stage + 1}B{microbatch}"
            assert start >= ends.get(before, 0) - 2 * error


def test_each_rank_knows_how_far_its_clock_is_from_rank_0s(on_hosts):
    program = f"""{STEP}
    from ppedu.engine.ranks.comm import PipelineGroup
    group = PipelineGroup.of(None)
    machines = [0] * group.size
    dist.all_gather_object(machines, clock.machine())
    found = clock.offset(group, machines)
    print(len(set(machines)), round(found.seconds), 0 <= found.error < 1)
    """
    assert on_hosts(program, 2) == ["2 0 True\n", "2 -3600 True\n"]


def test_the_latency_of_each_link_is_measured(network, on_hosts):
    """Messages between the hosts take 20 ms longer than within one; all ranks get the same table, for Costs."""
    program = f"""{STEP}
    print(json.dumps([[*pair, each] for pair, each in pp.run.latency().items()]))
    """
    with network.slow("beta", 0.02):
        printed = on_hosts(program, 4)
    assert len(set(printed)) == 1
    table = {(one, other): seconds for one, other, seconds in json.loads(printed[0])}
    assert table.keys() == {(one, other) for one in range(4) for other in range(4) if one != other}
    for (one, other), seconds in table.items():
        between = (one < 2) != (other < 2)
        assert seconds >= (0.02 if between else 0)
