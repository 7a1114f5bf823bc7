"""For all tests, and for the lessons when they are run as tests."""

import random
import socket
from contextlib import suppress

# Jupyter chooses ports for a kernel that are free at that moment; before the kernel has started, ranks or another
# kernel may get one of them from the system. The ports below are those that the system gives only to a program that
# asks for them by number (net.ipv4.ip_local_port_range of Linux begins at 32768).
PORTS = range(10_000, 32_768)


def find_available_port(self: object, ip: str) -> int:
    """Replace the method of this name of `jupyter_client.connect.LocalPortCache`."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((ip, port))
            return port


with suppress(ImportError):  # core, zoo and board are tested without Jupyter, too
    from jupyter_client.connect import LocalPortCache

    LocalPortCache.find_available_port = find_available_port
