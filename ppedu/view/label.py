"""Text from users. Names, titles and units may hold any character."""

from __future__ import annotations

import re

LONGEST = 100  # characters; a picture grows with its longest label
# What XML cannot hold: control characters, surrogates, and two code points that are not characters.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def encodable(text: str) -> str:
    """Return `text` with � for each character that a page or an SVG cannot hold."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def label(text: str) -> str:
    """Return `text` as a picture can show it: encodable, and shortened if it is long."""
    return encodable(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")
