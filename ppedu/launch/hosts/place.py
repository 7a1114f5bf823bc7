"""Where ranks run: what `--on` says, and the commands that start a program there."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import dataclass

from ppedu.core import SettingError

RELAY = "ppedu.launch.hosts.relay"  # the module that runs on each host
SSH = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ClearAllForwardings=yes")
HOST = re.compile(r"[\w.@:%\[\]][\w.@:%\[\]-]*")  # does not begin like an option of ssh


@dataclass(frozen=True)
class Place:
    """The hosts on which ranks run.

    Args:
        hosts: names that ssh knows; none for Slurm, which chooses them.
        options: of `salloc`, if Slurm chooses the hosts; None if it does not.
        python: the path of Python on the hosts.
        interface: the network interface that ranks on different hosts use; "" for the one at which a host is reached.
    """

    hosts: tuple[str, ...] = ()
    options: tuple[str, ...] | None = None
    python: str = sys.executable
    interface: str = ""

    @classmethod
    def of(cls, on: str, python: str | None = None, interface: str | None = None) -> Place | None:
        """Return the place that `--on` names; None for "local", this machine.

        Args:
            on: "local"; "ssh:alpha,beta"; "slurm", or "slurm:" and options of `salloc`.

        Raises:
            SettingError: `on` is something else, names a host twice, or a name is not one of a host; an argument is not
                a string, or contains control characters.
        """
        python, interface = python or sys.executable, interface or ""
        for option, value in {"--on": on, "--python": python, "--interface": interface}.items():
            if not isinstance(value, str) or not value.isprintable():
                raise SettingError(f"{option} must be a string without control characters; got {value!r}")
        kind, _, rest = on.partition(":")
        if kind == "ssh" and rest:
            hosts = tuple(name.strip() for name in rest.split(","))
            for index, name in enumerate(hosts):
                if not HOST.fullmatch(name):
                    raise SettingError(f"--on {on}: {name!r} is not the name of a host; write ssh:alpha,beta")
                if name in hosts[:index]:
                    raise SettingError(f"--on {on}: {name} is named twice; name each host once")
            return cls(hosts, None, python, interface)
        if kind == "slurm":
            try:
                return cls((), tuple(shlex.split(rest)), python, interface)
            except ValueError as error:
                raise SettingError(f"--on {on}: {error}") from None
        if on != "local":
            raise SettingError(f'unknown place --on {on!r}; write local, ssh:alpha,beta, slurm or "slurm: --nodes=2"')
        if python != sys.executable or interface:
            raise SettingError("--python and --interface are for ranks on other hosts; add --on ssh:alpha,beta")
        return None

    @property
    def nodes(self) -> int:
        """The number of hosts; with Slurm, the number that the options ask for."""
        if self.options is None:
            return len(self.hosts)
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("-N", "--nodes", default="1")
        asked = parser.parse_known_args(self.options)[0].nodes  # such as "2", or "2-4"
        least = asked.partition("-")[0]
        return int(least) if least.isdigit() else 1

    def by_ssh(self, host: str) -> list[str]:
        """Return the command that starts the relay on a host."""
        return [*SSH, "--", host, f"exec {shlex.quote(self.python)} -m {RELAY}"]

    def by_srun(self, job: str, host: str) -> list[str]:
        """Return the command that starts the relay on a host of a Slurm job, and ends the job when the relay ends."""
        run = ["srun", f"--jobid={job}", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered"]
        return [*run, "sh", "-c", f"{shlex.quote(self.python)} -m {RELAY}; scancel {job}"]
