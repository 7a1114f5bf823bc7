"""Text from users, whose names, titles and units may hold any character; and numbers, packed for pages."""

from __future__ import annotations

import re
from array import array
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress

LONGEST = 100  # characters; a picture grows with its longest label
# What XML cannot hold: control characters, surrogates, and two code points that are not characters.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def encodable(text: str) -> str:
    """Return `text` with � for each character that a page or an SVG cannot hold."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def label(text: str) -> str:
    """Return `text` as a picture can show it: encodable, and shortened if it is long."""
    return encodable(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def packed(numbers: Sequence[int | float]) -> str:
    """Return numbers as text that `unpack` in unpack.js reads: "" if all are 0.

    Each has 8 bytes, or 1, 2 or 4 where all are whole and not negative.
    """
    if not any(numbers):
        return ""
    for code in "BHI":
        with suppress(TypeError, OverflowError):  # not whole, negative, or too large
            return b64encode(array(code, numbers)).decode()
    return b64encode(array("d", numbers)).decode()
