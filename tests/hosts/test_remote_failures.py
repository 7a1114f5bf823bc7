"""Failures of hosts, and of the network between them, are reported with the right host, and leave nothing behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ppedu.core import PipelineError, RankError
from ppedu.launch.hosts.network import open_door, unreachable
from ppedu.launch.pool import RankPool

# Ranks 0 and 1 say that they are connected, then exchange messages until something happens.
FOREVER = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(())
    dist.all_reduce(x)
    print("connected", flush=True)
    while True:
        dist.all_reduce(x)
        time.sleep(0.01)
    """
WAIT = "import time; print('connected', flush=True); time.sleep(1000)"  # for ranks without torch
LIMIT = 30.0  # seconds, for a busy machine; alone, it takes 4 s of silence and a little more to end the other ranks


def run_forever(pool: RankPool, folder: Path, happen: Callable[[], object], text: str = FOREVER) -> None:
    """Run a program that does not end on two ranks, and let something happen once one has printed something."""
    program = folder / "forever.py"
    program.write_text(textwrap.dedent(text))
    happened = False

    def write(rank: int, piece: bytes) -> None:
        nonlocal happened
        if piece and not happened:
            happened = True
            happen()

    pool.run(program, 2, timeout=60, write=write)


def lose(pool: RankPool, folder: Path, happen: Callable[[], object], text: str = FOREVER) -> tuple[str, float]:
    """Let something happen to ranks, and return the error and after how many seconds it came."""
    times = []
    with pytest.raises(RankError) as caught:
        run_forever(pool, folder, lambda: (happen(), times.append(time.monotonic())), text)
    return str(caught.value), time.monotonic() - times[0]


def _ended(network: Any, before: set[str]) -> bool:
    """Wait until the processes and files `before` have gone from the hosts; return False if some stay."""
    end = time.monotonic() + 20
    while before & {*network.left()} and time.monotonic() < end:
        time.sleep(0.05)
    return not before & {*network.left()}


@pytest.mark.slow
def test_a_cut_link_is_named_and_the_next_run_connects_again(network, two_hosts, tmp_path, ranks):
    before = {*network.left()}
    try:
        error, seconds = lose(two_hosts, tmp_path, lambda: network.cut("beta"))
        assert error.startswith("rank 1 on beta failed:\nthe host has been silent for 4 s") and seconds < LIMIT
    finally:
        network.repair("beta")
    assert ranks("print(1)", 2, pool=two_hosts) == ["1\n", "1\n"]
    assert _ended(network, before)


def test_a_relay_that_is_killed_is_named_and_the_next_run_connects_again(
    network, connect, light_python, tmp_path, ranks
):
    pool = connect(python=light_python)
    error, seconds = lose(pool, tmp_path, lambda: network.kill("alpha", "launch.hosts.relay"), WAIT)
    assert error.startswith("rank 0 on alpha failed:\nthe host has closed the connection") and seconds < LIMIT
    assert ranks("print(1)", 2, pool=pool) == ["1\n", "1\n"]


@pytest.mark.slow
def test_a_host_that_is_lost_between_two_runs_does_not_fail_the_second(network, two_hosts, ranks):
    assert ranks("print(1)", 2, pool=two_hosts) == ["1\n", "1\n"]
    network.kill("beta", "launch.hosts.relay")
    time.sleep(0.5)
    assert ranks("print(2)", 2, pool=two_hosts) == ["2\n", "2\n"]


def test_a_killed_rank_is_named(network, on_hosts, nothing_left):
    with pytest.raises(RankError, match="rank 1 on beta was killed by SIGKILL"):
        on_hosts("import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)", 2)


def test_a_slow_host_is_named_when_the_time_is_over(network, on_hosts, nothing_left):
    program = """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(60)
        x = torch.ones(())
        dist.recv(x, src=1)
        """
    with pytest.raises(RankError) as caught:
        on_hosts(program, 2, timeout=4)
    error = str(caught.value)
    assert error.startswith("the ranks were stopped because they had not ended after 4 s")
    assert "rank 0 on alpha waits in recv(src=1) at line 7: dist.recv(x, src=1)" in error
    assert "rank 1 on beta is at line 5: time.sleep(60)" in error


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_located_by_its_stack(network, on_hosts, nothing_left):
    """It is in a call that lets no other thread run."""
    program = """
        import os, re
        if os.environ["RANK"] == "1":
            re.match("(a+)+b", "a" * 60)
        """
    with pytest.raises(RankError, match=r"rank 1 on beta is at line 4: re.match"):
        on_hosts(program, 2, timeout=3)


@pytest.mark.slow
def test_a_host_behind_a_slow_link_is_not_given_up(network, on_hosts):
    limit = ("tbf", "rate", "8mbit", "burst", "32k", "latency", "9s")
    network.run("beta", "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
    try:
        program = """
            import os
            if os.environ["RANK"] == "1":
                for _ in range(600):
                    print("x" * 9999)
            """
        assert len(on_hosts(program, 2)[1]) == 6_000_000
    finally:
        network.run("beta", "tc", "qdisc", "del", "dev", "eth0", "root")


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_full_disk_is_named_and_leaves_nothing(network, on_hosts, nothing_left, name):
    """Alpha also serves the ranks' store."""
    folder, rank = network.temporary(name), ("alpha", "beta").index(name)
    network.mount(name, "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder)
    network.mount(name, "sh", "-c", f"yes > {folder}/full || true")
    try:
        with pytest.raises(RankError, match=rf"rank {rank} on {name} failed:\n.*No space left on device"):
            on_hosts("print(1)", 2)
        listed = network.mount(name, "ls", folder)
        assert listed.split() == ["full"]
        [port] = network.run(name, "ss", "-Hltn").splitlines()
        assert port.split()[3].endswith(":22"), "the store's port is closed"
    finally:
        network.mount(name, "umount", "-l", folder)
    assert on_hosts("print(1)", 2, timeout=20) == ["1\n", "1\n"]


def test_after_the_end_of_a_zygote_the_next_run_connects_again(connect, light_python, ranks):
    pool = connect(python=light_python)
    with pytest.raises(RankError, match="rank 1 on beta "):
        ranks("import os\nif os.environ['RANK'] == '1': os.kill(os.getppid(), 9)", 2, pool=pool)
    assert ranks("print(1)", 2, timeout=20, pool=pool) == ["1\n", "1\n"]


@pytest.mark.slow
def test_a_zygote_that_a_rank_stops_leaves_nothing(ranks, connect):
    program = """
        import os, signal, subprocess, time
        if os.environ["RANK"] == "1":
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(60)
        """
    with pytest.raises(RankError):
        ranks(program, 2, timeout=2, pool=connect())


def test_a_failed_connection_is_reported_as_often_as_it_fails(connect, light_python, ranks):
    pool = connect(python=light_python, interface="lo")
    for _ in range(2):
        with pytest.raises(PipelineError, match="cannot reach"):
            ranks("pass", 2, pool=pool)


def test_a_host_that_another_answers_for_is_not_reached():
    async def ask():
        own, port, word = await open_door("127.0.0.1")
        async with own:
            return await unreachable([("beta", "127.0.0.1", port, word), ("gamma", "127.0.0.1", port, "another")])

    with ThreadPoolExecutor() as apart:  # the browser's tests have an event loop in this thread
        [told] = apart.submit(asyncio.run, ask()).result()
    assert "gamma at 127.0.0.1" in told
    assert "another host answers there" in told


@pytest.mark.parametrize("after", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_an_interrupt_while_connecting_prints_nothing(network, ranks, nothing_left, capfd, after):
    pool = RankPool(on="ssh:alpha,beta")
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks("import time; time.sleep(60)", 2, pool=pool)
    finally:
        timer.join()
        pool.close()
    assert "Traceback" not in capfd.readouterr().err


def test_ranks_that_print_without_end_are_located(network, on_hosts, nothing_left):
    with pytest.raises(RankError, match=r"rank 1 on beta is at line 2: while True: print") as caught:
        on_hosts("\nwhile True: print('y' * 100)", 2, timeout=3)
    assert "did not answer" not in str(caught.value)


def test_a_refused_key_is_reported_as_such(network, ranks, connect):
    with (network.folder / "config").open("a") as file:
        file.write(f"Host stranger\n HostName {network.address('alpha')}\n IdentityFile /nowhere/key\n")
        file.write(f" IdentitiesOnly yes\n StrictHostKeyChecking no\n UserKnownHostsFile {network.folder}/strangers\n")
    with pytest.raises(PipelineError, match=r"cannot start ranks on stranger: .*Permission denied"):
        ranks("pass", 1, pool=connect("ssh:stranger"))


def test_an_interrupt_ends_all_ranks_and_says_where_they_were(network, two_hosts, nothing_left, tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        run_forever(two_hosts, tmp_path, threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start)
    assert "rank 0 on alpha" in str(caught.value) and "rank 1 on beta" in str(caught.value)


def test_ranks_can_be_stopped_by_another_thread(network, two_hosts, nothing_left, tmp_path):
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        run_forever(two_hosts, tmp_path, threading.Timer(0.2, two_hosts.stop).start)


@pytest.mark.parametrize("after", ["connected", pytest.param("0", marks=pytest.mark.slow)])
def test_nothing_is_left_when_the_notebook_is_killed(network, nothing_left, light_python, tmp_path, after):
    """Killed while ranks run, or while it connects to the hosts."""
    program = tmp_path / "forever.py"
    program.write_text(WAIT)
    source = f"""
from ppedu.launch.hosts.network import open_door, unreachable
from ppedu.launch.pool import RankPool
import sys
pool = RankPool(on="ssh:alpha,beta", python={light_python!r})
pool.start()
print(0, flush=True)
pool.run({str(program)!r}, 2, write=lambda rank, piece: print(piece.decode(), flush=True))
"""
    before = _connections(network)
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    while after not in owner.stdout.readline():
        assert owner.poll() is None
    time.sleep(0.3)
    owner.kill()
    owner.wait()
    end = time.monotonic() + 20
    while _connections(network) - before and time.monotonic() < end:
        time.sleep(0.05)
    assert _connections(network) <= before


def test_a_host_that_dies_is_named(network, two_hosts, nothing_left, tmp_path):
    """Comes last, as the next test would have to connect again."""
    try:
        error, seconds = lose(two_hosts, tmp_path, lambda: network.crash("beta"))
    finally:
        if not (network.folder / "beta.pid").exists():
            network.start("beta")
    # On a busy machine, ssh may find that the address is gone before the silence is over.
    assert re.match(
        "rank 1 on beta failed:\nthe host has (been silent for 4 s|closed the connection): is it down", error
    )
    assert seconds < LIMIT
    for file in network.temporary("beta").glob("ppedu-*"):  # a dead host cannot tidy up
        subprocess.run(["rm", "-r", file], check=True)


def _connections(network: Any) -> set[str]:
    """Return the processes of ssh that are connected to hosts."""
    listed = subprocess.run(["pgrep", "-f", f"{network.folder}/config"], capture_output=True, text=True, check=False)
    return set(listed.stdout.split())
