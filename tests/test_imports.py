"""Imports and public names: the modules that ppedu loads, the layers of its packages, and `__all__`."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STANDARD_LIBRARY_ONLY = ("core", "zoo", "board")
HEAVY = {"torch", "numpy", "matplotlib", "IPython"}

LOADED = """
import sys
before = set(sys.modules)
{program}
print(*sorted({{name.partition('.')[0] for name in set(sys.modules) - before}}))
"""


def loaded(program):
    """Return the top-level modules that a fresh Python loads to run `program`."""
    done = subprocess.run([sys.executable, "-c", LOADED.format(program=program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


USE = """
import ppedu as pp
from ppedu.core import partition
schedule = pp.schedule("1f1b", 4, 8)
timeline = pp.simulate(schedule)
pp.check(schedule), str(schedule), schedule.to_csv(), timeline.memory(0), pp.Costs.fit(timeline)
pp.theory.idle("1f1b", 4, 8)
"""


@pytest.mark.parametrize(
    "program",
    ["import ppedu", "import ppedu.core, ppedu.zoo, ppedu.board.levels, ppedu.zoo.theory", USE],
    ids=["import", "packages", "use"],
)
def test_the_lower_layers_load_only_the_standard_library(program):
    names = loaded(program)
    assert "ppedu" in names
    assert not names & HEAVY
    assert names - {"ppedu"} <= set(sys.stdlib_module_names)


def test_a_trace_is_saved_and_loaded_without_matplotlib(tmp_path):
    program = f"""
import ppedu as pp
timeline = pp.simulate(pp.schedule("1f1b", 4, 8))
timeline.save({str(tmp_path / "x.json")!r})
assert pp.Timeline.load({str(tmp_path / "x.json")!r}).schedule == timeline.schedule
"""
    assert not loaded(program) & HEAVY


@pytest.mark.parametrize("package", STANDARD_LIBRARY_ONLY)
def test_no_function_of_a_lower_layer_imports_a_third_party_package(package):
    """Read the imports from the source, also those inside functions; only annotations may name other packages."""
    for file in (ROOT / "ppedu" / package).glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for_types = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        ignored = {child for node in for_types for child in ast.walk(node)}
        for node in set(ast.walk(tree)) - ignored:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {module.partition(".")[0] for module in modules} <= {"ppedu", *sys.stdlib_module_names}, file


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        (
            "core/actions.py",
            "def lazy():\n    from ppedu.zoo import schedule\n",
            "ppedu.core is not allowed to import ppedu.zoo",
        ),
        ("zoo/__init__.py", "from ppedu.board.board import Board\n", "ppedu.zoo is not allowed to import ppedu.board"),
        ("view/__init__.py", "import ppedu.run\n", "ppedu.view is not allowed to import ppedu.run"),
        ("run/__init__.py", "def lazy():\n    import ppedu.cli.main\n", "ppedu.run is not allowed to import ppedu.cli"),
        ("board/levels.py", "def lazy():\n    import torch\n", "ppedu.board is not allowed to import torch"),
        (
            "core/lower.py",
            "def lazy():\n    from ppedu import explore\n",
            "ppedu.core.lower is not allowed to import ppedu",
        ),
        ("other/__init__.py", "", "The following modules are not listed as layers:\n\n- ppedu.other"),
        ("core/actions.py", "import ppedu.core.placement\n", None),
    ],
)
def test_an_import_that_breaks_a_contract_is_reported(tmp_path, file, line, broken):
    """Append a line to a file of a copy of ppedu, and run import-linter there."""
    pytest.importorskip("importlinter")
    shutil.copytree(ROOT / "ppedu", tmp_path / "ppedu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    changed = tmp_path / "ppedu" / file
    changed.parent.mkdir(exist_ok=True)
    with changed.open("a", encoding="utf-8") as text:
        text.write(f"\n{line}")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, broken is None or broken in done.stdout) == (int(broken is not None), True), done.stdout


NAMES = """
import pkgutil
import ppedu as pp

def public():
    return [getattr(pp, name) for name in pp.__all__]

before = public()
for module in pkgutil.walk_packages(pp.__path__, "ppedu."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
for name, old, new in zip(pp.__all__, before, public()):
    assert old is new, f"{name} was {old!r} and is now {new!r}"
"""


def test_importing_every_submodule_leaves_the_public_names_unchanged():
    """A subpackage sets an attribute of its own name, and would replace a public function of the same name."""
    for module in ("torch", "matplotlib", "anywidget", "IPython"):
        pytest.importorskip(module)
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_submodule_has_the_name_of_a_public_function():
    import ppedu as pp

    submodules = {path.stem for path in (ROOT / "ppedu").iterdir()}
    assert not submodules & {name for name in pp.__all__ if callable(getattr(pp, name))}


def test_an_unknown_name_is_an_attribute_error():
    import ppedu as pp

    with pytest.raises(AttributeError, match="module 'ppedu' has no attribute 'nothing'"):
        _ = pp.nothing
