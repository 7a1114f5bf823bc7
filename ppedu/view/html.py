"""A timeline as a page of its own: it needs no network and no script, and can be sent as one file."""

from __future__ import annotations

from html import escape

from matplotlib import style

from ppedu.core.timeline import Timeline, show
from ppedu.view.plot import svg

STYLE = """
:root { color-scheme: light dark; --line: #d8d8d8; }
@media (prefers-color-scheme: dark) { :root { --line: #444; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.4rem; }
figure { margin: 0 0 1.5rem; padding: .75rem; overflow-x: auto; background: white; border: 1px solid var(--line); }
figure svg { display: block; width: 100%; min-width: 40rem; height: auto; }
.numbers { display: flex; flex-wrap: wrap; gap: 1.5rem 4rem; align-items: start; margin-bottom: 1.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem 1rem .15rem 0; border-bottom: 1px solid var(--line); text-align: left; font-weight: normal; }
td { text-align: right; padding-right: 0; }
thead th + th { text-align: right; padding: .15rem 0 .15rem 1.5rem; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.35; }
"""


def page(timeline: Timeline) -> str:
    """The text of the page: the picture, the numbers, the orders."""
    schedule, unit = timeline.schedule, timeline.costs.unit
    title = escape(f"{schedule.name}, {schedule.size}, {timeline.source}")
    with style.context("default"):  # on its white card, whatever style the notebook draws in
        picture = svg(timeline)
    picture = picture[picture.index("<svg") :]
    totals = {
        "makespan": show(timeline.makespan, unit),
        "bubble": f"{timeline.bubble:.1%}",
        "overhead": f"{timeline.overhead:.1%}",
        "span": show(timeline.span, unit),
    }
    ranks = zip(timeline.idle, timeline.peak_activations, strict=True)
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
<h1>{title}</h1>
<figure>{picture}</figure>
<div class="numbers">
<table>{"".join(f"<tr><th>{name}<td>{escape(number)}" for name, number in totals.items())}</table>
<table><thead><tr><th>rank<th>idle<th>peak activations<tbody>
{"".join(f"<tr><th>{rank}<td>{escape(show(idle, unit))}<td>{show(peak)}" for rank, (idle, peak) in enumerate(ranks))}
</table>
</div>
<details><summary>As text</summary><pre>{escape(timeline.text(width=300))}</pre></details>
<details><summary>The orders, as CSV</summary><pre>{escape(schedule.to_csv())}</pre></details>
"""
