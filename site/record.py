"""Record what the ranks of the lessons give back, for pages that have no ranks: `make recordings`."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ppedu.sim import Timeline

HERE = Path(__file__).parent
FILE = "recorded.json"  # by cell: the variable that holds the results, and the result of each rank
SAME = {"dict": [["as rank 0", True]]}  # in place of a rank's result
LESSONS = ("02", "03", "05", "07", "08", "09", "12", "14")


def key(source: str) -> str:
    """Return what identifies a cell in the file."""
    return hashlib.sha256(source.strip().encode()).hexdigest()[:16]


def encoded(value: Any) -> Any:
    """Return a value as JSON can hold it: timelines, numbers and text in dicts and lists.

    Raises:
        TypeError: It holds something else, such as a tensor.
    """
    if isinstance(value, Timeline):
        with TemporaryDirectory() as folder:
            path = Path(folder, "timeline.json")
            value.save(path)
            return {"timeline": json.loads(path.read_text(encoding="utf-8"))}
    if isinstance(value, dict):
        return {"dict": [[each, encoded(value[each])] for each in value]}
    if isinstance(value, (list, tuple)):
        return [encoded(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def decoded(value: Any) -> Any:
    """Return what `encoded` was given; tuples are lists now."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {name: decoded(each) for name, each in value["dict"]}
    with TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        path.write_text(json.dumps(value["timeline"]), encoding="utf-8")
        return Timeline.load(path)


def results_of(kept: dict[str, Any]) -> list[Any]:
    """Return the results of all ranks, as a cell's variable holds them."""
    first, *others = kept["results"]
    return [decoded(first), *(decoded(first if each == SAME else each) for each in others)]


def results_name(source: str) -> str:
    """Return the variable that a `%%torchrun` cell sets: what follows --out."""
    words = source.partition("\n")[0].split()
    return words[words.index("--out") + 1] if "--out" in words else "results"


def keep(results: Any, source_key: str, name: str, folder: str) -> None:
    """Write what the ranks gave back, if it can be recorded; called in the lesson's kernel."""
    try:
        first, *others = map(encoded, results)
    except (TypeError, ValueError):
        return
    content = json.dumps({"name": name, "results": [first, *(SAME if each == first else each for each in others)]})
    Path(folder, f"{source_key}.json").write_text(content, encoding="utf-8")


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    with TemporaryDirectory() as folder:
        for number in LESSONS:
            [path] = (HERE.parent / "notebooks").glob(f"{number}_*.ipynb")
            book = nbformat.read(path, as_version=4)
            cells = []
            for cell in book.cells:
                cells.append(cell)
                if cell.cell_type == "code" and cell.source.startswith("%%torchrun") and "give_back(" in cell.source:
                    name = results_name(cell.source)
                    code = f"import sys; sys.path.append({str(HERE)!r})\nfrom record import keep\n"
                    code += f"keep(globals().get({name!r}, []), {key(cell.source)!r}, {name!r}, {folder!r})"
                    cells.append(nbformat.v4.new_code_cell(code))
            book.cells = cells
            NotebookClient(book, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
            print(path.stem, file=sys.stderr)
        found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).iterdir())}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each, separators=(',', ':'))}" for name, each in found.items())
    (HERE / FILE).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
