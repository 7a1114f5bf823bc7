"""Values and pictures that a notebook and its ranks exchange, in files that only this user can read."""

from __future__ import annotations

import ast
import io
import keyword
import math
import os
import pickle
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppedu.core import PipelineError, SettingError
from ppedu.core.validate import require_count, require_instance
from ppedu.sim import Timeline

FOLDER = "PPEDU_RUN"  # the environment variable that holds the run's folder
NUMBER = "PPEDU_RANK"  # and the one that holds a rank's number in the run, if that is not RANK
FIGURE = "\x1b_ppedu:{}\x1b\\"  # a line of output that stands for a picture in the run's folder
INPUTS = "inputs"  # the file in the run's folder with the variables of `--in`
LIVE = FIGURE.format("live") + "\n"  # output, also within a line, that announces a new state of `show_live`

LIVE_FILE = "live"  # that state: the losses of all steps, the last step's timeline, and the number of steps
LIVE_INTERVAL = 0.2  # seconds between two states, except before the last one


def give_back(value: Any) -> None:
    """Pass a value to the notebook, where it is `results[rank]` once the cell has ended.

    Does nothing in a program that was not started by a `%%torchrun` cell.

    Args:
        value: anything that can be pickled, such as numbers, lists, tensors and Timelines, but no instance of a class
            that the cell itself defines. A later call replaces the value.

    Raises:
        SettingError: the value cannot be pickled.
    """
    if FOLDER in os.environ:
        rank = own_number()
        content = pickled(value, f"the value that rank {rank} gives back", "the cell")
        write_private(Path(os.environ[FOLDER], f"{rank}.result"), content)


def own_number() -> str:
    """Return the number of this rank among those that the notebook has started."""
    return os.environ.get(NUMBER) or os.environ["RANK"]


_last_shown = -LIVE_INTERVAL  # the time of the last call of `show_live` that had an effect


def show_live(losses: Sequence[float], timeline: Timeline, steps: int) -> None:
    """Show the progress of a training while its `%%torchrun` cell runs. Call this after each step.

        for step in range(steps):
            losses.append(pipeline.step(inputs, targets).item())
            pp.show_live(losses, pipeline.timeline, steps)

    All ranks may call it; only the call on rank 0 has an effect. Does nothing in a program that was not started by a
    cell.

    Args:
        losses: one number for each step so far.
        timeline: of the last step.
        steps: the total number of steps.

    Raises:
        SettingError: an argument has a wrong type, or there is no loss yet.
    """
    global _last_shown
    require_instance("the timeline given to show_live", timeline, Timeline, "a step's, such as pipeline.timeline")
    require_count("the number of steps", steps)
    try:
        numbers = [float(loss) for loss in losses]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        raise SettingError(f"show_live takes a list of losses, one number for each step; got {losses!r}") from None
    if not numbers:
        raise SettingError("show_live takes the losses of all steps so far; call it after the first step")
    if FOLDER not in os.environ or own_number() != "0":
        return
    if len(numbers) < steps and time.monotonic() < _last_shown + LIVE_INTERVAL:
        return
    _last_shown = time.monotonic()
    finite = [number if math.isfinite(number) else None for number in numbers]
    write_private(Path(os.environ[FOLDER], LIVE_FILE), pickled((finite, timeline, steps), "the training", "the cell"))
    print(LIVE, end="", flush=True)


def read_results(folder: Path, ranks: int) -> list[Any] | None:
    """Return a list with the value that each rank has passed to `give_back`, or None if no rank has called it.

    For a rank that has not called it, the list holds None.

    Args:
        folder: the run's.

    Raises:
        PipelineError: a value cannot be unpickled here.
    """
    files = [folder / f"{rank}.result" for rank in range(ranks)]
    if not any(file.exists() for file in files):
        return None
    problem = "the notebook cannot read the value that rank {} gave back"
    return [_unpickled(file, None, problem.format(rank)) for rank, file in enumerate(files)]


def require_name(option: str, name: str) -> None:
    """Raise SettingError unless `name`, which the user passed to `option`, can be the name of a variable."""
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        raise SettingError(
            f"{option}: {name!r} cannot name a variable; use letters, digits and underscores, as in results_2"
        )


def input_names(text: str) -> list[str]:
    """Return the variables named in `text`, the comma-separated value of `--in`, in order and without duplicates.

    Raises:
        SettingError: a name cannot be that of a variable.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        require_name(f"--in {text}", name)
    return list(dict.fromkeys(names))


def pickled_inputs(names: Sequence[str], values: Mapping[str, Any]) -> bytes:
    """Return the notebook's variables `names` as a pickled dict, for the file `INPUTS` in the run's folder.

    Raises:
        SettingError: a variable does not exist or cannot be pickled.
    """
    option = f"--in {','.join(names)}"
    for name in names:
        if name not in values:
            raise SettingError(f"{option}: the notebook has no variable {name!r}; define it in a cell before this one")
    return pickled({name: values[name] for name in names}, option, "the notebook")


def read_live(folder: Path) -> tuple[list[float | None], Timeline, int] | None:
    """Return the state of a training that `show_live` has saved in the run's folder: losses, timeline, steps; or None.

    Raises:
        PipelineError: rank 0's program has written something else there.
    """
    problem = f"rank 0's file {LIVE_FILE!r} is damaged; only show_live may write it"
    state = _unpickled(folder / LIVE_FILE, None, problem)
    if state is None or (isinstance(state, tuple) and [*map(type, state)] == [list, Timeline, int]):
        return state
    raise PipelineError(problem)


def read_inputs(folder: Path) -> dict[str, Any]:
    """Return the variables, by name, that `--in` passes to the ranks, from the file `INPUTS` in the run's folder.

    Raises:
        PipelineError: the file cannot be unpickled here.
    """
    return _unpickled(folder / INPUTS, {}, "a rank cannot read the variables of --in")


def _unpickled(file: Path, default: Any, problem: str) -> Any:
    """Return the pickled value in a file, `default` if the file does not exist.

    Raises:
        PipelineError: the value cannot be unpickled here. The message begins with `problem`.
    """
    try:
        return pickle.loads(file.read_bytes()) if file.exists() else default
    except Exception as error:
        raise PipelineError(f"{problem}: {type(error).__name__}: {error}") from None


def with_inputs(cell: str, names: Sequence[str], file: str) -> str:
    """Return the source `cell` with statements that set the variables `names` from the pickled dict in `file`.

    The statements are the first ones, but for a docstring and `from __future__ import …`, which must open a program.
    They are on the line of the last of these, so that the lines keep their numbers.
    """
    load = f"import pathlib, pickle; {', '.join(names)}, = pickle.loads(pathlib.Path({file!r}).read_bytes()).values()"
    program = ast.parse(cell)
    header = program.body[:1] if ast.get_docstring(program) is not None else []
    header += [each for each in program.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    if not header:
        return f"{load}\n{cell}"
    last = header[-1]
    assert last.end_lineno is not None
    lines = cell.encode().split(b"\n")  # because `end_col_offset` counts bytes
    line = lines[last.end_lineno - 1]
    lines[last.end_lineno - 1] = line[: last.end_col_offset] + f"; {load}".encode() + line[last.end_col_offset :]
    return b"\n".join(lines).decode()


def pickled(value: Any, name: str, origin: str) -> bytes:
    """Return the pickled value.

    Args:
        name, origin: what the value is and where it was made, such as "--in net" and "the notebook", for the error.

    Raises:
        SettingError: the value cannot be pickled, or contains a class or function that its origin itself defines.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except _InMain as error:
        raise SettingError(f"{name} contains {error}, which is defined in {origin}; move it to a module") from None
    except Exception as error:
        raise SettingError(f"{name} cannot be pickled: {error}; numbers, lists and tensors can") from error
    return buffer.getvalue()


def new_folder() -> Path:
    """Return an unused path for a run's folder, which does not exist yet."""
    return Path(tempfile.gettempdir(), f"ppedu-{uuid.uuid4().hex}")


def write_private(file: Path, content: bytes) -> None:
    """Write a file that only this user can read; other processes see all of its new content or none of it."""
    part = file.with_name(f"{file.name}.part")
    part.touch(mode=0o600)
    part.write_bytes(content)
    part.rename(file)


class _InMain(Exception):
    """Raised with the name of a class or function of `__main__` that cannot be pickled."""


class _Pickler(pickle.Pickler):
    """A pickler that raises _InMain for classes and functions of `__main__`: the receiving process has another one."""

    def reducer_override(self, value: Any) -> Any:
        if callable(value) and getattr(value, "__module__", "") == "__main__" and hasattr(value, "__qualname__"):
            raise _InMain(value.__qualname__)
        return NotImplemented
