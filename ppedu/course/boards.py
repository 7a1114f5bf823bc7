"""The learner's stars and best times on the puzzle's levels, kept in the progress file."""

from __future__ import annotations

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
        named = f"board {level}"
        times = [time for event in events if (time := _time(event.removeprefix(f"{named} in "))) is not None]
        return Result(min(events[named], MOST_STARS), min(times)) if events.get(named) and times else None

    def add(self, level: str, result: Result) -> None:
        """Record the stars, and the time."""
        super().add(level, result)
        record(f"board {level}", stars=result.stars)
        record(f"board {level} in {pretty(result.makespan)}")


def _time(text: str) -> float | None:
    """Return a time that `pretty` has written; None for other text."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
