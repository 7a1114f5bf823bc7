"""What goes from the notebook to its ranks and back: values in files that only this user can read, and pictures."""

from __future__ import annotations

import io
import json
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
from ppedu.view.trace import trace

FOLDER = "PPEDU_RUN"  # the environment variable that tells a rank its run's folder
FIGURE = "\x1b_ppedu:{}\x1b\\"  # stands, on a line of its own, for a picture in the run's folder
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
        SettingError: there is no loss yet.
    """
    global _told
    if not losses:
        raise SettingError("show_live takes the losses of all steps so far; call it after the first step")
    if os.environ.get("LOCAL_RANK") != "0" or FOLDER not in os.environ:
        return
    if len(losses) < steps and time.monotonic() < _told + MOST_OFTEN:
        return
    _told = time.monotonic()
    folder = Path(os.environ[FOLDER])
    state = json.dumps({"losses": [float(loss) if math.isfinite(loss) else None for loss in losses], "steps": steps})
    for name, text in zip(WATCHED, (trace(timeline), state), strict=True):
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


def inputs(names: str, values: Mapping[str, Any], file: Path, reads: str) -> str:
    """Write the notebook's variables `names`, separated by commas, to a file; returns the line that loads them.

    reads: what that line calls the file.

    Raises:
        SettingError: there is no such variable, or it cannot be taken apart.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not name.isidentifier() or name not in values:
            raise SettingError(f"--in {names}: there is no variable {name!r} in the notebook")
    packs = packed(tuple(values[name] for name in wanted), f"--in {names}", "the notebook")
    write_private(file, packs)
    return f"import pathlib, pickle; {', '.join(wanted)}, = pickle.loads(pathlib.Path({reads!r}).read_bytes())"


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
