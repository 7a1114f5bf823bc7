"""Cells on other hosts, in a real kernel: they show and return what they do on one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell

LESSONS = Path(__file__).parents[2] / "notebooks"
WITH_RANKS = sorted(each.name for each in LESSONS.glob("*.ipynb") if "%%torchrun -n" in each.read_text("utf-8"))


@pytest.fixture(scope="module")
def kernel(network: Any, kernel: Any) -> Any:
    """The kernel of other tests, started where the names of the hosts are known."""
    return kernel


def test_a_cell_names_its_hosts(kernel):
    cell = kernel("%%torchrun -n 2 --on ssh:alpha,beta\nimport os\nprint(os.environ['GROUP_RANK'])")
    assert (cell.text, cell.error) == ("[0] 0\n[1] 1\n", None)


def test_a_notebook_names_its_hosts_once(kernel):
    assert kernel("%torchrun --on ssh:alpha,beta").text == "%%torchrun now runs cells on ssh:alpha,beta\n"
    program = "import os\nprint(os.environ['GROUP_RANK'])"
    assert kernel(f"%%torchrun -n 2\n{program}").text == "[0] 0\n[1] 1\n"
    assert kernel(f"%%torchrun -n 2 --on local\n{program}").text == "[0] 0\n[1] 0\n"
    listed = kernel("%ranks").text
    assert "launcher of ssh:alpha,beta: process" in listed and "launcher zygote: process" in listed
    assert kernel("%torchrun --on local").text == "%%torchrun now runs cells on this machine\n"
    assert kernel(f"%%torchrun -n 2\n{program}").text == "[0] 0\n[1] 0\n"


def test_values_go_there_and_come_back(kernel):
    kernel("numbers = [1, 2, 3]")
    cell = kernel(
        "%%torchrun -n 3 --on ssh:alpha,beta --in numbers\nimport os, ppedu as pp\n"
        "pp.give_back({'rank': os.environ['RANK'], 'sum': sum(numbers)})"
    )
    assert cell.error is None
    assert kernel("print([r['rank'] for r in results], results[2]['sum'])").text == "['0', '1', '2'] 6\n"


def test_pictures_are_shown_where_they_are_made(kernel):
    cell = kernel(
        "%%torchrun -n 2 --on ssh:alpha,beta\nimport os\nfrom matplotlib import pyplot as plt\n"
        "print('before')\nplt.plot([1, int(os.environ['RANK'])])\nplt.show()\nprint('after')"
    )
    assert cell.text == "[0] before\n[0] after\n[1] before\n[1] after\n" and cell.error is None
    assert len([each for each in cell.shown if "image/png" in each]) == 2


def test_an_error_names_rank_host_and_line(kernel):
    cell = kernel("%%torchrun -n 2 --on ssh:alpha,beta\nimport os\nif os.environ['RANK'] == '1':\n    1 / 0")
    assert cell.traceback.splitlines()[0] == "rank 1 on beta failed:"
    assert "line 4, in <module>" in cell.traceback and cell.traceback.endswith("ZeroDivisionError: division by zero")


def test_a_deadlock_names_ranks_hosts_and_lines(kernel):
    cell = kernel(
        "%%torchrun -n 2 --on ssh:alpha,beta --timeout 3\nimport torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.recv(x, 1 - dist.get_rank())"
    )
    assert "rank 0 on alpha waits in recv(src=1) at line 5: dist.recv(x, 1 - dist.get_rank())" in cell.traceback
    assert "deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0: all receive, none sends" in cell.traceback


def test_a_wrong_option_is_an_error_in_one_line(kernel):
    assert kernel("%%torchrun --on moon\npass").traceback.startswith("unknown place --on 'moon'; write local,")
    assert kernel("%%torchrun --python /x\npass").traceback.startswith(
        "--python and --interface are for ranks on other"
    )
    assert kernel("%%torchrun -n 2 --on ssh:alpha --launcher torchrun\npass").traceback.startswith(
        "--launcher torchrun"
    )


def test_a_cell_of_a_lesson_prints_on_hosts_what_is_saved_in_it(kernel):
    cells = json.loads((LESSONS / "02_cutting_autograd.ipynb").read_text("utf-8"))["cells"]
    sources = ["".join(each["source"]) for each in cells]
    place = next(place for place, source in enumerate(sources) if source.startswith("%%torchrun -n 2\n"))
    cell = kernel(sources[place].replace("-n 2", "-n 2 --on ssh:alpha,beta", 1))
    [output] = cells[place]["outputs"]
    assert (cell.text, cell.error) == ("".join(output["text"]), None)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["ssh:alpha,beta", "ssh:alpha,beta,gamma"])
@pytest.mark.parametrize("lesson", WITH_RANKS)
def test_a_lesson_prints_on_hosts_what_it_prints_on_one_machine(network, tmp_path, lesson, on):
    """nbval compares all outputs with the saved ones. In a deadlock's report, hosts are named as well."""
    text = (LESSONS / lesson).read_text("utf-8")
    for rank, host in enumerate(("alpha", "beta")):
        text = text.replace(
            f"rank {rank} waits in recv(src={1 - rank})", f"rank {rank} on {host} waits in recv(src={1 - rank})"
        )
    page = json.loads(text)
    first = next(i for i, cell in enumerate(page["cells"]) if "%load_ext ppedu" in "".join(cell["source"]))
    metadata = {"tags": ["nbval-ignore-output"]}
    hosts = new_code_cell(f"%torchrun --on {on}", id="hosts", metadata=metadata)  # type: ignore[no-untyped-call]
    page["cells"].insert(first + 1, hosts)
    for each in LESSONS.iterdir():
        (tmp_path / each.name).symlink_to(each)
    copy = tmp_path / "lesson.ipynb"
    copy.write_text(json.dumps(page), "utf-8")
    options = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=300", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, copy],
        env=os.environ | {"PPEDU_STILL": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
