"""Hosts for the tests: network namespaces, each with an sshd of its own. They need root and Debian's openssh-server.

All have this machine's files, but their own name, temporary folder and interface; beta's clock is an hour ahead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NAMES = ("alpha", "beta", "gamma")
SSHD = "/usr/sbin/sshd"
ROOT = Path(__file__).parents[2]  # hosts run the ppedu in this folder, whichever is installed


def command(*words: object) -> str:
    """Run a command, which must succeed, and return what it prints."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
    return done.stdout


class Network:
    """The hosts alpha, beta and gamma, at 10.X.Y.2 and so on; this machine is 10.X.Y.1. mark: see `left`."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, f"PPEDU_TEST={folder}"
        self.prefix = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
        self.id = f"{os.getpid() % 10**6}"
        self.bridge = f"pp{self.id}"
        command("ip", "link", "add", self.bridge, "type", "bridge")
        command("ip", "addr", "add", f"{self.prefix}.1/24", "dev", self.bridge)
        command("ip", "link", "set", self.bridge, "up")
        for key in ("key", "hostkey"):
            command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
        Path("/run/sshd").mkdir(exist_ok=True)
        (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
        (folder / "known_hosts").touch()
        # The real ssh, with a configuration of these hosts in place of the user's.
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        (folder / "bin" / "ssh").chmod(0o755)
        (folder / "config").write_text("".join(map(self._configuration, NAMES)))
        for name in NAMES:
            self.start(name)

    def address(self, name: str) -> str:
        return f"{self.prefix}.{2 + NAMES.index(name)}"

    def namespace(self, name: str) -> str:
        return f"pp{self.id}-{name}"

    def temporary(self, name: str) -> Path:
        """Return the host's folder for temporary files."""
        return self.folder / "tmp" / name

    def start(self, name: str) -> None:
        """Start a host: its network, and its sshd."""
        space, link = self.namespace(name), f"pp{self.id}{name[0]}"
        # The names of the hosts, and no name service: torch looks up the names of its peers.
        etc = Path("/etc/netns", space)
        etc.mkdir(parents=True, exist_ok=True)
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(n)} {n}\n" for n in NAMES))
        (etc / "nsswitch.conf").write_text("passwd: files\nhosts: files\n")
        command("ip", "netns", "add", space)
        command("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        card = f"02:00:00:00:00:{2 + NAMES.index(name):02x}"  # the same after a crash
        command("ip", "-n", space, "link", "set", "eth0", "address", card)
        command("ip", "netns", "exec", space, "ethtool", "-K", "eth0", "tx", "off")  # for `slow`, which reads packets
        command("ip", "link", "set", link, "master", self.bridge, "up")
        command("ip", "-n", space, "link", "set", "lo", "up")
        command("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        command("ip", "-n", space, "link", "set", "eth0", "up")
        self.temporary(name).mkdir(parents=True, exist_ok=True)
        settings = f"""
            ListenAddress {self.address(name)}
            HostKey {self.folder}/hostkey
            AuthorizedKeysFile {self.folder}/authorized_keys
            PidFile {self.folder}/{name}.pid
            StrictModes no
            UsePAM no
            SetEnv TMPDIR={self.temporary(name)} PYTHONPATH={ROOT} {self.mark}
            """
        (self.folder / f"{name}.sshd").write_text(settings)
        command(*self.on(name), SSHD, "-f", self.folder / f"{name}.sshd")
        end = time.monotonic() + 10
        while not (self.folder / f"{name}.pid").exists() and time.monotonic() < end:
            time.sleep(0.01)

    def on(self, name: str) -> list[str]:
        """Return the words before a command that run it on a host, without ssh."""
        ahead = ["--time", "--monotonic", "3600", "--fork"] if name == "beta" else []
        named = ["unshare", "--uts", *ahead, "sh", "-c", f'hostname {name}; exec "$@"', name]
        return ["ip", "netns", "exec", self.namespace(name), *named]

    def run(self, name: str, *words: object) -> str:
        """Run a command on a host, without ssh, and return what it prints."""
        return command(*self.on(name), *words)

    def crash(self, name: str) -> None:
        """End all processes of a host at once, and its network, as a power failure does; `start` starts it again."""
        self.cut(name)
        for process in command("ip", "netns", "pids", self.namespace(name)).split():
            subprocess.run(["kill", "-9", process], check=False, capture_output=True)
        command("ip", "netns", "del", self.namespace(name))
        shutil.rmtree(Path("/etc/netns", self.namespace(name)), ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"pp{self.id}{name[0]}"], check=False, capture_output=True)
        (self.folder / f"{name}.pid").unlink(missing_ok=True)

    def kill(self, name: str, text: str) -> None:
        """Kill the processes on a host whose command line contains the text."""
        for process in command("ip", "netns", "pids", self.namespace(name)).split():
            with contextlib.suppress(OSError):
                if text.encode() in Path("/proc", process, "cmdline").read_bytes():
                    os.kill(int(process), signal.SIGKILL)

    def mount(self, name: str, *words: object) -> str:
        """Run a command in the host's view of the file system, and return what it prints."""
        return command("nsenter", "-t", (self.folder / f"{name}.pid").read_text().strip(), "-m", *words)

    def cut(self, name: str) -> None:
        """Cut the host's link: packets vanish."""
        command("ip", "link", "set", f"pp{self.id}{name[0]}", "nomaster")

    def repair(self, name: str) -> None:
        command("ip", "link", "set", f"pp{self.id}{name[0]}", "master", self.bridge)

    @contextlib.contextmanager
    def slow(self, name: str, delay: float) -> Iterator[None]:
        """Lengthen the host's link: each packet takes `delay` seconds more, in each direction."""
        link, tap = f"pp{self.id}{name[0]}", f"pp{self.id}{name[0]}t"
        program = [sys.executable, str(Path(__file__).with_name("slow.py")), link, tap, str(delay)]
        with subprocess.Popen(program, stdout=subprocess.PIPE) as cable:
            assert cable.stdout is not None
            cable.stdout.readline()
            try:
                self.cut(name)
                command("ip", "link", "set", tap, "master", self.bridge, "up")
                yield
            finally:
                cable.kill()
                cable.wait()
                self.repair(name)

    def left(self) -> list[str]:
        """Return the processes and files that runs have left on hosts."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in file.read_bytes() and b"sshd" not in (file.parent / "comm").read_bytes():
                    line = (file.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(f"{file.parent.name} {line}")
            except OSError:
                continue
        return found + [str(path) for path in (self.folder / "tmp").glob("*/ppedu-*")]

    def close(self) -> None:
        for name in NAMES:
            if Path("/run/netns", self.namespace(name)).exists():
                self.crash(name)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)

    def _configuration(self, name: str) -> str:
        return f"""
            Host {name}
              HostName {self.address(name)}
              User root
              IdentityFile {self.folder}/key
              UserKnownHostsFile {self.folder}/known_hosts
              StrictHostKeyChecking accept-new
              LogLevel ERROR
            """
