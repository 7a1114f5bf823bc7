"""The learner's progress: two text files next to the lessons, which learners can read, edit and delete.

One has a line for each event, the other the right answers as programs, and predictions with their outcomes, for a
certificate.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from ppedu.core.files import replace_bytes

PROGRESS, KEPT = Path("progress.txt"), Path("answers.json")
STAR, NO_STAR = "★", "☆"


def stars(number: int, most: int) -> str:
    """Return stars as text: "★★☆"."""
    earned = min(number, most)
    return STAR * earned + NO_STAR * (most - earned)


def record(event: str, stars: int = 0) -> None:
    """Record an event in progress.txt, such as `record("board 1f1b", stars=2)`, unless it is there with as many stars.

    `progress` shows the stars of exercises and of the puzzle's levels. If the file cannot be written, a sentence is
    printed.
    """
    try:
        known = recorded()
        if event not in known or known[event] < stars:
            # The last line has no end if an editor left it so, or the disk was full.
            begin = "\n" if PROGRESS.exists() and PROGRESS.read_bytes()[-1:] not in (b"", b"\n") else ""
            words = f"{event} {STAR * stars}" if stars else event
            with PROGRESS.open("a", encoding="utf-8") as file:  # appended: several notebooks may run at once
                file.write(f"{begin}{words} on {date.today()}\n")
    except OSError as error:
        print(f"(This could not be recorded in {PROGRESS}: {error.strerror}.)")


def recorded() -> dict[str, int]:
    """Return the recorded events in the order of the file, each with the most stars that it has been given.

    Raises:
        OSError: the file cannot be read.
    """
    events: dict[str, int] = {}
    lines = PROGRESS.read_text(encoding="utf-8", errors="replace").splitlines() if PROGRESS.exists() else []
    for line in lines:
        event = line.partition(" on ")[0].replace(STAR, "").strip()
        events[event] = max(line.count(STAR), events.get(event, 0))
    return events


def keep(kind: str, name: str, entry: Any) -> None:
    """Store an entry, such as the program of the answer "03.1", in place of an earlier one with this name.

    Args:
        kind: "answers" or "predictions".
    """
    known = kept()
    known[kind][name] = entry
    with suppress(OSError):  # of the same folder, `record` reports it
        replace_bytes(KEPT, (json.dumps(known, indent=1, ensure_ascii=False) + "\n").encode())


def kept() -> dict[str, dict[str, Any]]:
    """Return the stored answers and predictions by name; none if the file is missing or damaged."""
    found: Any = {}
    with suppress(OSError, ValueError):
        found = json.loads(KEPT.read_text(encoding="utf-8"))
    parts = {}
    for kind in ("answers", "predictions"):
        part = found.get(kind) if isinstance(found, dict) else None
        parts[kind] = part if isinstance(part, dict) else {}
    return parts
