"""Store the pictures in notebooks with a palette of 256 colors, at a third of the size: `palette.py NOTEBOOK…`."""

import base64
import io
import sys
from pathlib import Path

import nbformat
from PIL import Image


def smaller(picture: str) -> str:
    """Return a PNG picture, in base64, with a palette."""
    content = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    return base64.b64encode(content.getvalue()).decode() + "\n"


for path in map(Path, sys.argv[1:]):
    notebook = nbformat.read(path, as_version=4)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        if "image/png" in data:
            data["image/png"] = smaller(data["image/png"])
    nbformat.write(notebook, path)
