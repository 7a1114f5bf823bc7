"""The learner's stars and best times on the puzzle's levels, kept in the progress file."""

from __future__ import annotations

from contextlib import suppress

from ppedu.core.numeric import pretty
from ppedu.course.board.results import MOST_STARS, Keeper, Result
from ppedu.course.exercises.progress_file import record, recorded


class FileKeeper(Keeper):
    """Keeps the best results in progress.txt, next to the lessons, so that they outlive the kernel."""

    def best(self, level: str) -> Result | None:
        """Return the best result in the file, or the best since the kernel started if the file cannot be read."""
        try:
            events = recorded()
        except OSError:
            return super().best(level)
        name, times = f"board {level}", []
        for event in events:
            with suppress(ValueError):  # another event, or an edited one
                times.append(float(event.removeprefix(f"{name} in ").replace(",", "")))
        return Result(min(events[name], MOST_STARS), min(times)) if events.get(name) and times else None

    def add(self, level: str, result: Result) -> None:
        super().add(level, result)
        record(f"board {level}", stars=result.stars)
        record(f"board {level} in {pretty(result.makespan)}")
