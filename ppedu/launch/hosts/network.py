"""The network addresses of this host."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv6Address
from pathlib import Path

from ppedu.core import SettingError

SIOCGIFADDR = 0x8915  # asks for the IPv4 address of an interface
REACH = 3.0  # seconds in which a host must be reached


def own_address(interface: str) -> tuple[str, str]:
    """Return the IPv4 address at which other hosts reach this one, and the interface that has it.

    Args:
        interface: a name; "" for the interface at which this host has been reached by ssh or, under Slurm, the one that
            has the address of its name.

    Raises:
        SettingError: this host has no interface of that name with an IPv4 address.
    """
    found = addresses()
    reached = os.environ.get("SSH_CONNECTION", "").split()[2:3]  # of client, its port, this host, its port
    if not interface and reached and ":" in reached[0]:
        interface = _interface_of(IPv6Address(reached[0].partition("%")[0]))
    if interface:
        if interface not in found:
            raise SettingError(f"it has no interface {interface!r} with an IPv4 address; it has {', '.join(found)}")
        return found[interface], interface
    try:
        address = socket.gethostbyname(reached[0] if reached else socket.gethostname())
    except OSError:
        address = ""
    if address.startswith("127."):
        return address, "lo"
    for name, each in found.items():
        if each == address:
            return each, name
    raise SettingError(f"it is unclear where other hosts reach it; name one of {', '.join(found)} with --interface")


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _interface_of(address: IPv6Address) -> str:
    """Return the interface that has an IPv6 address, "" if none has."""
    for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
        digits, *_, name = line.split()
        if IPv6Address(bytes.fromhex(digits)) == address:
            return name
    return ""


async def open_door(address: str) -> tuple[asyncio.Server, int, str]:
    """Let other hosts try to reach this one.

    Returns:
        What listens; its port; and the word that a connection reads. By the word, another host knows that it has not
        reached a third one, or itself: all hosts have a 127.0.0.1, and many the same address of a bridge.
    """
    word = secrets.token_hex(8)

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(word.encode())
        writer.close()

    server = await asyncio.start_server(answer, address, 0)
    return server, server.sockets[0].getsockname()[1], word


async def unreachable(others: Sequence[tuple[str, str, int, str]]) -> list[str]:
    """Return a clause for each host that cannot be reached from here.

    Args:
        others: their names, addresses, ports and words, see `open_door`.
    """

    async def read(address: str, port: int) -> str:
        reader, writer = await asyncio.open_connection(address, port)
        with contextlib.closing(writer):
            return (await reader.read()).decode(errors="replace")

    async def reach(name: str, address: str, port: int, word: str) -> str | None:
        try:
            found = await asyncio.wait_for(read(address, port), REACH)
        except (OSError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no answer within {REACH:g} s"
        else:
            if found == word:
                return None
            reason = "another host answers there"
        return f"{name} at {address}, port {port} ({reason})"

    return [found for found in await asyncio.gather(*(reach(*each) for each in others)) if found]
