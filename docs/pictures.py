"""Draw the pictures of the README and the lessons: `make pictures`.

A lesson's picture is the output of its cell with the tag `picture`.
"""

import base64
import io
from pathlib import Path

import nbformat
from matplotlib import pyplot
from PIL import Image, ImageOps

import ppedu as pp

HERE = Path(__file__).parent
SMALL = 480, 270  # pixels; shown at half of that

figure, panels = pyplot.subplots(2, 1, figsize=(11, 6.2), layout="constrained", sharex=True)
for name, ax in zip(("gpipe", "1f1b"), panels, strict=True):
    pp.simulate(pp.schedule(name, ranks=4, microbatches=8)).plot(ax, memory=8)
figure.savefig(HERE / "timelines.png", dpi=140)

for lesson in sorted(HERE.parent.glob("notebooks/*.ipynb")):
    for cell in nbformat.read(lesson, as_version=4).cells:
        if "picture" in cell.metadata.get("tags", []):
            [shown] = (output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
            small = ImageOps.pad(Image.open(io.BytesIO(base64.b64decode(shown))).convert("RGB"), SMALL, color="white")
            small.quantize(64).save(HERE / "lessons" / f"{lesson.stem[:2]}.png", optimize=True)
