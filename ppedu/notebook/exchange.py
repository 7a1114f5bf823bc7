"""What goes from the notebook to its ranks and back: values in files that only this user can read, and pictures."""

from __future__ import annotations

import ast
import io
import json
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

from ppedu.core.errors import PipelineError, SettingError
from ppedu.core.timeline import Timeline
from ppedu.core.validate import require_count
from ppedu.view.perfetto import chrome_trace

FOLDER = "PPEDU_RUN"  # the environment variable that tells a rank its run's folder
FIGURE = "\x1b_ppedu:{}\x1b\\"  # stands, on a line of its own, for a picture in the run's folder
INPUTS = "inputs"  # the file in the run's folder that holds the variables of `--in`
LIVE = FIGURE.format("live") + "\n"  # and this, wherever it stands, for a new state of a training that is watched

WATCHED = ("timeline.json", "losses.json")  # of a training that is watched: its last step, and the losses of all
MOST_OFTEN = 0.2  # seconds between two states of it, the last one excepted


def give_back(value: Any) -> None:
    """Give a value back to the notebook: after the cell it is `results[rank]`. The last one given counts.

    It can be whatever pickle can take apart, such as numbers, lists, tensors and Timelines; not what is defined in the
    cell itself, as the notebook knows nothing of that. In a program that no `%%torchrun` cell has started, this does
    nothing.

    Raises:
        SettingError: it cannot be taken apart.
    """
    if FOLDER in os.environ:
        rank = os.environ["LOCAL_RANK"]
        file = Path(os.environ[FOLDER], f"{rank}.result")
        write_private(file.with_suffix(".part"), packed(value, f"what rank {rank} gives back", "the cell"))
        file.with_suffix(".part").rename(file)


_told = -MOST_OFTEN  # when this process has told of a state last


def show_live(losses: Sequence[float], timeline: Timeline, steps: int) -> None:
    """Show, while a `%%torchrun` cell runs, how far a training has come. To be called after each step.

        for step in range(steps):
            losses.append(pipeline.step(inputs, targets).item())
            pp.show_live(losses, pipeline.timeline, steps)

    losses: of all steps so far. timeline: the last step's. steps: how many there will be.

    Every rank may call it; what rank 0 says is shown. In a program that no cell has started, it does nothing.

    Raises:
        SettingError: there is no loss yet, or these are not numbers, a timeline and a number of steps.
    """
    global _told
    if not isinstance(timeline, Timeline):
        raise SettingError(f"show_live takes a step's timeline, such as pipeline.timeline; got {timeline!r}")
    require_count("the number of steps", steps)
    try:
        numbers = [float(loss) for loss in losses]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        raise SettingError(f"show_live takes a list of losses, one number for each step; got {losses!r}") from None
    if not numbers:
        raise SettingError("show_live takes the losses of all steps so far; call it after the first step")
    if os.environ.get("LOCAL_RANK") != "0" or FOLDER not in os.environ:
        return
    if len(numbers) < steps and time.monotonic() < _told + MOST_OFTEN:
        return
    _told = time.monotonic()
    folder = Path(os.environ[FOLDER])
    finite = [number if math.isfinite(number) else None for number in numbers]
    state = json.dumps({"losses": finite, "steps": int(steps)})
    for name, text in zip(WATCHED, (chrome_trace(timeline), state), strict=True):
        part = folder / f"{name}.part"
        write_private(part, text.encode())
        part.rename(folder / name)
    print(LIVE, end="", flush=True)


def given_back(folder: Path, ranks: int) -> list[Any] | None:
    """What each rank has given back, None for those that have not; None if nobody has.

    Raises:
        PipelineError: something cannot be put together here.
    """
    files = [folder / f"{rank}.result" for rank in range(ranks)]
    if not any(file.exists() for file in files):
        return None
    found: list[Any] = []
    for rank, file in enumerate(files):
        try:
            found.append(pickle.loads(file.read_bytes()) if file.exists() else None)
        except Exception as error:
            raise PipelineError(f"what rank {rank} gave back cannot be read here: {error}") from error
    return found


def require_name(option: str, name: str) -> None:
    """Raise SettingError unless `name` can be a variable of the notebook's own."""
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        raise SettingError(
            f"{option}: {name!r} cannot name a variable; use letters, digits and underscores, as in results_2"
        )


def input_names(text: str) -> list[str]:
    """Return the names in `text`, the value of `--in`, in order and each once.

    Raises:
        SettingError: one of them cannot name a variable.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        require_name(f"--in {text}", name)
    return list(dict.fromkeys(names))


def packed_inputs(names: Sequence[str], values: Mapping[str, Any]) -> bytes:
    """Return the notebook's variables `names` as a pickled dict, for the file `INPUTS` in the run's folder.

    Raises:
        SettingError: there is no such variable, or it cannot be taken apart.
    """
    option = f"--in {','.join(names)}"
    for name in names:
        if name not in values:
            raise SettingError(f"{option}: there is no variable {name!r} in the notebook")
    return packed({name: values[name] for name in names}, option, "the notebook")


def read_inputs(folder: Path) -> dict[str, Any]:
    """Return the variables that the notebook has given to its ranks.

    Raises:
        PipelineError: they cannot be put together here.
    """
    file = folder / INPUTS
    try:
        values: dict[str, Any] = pickle.loads(file.read_bytes()) if file.exists() else {}
    except Exception as error:
        raise PipelineError(f"a rank cannot read what --in gives it: {type(error).__name__}: {error}") from None
    return values


def with_inputs(cell: str, names: Sequence[str], file: str) -> str:
    """Return the cell's source with a line that loads its inputs, the pickled dict in `file`.

    The line comes first, but for what Python wants at the very beginning: a docstring and `from __future__ import …`.
    """
    load = f"import pathlib, pickle; {', '.join(names)}, = pickle.loads(pathlib.Path({file!r}).read_bytes()).values()"
    program, last = ast.parse(cell), None
    for each in program.body:
        is_docstring = each is program.body[0] and ast.get_docstring(program) is not None
        if not is_docstring and not (isinstance(each, ast.ImportFrom) and each.module == "__future__"):
            break
        last = each
    if last is None:
        return f"{load}\n{cell}"
    assert last.end_lineno is not None
    lines = cell.split("\n")
    line = lines[last.end_lineno - 1].encode()  # as columns are counted in bytes
    before, after = line[: last.end_col_offset].decode(), line[last.end_col_offset :].decode()
    if after.strip().startswith(";"):  # another statement is on this line
        lines[last.end_lineno - 1] = f"{before}; {load}{after}"
    else:
        lines.insert(last.end_lineno, load)
    return "\n".join(lines)


def packed(value: Any, what: str, where: str) -> bytes:
    """`value`, pickled.

    Raises:
        SettingError: that cannot be, or the other side could not make sense of it.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except _Unknown as error:
        raise SettingError(f"{what} has {error} in it, which is defined in {where} and known only there") from None
    except Exception as error:
        raise SettingError(f"{what} cannot be taken apart and sent: {error}") from error
    return buffer.getvalue()


def new_folder() -> Path:
    """A name for a run's folder. Its maker knows it before the folder is there, and so can always remove it."""
    return Path(tempfile.gettempdir(), f"ppedu-{uuid.uuid4().hex}")


def write_private(file: Path, content: bytes) -> None:
    """Write a file that nobody else can read."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(content)


class _Unknown(Exception):
    pass


class _Pickler(pickle.Pickler):
    """Refuses what is defined in `__main__`, which is another module on the other side."""

    def reducer_override(self, value: Any) -> Any:
        if callable(value) and getattr(value, "__module__", "") == "__main__" and hasattr(value, "__qualname__"):
            raise _Unknown(value.__qualname__)
        return NotImplemented
