"""File names, and reading and writing files."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from ppedu.core.errors import PipelineError, SettingError


def named(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a Path. Raise SettingError if it cannot be the name of a file."""
    if isinstance(path, str) and not path:
        raise SettingError("a file name must not be empty; '.' is the current folder")
    try:
        where = Path(path)
        possible = b"\0" not in os.fsencode(where)  # raises ValueError for a lone surrogate
    except (TypeError, ValueError):
        possible = False
    if not possible:
        raise SettingError(f"a file name must be text or a Path; got {path!r}")
    return where


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file to read its bytes; one that gzip has compressed is decompressed, whatever its name.

    Raises:
        PipelineError: The file cannot be read, or its compressed data is damaged; also while it is being read.
    """
    try:
        with named(path).open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            yield cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if zipped else raw
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"it is damaged ({error})"
        raise PipelineError(f"cannot read {str(path)!r}: {why}") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path`, as `replace_bytes` does. Raise PipelineError if that is impossible."""
    try:
        replace_bytes(named(path), content)
    except OSError as error:
        raise _cannot_write(path, error.strerror) from error


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a kill at any time leaves all of its old content or all of the new.

    Links, special files such as /dev/stdout, and files in a folder where none can be created are written in place.

    Raises:
        OSError: The file cannot be written.
    """
    before = path.lstat() if os.path.lexists(path) else None
    if before is None:
        replaceable = True
    else:
        single_file = stat.S_ISREG(before.st_mode) and before.st_nlink == 1
        replaceable = single_file and os.access(path, os.W_OK)
    if not (replaceable and os.access(path.parent, os.W_OK)):
        path.write_bytes(content)
        return
    part = path.parent / f".{os.urandom(8).hex()}.part"  # not made of the name, which may be as long as possible
    try:
        part.write_bytes(content)
        if before is not None:
            part.chmod(stat.S_IMODE(before.st_mode))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise PipelineError if a file at `path` could not be written; nothing is written."""
    where = named(path)
    try:
        if where.is_dir():
            raise _cannot_write(path, "it is a folder")
        if not where.parent.is_dir():
            raise _cannot_write(path, f"there is no folder {str(where.parent)!r}")
        if not os.access(where if where.exists() else where.parent, os.W_OK):
            raise _cannot_write(path, "permission denied")
    except OSError as error:  # such as a name that is too long
        raise _cannot_write(path, error.strerror) from error


def _cannot_write(path: str | os.PathLike[str], why: str | None) -> PipelineError:
    return PipelineError(f"cannot write {str(path)!r}: {why}; name a file in a folder that you may write to")
