"""Statements about the project are true: the README's snippets, the environments, make targets, workflows."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/guide.md")}


@pytest.fixture(params=PAGES)
def text(request):
    return PAGES[request.param]


def test_snippets_give_the_values_their_comments_state(text, tmp_path, monkeypatch):
    shutil.copy(ROOT / "notebooks/cluster.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    names, checked = {}, 0
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        for node in ast.parse(block).body:
            source = ast.get_source_segment(block, node)
            comment = block.splitlines()[node.end_lineno - 1].partition("# ")[2].strip()
            if isinstance(node, ast.Expr) and comment:
                assert repr(eval(source, names)) == comment, source
                checked += 1
            else:
                exec("\n".join(block.splitlines()[_first_line(node) : node.end_lineno]), names)
    assert checked >= 4


def test_the_guides_cell_runs_on_as_many_ranks_as_it_says(ranks):
    cells = re.findall(r"```\n%%torchrun -n (\d+)\n(.*?)```", PAGES["docs/guide.md"], re.DOTALL)
    assert cells
    for size, program in cells:
        output = ranks(program + "\ndist.barrier()\n", int(size))
        assert all(f"rank {rank} holds" in text for rank, text in enumerate(output))


def test_the_pair_that_hides_an_all_to_all_has_the_gradients_of_one_process(ranks):
    """The cell compares gradients itself. The simulated times are those on the page; measured ones differ."""
    page = (ROOT / "docs/experts.md").read_text(encoding="utf-8")
    program, stated = re.search(r"```\n%%torchrun -n 4\n(.*?)```.*```\n(.*?)```", page, re.DOTALL).groups()
    output = ranks(program, 4)
    simulated = re.compile(r"^(.*): [\d.]+ s measured, ([\d.]+) s simulated$", re.MULTILINE)
    assert simulated.findall(output[0]) == simulated.findall(stated) and len(simulated.findall(stated)) == 2


def test_the_stakes_that_the_readme_states_are_those_of_the_running_example():
    import ppedu as pp
    from ppedu.course.project import GB, HOUR, heron

    def run(name):
        return pp.simulate(pp.schedule(name, 8, 32), heron.costs(8))

    usual, best = run("1f1b"), run("zb-v")
    waiting = f"wait {usual.bubble:.1%} of the time. At ${heron.price:.0f} per GPU-hour"
    for stated in (
        f"{heron.weights / 1e9:.0f} billion weights, on {heron.gpus(8):,} GPUs",
        f"these GPUs {waiting}, that's ${usual.bubble * heron.dollars(8, HOUR):.0f} an hour",
        f"waits {best.bubble:.0%} of the time",
        f"needs {heron.peak(best):.0f} GB where 1F1B's needs {heron.peak(usual):.0f}",
    ):
        assert stated in " ".join(README.split()), stated
    assert heron.peak(run("gpipe")) > heron.memory / GB


@pytest.mark.parametrize("name", ["autopsy", "plan"])
def test_the_commands_on_these_pages_print_what_is_shown(capsys, tmp_path, monkeypatch, name):
    from ppedu.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["lessons", ".", "--no-open"]) == 0 and capsys.readouterr()
    (command, printed), (same, part) = (
        re.search(rf"```\n\$ ppedu ({name} .*?)\n(.*?)```", page, re.DOTALL).groups()
        for page in (PAGES["docs/guide.md"], README)
    )
    assert main(command.split()) == 0
    assert capsys.readouterr().out.split("\n") == printed.split("\n")
    assert command == same and all(each.strip("\n") in printed for each in part.split("…"))


def test_the_run_of_the_cluster_is_drawn():
    from ppedu.course.drawn import CLUSTER, table_of

    assert table_of(CLUSTER.records()) == (ROOT / "notebooks/cluster.csv").read_text()


def _first_line(node):
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1


@pytest.mark.parametrize(
    "name",
    [
        *PAGES,
        "CONTRIBUTING.md",
        *map("docs/{}.md".format, ("architecture", "asynchronous", "instructors", "losses", "verdicts")),
    ],
)
def test_links_and_pictures_exist(name):
    text, folder = (ROOT / name).read_text(encoding="utf-8"), (ROOT / name).parent
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        path, _, section = target.partition("#")
        file = folder / path if path else ROOT / name
        assert file.exists(), target
        titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if section else []
        assert not section or section in [title.lower().replace(" ", "-") for title in titles], target


def test_the_animation_moves_and_is_small():
    from PIL import Image

    file = ROOT / "docs/widget.gif"
    with Image.open(file) as animation:
        assert animation.n_frames > 30
    assert file.stat().st_size < 1_500_000


def test_readme_shows_a_picture_of_each_lesson_and_leads_there():
    row = r'^\| \[<img src="docs/lessons/(\d\d)\.png".*?\]\((.*?)\) \| \[\*\*(.*?)\*\*\]'
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))[1:]
    for found, lesson in zip(re.findall(row, README, re.MULTILINE), lessons, strict=True):
        [title] = json.loads(lesson.read_text())["cells"][0]["source"][:1]
        assert found == (lesson.name[:2], f"notebooks/{lesson.name}", title.strip("# \n"))


def test_binder_reads_the_same_environment_as_conda_users():
    assert (ROOT / "binder/environment.yml").read_bytes() == (ROOT / "environment.yml").read_bytes()
    for script in ("binder/postBuild", "binder/start", ".ci/run"):
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} must be executable"


def test_repo2docker_builds_the_image_from_binders_folder():
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", str(ROOT)]
    image = subprocess.run(command, capture_output=True, text=True, check=True)
    steps = image.stdout + image.stderr
    assert "Building conda environment for python=3.12" in steps
    assert re.search(r"^COPY .*src/binder/environment.yml ", steps, re.MULTILINE)
    assert re.search(r"^RUN \./binder/postBuild$", steps, re.MULTILINE)
    assert re.search(r'^ENV R2D_ENTRYPOINT="\S+/binder/start"$', steps, re.MULTILINE)


CONDA_NAMES = {"pytorch-cpu": "torch", "matplotlib-base": "matplotlib"}


def test_environment_agrees_with_constraints_and_pyproject():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    conda = {}
    for line in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]:
        name, _, version = line.partition("=")
        conda[CONDA_NAMES.get(name, name)] = version
    python = conda.pop("python")
    del conda["pip"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {
        re.match(r"[\w-]+", requirement)[0]
        for requirement in project["dependencies"] + extras["plot"] + extras["run"] + extras["lab"]
        if not requirement.startswith("ppedu")
    }
    assert set(conda) == needed
    assert conda == {name: pins[name] for name in needed}
    assert pins["torch"] == "2.13.0"
    assert tuple(map(int, python.split("."))) >= (3, 10)
    every = {re.match(r"[\w-]+", r)[0] for rs in extras.values() for r in rs} - {"ppedu"} | needed
    assert every <= set(pins), "every direct dependency is pinned"


def test_version_is_stated_once_and_the_same():
    import ppedu

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ppedu.__version__ == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"/v{version}?urlpath=lab/tree/notebooks/" in README
    assert set(re.findall(r"/v([\d.]+\d)", README)) == {version}


def test_the_page_about_the_architecture_is_right():
    contract, *_ = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(layer.split(" | ")) for layer in reversed(contract["layers"])]
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## The packages")[2].partition("\n## ")[0], re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == layers
    files = re.findall(r"`([\w/]+\.py)`", page)
    assert len(files) > 50 and not [file for file in files if not (ROOT / "ppedu" / file).exists()]


@pytest.mark.parametrize(
    "target", ["lab", "check", "test", "test-all", "test-pythons", "test-torches", "lint", "bench", "dist"]
)
def test_make_knows_the_target(target):
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_step_of_the_workflows_is_a_make_target_of_this_project():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            choices = job.get("strategy", {}).get("matrix", {}).get("target", [])
            for command in (step["run"] for step in job["steps"] if "run" in step):
                make, target = command.split()[:2]
                expected = set(choices) if target == "${{" else {target}
                assert make == "make" and expected <= targets, command


def test_a_release_is_refused_when_the_tag_is_not_the_version():
    command = ["make", "dist", "TAG=v0.0.0", "--old-file=.venv/.test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "The tag v0.0.0 is not v and the version in pyproject.toml" in done.stdout


def answers(address):
    try:
        with urlopen(address) as page:
            return page.status == 200
    except URLError:
        return False


def test_make_lab_serves_the_first_lesson_as_any_user_and_without_a_display(tmp_path):
    """As root, where the tests run as root, as in most containers."""
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    seen = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")}
    make = ["make", "--old-file=.venv/.lab", "lab", f"BIN={Path(sys.executable).parent}", "LAB=--port=0"]
    with (tmp_path / "log").open("w+") as log:
        lab = subprocess.Popen(make, cwd=ROOT, env=seen | folders, stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + 60
            while not (found := re.search(r"http://localhost:\S+(?=\s)", (tmp_path / "log").read_text())):
                assert time.monotonic() < end and lab.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
            assert "/lab/tree/00_start_here.ipynb?token=" in found[0]
            while not answers(found[0]):  # JupyterLab prints its address before it listens there
                assert time.monotonic() < end and lab.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
            with urlopen(found[0].replace("/lab/tree/", "/files/")) as lesson:
                assert lesson.read() == (ROOT / "notebooks/00_start_here.ipynb").read_bytes()
        finally:
            os.killpg(lab.pid, signal.SIGTERM)
            lab.wait(60)


@pytest.fixture
def bare(tmp_path):
    """`bare(*words, **programs)`: run words in a copy of the project, where PATH has only these shell scripts."""

    def run(*words, **programs):
        folder, path = tmp_path / "project", tmp_path / "path"
        for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        path.mkdir()
        for name, script in {"dirname": f'exec {shutil.which("dirname")} "$@"', **programs}.items():
            file = path / name.replace("_", "-")
            file.write_text(f"#!/bin/sh\n{script}\n")
            file.chmod(0o755)
        words = [shutil.which(words[0]), *words[1:]]
        return subprocess.run(words, cwd=folder, env={"PATH": str(path)}, capture_output=True, text=True, timeout=60)

    return run


WITHOUT_VENV = 'case "$2" in *ensurepip*) exit 1;; esac'


@pytest.mark.parametrize(
    ("programs", "says"),
    [
        ({"python3": WITHOUT_VENV}, "ppedu's Makefile needs python3-venv: apt-get install python3-venv\n"),
        ({"python3": "exit 1"}, "ppedu needs Python 3.10 or newer; python3 is missing or older. "),
        ({}, "ppedu needs Python 3.10 or newer; python3 is missing or older. "),
    ],
)
def test_make_says_in_one_sentence_what_the_machine_lacks(bare, programs, says):
    done = bare("make", "lab", **programs)
    assert done.returncode == 2 and done.stdout.startswith(says) and done.stdout.count("\n") == 1
    assert done.stderr.count("\n") == 1  # make's own "*** Error 1"


SKIPPED = "The tests in a browser need Chromium and are skipped without it: apt-get install chromium libatomic1\n"


@pytest.mark.parametrize(("programs", "says"), [({}, SKIPPED), ({"google_chrome": ""}, "")])
def test_make_test_says_before_it_installs_that_there_is_no_browser(bare, programs, says):
    done = bare("make", "test", python3="[ $1 = -c ] || exit 1", **programs)
    assert done.returncode == 2 and done.stdout.startswith(f"{says}Installing into .venv")


HOSTS = dict.fromkeys(("sshd", "ssh", "ip", "ethtool", "slurmd", "munged"), "")


@pytest.mark.parametrize(
    ("programs", "installed"),
    [
        ({"chromium": "", "python3": "", "npm": "", **HOSTS}, ""),
        ({"python3": "", "npm": "", **HOSTS}, "install -y -qq --no-install-recommends chromium libatomic1\n"),
        (
            {"python3": WITHOUT_VENV},
            "install -y -qq --no-install-recommends chromium libatomic1 npm openssh-server openssh-client iproute2 "
            "ethtool slurm-wlm munge python3-venv\n",
        ),
    ],
)
def test_ci_installs_what_is_missing(bare, programs, installed):
    done = bare("bash", ".ci/run", make='echo make "$@"', apt_get='[ $1 = update ] || echo "$@"', **programs)
    assert (done.returncode, done.stdout) == (0, f"{installed}make lint test\n"), done.stderr
