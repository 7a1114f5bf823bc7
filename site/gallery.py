"""The gallery: a page for each published schedule, and one for claims that do not hold, all computed."""

from __future__ import annotations

import inspect
import json
import re
from ast import Constant, Expr, FunctionDef, parse
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import dedent

from claims import CLAIMS, Claim
from figures import RATES, SPANS, WHY, figures, rate

import ppedu as pp
from ppedu.core import PipelineError
from ppedu.core.numeric import Number, pretty
from ppedu.search.atlas import PLACEMENTS, Entry, atlas
from ppedu.sim import Timeline
from ppedu.view.interactive import display
from ppedu.view.look import shade
from ppedu.view.model import Panel
from ppedu.view.plot import picture
from ppedu.zoo import theory
from ppedu.zoo.registry import facts_of, options_of, published, require_registered
from ppedu.zoo.theory import Fact

SIZE = 4, 8  # ranks and microbatches of the pictures, and of the first numbers
RANKS, MICROBATCHES = range(2, 17), range(1, 33)  # the sizes for which a page has the values of the formulas
SIMULATED = SIZE, (8, 32)
PROVEN = (2, 8), (3, 8), (4, 8), (4, 12)
QUANTITIES = ("makespan", "bubble", "peak")
UNITS = pp.Costs()
POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; connect-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self'; base-uri 'none'; form-action 'none'"
)
TITLE = "Claims we could not confirm"
CLAIMED = """<p>What is written about pipeline schedules is often wrong, and gets copied. Below each claim is the code
that tests it, and what it printed when this page was made. If you find that we are wrong, please open an issue.</p>"""
BEGINS = re.compile(r"^Yield the actions of `rank` (in |when )?")
ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
PAGE = re.compile(r"(?:github\.com|doi\.org)/[\w./-]+\w")


def write(folder: Path) -> None:
    """Write the pages, their pictures and what makes them live into a folder, with a list of them."""
    folder.mkdir()
    rows = []
    for name in published():
        timeline = _timeline(name, *SIZE)
        shown = display(timeline)
        (folder / f"{name}.svg").write_bytes(picture(shown.stack, "svg"))
        (folder / f"{name}-small.svg").write_text(_small(timeline), encoding="utf-8")
        live = {"state": shown.state(), "values": _values(name)}
        (folder / f"{name}.json").write_text(json.dumps(live, separators=(",", ":")), encoding="utf-8")
        (folder / f"{name}.html").write_text(_page(name, _schedule(name, timeline), "gallery.js"), encoding="utf-8")
        rows.append(
            f'<li><a href="{name}.html"><img src="{name}-small.svg" alt="" loading="lazy">{escape(name)}</a> '
            f"<p>{_linked(next(_paragraphs(name)))}</p></li>"
        )
    ranks, microbatches = SIZE
    intro = (
        f"<p>Each picture is a simulation of {ranks} ranks with {microbatches} microbatches; a forward takes 1, a "
        "backward 2. Each row is a rank, and time runs to the right. Forwards are blue and backwards green. Where they "
        "are split, the half for inputs (I) is pale green, the half for weights (W) yellow. Later chunks are "
        "darker. In brackets is where a schedule was published.</p>"
    )
    listed = f'<h1>Published schedules</h1>\n{intro}\n<ul class="gallery">\n{chr(10).join(rows)}\n</ul>'
    (folder / "index.html").write_text(_page("Published schedules", listed), encoding="utf-8")
    body = "\n".join(map(_claim, CLAIMS))
    (folder / "claims.html").write_text(_page(TITLE, f"<h1>{TITLE}</h1>\n{CLAIMED}\n{body}"), encoding="utf-8")


def _timeline(name: str, ranks: int, microbatches: int) -> Timeline:
    return pp.simulate(pp.schedule(name, ranks, microbatches))


def _small(timeline: Timeline) -> str:
    """Return the boxes of a timeline alone, as a small picture that fills the width that it gets."""
    boxes, chunks = Panel(timeline).boxes, timeline.schedule.chunks
    end = max(box.end for box in boxes)
    drawn = []
    for box in boxes:
        fill = "".join(f"{round(255 * each):02x}" for each in shade(box.op, box.microbatch, box.chunk, chunks))
        top, high = box.rank + (0.4 if box.part == 2 else 0), 0.4 if box.part else 0.8
        drawn.append(
            f'<rect x="{box.start:g}" y="{top:g}" width="{box.end - box.start:g}" height="{high}" fill="#{fill}"/>'
        )
    view = f'viewBox="0 0 {end:g} {timeline.schedule.ranks}" preserveAspectRatio="none"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{"".join(drawn)}</svg>'


def _page(title: str, body: str, script: str = "") -> str:
    started = f'\n<script type="module" src="../{script}"></script>' if script else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · ppedu</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="../look.css">
<link rel="stylesheet" href="../widgets.css">
<link rel="stylesheet" href="../gallery.css">
<nav aria-label="pages">
  <a href="../">playground</a> <a href="../book/">lessons, guide, reference</a> <a href="./">published schedules</a>
  <a href="claims.html">claims we could not confirm</a>
</nav>
<main>
{body}
</main>{started}
</html>
"""


def _schedule(name: str, timeline: Timeline) -> str:
    """Return the body of a schedule's page."""
    facts = facts_of(name)
    assert facts is not None  # every published schedule has them
    idea, *more = _paragraphs(name)
    first = facts.source.partition(";")[0]
    said = {"The idea": idea, "Published in": first, "The price": facts.price, "In use": facts.used}
    listed = "".join(f"<dt>{title}<dd>{_linked(text)}" for title, text in said.items())
    description = "".join(f"<p>{_linked(part)}</p>" for part in more)
    names = [*published()]
    here = names.index(name)
    ways = [f'<a href="{each}.html">{word}: {each}</a>' for word, each in _around(names, here)]
    return f"""<h1>{escape(name)}</h1>
<figure data-live="{name}.json"><img src="{name}.svg" alt="{escape(timeline.summary())}"></figure>
<p class="open"><a href="{escape(timeline.link("../"))}">Open it in the playground</a>, with controls for sizes and
costs.</p>
<dl>{listed}</dl>
<div class="halves">
<section>
<h2>Formulas</h2>
{_formulas(name)}
</section>
<section>
<h2>How far from the best</h2>
{_gaps(name)}
</section>
</div>
<h2>How it works</h2>
{description}
{_printed(name)}
<h2>The generator</h2>
<pre tabindex="0"><code>{escape(_source(name))}</code></pre>
<h2>Sources</h2>
<p>{_linked(facts.source)}.</p>
<nav class="ways" aria-label="other schedules">{" ".join(ways)}</nav>"""


def _around(names: list[str], here: int) -> Iterator[tuple[str, str]]:
    """Yield the schedules before and after one, each with a word for the link."""
    if here:
        yield "Before", names[here - 1]
    if here + 1 < len(names):
        yield "Next", names[here + 1]


def _source(name: str) -> str:
    """Return the code of a generator without its docstring, which the page prints as text."""
    text = dedent(inspect.getsource(require_registered(name).generator))
    function = parse(text).body[0]
    assert isinstance(function, FunctionDef)
    lines = text.splitlines()
    first = function.body[0]
    if isinstance(first, Expr) and isinstance(first.value, Constant) and first.end_lineno:
        del lines[first.lineno - 1 : first.end_lineno]
    return "\n".join(lines[function.lineno - 1 :])  # without the decorator, whose facts are on the page


def _fact(quantity: str, name: str, ranks: int, microbatches: int) -> Fact | None:
    """Return a formula with its value, or None where none is known or holds."""
    with suppress(PipelineError):
        fact: Fact = getattr(theory, quantity)(name, ranks, microbatches, UNITS)
        return fact
    return None


def _values(name: str) -> dict[str, list[str]]:
    """Return the values of the formulas as texts: for each number of ranks, those of all numbers of microbatches."""
    return {
        quantity: [
            " ".join(_value(quantity, _fact(quantity, name, ranks, microbatches)) for microbatches in MICROBATCHES)
            for ranks in RANKS
        ]
        for quantity in _known(name)
    }


def _known(name: str) -> dict[str, Fact]:
    """Return the quantities for which there is a formula, each with the formula at a size where it holds."""
    sizes = [SIZE, (4, 32)]
    known = {
        quantity: next(filter(None, (_fact(quantity, name, *size) for size in sizes)), None) for quantity in QUANTITIES
    }
    return {quantity: fact for quantity, fact in known.items() if fact}


def _value(quantity: str, fact: Fact | None) -> str:
    """Return the value of a formula, the largest of all ranks, as text; a dash if it does not hold."""
    if fact is None:
        return "–"
    return _written(quantity, max(fact.value) if isinstance(fact.value, tuple) else fact.value)


def _formulas(name: str) -> str:
    """Return two inputs and a table of the formulas with their values, beside those of simulations."""
    known = _known(name)
    ranks, microbatches = SIZE
    rows = []
    simulated = [_timeline(name, *size) for size in SIMULATED]
    for quantity in QUANTITIES:
        fact = known.get(quantity)
        holds = f"<small>if {_signs(fact.holds)}</small>" if fact and fact.holds else ""
        formula = f"<code>{_signs(fact.formula)}</code> {holds}" if fact else "by simulation"
        value = _value(quantity, _fact(quantity, name, *SIZE))
        measured = "".join(f"<td>{_written(quantity, _simulated(each)[quantity])}" for each in simulated)
        rows.append(
            f'<tr><th scope="row">{quantity}<td>{formula}<td><output name="{quantity}">{value}</output>{measured}'
        )
    form = ""
    if known:
        inputs = {"ranks": (RANKS, ranks), "microbatches": (MICROBATCHES, microbatches)}
        form = "".join(
            f'<label>{word} <input type="number" name="{word}" min="{span[0]}" max="{span[-1]}" value="{at}"></label>'
            for word, (span, at) in inputs.items()
        )
    sizes = "".join(f'<th scope="col">simulated, {p} × {m}' for p, m in SIMULATED)
    head = f'<tr><td><th scope="col">formula<th scope="col">value{sizes}'
    return f"""<form hidden>{form}</form>
<div class="wide"><table><thead>{head}<tbody>{"".join(rows)}</table></div>
<p class="note">p ranks, m microbatches, s slices of each, v chunks on each rank, r the rank, k its peak.
F = 1, B = 2 and I = W = 1 are the times of a rank's share of the model. The bubble is the idle share of all ranks'
time, the peak the activations of the fullest rank, in microbatches. A size of {ranks} × {microbatches} is {ranks} ranks
and {microbatches} microbatches.</p>"""


def _signs(formula: str) -> str:
    return escape(formula.replace(">=", "≥").replace("<=", "≤").replace("-", "−"))


def _simulated(timeline: Timeline) -> dict[str, object]:
    return {"makespan": timeline.makespan, "bubble": timeline.bubble, "peak": max(timeline.peak_activations)}


def _gaps(name: str) -> str:
    """Return a table of the schedule's makespan beside the least possible one for small sizes."""
    place = _in_atlas(name)
    if place is None:
        return "<p>How short a step can be with such a placement, with slices or a shared head, is not proven yet.</p>"
    rows = []
    for ranks, microbatches in PROVEN:
        with suppress(PipelineError):  # the schedule does not exist for every size
            takes, best = _beside_best(name, ranks, microbatches, place)
            least = pretty(best.makespan) if best.status == "optimal" else f"{best.bound} to {best.makespan}"
            longer = float(takes / best.makespan) - 1
            gap = f"{longer:.1%} longer" if longer else "the best" if best.status == "optimal" else "the best known"
            rows.append(f'<tr><th scope="row">{ranks} × {microbatches}<td>{pretty(takes)}<td>{least}<td>{gap}')
    head = '<tr><th scope="col">size<th scope="col">takes<th scope="col">least possible<td>'
    return f"""<div class="wide"><table><thead>{head}<tbody>{"".join(rows)}</table></div>
<p class="note">The least time of any order on the same placement, with backwards in halves, in the memory that this
schedule needs. F, I and W of a stage take 1. <a href="../book/docs/optima.html">How it is proven</a></p>"""


def _in_atlas(name: str) -> str | None:
    """Return the placement of the atlas for a schedule, of two slices if it has any; None without an entry."""
    try:
        made = _made(name, 2, 4)
    except PipelineError:  # it does not exist with two slices
        return None
    if made.placement.barriers:  # no entry has S and T
        return None
    kind = made.placement.name, made.chunks, made.slices, bool(made.recomputed)
    return next((each for each, of in PLACEMENTS.items() if of[:4] == kind), None)


def _made(name: str, ranks: int, microbatches: int) -> pp.Schedule:
    return pp.schedule(name, ranks, microbatches, **({"slices": 2} if "slices" in options_of(name) else {}))


def _beside_best(name: str, ranks: int, microbatches: int, place: str) -> tuple[Number, Entry]:
    """Return the makespan of a schedule, and the entry of the atlas for its placement and memory."""
    made = _made(name, ranks, microbatches)
    timeline = pp.simulate(made, atlas(ranks, microbatches, placement=place).costs)
    return timeline.makespan, atlas(ranks, microbatches, max(timeline.peak_activations), place)


def _printed(name: str) -> str:
    """Return a table of the figures that papers print, beside the same simulated."""
    parts = []
    for source, group in groupby((each for each in figures() if each.schedule == name), lambda each: each.source):
        rows = "".join(f"<tr><td>{each.setting}<td>{each.printed:.4f}<td>{rate(each):.4f}\n" for each in group)
        parts.append(
            f"<h2>In the paper and simulated</h2>\n<p>{_linked(source)}: {SPANS if name == 'zb-h2' else RATES}</p>\n"
            '<div class="wide"><table class="printed"><thead><tr><th>sizes and times<th>printed<th>simulated<tbody>'
            f"{rows}</table></div>\n"
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
    code = PAGE.sub(r'<a href="https://\g<0>">\g<0></a>', code)
    return ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>', code)
