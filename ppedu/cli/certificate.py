"""`ppedu certificate`: write a certificate of the solved exercises, or check one."""

from __future__ import annotations

from argparse import Namespace


def write(options: Namespace) -> int:
    """write a certificate of the exercises that are solved in this folder"""
    from ppedu.course.certificates import certificate

    certificate(options.name, options.save)
    return 0


def check(options: Namespace) -> int:
    """run the answers in a certificate again, and print what holds"""
    from ppedu.course.certificates import check_certificate

    wrong = 0
    for line in check_certificate(options.file, options.seconds):
        print(line, flush=True)
        wrong += line.holds is False
    return int(wrong > 0)
