"""`ppedu lessons` copies the lessons, and never overwrites a learner's work."""

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ppedu.cli import lessons
from ppedu.cli.main import main

ROOT = Path(__file__).parents[2]
LESSONS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
NAMES = [*LESSONS, "AGENTS.md", "cluster.csv", "model.toml"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    """Return a function that runs the command in an empty folder and returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(["lessons", *arguments])
        return code, *capsys.readouterr()

    return run


def test_lessons_are_copied_and_the_command_to_open_them_is_printed(cli):
    code, out, _ = cli("--no-open")
    assert code == 0 and contents(Path("ppedu-lessons")) == contents_of_lessons()
    assert out.endswith("To open them: cd ppedu-lessons && jupyter lab 00_start_here.ipynb\n")


def contents_of_lessons(python=None):
    versions = ("3.11.7", python or platform.python_version())
    saved, own = (f'"version": "{version}"'.encode() for version in versions)
    return {name: (ROOT / "notebooks" / name).read_bytes().replace(saved, own) for name in NAMES}


def test_copied_lessons_name_this_python_so_that_jupyterlab_leaves_them_as_they_are(cli, monkeypatch):
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.13")
    for _ in range(2):
        assert "Kept" not in cli("x", "--no-open")[1]
    assert contents(Path("x")) == contents_of_lessons("3.12.13") != contents_of_lessons("3.11.7")


def test_changed_lessons_are_kept_and_deleted_ones_are_copied_again(cli):
    folder = Path("deep/my lessons")
    cli(str(folder), "--no-open")
    (folder / NAMES[3]).write_text("mine")
    (folder / NAMES[5]).unlink()
    code, out, _ = cli(str(folder), "--no-open")
    assert code == 0 and contents(folder) == contents_of_lessons() | {NAMES[3]: b"mine"}
    assert f"Kept, because you have changed them: {NAMES[3]}\n" in out and "choose another folder" in out
    assert "cd 'deep/my lessons' && jupyter lab" in out


def test_a_missing_source_or_an_unwritable_folder_is_reported(cli, monkeypatch):
    Path("file").touch()
    code, _, error = cli("file", "--no-open")
    assert code == 1 and error == "ppedu: cannot copy the lessons to file: File exists; choose another folder\n"
    monkeypatch.setattr(lessons, "PACKAGE", Path("nowhere/ppedu"))
    code, _, error = cli("--no-open")
    assert code == 1 and "there are no lessons in nowhere/ppedu/lessons" in error


def test_jupyterlab_starts_in_the_folder_or_its_installation_is_suggested(cli, tmp_path, monkeypatch):
    (tmp_path / "jupyterlab.py").write_text("import os, sys; print('opened', os.getcwd(), *sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "ppedu", "lessons", "x", "--lab=--port=9 --notebook-dir='a b'"], capture_output=True,
        text=True, timeout=60, env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, cwd=tmp_path,
    )  # fmt: skip
    copied, opened = done.stdout.splitlines()
    assert copied == "The lessons are in x/"
    assert opened.startswith(f"opened {tmp_path / 'x'} --LabApp.default_url=/lab/tree/00_start_here.ipynb ")
    assert opened.endswith(" --port=9 --notebook-dir=a b")
    monkeypatch.setattr(lessons, "find_spec", lambda name: None)
    code, _, error = cli("x")
    assert code == 1 and "pip install 'ppedu[lab]'" in error


@pytest.mark.parametrize(
    ("system", "user", "names", "options"),
    [
        ("linux", 1000, ["DISPLAY"], []),
        ("linux", 1000, ["WAYLAND_DISPLAY"], []),
        ("linux", 1000, ["BROWSER"], []),  # such as that of an editor at the other end of SSH
        ("linux", 1000, [], ["--no-browser"]),
        ("linux", 0, ["DISPLAY"], ["--allow-root"]),
        ("linux", 0, [], ["--allow-root", "--no-browser"]),
        ("darwin", 501, [], []),
        ("win32", None, [], []),
    ],
)
def test_options_for_jupyterlab_depend_on_the_display_and_the_user(monkeypatch, system, user, names, options):
    monkeypatch.setattr(sys, "platform", system)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, "x")
    if user is None:
        monkeypatch.delattr(os, "geteuid")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user)
    assert lessons.lab_options("x.ipynb") == ["--LabApp.default_url=/lab/tree/x.ipynb", *options]


FULL = """
import resource, sys
from ppedu.cli.main import main

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1))
sys.exit(main(["lessons", "x", "--no-open"]))
"""


def test_a_full_disk_leaves_no_partial_lesson(cli, tmp_path):
    sizes = sorted((ROOT / "notebooks" / name).stat().st_size for name in NAMES)
    full = subprocess.run([sys.executable, "-c", FULL, str(sizes[-2])], capture_output=True, text=True, timeout=60)
    assert full.returncode == 1 and full.stdout == ""
    assert full.stderr == "ppedu: cannot copy the lessons to x: File too large; choose another folder\n"
    copied = contents(tmp_path / "x")
    assert copied.items() < contents_of_lessons().items()
    assert cli("x", "--no-open")[1].splitlines()[0] == "The lessons are in x/"
    assert contents(tmp_path / "x") == contents_of_lessons()


@pytest.fixture
def source(tmp_path):
    """Return a copy of the files that are packaged, with files of the learner's own beside the lessons."""
    folder = tmp_path / "source"
    for name in ("ppedu", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("mine.csv", "mine.toml", "timeline.json"):
        (folder / "notebooks" / name).touch()
    return folder


def test_the_wheel_has_the_command_the_lessons_and_their_files(source, tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=60)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (command,) = (wheel.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    assert sorted(name for name in names if "lessons/" in name) == [f"ppedu/lessons/{name}" for name in NAMES]
    assert not [name for name in names if not name.startswith("ppedu")]
    assert command == "[console_scripts]\nppedu = ppedu.__main__:run\n"


@pytest.mark.slow
def test_the_readmes_commands_work_in_an_empty_folder_after_an_installation(source, tmp_path):
    """The wheel is built from the source distribution, and installed without any other package."""
    python, home = tmp_path / "venv/bin/python", tmp_path / "ein leerer Ordner ✓"
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, source], check=True)
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)

    def run(command, folder):
        words, path = command.split(), f"{python.parent}{os.pathsep}{os.defpath}"
        done = subprocess.run(words, cwd=folder, env={"PATH": path}, capture_output=True, text=True, timeout=200)
        return done.returncode, done.stdout, done.stderr

    home.mkdir()
    code, out, error = run("ppedu lessons", home)
    assert (code, out) == (1, "The lessons are in ppedu-lessons/\n") and "pip install 'ppedu[lab]'" in error
    assert contents(home / "ppedu-lessons") == contents_of_lessons()
    commands = re.findall(r"```\n\$ (ppedu .*?)\n(.*?)```", (ROOT / "docs/guide.md").read_text(), re.DOTALL)
    assert {command.split()[1] for command, _ in commands} == {"autopsy", "plan"}
    for command, printed in commands:
        assert run(command, home / "ppedu-lessons") == (0, printed, "")
