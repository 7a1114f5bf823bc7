"""Timelines as a page of their own: it needs no network and no kernel, and can be sent as one file."""

from __future__ import annotations

import json
from html import escape

from ppedu.core.numeric import pretty
from ppedu.core.timeline import Timeline
from ppedu.view.label import encodable
from ppedu.view.shown import HERE, Shown

STYLE = """
:root { color-scheme: light dark; --line: #d8d8d8; }
@media (prefers-color-scheme: dark) { :root { --line: #444; } }
body {
  background: Canvas; color: CanvasText; font: 15px/1.5 system-ui, sans-serif;
  max-width: 90rem; margin: 2rem auto; padding: 0 1.5rem;
}
h1 { font-size: 1.4rem; }
h2 { font-size: 1.1rem; }
h1, h2 { overflow-wrap: anywhere; }
main { margin-bottom: 1.5rem; }
.numbers { display: flex; flex-wrap: wrap; gap: 1.5rem 4rem; align-items: start; margin-bottom: 1.5rem; }
.numbers table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.numbers th, .numbers td {
  padding: .15rem 1rem .15rem 0; border-bottom: 1px solid var(--line); text-align: left; font-weight: normal;
}
.numbers td { text-align: right; padding-right: 0; white-space: nowrap; }
.numbers .meaning { text-align: left; padding-left: 1.5rem; white-space: normal; }
.numbers thead th + th { text-align: right; padding: .15rem 0 .15rem 1.5rem; }
section pre { overflow-x: auto; font-size: 13px; line-height: 1.35; }
"""


NUMBERS = {  # what they mean; the values are in `_numbers`
    "makespan": "from the first start to the last end",
    "bubble": "idle share of all ranks’ time",
    "overhead": "makespan / busiest rank’s busy time − 1",
    "span": "longest time from a rank’s own start to its own end",
}


def page(shown: Shown) -> str:
    """Return the text of the page: the widget that `shown` is, and each timeline's numbers and orders."""
    timelines = [timeline for timeline, _ in shown.panels()]
    titles = [f"{each.schedule.name}, {each.schedule.size}, {each.source}" for each in timelines]
    title = escape(titles[0] if len(titles) == 1 else ", ".join(each.schedule.name for each in timelines))
    # A name that ends the script must not end it.
    state = json.dumps(shown.state()).replace("<", "\\u003c")
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("widgets.js", "widgets.css"))
    headings = [f"<h2>{escape(each)}</h2>" if len(titles) > 1 else "" for each in titles]
    sections = "\n".join(map(_section, headings, timelines))
    return encodable(f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}{style}</style>
<header><h1>{title}</h1></header>
<main><noscript><p>The picture needs JavaScript; the numbers and the text below do not.</p></noscript></main>
{sections}
<script type="module">
{script}
mount(document.querySelector("main"), {state});
</script>
</html>
""")


def _section(heading: str, timeline: Timeline) -> str:
    """Return the numbers and the orders of a timeline as HTML."""
    unit = timeline.costs.unit
    totals = {
        "makespan": pretty(timeline.makespan, unit),
        "bubble": f"{timeline.bubble:.1%}",
        "overhead": f"{timeline.overhead:.1%}",
        "span": pretty(timeline.span, unit),
    }
    rows = "".join(
        f"<tr><th>{name}<td>{escape(totals[name])}<td class=meaning>{means}" for name, means in NUMBERS.items()
    )
    ranks = "".join(
        f"<tr><th>{rank}<td>{escape(pretty(idle, unit))}<td>{pretty(peak)}"
        for rank, (idle, peak) in enumerate(zip(timeline.idle, timeline.peak_activations, strict=True))
    )
    return f"""<section aria-label="numbers and orders of {escape(timeline.schedule.name)}">
{heading}
<div class="numbers">
<table>{rows}</table>
<table><thead><tr><th>rank<th>idle<th>peak activations<tbody>
{ranks}
</table>
</div>
<details><summary>As text</summary><pre tabindex="0">{escape(timeline.text(width=300))}</pre></details>
<details><summary>The orders, as CSV</summary><pre tabindex="0">{escape(timeline.schedule.to_csv())}</pre></details>
</section>"""
