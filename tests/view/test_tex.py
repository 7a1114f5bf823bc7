"""Timelines saved for LaTeX: what the file says, read here by other rules, and what pdfLaTeX makes of it."""

import re
import shutil
import subprocess
from dataclasses import replace
from fractions import Fraction

import pytest

import ppedu as pp
from ppedu import Costs, simulate
from ppedu.view.look import shade

F1B = simulate(pp.schedule("1f1b", 4, 8))
DUAL = simulate(pp.schedule("dualpipe", 4, 8), Costs(overlap=Fraction(5, 2), latency=Fraction(1, 4)))
ZB = simulate(pp.schedule("zb-v", 4, 8), Costs(forward=Fraction(1, 80), unit="s"))
POINT, NUMBER = r"\(([\d.]+),([\d.]+)\)", r"(?: node\[\w+\] \{(\d+)\})?"
PATH = re.compile(rf"\\path\[(\w+)([^]]*)\] {POINT} rectangle {POINT}{NUMBER};")
ODD = "100% µs_of $x^2$ \\bad{#&~} ü ẍ 漢 <b>\n\\end{document}"


def drawn(shown, path):
    """Return the boxes in the file that `shown` writes: color, other styles, left, top, right, bottom and number."""
    shown.save(path)
    text = path.read_text()
    colors = dict(re.findall(r"\\definecolor\{(\w+)\}\{HTML\}\{(\w{6})\}", text))
    found = [(colors[key], *rest) for key, *rest in PATH.findall(text)]
    assert len(found) == text.count(" rectangle "), "a box is written in another way"
    return found


@pytest.mark.parametrize("timeline, factor", [(F1B, 1), (DUAL, 1), (ZB, 1000)], ids=["1f1b", "dualpipe", "zb-v"])
def test_each_action_is_a_box_at_exactly_its_times_in_its_colour(tmp_path, timeline, factor):
    chunks, placement = timeline.schedule.chunks, timeline.schedule.placement
    expected = []
    for rank in range(4):
        for action, start, end in timeline.spans(rank):
            for half, (stage, op, microbatch, _) in enumerate(action.singles, 1):
                fill = shade(op, microbatch, placement.chunk(stage, microbatch), chunks)
                color = "".join(f"{round(255 * channel):02X}" for channel in fill)
                times = (Fraction(start) * factor, Fraction(end) * factor)
                expected.append((rank, *times, half if action.parts else 0, color, str(microbatch)))
    found = []
    for color, _, left, top, right, bottom, number in drawn(timeline, tmp_path / "x.tex"):
        rank, upper, lower = int(float(top)), float(top) % 1, float(bottom) % 1
        half = 1 if lower < 0.6 else 2 if upper > 0.4 else 0
        found.append((rank, Fraction(left), Fraction(right), half, color, number))
    assert sorted(found) == sorted(expected)


def test_numbers_are_left_out_where_they_do_not_fit(tmp_path):
    small = drawn(simulate(pp.schedule("1f1b", 4, 64)), tmp_path / "x.tex")
    assert len(small) == 512 and not any(number for *_, number in small)


def test_marks_second_streams_and_outlines_have_styles_of_their_own(tmp_path):
    differs = pp.differences(pp.schedule("1f1b", 4, 6), pp.schedule("gpipe", 4, 6))
    marked = [each for each in drawn(differs, tmp_path / "x.tex") if "differs" in each[1]]
    assert len(marked) == len(differs.first) + len(differs.second) > 0
    for _, style, *_, number in drawn(DUAL, tmp_path / "x.tex"):
        assert ("second" in style) == (int(number) >= 4), "dualpipe's second half goes the other way"
    for lanes in (False, True):
        both = drawn(F1B.show(outline=DUAL if lanes else F1B, lanes=lanes), tmp_path / "x.tex")
        upper = [each for each in both if "draw=" not in each[1]]
        assert len(upper) == 64 and len(both) > 120


@pytest.mark.parametrize("forward", [1e-7, 1e6])
def test_times_that_tex_cannot_count_are_scaled_and_the_axis_keeps_its_numbers(tmp_path, forward):
    schedule = pp.schedule("gpipe", 1, 1)
    forward_box, backward_box = drawn(simulate(schedule, Costs(forward=forward, backward=forward)), tmp_path / "x.tex")
    assert 0.1 <= float(forward_box[4]) == float(backward_box[4]) / 2 < 10_000
    text = (tmp_path / "x.tex").read_text()
    assert "multiplied by" in text and f"{{{forward:.10g}}};" in text


TINY = pp.schedule("gpipe", 2, 2)
NAMED = replace(simulate(replace(TINY, name=ODD), Costs(unit=ODD)), source=ODD)
SHOWN = {
    "alone": pp.compare("1f1b", NAMED, ranks=2, microbatches=2),
    "pairs": DUAL,
    "lanes": simulate(TINY).show(outline=simulate(TINY), lanes=True),
}


def test_pdflatex_compiles_the_files_alone_and_in_a_paper_that_loads_only_tikz(tmp_path):
    if not shutil.which("pdflatex"):
        pytest.skip("no pdflatex here; install texlive-latex-extra and texlive-pictures")
    for name, shown in SHOWN.items():
        shown.save(tmp_path / f"{name}.tex")
    inputs = "\n\n".join(rf"\input{{{name}.tex}}" for name in SHOWN)
    paper = rf"\documentclass{{article}}\usepackage{{tikz}}\begin{{document}}{inputs}\end{{document}}"
    (tmp_path / "paper.tex").write_text(paper)
    for name in ("alone", "paper"):
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and f"Output written on {name}.pdf" in done.stdout, done.stdout[-1500:]
        assert "(1 page" in done.stdout, "a caption is not split off"
