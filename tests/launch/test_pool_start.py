"""How a pool starts: its launcher, its first moments, and arguments that it refuses."""

import os
import signal
import threading
import time
import uuid

import pytest

from ppedu import PipelineError, RankError, SettingError
from ppedu.launch.pool import RankPool


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), "soon"])
def test_an_invalid_timeout_is_refused(ranks, spare_pool, timeout):
    with pytest.raises(SettingError, match="timeout must"):
        ranks("print('never')", 1, timeout=timeout, pool=spare_pool)


def test_two_threads_cannot_run_ranks_in_one_pool(ranks, light_pool, tmp_path):
    found = []

    def other():
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
        with pytest.raises(SettingError) as caught:
            ranks("print('never')", 1, pool=light_pool)
        found.append(str(caught.value))
        light_pool.stop()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        ranks(f"open({str(tmp_path / 'here')!r}, 'w'); import time; time.sleep(1000)", 2, pool=light_pool)
    thread.join()
    assert "other ranks are running" in found[0]
    assert ranks("print('well')", 2, pool=light_pool) == ["well\n"] * 2


def before_others(folder):
    """Return the PYTHONPATH with which modules in `folder` are found first."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def importing_pool(tmp_path, monkeypatch):
    """A pool whose launcher imports a torch that takes long, until PYTHONPATH names another one."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "torch.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", before_others(tmp_path / "slow"))
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.parametrize("slow", [False, True])
def test_an_interrupt_while_torch_is_imported_takes_effect_at_once(tmp_path, start_owner, leftovers, slow):
    if slow:
        (tmp_path / "torch.py").write_text("import time; time.sleep(1000)")
    source = """
        print("begun", flush=True)
        try: pool.run(sys.argv[1], 2, write=write)
        finally: pool.close()
        """
    process, mark = start_owner(source, PYTHONPATH=before_others(tmp_path))
    process.stdout.readline()
    time.sleep(0.5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and time.monotonic() - begin < 4
    assert "BrokenPipe" not in errors and errors.count("Traceback") == 1
    assert leftovers(mark) == []


@pytest.mark.parametrize("unread", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_launcher_killed_while_it_imports_torch_is_reported_as_killed(
    ranks, importing_pool, light, tmp_path, monkeypatch, unread
):
    importing_pool.start()
    if unread:  # a message that it never reads
        importing_pool.make_folder(tmp_path / "folder")
    os.kill(importing_pool.server, signal.SIGKILL)
    with pytest.raises(PipelineError, match="the launcher was killed by SIGKILL while it imported torch; run it again"):
        importing_pool._wait_until_ready()
    monkeypatch.setenv("PYTHONPATH", light)
    assert ranks("print('well')", 2, pool=importing_pool) == ["well\n"] * 2


def test_without_torch_the_error_names_what_to_install(tmp_path, start_owner, leftovers):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    source = """
        folder = new_folder()
        try:
            pool.make_folder(folder)
            pool.run(sys.argv[1], 2, write=write, folder=folder)
        except Exception as error: print(error)
        folder.rmdir()
        """
    process, mark = start_owner(source, PYTHONPATH=before_others(tmp_path))
    printed, errors = process.communicate(timeout=60)
    reason = "importing torch failed: ModuleNotFoundError: No module named 'torch'; pip install 'ppedu[run]'"
    assert (printed, errors) == (f"cannot start ranks: {reason}\n", "")
    assert leftovers(mark) == []


@pytest.mark.parametrize("launcher", ["zygote", "torchrun"])
@pytest.mark.parametrize("ready", [False, True])
def test_an_owner_killed_before_its_ranks_start_leaves_nothing_behind(start_owner, leftovers, light, ready, launcher):
    """No process, no folder, and no message, whether the launcher is ready or still imports torch."""
    source = f"""
        {ready} and (pool.start(), pool._wait_until_ready())
        folder = new_folder()
        pool.make_folder(folder)
        (folder / "cell.py").touch()
        print(folder.exists(), flush=True)
        os.kill(os.getpid(), 9)
        """
    quick = {"PYTHONPATH": light} if ready and launcher == "zygote" else {}
    process, mark = start_owner(source, LAUNCHER=launcher, **quick)
    assert process.communicate(timeout=60) == ("True\n", "")
    assert process.returncode == -signal.SIGKILL
    assert leftovers(mark) == []


@pytest.mark.parametrize("launcher", ["zygote", "torchrun"])
def test_the_environment_is_not_written_to_a_file(start_owner, leftovers, light, launcher):
    program = """
import os, tempfile
from pathlib import Path
files = [file for file in Path(tempfile.gettempdir()).rglob("*") if file.is_file()]
print(len(files) > 0, [file.name for file in files if os.environ["PASSWORD"].encode() in file.read_bytes()])"""
    source = "pool.run(sys.argv[1], 1, write=write); pool.close()"
    quick = {"PYTHONPATH": light} if launcher == "zygote" else {}
    process, mark = start_owner(source, program, PASSWORD=uuid.uuid4().hex, LAUNCHER=launcher, **quick)
    assert process.communicate(timeout=60)[0] == "True []\n"
    assert leftovers(mark) == []


def test_another_thread_can_stop_a_launcher_that_is_starting(importing_pool, light, ranks, monkeypatch):
    timer = threading.Timer(0.3, importing_pool.stop)
    timer.start()
    with pytest.raises(PipelineError, match="was killed by SIGKILL while it imported torch; run it again"):
        ranks("import time; time.sleep(1000)", 2, pool=importing_pool)
    timer.join()
    monkeypatch.setenv("PYTHONPATH", light)
    assert ranks("print('well')", 2, pool=importing_pool) == ["well\n"] * 2


@pytest.mark.parametrize("launcher", [None, 3, [], "", "wat", {}])
def test_an_unknown_launcher_is_refused(launcher):
    with pytest.raises(SettingError, match="unknown launcher"):
        RankPool(launcher)


INVALID = [None, 3, "text", b"bytes", [1], {"a": 1}, object(), 2.5, float("nan"), True, ["x", None], "\ud800"]
VALID = {  # the values above that are valid for an argument
    "program": ("text", "\ud800"),
    "ranks": (3,),
    "arguments": (),
    "timeout": (None, 3, 2.5),
    "flags": (),
    "folder": (None,),
    "environment": (None,),
    "write": (),
}


@pytest.mark.parametrize("name", VALID)
def test_an_argument_of_a_wrong_type_is_refused_before_the_launcher_starts(tmp_path, name):
    fresh = RankPool()
    for value in INVALID:
        if not any(value is each for each in VALID[name]):
            given = {"program": "x.py", "ranks": 1, "write": print, name: value}
            with pytest.raises(SettingError, match=f"{name}|the number of ranks"):
                fresh.run(**given)
    assert fresh.server is None
