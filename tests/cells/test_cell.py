"""Values, pictures, progress bars and scripts of a `%%torchrun` cell in a real Jupyter kernel."""

import base64
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(kernel):
    """The notebook's folder."""
    return Path(kernel("import os; print(os.getcwd())").text.strip())


def test_ranks_get_variables_of_the_notebook_and_give_values_back(kernel):
    kernel("import ppedu as pp\nsize, made = 3, pp.schedule('1f1b', 4, 8)")
    cell = kernel("""%%torchrun -n 3 --in size,made
import os, ppedu as pp
rank = int(os.environ["RANK"])
assert rank < size
if rank != 1:
    pp.give_back((rank, pp.simulate(made)))""")
    assert (cell.text, cell.error) == ("", None)
    cell = kernel("print([each and (each[0], each[1].makespan) for each in results], results[0][1].schedule == made)")
    assert cell.text == "[(0, 33), None, (2, 33)] True\n"


def test_the_last_value_given_back_is_set_under_the_name_of_out(kernel):
    kernel("%%torchrun -n 2 --out found\nimport ppedu as pp\npp.give_back(1)\npp.give_back([2])")
    assert kernel("print(found)").text == "[[2], [2]]\n"


def test_values_are_given_back_even_if_the_cell_fails_later(kernel, failed):
    failed("%%torchrun --out early\nimport ppedu as pp\npp.give_back(7)\n1 / 0")
    assert kernel("print(early)").text == "[7]\n"


def test_a_variable_that_cannot_be_passed_is_refused_before_any_rank_runs(kernel, failed):
    assert (
        "--in nothing: the notebook has no variable 'nothing'"
        in failed("%%torchrun --in nothing\nprint('never')").traceback
    )
    kernel("class Net: pass\nnet, lock = Net(), __import__('threading').Lock()")
    cell = failed("%%torchrun --in net\nprint('never')")
    assert cell.traceback == "--in net contains Net, which is defined in the notebook; move it to a module"
    assert "--in lock cannot be pickled: cannot pickle" in failed("%%torchrun --in lock\nprint()").traceback


def test_an_error_of_the_cell_hides_values_that_cannot_be_read(kernel, failed, folder):
    (folder / "mine.py").write_text("import os\nif 'RANK' not in os.environ: 1 / 0\nclass Net: pass")
    program = "import ppedu as pp, mine\npp.give_back(mine.Net())"
    assert (
        "the notebook cannot read the value that rank 0 gave back: ZeroDivisionError: division by zero"
        in failed(f"%%torchrun\n{program}").traceback
    )
    assert "ValueError: mine" in failed(f"%%torchrun\n{program}\nraise ValueError('mine')").traceback


def test_a_value_that_cannot_be_given_back_is_refused_in_its_line(failed):
    cell = failed("%%torchrun\nimport ppedu as pp\nclass Net: pass\npp.give_back(Net())")
    assert "the value that rank 0 gives back contains Net, which is defined in the cell" in cell.traceback
    assert 'File "cell", line 4' in cell.traceback


def test_a_figure_is_shown_below_the_output_that_precedes_it(kernel):
    cell = kernel("""%%torchrun -n 2
import os, matplotlib.pyplot as plt
print("before")
plt.figure(figsize=(2, 1 + int(os.environ["RANK"])), dpi=100)
plt.plot([1, 2])
if os.environ["RANK"] == "0":
    plt.show()
print("after")""")
    assert cell.text == "[0] before\n[0] after\n[1] before\n[1] after\n"
    # On a busy machine, the cell also shows for how long it ran.
    pictures = [base64.b64decode(each["image/png"]) for each in cell.shown if "image/png" in each]
    heights = [int.from_bytes(picture[20:24], "big") for picture in pictures]  # of a PNG's header
    assert len(heights) == 2 and heights[0] < heights[1]


def test_a_progress_bar_is_one_line_that_is_updated(kernel):
    cell = kernel("""%%torchrun -n 2
import os, time
from tqdm import tqdm
for _ in tqdm(range(8), ncols=60): time.sleep(0.05 if os.environ["RANK"] == "0" else 0)
print("done")""")
    (bar,) = [each["text/plain"] for each in cell.shown if "ran for" not in each["text/plain"]]
    assert bar.startswith("[0] 100%") and "8/8" in bar
    assert re.fullmatch(r"\[0\] done\n\[1\] 100%[^\n]*\n\[1\] done\n", cell.text)


def test_live_output_is_shown_as_it_arrives(kernel):
    cell = kernel("""%%torchrun -n 2 --live
import os, time
rank = int(os.environ["RANK"])
time.sleep(0.5 * (1 - rank))
print("begin")
time.sleep(1.0 * rank)
print("end")""")
    assert cell.text == "[1] begin\n[0] begin\n[0] end\n[1] end\n"


def test_output_of_too_many_lines_goes_to_a_file(kernel):
    cell = kernel("%%torchrun -n 2\nfor number in range(3000): print(number)")
    lines = cell.text.splitlines()
    assert len(lines) == 2 * 1001 and lines[999] == "[0] 999"
    file = Path(re.search(r"continued in (\S+),", lines[1000])[1])
    assert file.stat().st_mode & 0o777 == 0o600
    kept = sorted(file.read_text().splitlines(), key=lambda line: line[:3])  # sorted by rank only
    assert kept == [f"[{rank}] {number}" for rank in range(2) for number in range(1000, 3000)]
    kernel("%%torchrun\nprint()")
    assert not file.exists()


@pytest.mark.parametrize("body", ["sys.stdout.write('q' * 100_000_000)", "for _ in range(900): print('q' * 60_000)"])
def test_output_of_few_but_long_lines_goes_to_a_file(kernel, body):
    cell = kernel(f"%%torchrun\nimport sys\n{body}")
    assert cell.error is None and 500_000 < len(cell.text) < 2_000_000
    file = Path(re.search(r"continued in (\S+),", cell.text)[1])
    assert file.stat().st_size > 50_000_000 - 100_000
    kernel("%%torchrun\nprint()")
    assert not file.exists()


def test_a_huge_error_is_cut(failed):
    cell = failed("%%torchrun\nraise ValueError('x' * 10_000_000)")
    assert len(cell.traceback) < 200_000 and cell.traceback.startswith("rank 0 failed:\nTraceback")
    assert re.search(r"… \d+ characters omitted …", cell.traceback)


def test_an_error_that_is_not_valid_unicode_is_shown(failed):
    assert failed(r"""%%torchrun
raise ValueError('\ud800')""").traceback.endswith(r"ValueError: \ud800")


def test_a_cell_with_inputs_may_begin_with_a_future_import(kernel, failed):
    kernel("size = 5")
    cell = kernel("""%%torchrun --in size
"A docstring."
from __future__ import annotations
x: nowhere = size
print(x, __doc__, __annotations__)""")
    assert (cell.text, cell.error) == ("[0] 5 A docstring. {'x': 'nowhere'}\n", None)
    cell = failed("%%torchrun --in size\nfrom __future__ import annotations\nsize / 0  # the third line")
    assert 'File "cell", line 3, in <module>\n    size / 0  # the third line\n' in cell.traceback


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "nonsense"])
def test_an_encoding_declared_in_the_cell_is_ignored(failed, encoding):
    cell = failed(f"%%torchrun\n#!coding: {encoding}\nprint('é')\n1 / 0  # é")
    assert cell.text == "[0] é\n" and "line 4, in <module>\n    1 / 0  # é\n" in cell.traceback


def test_an_input_that_a_rank_cannot_read_is_reported_in_one_sentence(kernel, failed, folder):
    (folder / "here.py").write_text("import os\nif 'RANK' in os.environ: 1 / 0\nclass Net: pass")
    kernel("import here\nnet = here.Net()")
    cell = failed("%%torchrun --in net\nprint('never')")
    reason = "a rank cannot read the variables of --in: ZeroDivisionError: division by zero"
    assert (cell.text, cell.traceback) == ("", f"rank 0 failed:\nppedu.core.errors.PipelineError: {reason}")


SAVED = """import sys, time, torch, torch.distributed as dist
import ppedu as pp
dist.init_process_group("gloo")
x = torch.full((2,), float(dist.get_rank() + first))
dist.all_reduce(x)
print(f"{x.tolist()} {__name__} {len(sys.argv)}\\n", end="")  # in one write, as torchrun mixes the output of its ranks
pp.give_back(x.tolist())"""


def test_a_saved_cell_prints_the_same_under_torchrun(kernel, folder):
    kernel("first = 5")
    cell = kernel(f"%%torchrun -n 2 --in first --save lesson.py\n{SAVED}")
    assert cell.text == "[0] [11.0, 11.0] __main__ 1\n[1] [11.0, 11.0] __main__ 1\n"
    header = (folder / "lesson.py").read_text().splitlines()[:2]
    command = header[1].removeprefix("# ").split()
    assert command == ["torchrun", "--standalone", "--nproc-per-node", "2", "lesson.py"]
    assert "magic" not in (folder / "lesson.py").read_text() and "%%" not in (folder / "lesson.py").read_text()
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]], cwd=folder, capture_output=True, text=True
    )
    assert sorted(run.stdout.splitlines()) == sorted(line[4:] for line in cell.text.splitlines()), run.stderr


def test_a_cell_is_saved_as_a_job(kernel, folder):
    cell = kernel("%%torchrun -n 2 --nodes 2 --save lesson.sbatch\nprint(1)\n")
    assert (cell.text, cell.error) == ("[0] 1\n[1] 1\n", None)
    assert "--nodes=2" in (folder / "lesson.sbatch").read_text() and "print(1)" in (folder / "lesson.py").read_text()


def test_a_file_that_was_not_saved_from_a_notebook_is_not_overwritten(kernel, failed, folder):
    (folder / "mine.py").write_text("precious")
    assert "exists and was not saved by ppedu" in failed("%%torchrun --save mine.py\nprint('never')").traceback
    assert (folder / "mine.py").read_text() == "precious"
    assert not kernel("%%torchrun --save again.py\nprint(1)\n").error
    assert not kernel("%%torchrun --save again.py\nprint(2)\n").error
    assert (folder / "again.py").read_text().endswith("print(2)\n")


def test_the_launcher_torchrun_gives_the_same_results_and_errors(kernel, failed):
    kernel("first = 5")
    cell = failed(f"""%%torchrun -n 2 --in first --launcher torchrun
{SAVED}
dist.barrier()
dist.get_rank() == 1 and 1 / 0
time.sleep(1000)""")
    assert cell.text == "[0] [11.0, 11.0] __main__ 1\n[1] [11.0, 11.0] __main__ 1\n"
    assert kernel("print(results)").text == "[[11.0, 11.0], [11.0, 11.0]]\n"
    assert cell.traceback.startswith("rank 1 failed:\n") and 'File "cell", line 10' in cell.traceback


@pytest.mark.slow
def test_an_option_that_torchrun_does_not_know_is_reported(failed):
    assert "unrecognized arguments: --wat" in failed("%%torchrun --launcher torchrun --wat\nprint()").traceback


def test_a_message_larger_than_its_tensor_is_explained(failed):
    cell = failed("""%%torchrun -n 2
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.arange(4)  # of eight bytes each
dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x.float(), 0)
dist.barrier()""")
    assert cell.traceback.startswith("rank 1 was killed by SIGABRT")
    assert "a message is larger than the tensor that receives it" in cell.traceback


def test_ranks_lists_the_launchers_and_stops_them(kernel):
    assert re.fullmatch(r"no ranks are running\nlauncher zygote: process \d+, \d+ MB\n.*", kernel("%ranks").text, re.S)
    assert kernel("%ranks stop").text == "no ranks are running\n"
    assert kernel("%%torchrun\nprint('well')").text == "[0] well\n"
    assert "unknown command 'halt'" in kernel("%ranks halt").traceback


def test_ranks_lists_running_ranks(kernel, folder):
    kernel("""import os, threading
magic = get_ipython().magics_manager.registry["TorchrunMagic"]
def look():
    import time
    while not os.path.exists("started"): time.sleep(0.05)
    magic.ranks("")
    magic.ranks("stop")
thread = threading.Thread(target=look)
thread.start()""")
    cell = kernel(
        "%%torchrun -n 2\nimport os, time\nos.environ['RANK'] == '1' and open('started', 'w')\ntime.sleep(1000)"
    )
    assert "was killed by SIGKILL" in cell.traceback
    assert re.search(r"rank 1: process \d+, running for \d+ s, \d+ MB\n", cell.text + kernel("thread.join()").text)


def test_help_fits_the_line(kernel):
    text = kernel("%torchrun").text
    assert "--nproc-per-node" in text and "number of ranks" in text and max(map(len, text.splitlines())) < 100


def test_ranks_that_need_too_much_memory_are_refused(kernel, failed):
    kernel("from ppedu.launch import resources\nkept, resources.free_memory = resources.free_memory, lambda: 100 << 20")
    cell = kernel("%%torchrun -n 8\nprint('never')")
    kernel("resources.free_memory = kept")
    assert cell.text == "" and re.search(
        r"8 ranks need about \d+ MB of memory; 100 MB are free, enough for \d$", cell.traceback
    )


def test_ranks_listen_to_this_machine_only(kernel, ranks):
    # Every address that a rank, or the store of the rendezvous, listens to.
    program = """
import glob, os, re, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
parent = os.getppid()
family = [os.getpid(), parent]
for stat in glob.glob("/proc/[0-9]*/stat"):
    try: text = open(stat).read()
    except OSError: continue  # a process that has ended meanwhile
    if text.rpartition(")")[2].split()[1] == str(parent): family.append(int(text.split()[0]))
inodes = set()
for process in family:
    for entry in glob.glob(f"/proc/{process}/fd/*"):
        try: inodes.update(re.findall(r"socket:\\[(\\d+)\\]", os.readlink(entry)))
        except OSError: pass
for file in ("tcp", "tcp6"):
    for row in open(f"/proc/net/{file}").read().splitlines()[1:]:
        _, local, _, state, *rest = row.split()
        if state == "0A" and rest[5] in inodes: print(local.split(":")[0])
dist.barrier()
"""
    found = ranks(program, 2)
    assert found[0] and set("".join(found).split()) == {"0100007F"}


def test_a_hang_of_a_pipeline_is_reported_with_its_actions(failed):
    cell = failed("""%%torchrun -n 2 --timeout 5
import time, torch, torch.distributed as dist, ppedu as pp
from ppedu.run import Pipeline
dist.init_process_group("gloo")
schedule, rank = pp.schedule("gpipe", 2, 2), dist.get_rank()
pipeline = Pipeline(schedule, {rank: torch.nn.Linear(2, 2)}, torch.nn.functional.mse_loss)
if rank == 1:
    pipeline.on(pp.Op.B, lambda action, step: time.sleep(1000))
pipeline.step(torch.ones(2, 2), torch.ones(2, 2))""")
    lines = cell.traceback.splitlines()
    assert lines[1].startswith("rank 0 waits in 0B0, for 0RECV_B0 from rank 1 at line 9: pipeline.step")
    assert lines[2].startswith("rank 1 is at line 8") and lines[3] == "rank 0 waits for rank 1, which is not waiting"


def test_an_interrupt_during_a_deadlock_gives_a_hang_report(kernel, failed, tmp_path):
    process = int(kernel("import os; print(os.getpid())").text)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(process, 2)

    threading.Thread(target=interrupt).start()
    cell = failed(f"""%%torchrun -n 2
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
open(f"{tmp_path}/{{os.getpid()}}", "w")
dist.send(torch.ones(1), dst=1 - dist.get_rank())""")
    assert cell.traceback.splitlines() == [
        "interrupted",
        "rank 0 waits in send(dst=1) at line 5: dist.send(torch.ones(1), dst=1 - dist.get_rank())",
        "rank 1 waits in send(dst=0) at line 5: dist.send(torch.ones(1), dst=1 - dist.get_rank())",
        "deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0: all send, none receives",
    ]


TRAIN = """from ppedu.run import TrainConfig, train_gpt
import torch.distributed as dist
dist.init_process_group("gloo")
config = TrainConfig(steps=3, microbatches=4, schedule="1f1b", layers=4, width=32)
print(f"{[round(loss, 4) for loss in train_gpt(config).losses]}\\n", end="")  # in one write"""


@pytest.mark.slow
def test_a_cell_can_be_one_of_several_nodes(kernel, folder):
    # Two agents of torchrun on this machine: one of them starts the cell's ranks, the other the saved script's.
    alone = kernel(f"%%torchrun -n 4 --save node.py\n{TRAIN}").text.splitlines()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {port}"
    command = [sys.executable, "-m", "torch.distributed.run", *nodes.split(), "--node-rank=1", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([*command, "node.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    cell = kernel(f"%%torchrun -n 2 --launcher torchrun {nodes} --node-rank 0 --timeout 90\n{TRAIN}")
    assert cell.error is None and cell.text.splitlines() == alone[:2]
    assert sorted(other.communicate(timeout=60)[0].splitlines()) == sorted(line[4:] for line in alone[2:])


def test_a_live_view_shows_losses_that_are_not_numbers(kernel, failed):
    begin = "import ppedu as pp\nt = pp.simulate(pp.schedule('1f1b', 1, 2))\n"
    cell = kernel(f"%%torchrun\n{begin}pp.show_live([2.5, float('nan')], t, 3)\nprint('on')")
    assert cell.error is None and cell.text == "[0] on\n"
    assert "step 2 of 3, loss not a number" in cell.shown[0]["text/plain"]
    assert "call it after the first step" in failed(f"%%torchrun\n{begin}pp.show_live([], t, 3)").traceback
    cell = kernel(r"%%torchrun" + "\n" + r"print('\x1b_ppedu:live\x1b' + chr(92)); print('on')")
    assert cell.error is None and cell.text == "[0] on\n", "nothing to show"


SHOW = """import os, pickle, ppedu as pp
t = pp.simulate(pp.schedule("1f1b", 1, 2))
pp.show_live([1.0], t, 2)
open(os.environ["PPEDU_RUN"] + "/live", "wb").write({})
print("\\x1b_ppedu:live\\x1b" + chr(92))
"""
DAMAGED = ['b"garbage"', "pickle.dumps(([1.0], t))", "pickle.dumps((1.0, t, 2))"]


@pytest.mark.parametrize(
    "content", [*DAMAGED[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in DAMAGED[2:])]
)
def test_a_damaged_live_view_is_reported(failed, content):
    cell = failed("%%torchrun\n" + SHOW.format(content))
    assert cell.traceback.startswith("rank 0's file 'live' is damaged; only show_live may write it")


def test_a_cell_works_in_a_terminal(light):
    cell = r"import time; from tqdm import tqdm\nfor _ in tqdm(range(4), ncols=60): time.sleep(0.2)\nprint(7)"
    program = f"""get_ipython().run_line_magic("load_ext", "ppedu")
get_ipython().run_cell_magic("torchrun", "-n 2", "{cell}")"""
    command = [sys.executable, "-m", "IPython", "--no-banner", "-c", program]
    quick = os.environ | {"PYTHONPATH": light}
    run = subprocess.run(command, env=quick, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=100)
    # A bar is written over itself. (Read as bytes: as text, a carriage return would become a new line.)
    shown = [line.rpartition("\r")[2] for line in run.stdout.decode().split("\n")]
    (bar,) = [line for line in shown if line.startswith("[0]") and "it" in line]
    assert re.match(r"\[0\] 100%.* 4/4", bar) and "[0] 7" in shown and "[1] 7" in shown
    assert "Traceback" not in run.stdout.decode()


def test_a_cell_that_runs_for_long_shows_that_its_ranks_are_running(kernel):
    cell = kernel("%%torchrun -n 2\nimport time\ntime.sleep(4.5)")
    [state] = cell.shown
    assert not cell.error and re.fullmatch(r"ran for [345] s", state["text/plain"])
