"""Fixtures for the tests of ranks on other hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from netns import SSHD, Network


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    tools = [shutil.which(name) for name in ("ip", "ethtool", SSHD)]
    if sys.platform != "linux" or os.geteuid() != 0 or not all(tools):
        pytest.skip("hosts are network namespaces with an sshd: needs root, iproute2, ethtool and openssh-server")
    name = f"pp-probe{os.getpid()}"
    probe = [["ip", "netns", "add", name], ["ip", "netns", "exec", name, "unshare", "--time", "true"]]
    allowed = all(subprocess.run(each, capture_output=True, check=False).returncode == 0 for each in probe)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if not allowed:
        pytest.skip("hosts are network namespaces, which this machine does not permit")
    made = Network(tmp_path_factory.mktemp("hosts"))
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{made.folder / 'bin'}:{before}"
    yield made
    os.environ["PATH"] = before
    made.close()


@pytest.fixture
def light_python(network: Network, light: str) -> str:
    """A Python for hosts whose ranks do not use torch."""
    file = network.folder / "light_python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={light}:$PYTHONPATH exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def nothing_left(network: Network) -> Iterator[None]:
    """After the test, wait until all that it has started on hosts has ended; fail if some has not within 20 s."""
    before = {*network.left()}
    yield
    end = time.monotonic() + 20
    while (found := {*network.left()} - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not found


@pytest.fixture
def connect(nothing_left: None) -> Iterator[Callable[..., Any]]:
    """`connect(on, …)` returns a pool of ranks, which the end of the test closes; nothing of it may be left then."""
    from ppedu.launch.pool import RankPool

    pools: list[RankPool] = []

    def make(on: str = "ssh:alpha,beta", **options: str) -> RankPool:
        pools.append(RankPool(on=on, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def shared_pool(network: Network) -> Iterator[Any]:
    from ppedu.launch.pool import RankPool

    pool = RankPool(on="ssh:alpha,beta")
    yield pool
    pool.close()


@pytest.fixture
def two_hosts(shared_pool: Any) -> Any:
    """A pool of ranks on alpha and beta, which is connected."""
    shared_pool.run("platform", 2, module=True, timeout=60, write=lambda *_: None)
    return shared_pool


@pytest.fixture
def on_hosts(ranks: Callable[..., list[str]], two_hosts: Any) -> Callable[..., list[str]]:
    """`on_hosts(program, n, *arguments)` runs a program's text on n ranks of alpha and beta; see `ranks`."""

    def run(program: str, n: int, *arguments: str, timeout: float = 60) -> list[str]:
        return ranks(program, n, *arguments, timeout=timeout, pool=two_hosts)

    return run
