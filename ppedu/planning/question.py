"""Questions to `ppedu.plan` in TOML files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ppedu.core.errors import ParseError, PipelineError
from ppedu.core.files import named
from ppedu.core.validate import require_count
from ppedu.planning.machine import Machine
from ppedu.planning.model import Model
from ppedu.planning.pieces import Pieces

ROWS = ("forward", "backward", "input", "weight", "activation", "weights")
EXAMPLE = """[model]
layers = 32
forward = [0.5, 12, 29]  # embedding, each layer, head with loss
unit = "ms"

[machine]
memory = 80e9

[plan]
ranks = 8
microbatches = 32"""


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of `plan` that a TOML file holds.

    model: The name of a published model; a table of the sizes of a `Model`; or a table of the arguments of
        `Model.measured`. In that one, lists of three numbers are those of the embedding, each of the `layers`, and the
        head.
    machine: A name, or a table of the fields of a `Machine`.
    plan: A table of the other arguments.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: It is not such a file.
    """
    try:
        import tomllib  # type: ignore[import-not-found]  # of Python 3.11
    except ImportError:
        raise PipelineError("reading a TOML file needs Python 3.11; call ppedu.plan instead") from None
    try:
        text = named(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error}") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParseError(f"{str(path)!r} is not TOML: {error}") from None
    if tables.keys() != {"model", "machine", "plan"} or not isinstance(tables["plan"], dict):
        raise ParseError(f"{str(path)!r} must have the tables model, machine and plan, such as\n\n{EXAMPLE}\n")
    for name in ("model", "machine"):
        if not isinstance(tables[name], str | dict):
            raise ParseError(f"{str(path)!r}: {name} is a table or a name in quotes; got {tables[name]!r}")
    try:
        model = tables["model"] if isinstance(tables["model"], str) else _model(dict(tables["model"]))
        machine = tables["machine"] if isinstance(tables["machine"], str) else Machine(**tables["machine"])
    except (TypeError, ValueError) as error:  # an unknown or a missing name
        text = str(error)
        for function in ("Model.__init__()", "Machine.__init__()", "measured()"):
            text = text.replace(function, "it")
        raise ParseError(f"{str(path)!r}: {text}") from None
    return {"model": model, "machine": machine, **tables["plan"]}


def _model(table: Mapping[str, Any]) -> Model | Pieces:
    """Return the model of a table."""
    if "forward" not in table:
        return Model(**table)
    layers = table.get("layers")
    if layers is not None:
        require_count("layers", layers)
    given = {name: value for name, value in table.items() if name != "layers"}
    for name in ROWS:
        row = given.get(name)
        if layers is not None and isinstance(row, list) and len(row) == 3:
            given[name] = [row[0], *[row[1]] * layers, row[2]]
    return Model.measured(**given)
