"""What is written down about the project is true: the README's snippet, the environments, the imports."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_snippets_give_the_values_their_comments_state():
    names, checked = {}, 0
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        for node in ast.parse(block).body:
            source = ast.get_source_segment(block, node)
            comment = block.splitlines()[node.end_lineno - 1].partition("# ")[2].strip()
            if isinstance(node, ast.Expr) and comment:
                assert repr(eval(source, names)) == comment, source
                checked += 1
            else:
                exec("\n".join(block.splitlines()[_first_line(node) : node.end_lineno]), names)
    assert checked >= 8


def test_readme_cell_runs_on_as_many_ranks_as_it_says(ranks):
    cells = re.findall(r"```\n%%torchrun -n (\d+)\n(.*?)```", README, re.DOTALL)
    assert cells
    for size, program in cells:
        output = ranks(program + "\ndist.barrier()\n", int(size))
        assert all(f"rank {rank} holds" in text for rank, text in enumerate(output))


def _first_line(node):
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1


def test_readme_links_and_pictures_are_there():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", README) + re.findall(r'src="([^"]+)"', README):
        assert (ROOT / target).exists(), target


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
        for requirement in project["dependencies"] + extras["run"] + extras["lab"]
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


@pytest.mark.parametrize("target", ["lab", "test", "test-all", "lint", "bench"])
def test_make_knows_the_target(target):
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
