"""Passes Ethernet frames between two network interfaces, each after a delay: `python slow.py INTERFACE TAP SECONDS`.

It makes the interface TAP. Both are then two ends of a long cable. (The kernel's netem does the same, where it exists.)
"""

import contextlib
import fcntl
import heapq
import os
import select
import socket
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x2, 0x1000
ETH_P_ALL = 3


def main(interface: str, tap: str, delay: float) -> None:
    there = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    there.bind((interface, 0))
    here = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(here, TUNSETIFF, struct.pack("16sH22x", tap.encode(), IFF_TAP | IFF_NO_PI))
    print("ready", flush=True)
    due: list[tuple[float, int, bool, bytes]] = []  # frames, by the time at which they arrive
    number = 0
    while True:
        left = max(0.0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select([there, here], [], [], left)
        now = time.monotonic()
        if there in ready:
            frame, sender = there.recvfrom(1 << 16)
            if sender[2] != socket.PACKET_OUTGOING:
                number += 1
                heapq.heappush(due, (now + delay, number, True, frame))
        if here in ready:
            number += 1
            heapq.heappush(due, (now + delay, number, False, os.read(here, 1 << 16)))
        while due and due[0][0] <= now:
            _, _, arrives_here, frame = heapq.heappop(due)
            with contextlib.suppress(OSError):  # a lost frame, as on a cable
                os.write(here, frame) if arrives_here else there.send(frame)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
