"""`%%torchrun` in a real Jupyter kernel."""

import os
import subprocess
import sys
import threading
import time
import uuid

import pytest


def test_output_is_shown_with_its_rank_in_the_order_of_the_ranks(kernel):
    # The last rank writes first.
    cell = kernel("%%torchrun -n 4\nimport os, time\nr = int(os.environ['RANK'])\ntime.sleep(0.3 - r / 10)\nprint(r)")
    assert (cell.text, cell.error) == ("[0] 0\n[1] 1\n[2] 2\n[3] 3\n", None)


@pytest.mark.parametrize("options", ["", "-n 1", "--nproc-per-node 1", "--nproc-per-node=1 --timeout=30"])
def test_options_of_torchrun_are_accepted(kernel, options):
    assert kernel(f"%%torchrun {options}\nimport os; print(os.environ['WORLD_SIZE'])").text == "[0] 1\n"


def test_variables_of_the_notebook_are_not_in_the_ranks_nor_the_reverse(kernel):
    kernel("secret = 5")
    assert kernel("%%torchrun\nleft = 5\nprint('secret' in globals(), __name__)").text == "[0] False __main__\n"
    assert kernel("print('left' in globals())").text == "False\n"


def test_ranks_run_in_the_notebooks_folder_and_import_from_it(kernel):
    kernel("open('beside.py', 'w').write('import os; folder = os.getcwd()')")
    assert (
        kernel("import os; print(os.getcwd())").text
        == kernel("%%torchrun\nimport beside\nprint(beside.folder)").text[4:]
    )


def test_a_failed_rank_is_reported_with_the_line_of_the_cell_only(failed):
    cell = failed("""%%torchrun -n 2
import os
if os.environ["RANK"] == "1":
    print("so far")
    [][7]  # one too many""")
    assert cell.text == "[1] so far\n"
    lines = cell.traceback.splitlines()
    assert lines[0] == "rank 1 failed:" and lines[-1] == "IndexError: list index out of range"
    assert "    [][7]  # one too many" in lines
    assert cell.traceback.count("File ") == 1 and 'File "cell", line 5' in cell.traceback


def test_an_error_of_ppedu_is_reported_with_the_line_of_the_cell(failed):
    cell = failed("%%torchrun\nfrom ppedu.run import communicate\ncommunicate('send')")
    assert cell.traceback.count("File ") == 1 and "unknown operation 'send'" in cell.traceback


def test_a_syntax_error_is_reported_before_any_rank_runs(failed):
    cell = failed("%%torchrun -n 2\nprint('never')\nif True print()")
    assert cell.text == ""
    assert cell.traceback.splitlines() == ["line 3 of the cell: invalid syntax", "if True print()", "        ^"]


@pytest.mark.parametrize("body", ["x = 5\nawait x", "x = 5\nreturn x"])
def test_await_and_return_outside_a_function_are_syntax_errors(failed, body):
    cell = failed(f"%%torchrun\n{body}")
    assert cell.traceback.startswith("line 3 of the cell: ") and body.splitlines()[1] in cell.traceback.splitlines()


BAD_OPTIONS = {
    "-n 0": "the number of ranks must be at least 1; got 0",
    "-n -1": "the number of ranks must be at least 1; got -1",
    "-n x": "invalid int value: 'x'",
    "-n": "expected one argument",
    "-n 1.5": "invalid int value: '1.5'",
    "-n 65": "at most 64 ranks",
    "-n 99999999999999": "at most 64 ranks",
    "--wat": "unrecognized arguments: --wat",
    "4": "unrecognized arguments: 4",
    "--timeout soon": "invalid float value: 'soon'",
    "--timeout nan": "timeout must",
    "--timeout -1": "timeout must",
    "-n '2": "No closing quotation",
    "--out 'a b'": "'a b' cannot name a variable",
    "--out a.b": "'a.b' cannot name a variable",
    "--out class": "'class' cannot name a variable",
    "--out __builtins__": "'__builtins__' cannot name a variable",
    "--out ''": "'' cannot name a variable",
    "--in class": "'class' cannot name a variable",
    "--in __name__": "'__name__' cannot name a variable",
    "--in ,": "'' cannot name a variable",
    "--save ''": "--save needs the name of a file, such as lesson.py or job.sbatch",
}


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS.items())
def test_invalid_options_are_refused_in_at_most_three_lines(failed, options, says):
    cell = failed(f"%%torchrun {options}\nprint('never')")
    assert cell.text == "" and says in cell.traceback and len(cell.traceback.splitlines()) <= 3


REFUSED = """
import resource, time
from IPython.testing.globalipapp import start_ipython
from ppedu.cells.magic import CellError
shell = start_ipython()
shell.run_line_magic("load_ext", "ppedu")
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for options in ("-n 1000000", "-n 99999999999999", "-n 1000000 --launcher torchrun", "-n 64 --timeout nan"):
    begin = time.monotonic()
    try:
        shell.run_cell_magic("torchrun", options, "print('never')")
    except CellError as error:
        print(f"{time.monotonic() - begin < 2} {error}")
"""


def test_a_huge_number_of_ranks_is_refused_before_anything_is_allocated(tmp_path, light):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": light}
    run = subprocess.run([sys.executable, "-c", REFUSED], env=environment, capture_output=True, text=True, timeout=100)
    assert run.stdout.splitlines() == [
        "True at most 64 ranks can be started from here; got 1000000",
        "True at most 64 ranks can be started from here; got 99999999999999",
        "True at most 64 ranks can be started from here; got 1000000",
        "True timeout must be a number of seconds above 0; got nan",
    ], run.stderr
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("ppedu")]


def test_an_infinite_timeout_is_accepted(kernel):
    cell = kernel("%%torchrun --timeout inf\nprint('well')")
    assert (cell.text, cell.error) == ("[0] well\n", None)


def test_a_timeout_shows_the_output_and_the_line_of_each_rank(failed):
    cell = failed("%%torchrun -n 2 --timeout 1.5\nimport time\nprint('so far')\ntime.sleep(1000)  # too long")
    assert cell.text == "[0] so far\n[1] so far\n"
    assert cell.traceback.splitlines() == [
        "the ranks were stopped because they had not ended after 1.5 s",
        "rank 0 is at line 4: time.sleep(1000)  # too long",
        "rank 1 is at line 4: time.sleep(1000)  # too long",
    ]


def test_an_interrupt_ends_the_cell_and_its_ranks(kernel, failed, tmp_path, gone):
    process = int(kernel("import os; print(os.getpid())").text)

    def interrupt():
        end = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(process, 2)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    line = f"Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(1000)"
    cell = failed(f"%%torchrun -n 2\nimport os, time\nfrom pathlib import Path\n{line}")
    interrupter.join()
    lines = [f"rank {rank} is at line 4: {line}" for rank in (0, 1)]
    assert cell.traceback.splitlines() == ["interrupted", *lines]
    assert gone(int(path.name) for path in tmp_path.iterdir())


@pytest.fixture(scope="module")
def stopped(light):
    """Return an executed notebook whose third cell fails, the mark of its processes, and its error."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    cells = ["%load_ext ppedu", "%%torchrun -n 2\nprint('well')", "%%torchrun -n 2\n1 / 0", "print('never')"]
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    mark = uuid.uuid4().hex
    client = NotebookClient(page, kernel_name="python3", timeout=100)
    with pytest.raises(CellExecutionError) as caught:
        client.execute(env=os.environ | {"PPEDU_TEST": mark, "PYTHONPATH": light})
    return page, mark, str(caught.value)


def test_run_all_stops_at_the_cell_that_failed(stopped):
    page, _, message = stopped
    assert [bool(cell.outputs) for cell in page.cells] == [False, True, True, False]
    assert "ZeroDivisionError" in message


def test_no_process_outlives_the_kernel(stopped, marked):
    end = time.monotonic() + 20
    while marked(stopped[1]) and time.monotonic() < end:
        time.sleep(0.05)
    assert marked(stopped[1]) == []


def test_a_cell_puts_a_part_into_the_learners_own_file(kernel):
    cell = kernel("%%my_pipeline 02.3\ndef send(tensor, peer):\n    ...")
    assert cell.error is None and "the function `receive` is missing" in cell.shown[0]["text/plain"]
    solution = kernel("%my_pipeline 02.3 --solution").shown[-1]
    assert solution["text/markdown"].startswith("```python\ndef send(")
    part = solution["text/plain"] + "  # mine"
    right = kernel(f"%%my_pipeline 02.3\n{part}")
    assert right.shown[0]["text/plain"].startswith("Right. ")
    assert part in kernel("print(open('my_pipeline.py').read())").text
    assert kernel("%%torchrun\nfrom my_pipeline import send\nprint(send.__name__)").text == "[0] send\n"
    assert kernel("%%my_pipeline 2\nx = 1").traceback.startswith("no part of my_pipeline.py has the number '2'")
