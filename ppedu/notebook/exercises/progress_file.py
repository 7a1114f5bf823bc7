"""The learner's progress: a text file next to the lessons, which learners can read, edit and delete."""

from __future__ import annotations

from datetime import date
from pathlib import Path

PROGRESS = Path("progress.txt")
STAR, NO_STAR = "★", "☆"


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
            with PROGRESS.open("a", encoding="utf-8") as file:  # appended: several notebooks may run at once
                file.write(f"{begin}{' '.join(filter(None, (event, STAR * stars)))} on {date.today()}\n")
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
