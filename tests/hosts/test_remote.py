"""Ranks on other hosts: what works on one machine works there, too."""

import contextlib
import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from ppedu.core import PipelineError, SettingError
from ppedu.launch.pool import RankPool

SUM = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(x)
    print(x.item(), *(os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")))
    """


def test_ranks_are_divided_among_the_hosts(on_hosts, nothing_left):
    assert on_hosts(SUM, 4) == ["1111 0 0 2 0\n", "1111 1 1 2 0\n", "1111 2 0 2 1\n", "1111 3 1 2 1\n"]
    assert on_hosts(SUM, 3) == ["111 0 0 2 0\n", "111 1 1 2 0\n", "111 2 0 1 1\n"]
    assert on_hosts(SUM, 1) == ["1 0 0 1 0\n"]


def test_each_rank_runs_on_its_host(on_hosts, network):
    program = "import socket; print(open('/proc/self/net/fib_trie').read())"
    printed = on_hosts(program, 2)
    assert [f"{network.address(name)}\n" in text for text in printed for name in ("alpha", "beta")] == [
        *(True, False),
        *(False, True),
    ]


def test_values_and_programs_travel(two_hosts, network, tmp_path):
    from ppedu.launch.exchange import INPUTS, pickled, read_results, write_private

    folder = tmp_path / "run"
    two_hosts.make_folder(folder)
    write_private(folder / INPUTS, pickled({"x": list(range(200_000))}, "x", "the test"))
    program = folder / "cell.py"
    program.write_text("import ppedu as pp, os; pp.give_back((sum(x), os.environ['TMPDIR'], x * 5))")
    two_hosts.run(program, 2, folder=folder, environment={"PPEDU_RUN": str(folder)}, timeout=60, write=lambda *_: None)
    results = read_results(folder, 2)
    assert [result[:2] for result in results] == [
        (sum(range(200_000)), str(network.temporary(name))) for name in ("alpha", "beta")
    ]
    assert results[1][2] == [*range(200_000)] * 5


def test_long_output_arrives_complete_and_in_order(on_hosts):
    program = """
        import os
        for line in range(50_000):
            print(os.environ["RANK"], line)
        """
    assert on_hosts(program, 2) == ["".join(f"{rank} {line}\n" for line in range(50_000)) for rank in range(2)]


def test_output_after_a_large_value_arrives_with_it(two_hosts, tmp_path):
    from ppedu.launch.exchange import read_results

    folder, printed = tmp_path / "run", []
    two_hosts.make_folder(folder)
    program = folder / "cell.py"
    program.write_text("import ppedu as pp; pp.give_back(bytes(80_000_000)); print('the end')")
    settings = {"folder": folder, "environment": {"PPEDU_RUN": str(folder)}, "timeout": 60}
    two_hosts.run(program, 2, write=lambda rank, piece: printed.append(piece), **settings)
    assert b"".join(printed).count(b"the end\n") == 2
    assert [len(result) for result in read_results(folder, 2)] == [80_000_000] * 2


def test_output_that_is_read_slowly_arrives_to_its_end(two_hosts, tmp_path):
    program, printed = tmp_path / "long.py", bytearray()
    program.write_text("print('x' * 6_000_000)\nprint('the end')")

    def write(rank, piece):
        printed.extend(piece)
        time.sleep(0.02)

    two_hosts.run(program, 1, write=write, timeout=60)
    assert len(printed) == 6_000_009 and printed.endswith(b"the end\n")


def test_nothing_of_ours_listens_and_torch_listens_on_the_interface_only(on_hosts, network):
    """While ranks run, only torch listens on the hosts, and this machine does not listen at all."""
    program = """
        import os, subprocess, time, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print(subprocess.run(["ss", "-Hltn"], capture_output=True, text=True).stdout)
        dist.barrier()
        """
    before = _listening()
    printed = on_hosts(program, 2)
    for name, text in zip(("alpha", "beta"), printed, strict=True):
        places = {line.split()[3] for line in text.splitlines() if line.strip()} - {f"{network.address(name)}:22"}
        assert places and all(place.startswith(network.address(name)) for place in places)
    # gloo's ranks on both, and the store on alpha.
    assert _listening() == before
    with socket.create_server(("127.0.0.1", 0)):
        assert len(_listening()) == len(before) + 1


def _listening() -> set[str]:
    """Return the addresses at which this process listens, or one that it has started."""
    parents, own, sockets = {}, {os.getpid()}, set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    while more := {process for process, parent in parents.items() if parent in own} - own:
        own |= more
    for file in (file for process in own for file in Path(f"/proc/{process}/fd").glob("*")):
        with contextlib.suppress(OSError):  # it is closed
            sockets.add(str(file.readlink()))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def test_command_lines_and_logs_hold_no_secret(on_hosts, network):
    """Neither the program nor the secret of a connection can be read by another user of a host."""
    program = """
        import subprocess
        password = "swordfish"
        print(subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout)
        """
    printed = "".join(on_hosts(program, 2))
    assert "ppedu.launch.hosts.relay" in printed and "swordfish" not in printed
    assert not re.search(r"\b[0-9a-f]{32}\b", "\n".join(each for each in printed.splitlines() if "relay" in each))


STRAY = """
import os, socket, threading, time, torch, torch.distributed as dist
from ipaddress import IPv4Address
from pathlib import Path

SENT = [b"GET / HTTP/1.0\\r\\n\\r\\n", os.urandom(4096), bytes(64), b"\\xff" * 64, b""]
held = {}

def disturb():
    '''Connect to whatever listens on this host but sshd, as soon as it does, and stay.'''
    while True:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = (bytes.fromhex(part) for part in local.split(":"))
            place = str(IPv4Address(address[::-1])), int.from_bytes(port, "big")
            if state == "0A" and place[1] != 22 and place not in held:
                held[place] = [socket.create_connection(place) for _ in SENT]
                for client, text in zip(held[place], SENT):
                    client.sendall(text)

threading.Thread(target=disturb, daemon=True).start()
dist.init_process_group("gloo")
x = torch.ones(())
for _ in range(100):
    dist.all_reduce(x.fill_(1))
    time.sleep(0.005)
print(x.item(), len(held))
"""


def test_stray_connections_get_nothing_and_stop_nothing(on_hosts, nothing_left):
    """Clients that connect to the ports of the store and of gloo, send something and stay, do not disturb a run."""
    assert on_hosts(STRAY, 2) == ["2.0 2\n", "2.0 1\n"]  # the store is on alpha


def test_a_third_host_and_few_ranks(ranks, connect, light_python):
    pool = connect("ssh:alpha,beta,gamma", python=light_python)
    program = "import os; print(os.environ['GROUP_RANK'])"
    assert ranks(program, 4, pool=pool) == ["0\n", "0\n", "1\n", "2\n"]
    assert ranks(program, 2, pool=pool) == ["0\n", "1\n"]


@pytest.mark.parametrize(
    ("on", "problem"),
    [
        ("ssh:delta", "cannot start ranks on delta: .*[Cc]ould not resolve hostname delta"),
        ("ssh:alpha,alpha", "alpha is named twice"),
        ("ssh:-oProxyCommand=x", "not the name of a host"),
        ("ssh:", "unknown place"),
        ("cloud", "unknown place --on 'cloud'; write local"),
        ('slurm:"', "No closing quotation"),
        (7, "--on must be a string without control characters; got 7"),
        ("ssh:a\0b", "--on must be a string without control characters"),
    ],
)
def test_a_wrong_place_is_an_error(ranks, connect, on, problem):
    with pytest.raises(PipelineError, match=problem):
        ranks("pass", 1, pool=connect(on))


def test_only_forked_ranks_run_on_hosts():
    with pytest.raises(SettingError, match="leave it out, or --on"):
        RankPool("torchrun", on="ssh:alpha")


def script(folder: Path, text: str) -> str:
    """Write a program of the shell that can stand for Python; return its path."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("python", "problem"),
    [
        ("/nowhere/python", "cannot run the same Python as here .*name its own with --python"),
        ("isolated", "has no ppedu; install 'ppedu"),
    ],
)
def test_a_host_without_the_environment_is_an_error(ranks, connect, tmp_path, python, problem):
    if python == "isolated":  # from PYTHONPATH
        python = script(tmp_path, 'exec /usr/bin/python3 -I "$@"')
    with pytest.raises(PipelineError, match=problem):
        ranks("pass", 2, pool=connect(python=python))


def test_another_version_is_an_error(network, ranks, connect, tmp_path):
    """A Python on beta whose torch says that it is another version."""
    (tmp_path / "torch-1.0.0.dist-info").mkdir(parents=True)
    (tmp_path / "torch-1.0.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.0.0\n")
    there = f'[ "$TMPDIR" = {network.temporary("beta")} ] && export PYTHONPATH={tmp_path}'
    python = script(tmp_path, f'{there}\nexec {sys.executable} "$@"')
    with pytest.raises(PipelineError, match=r"beta has torch 1\.0\.0, this machine \d.*the same everywhere"):
        ranks("pass", 2, pool=connect(python=python))


def test_hosts_that_do_not_reach_each_other_are_an_error(network, ranks, connect, light_python):
    network.run("beta", "ip", "route", "add", "blackhole", network.address("alpha"))
    try:
        with pytest.raises(PipelineError, match=r"beta cannot reach alpha at 10.*name a network.*--interface"):
            ranks("pass", 2, pool=connect(python=light_python))
    finally:
        network.run("beta", "ip", "route", "del", "blackhole", network.address("alpha"))


def test_an_unknown_interface_is_an_error(ranks, connect):
    with pytest.raises(PipelineError, match=r"(alpha|beta): it has no interface 'ib0'.* it has lo, eth0"):
        ranks("pass", 2, pool=connect(interface="ib0"))


def test_a_host_that_talks_first_is_understood(ranks, connect, light_python, tmp_path):
    """As with a line in the host's .bashrc that prints a greeting."""
    python = script(tmp_path, f'echo "Welcome to $(hostname)"\nexec {light_python} "$@"')
    assert ranks("print(1)", 2, pool=connect(python=python)) == ["1\n", "1\n"]


def test_ports_are_closed_between_runs(two_hosts, ranks, network):
    """After a run, only sshd listens on the hosts."""
    ranks(SUM, 2, pool=two_hosts)
    for name in ("alpha", "beta"):
        found = network.run(name, "ss", "-Hltn").splitlines()
        assert [line.split()[3] for line in found] == [f"{network.address(name)}:22"]
    with socket.socket() as client:
        assert client.connect_ex((network.address("alpha"), 29500)) != 0
