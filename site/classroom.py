"""The zip for instructors: what a class needs in a room without a network."""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
NAME = "ppedu-class.zip"
START = """\
ppedu for a class, without a network

The pages: lessons that run in the browser, playground, puzzle, published schedules, guide. They need only Python 3:

    python3 serve.py site                    on your own machine
    python3 serve.py site --host 0.0.0.0     for everyone on the same network, at http://<your address>:8000/

The lessons as notebooks, which start several ranks: install the wheel on each machine before the class, with a network.

    pip install "{wheel}[lab]" --extra-index-url https://download.pytorch.org/whl/cpu
    ppedu doctor
    ppedu lessons

homework/ has the exercises of each lesson without solutions, for nbgrader, otter-grader or `ppedu grade`.
The page for instructors: site/book/docs/instructors.html
"""


def write(site: Path) -> None:
    """Put the built site, the wheel, the homework and a server into a zip, and that into the site."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = Path(next(WheelBuilder(str(ROOT)).build(directory=temporary)))
        assign = [sys.executable, "-m", "ppedu", "assignment", "all", "tiny", "--out", str(folder / "homework")]
        subprocess.run(assign, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (folder / "START.txt").write_text(START.format(wheel=wheel.name), encoding="utf-8")
        files = {path: path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        files |= {path: Path("site", path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
        files[Path(__file__).with_name("serve.py")] = Path("serve.py")
        with zipfile.ZipFile(site / NAME, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, name in files.items():
                archive.write(path, Path("ppedu-class", name))
