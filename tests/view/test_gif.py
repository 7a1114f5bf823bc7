"""The animations that the widgets write, run by Node and read by Pillow."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

SOURCE = Path(__file__).parents[2] / "ppedu" / "view" / "js" / "gif.js"
PROGRAM = """
import { readFileSync, writeFileSync } from "node:fs";
import { Gif, frequentColors } from %s;
const { width, height, frames } = JSON.parse(readFileSync("frames.json"));
const pictures = frames.map((each) => Uint32Array.from(each));
const gif = new Gif(width, height, frequentColors(pictures));
for (const each of pictures) gif.add(each, 7);
writeFileSync("x.gif", new Uint8Array(await gif.file().arrayBuffer()));
"""


def animated(folder, width, height, frames):
    """Write frames, lists of colors as red, green and blue, and return what is read."""
    if not shutil.which("node"):
        pytest.skip("no Node here; install nodejs")
    pixels = [[r | g << 8 | b << 16 | 255 << 24 for r, g, b in frame] for frame in frames]
    (folder / "frames.json").write_text(json.dumps({"width": width, "height": height, "frames": pixels}))
    (folder / "x.mjs").write_text(PROGRAM % json.dumps(SOURCE.as_uri()))
    subprocess.run(["node", "x.mjs"], cwd=folder, check=True, timeout=30)
    gif = Image.open(folder / "x.gif")
    assert gif.size == (width, height)
    read = []
    for number in range(gif.n_frames):
        gif.seek(number)
        assert gif.info["duration"] == 70
        levels = gif.convert("RGB").tobytes()
        read.append([tuple(levels[at : at + 3]) for at in range(0, len(levels), 3)])
    return read


def test_frames_are_read_as_they_were_written(tmp_path):
    chance, (width, height) = random.Random(7), (150, 90)
    colors = [(k, 255 - k, k * 7 % 256) for k in range(256)]
    noise = [chance.choice(colors) for _ in range(width * height)]  # fills the table of codes several times
    patch, dot, flat = list(noise), list(noise), [colors[3]] * (width * height)
    for y in range(20, 70):
        patch[y * width + 30 : y * width + 60] = [colors[9]] * 30
    dot[-1] = colors[1] if noise[-1] == colors[0] else colors[0]
    frames = [noise, patch, noise, dot, flat, [*flat[:-3], *noise[:3]]]
    assert animated(tmp_path, width, height, frames) == frames


@pytest.mark.parametrize("pixels", [1, 2, 254, 255, 256, 511, 3838, 3839, 3840, 3841])
def test_codes_grow_longer_at_the_right_pixel(tmp_path, pixels):
    chance = random.Random(pixels)
    frame = [(chance.randrange(16) * 16, 0, chance.randrange(8)) for _ in range(pixels)]
    assert animated(tmp_path, pixels, 1, [frame]) == [frame]


def test_a_rare_color_is_replaced_by_the_nearest(tmp_path):
    grays = [(k, k, k) for k in range(256)] * 2
    (read,) = animated(tmp_path, 513, 1, [[*grays, (250, 3, 2)]])
    assert read[:-1] == grays and read[-1] == (85, 85, 85)
