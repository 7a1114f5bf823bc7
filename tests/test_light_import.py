"""The ground floor needs the standard library alone."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "matplotlib", "IPython"}

LOADED = """
import sys
before = set(sys.modules)
{program}
print(*sorted({{name.partition('.')[0] for name in set(sys.modules) - before}}))
"""


def loaded(program):
    """The top-level modules that a fresh Python loads to run `program`."""
    done = subprocess.run([sys.executable, "-c", LOADED.format(program=program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


USE = """
import ppedu as pp
from ppedu.core import partition
schedule = pp.schedule("1f1b", 4, 8)
timeline = pp.simulate(schedule)
pp.check(schedule), str(schedule), schedule.to_csv(), timeline.memory(0), pp.Costs.fit(timeline)
"""


@pytest.mark.parametrize(
    "program", ["import ppedu", "import ppedu.core, ppedu.zoo", USE], ids=["import", "floor", "use"]
)
def test_the_ground_floor_loads_the_standard_library_alone(program):
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


def test_the_public_names_are_there_and_others_are_not():
    import ppedu as pp

    assert all(hasattr(pp, name) for name in pp.__all__)
    with pytest.raises(AttributeError, match="module 'ppedu' has no attribute 'nothing'"):
        _ = pp.nothing
