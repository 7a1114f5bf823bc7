"""A timeline as a page of its own: it needs no network and no kernel, and can be sent as one file."""

from __future__ import annotations

import json
from html import escape

from ppedu.core.timeline import Timeline, show
from ppedu.view.label import encodable
from ppedu.view.shown import HERE, view

STYLE = """
:root { color-scheme: light dark; --line: #d8d8d8; }
@media (prefers-color-scheme: dark) { :root { --line: #444; } }
body {
  background: Canvas; color: CanvasText; font: 15px/1.5 system-ui, sans-serif;
  max-width: 90rem; margin: 2rem auto; padding: 0 1.5rem;
}
h1 { font-size: 1.4rem; }
main { margin-bottom: 1.5rem; }
.numbers { display: flex; flex-wrap: wrap; gap: 1.5rem 4rem; align-items: start; margin-bottom: 1.5rem; }
.numbers table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.numbers th, .numbers td {
  padding: .15rem 1rem .15rem 0; border-bottom: 1px solid var(--line); text-align: left; font-weight: normal;
}
.numbers td { text-align: right; padding-right: 0; }
.numbers thead th + th { text-align: right; padding: .15rem 0 .15rem 1.5rem; }
section pre { overflow-x: auto; font-size: 13px; line-height: 1.35; }
"""


def page(timeline: Timeline) -> str:
    """The text of the page: the timeline as `Timeline.show` shows it, the numbers, the orders."""
    schedule, unit = timeline.schedule, timeline.costs.unit
    title = escape(f"{schedule.name}, {schedule.size}, {timeline.source}")
    # A name that ends the script must not end it.
    state = json.dumps(view(timeline).state()).replace("<", "\\u003c")
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("widgets.js", "widgets.css"))
    totals = {
        "makespan": show(timeline.makespan, unit),
        "bubble": f"{timeline.bubble:.1%}",
        "overhead": f"{timeline.overhead:.1%}",
        "span": show(timeline.span, unit),
    }
    ranks = zip(timeline.idle, timeline.peak_activations, strict=True)
    return encodable(f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}{style}</style>
<header><h1>{title}</h1></header>
<main><noscript><p>The picture needs JavaScript; the numbers and the text below do not.</p></noscript></main>
<section aria-label="numbers and orders">
<div class="numbers">
<table>{"".join(f"<tr><th>{name}<td>{escape(number)}" for name, number in totals.items())}</table>
<table><thead><tr><th>rank<th>idle<th>peak activations<tbody>
{"".join(f"<tr><th>{rank}<td>{escape(show(idle, unit))}<td>{show(peak)}" for rank, (idle, peak) in enumerate(ranks))}
</table>
</div>
<details><summary>As text</summary><pre tabindex="0">{escape(timeline.text(width=300))}</pre></details>
<details><summary>The orders, as CSV</summary><pre tabindex="0">{escape(schedule.to_csv())}</pre></details>
</section>
<script type="module">
{script}
mount(document.querySelector("main"), {state});
</script>
</html>
""")
