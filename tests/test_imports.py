"""Imports and public names: the modules that ppedu loads, the layers of its packages, and `__all__`."""

import ast
import graphlib
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STANDARD_LIBRARY_ONLY = ("core", "sim", "zoo")
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
from ppedu.sim import partition
schedule = pp.schedule("1f1b", 4, 8)
timeline = pp.simulate(schedule)
pp.check(schedule), str(schedule), schedule.to_csv(), timeline.memory(0), pp.Costs.fit(timeline)
pp.theory.idle("1f1b", 4, 8)
"""


@pytest.mark.parametrize(
    "program",
    ["import ppedu", "import ppedu.core, ppedu.zoo, ppedu.course.board.levels, ppedu.zoo.theory", USE],
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


# By file: a line that a contract forbids, and what is then reported.
FORBIDDEN = {
    "core/actions.py": ("def lazy():\n    from ppedu.sim.costs import Costs\n", "ppedu.core", "ppedu.sim"),
    "sim/costs.py": ("from ppedu.zoo import schedule\n", "ppedu.sim", "ppedu.zoo"),
    "zoo/__init__.py": ("from ppedu.course.board.board import Board\n", "ppedu.zoo", "ppedu.course"),
    "view/__init__.py": ("import ppedu.engine\n", "ppedu.view", "ppedu.engine"),
    "launch/pool.py": ("def lazy():\n    import ppedu.view.model\n", "ppedu.launch", "ppedu.view"),
    "engine/__init__.py": ("def lazy():\n    import ppedu.cli.main\n", "ppedu.engine", "ppedu.cli"),
    "planning/plan.py": ("def lazy():\n    import torch\n", "ppedu.planning", "torch"),
    "core/lowering.py": ("def lazy():\n    from ppedu import explore\n", "ppedu.core.lowering", "ppedu"),
}


def contracts(folder, changes):
    """Append lines to files of a copy of ppedu, and return the exit status and the output of import-linter there."""
    pytest.importorskip("importlinter")
    shutil.copytree(ROOT / "ppedu", folder / "ppedu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for file, line in changes.items():
        changed = folder / "ppedu" / file
        changed.parent.mkdir(exist_ok=True)
        with changed.open("a", encoding="utf-8") as text:
            text.write(f"\n{line}")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_imports_that_break_a_contract_are_reported(tmp_path):
    status, printed = contracts(tmp_path / "upwards", {file: line for file, (line, *_) in FORBIDDEN.items()})
    assert status == 1
    for _, below, above in FORBIDDEN.values():
        assert f"{below} is not allowed to import {above}:" in printed, printed
    status, printed = contracts(tmp_path / "new", {"other/__init__.py": ""})
    assert status == 1 and "The following modules are not listed as layers:\n\n- ppedu.other" in printed
    assert contracts(tmp_path / "down", {"core/actions.py": "import ppedu.core.placement\n"})[0] == 0


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions count; those for annotations alone do not."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("ppedu", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules - {"ppedu"}}
    assert len(imports) > 200
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_a_package_is_small_enough_to_be_seen_through():
    """At most 20 files and 4,000 lines; the exercises, a file for each lesson, have more."""
    for folder in {file.parent for file in (ROOT / "ppedu").rglob("*.py")}:
        files = [*folder.glob("*.py")]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        assert folder.name == "exercises" or (len(files) <= 20 and lines <= 4000), (folder, len(files), lines)


def test_no_two_classes_have_the_same_name():
    found = [
        (node.name, file)
        for file in (ROOT / "ppedu").rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    names = Counter(name for name, _ in found)
    assert not [each for each in found if names[each[0]] > 1]


def test_starting_ranks_loads_neither_the_course_nor_a_widget():
    """The launcher and every host load this, and each rank has it in memory."""
    modules = "pool, zygote, agent, jobs, hosts.remote"
    program = "import sys, " + ", ".join(f"ppedu.launch.{each}" for each in modules.split(", "))
    program += "\nprint(*[name for name in sys.modules if name.startswith('ppedu.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    names = done.stdout.split()
    assert {name.split(".")[1] for name in names} == {"core", "launch", "sim", "zoo"} and len(names) < 68, done


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
