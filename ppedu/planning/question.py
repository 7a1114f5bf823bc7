"""Questions to `ppedu.plan` in TOML files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from ppedu.core import ParseError, PipelineError, SettingError
from ppedu.core.files import named
from ppedu.core.validate import require_count, require_instance
from ppedu.planning.machine import Machine
from ppedu.planning.model import Model
from ppedu.planning.pieces import MOST_LAYERS, Pieces, measured
from ppedu.planning.planner import SPLITS, plan

ROWS = ("forward", "backward", "input", "weight", "activation", "weights")
EXAMPLE = """[model]
layers = 32
forward = [0.5, 12, 29]  # embedding, each layer, head with loss
unit = "ms"
activation = [0, 1.1e9, 6.3e9]  # bytes of a microbatch, from its forward to its backward
weights = [525e6, 218e6, 525e6]
bytes_per_weight = 16

[machine]
memory = 80e9  # bytes of a GPU; try 40e9

[plan]
ranks = 8
microbatches = 32"""


def _keys(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments of a function, and whether each must be given."""
    return {name: each.default is Parameter.empty for name, each in signature(function).parameters.items()}


FILE, SIZES, TIMES, MACHINE, PLAN = "the file", "[model] with sizes", "[model] with forward", "[machine]", "[plan]"
KEYS = {
    FILE: dict.fromkeys(("model", "machine", "plan"), True),
    SIZES: _keys(Model),
    TIMES: {**_keys(measured), "layers": False},
    MACHINE: _keys(Machine),
    PLAN: {**_keys(plan), **dict.fromkeys(SPLITS, False)},
}
for absent in ("model", "machine", "progress", "split"):
    del KEYS[PLAN][absent]


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of `plan` that a TOML file holds.

    Args:
        model: The name of a published model; a table of the sizes of a `Model`; or a table of the arguments of
            `Model.measured`. In that one, lists of three numbers are those of the embedding, each of the `layers`, and
            the head.
        machine: A name, or a table of the fields of a `Machine`.
        plan: A table of the other arguments.

    Every key has an effect; any other key is refused.

    Raises:
        PipelineError: The file cannot be read.
        ParseError: It is not such a file.
    """
    try:
        import tomllib  # type: ignore[import-not-found]  # of Python 3.11
    except ImportError:
        raise PipelineError("reading a TOML file needs Python 3.11; call ppedu.plan instead") from None
    file = named(path)
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        str(tables)  # raises ValueError if a hexadecimal number has too many digits to be printed
    except OSError as error:
        raise PipelineError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise ParseError(f"{str(path)!r} is not TOML: {error}") from None
    if not tables.keys() >= KEYS[FILE].keys():
        raise ParseError(f"{str(path)!r} must have the tables model, machine and plan, such as\n\n{EXAMPLE}\n")
    try:
        return _question(tables)
    except SettingError as error:
        raise ParseError(f"{str(path)!r}: {error}") from None


def _question(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `plan` in the tables of a file."""
    _require_known(FILE, tables)
    model, machine, options = (tables[name] for name in KEYS[FILE])
    require_instance("model", model, str | dict, "a table, or a name in quotes")
    require_instance("machine", machine, str | dict, "a table, or a name in quotes")
    require_instance("plan", options, dict, "a table")
    _require_known(PLAN, options)
    if isinstance(machine, dict):
        _require_known(MACHINE, machine)
        machine = Machine(**machine)
    if isinstance(model, dict):
        if twice := [name for name in model if name in options]:
            raise SettingError(f"{twice[0]} is in [model] and in [plan]; leave out one of them")
        model = _model(model)
    return {"model": model, "machine": machine, **options}


def _model(table: Mapping[str, Any]) -> Model | Pieces:
    """Return the model of a table."""
    if "forward" not in table:
        _require_known(SIZES, table)
        return Model(**table)
    _require_known(TIMES, table)
    given = {name: value for name, value in table.items() if name != "layers"}
    if "layers" in table:
        layers = require_count("layers", table["layers"], most=MOST_LAYERS)
        for name in ROWS:
            row = given.get(name)
            if isinstance(row, list) and len(row) == 3:
                given[name] = [row[0], *[row[1]] * layers, row[2]]
            elif isinstance(row, list) and len(row) != layers + 2:
                raise SettingError(
                    f"layers = {layers} contradicts the {len(row)} entries of {name}; give {name} three entries (the "
                    f"embedding, each layer, the head) or {layers + 2}, or leave out layers"
                )
    return measured(**given)


def _require_known(where: str, table: Mapping[str, Any]) -> None:
    """Raise SettingError if a table has an unknown key, or lacks one that must be given."""
    keys = KEYS[where]
    for name in table:
        if name not in keys:
            others, near = [other for other in KEYS if name in KEYS[other]], get_close_matches(name, keys, 1)
            hint = f"it belongs in {' or '.join(others)}; " if others else f"did you mean {near[0]!r}? " if near else ""
            raise SettingError(f"unknown key {name!r} in {where}; {hint}the keys are {', '.join(keys)}")
    if missing := [name for name, needed in keys.items() if needed and name not in table]:
        raise SettingError(f"{where} lacks {', '.join(map(repr, missing))}")
