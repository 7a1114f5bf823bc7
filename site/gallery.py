"""The gallery: a page for each published schedule, and one for claims that do not hold, all computed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from itertools import groupby
from pathlib import Path

from claims import CLAIMS, Claim
from figures import RATES, SPANS, WHY, figures, rate

import ppedu as pp
from ppedu.core import PipelineError
from ppedu.core.numeric import pretty
from ppedu.sim import Timeline
from ppedu.view.interactive import display
from ppedu.view.plot import picture
from ppedu.zoo import theory
from ppedu.zoo.registry import facts_of, published, require_registered

SIZES = ((4, 8), (8, 32))
QUANTITIES = ("makespan", "bubble", "peak")
POLICY = "default-src 'none'; style-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
TITLE = "Claims we could not confirm"
CLAIMED = """<p>What is written about pipeline schedules is often wrong, and gets copied. Below each claim is the code
that tests it, and what it printed when this page was made. If you find that we are wrong, please open an issue.</p>"""
BEGINS = re.compile(r"^Yield the actions of `rank` (in )?")
ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")


def write(folder: Path) -> None:
    """Write the pages and their pictures into a folder, with a list of them."""
    folder.mkdir()
    rows = []
    for name in published():
        timeline = _timeline(name, *SIZES[0])
        (folder / f"{name}.svg").write_bytes(picture(display(timeline).stack, "svg"))
        (folder / f"{name}.html").write_text(_page(name, _schedule(name, timeline)), encoding="utf-8")
        said = next(_paragraphs(name))
        rows.append(
            f'<li><a href="{name}.html"><img src="{name}.svg" alt="" loading="lazy"><b>{escape(name)}</b></a> '
            f"{_linked(said)}</li>"
        )
    intro = "<p>Each picture is a simulation of 4 ranks with 8 microbatches; a forward takes 1, a backward 2.</p>"
    listed = f'<h1>Published schedules</h1>\n{intro}\n<ul class="gallery">\n{chr(10).join(rows)}\n</ul>'
    (folder / "index.html").write_text(_page("Published schedules", listed), encoding="utf-8")
    body = "\n".join(map(_claim, CLAIMS))
    (folder / "claims.html").write_text(_page(TITLE, f"<h1>{TITLE}</h1>\n{CLAIMED}\n{body}"), encoding="utf-8")


def _timeline(name: str, ranks: int, microbatches: int) -> Timeline:
    return pp.simulate(pp.schedule(name, ranks, microbatches))


def _page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · ppedu</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="../page.css">
<link rel="stylesheet" href="../site.css">
<nav>
  <a href="../">playground</a> <a href="../book/">lessons, guide, reference</a> <a href="./">published schedules</a>
  <a href="claims.html">claims we could not confirm</a>
</nav>
<main>
{body}
</main>
</html>
"""


def _schedule(name: str, timeline: Timeline) -> str:
    """Return the body of a schedule's page."""
    generator, facts = require_registered(name).generator, facts_of(name)
    assert facts is not None  # every published schedule has them
    sizes, time, peak = facts.cells()
    known = [("sizes", sizes), ("idle time of a rank", time), ("activations of rank r", peak), ("source", facts.source)]
    rows = "".join(f"<tr><th>{title}<td>{_linked(text)}" for title, text in known if text)
    description = "".join(f"<p>{_linked(part)}</p>" for part in _paragraphs(name))
    return f"""<h1>{escape(name)}</h1>
{description}
<figure><img src="{name}.svg" alt="{escape(timeline.summary())}"></figure>
<p><a href="{escape(timeline.link("../"))}">Open it in the playground</a>, with controls for sizes and costs.</p>
<h2>What is known</h2>
<table>{rows}</table>
<p class="note">p ranks, m microbatches, v chunks on each rank; F, B, I and W take a rank's share of the model.</p>
<h2>Formula and simulation</h2>
<table><thead><tr><th>size<th>quantity<th>formula<th>simulated<tbody>
{"".join(_compared(name))}</table>
{_printed(name)}
<h2>The generator</h2>
<pre tabindex="0"><code>{escape(inspect.getsource(generator))}</code></pre>"""


def _compared(name: str) -> Iterator[str]:
    """Yield rows of a table: what a formula says, where there is one, beside the simulation."""
    for ranks, microbatches in SIZES:
        timeline = _timeline(name, ranks, microbatches)
        simulated = {"makespan": timeline.makespan, "bubble": timeline.bubble, "peak": max(timeline.peak_activations)}
        for quantity in QUANTITIES:
            said = ""
            with suppress(PipelineError):
                value = getattr(theory, quantity)(name, ranks, microbatches).value
                said = _written(quantity, max(value) if isinstance(value, tuple) else value)
            size = f"{ranks} ranks, {microbatches} microbatches"
            yield f"<tr><td>{size}<td>{quantity}<td>{said or '–'}<td>{_written(quantity, simulated[quantity])}\n"


def _printed(name: str) -> str:
    """Return a table of the figures that papers print, beside the same simulated."""
    parts = []
    for source, group in groupby((each for each in figures() if each.schedule == name), lambda each: each.source):
        rows = "".join(f"<tr><td>{each.setting}<td>{each.printed:.4f}<td>{rate(each):.4f}\n" for each in group)
        parts.append(
            f"<h2>In the paper and simulated</h2>\n<p>{_linked(source)}: {SPANS if name == 'zb-h2' else RATES}</p>\n"
            f"<table><thead><tr><th>sizes and times<th>printed<th>simulated<tbody>\n{rows}</table>\n"
        )
    return "".join(parts) + (f"<p>{WHY[name]}</p>" if name in WHY else "")


def _claim(claim: Claim) -> str:
    printed, made = claim.run()
    live = ""
    if made:
        address = pp.simulate(made).link("../")
        live = f'\n<p><a href="{escape(address)}">Open the schedule in the playground</a></p>'
    return f"""<section>
<h2>{_linked(claim.said)}</h2>
<p class="note">Found as {_linked(claim.kind)}.</p>
<pre tabindex="0"><code>import ppedu as pp

{escape(claim.code.strip())}</code></pre>
<pre tabindex="0">{escape(printed)}</pre>
<p>{_linked(claim.but)}</p>{live}
</section>"""


def _written(quantity: str, value: object) -> str:
    return f"{float(value):.1%}" if quantity == "bubble" else pretty(value)  # type: ignore[arg-type]


def _paragraphs(name: str) -> Iterator[str]:
    """Yield the paragraphs of a generator's docstring, without the words with which they all begin."""
    first, *others = (inspect.getdoc(require_registered(name).generator) or "").split("\n\n")
    short = BEGINS.sub("", first)
    yield short[0].upper() + short[1:]
    for other in others:
        yield other.removeprefix("Args:\n")


def _linked(text: str) -> str:
    """Return text as HTML, with links to the papers that it names, and names of Python in their font."""
    code = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>', code)
