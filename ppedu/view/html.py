"""Timelines as a page: one file, which needs neither a network nor a kernel."""

from __future__ import annotations

import json
import os
from html import escape
from typing import TYPE_CHECKING

from ppedu.core.files import write_text
from ppedu.core.numeric import pretty
from ppedu.sim import Timeline
from ppedu.view.label import encodable
from ppedu.view.script import script, style

if TYPE_CHECKING:
    from ppedu.view.interactive import Interactive


def page(shown: Interactive, report: str = "") -> str:
    """Return the HTML of a page with the timelines that `shown` displays, and the numbers and orders of each.

    Args:
        report: HTML to put above the timelines.
    """
    panels, timelines = shown.panels(), shown.stack.timelines
    titles = [f"{each.schedule.name}, {each.schedule.size}, {each.source}" for each in timelines]
    if len(panels) == 1:
        first, sources = timelines[0].schedule, dict.fromkeys(each.source for each in timelines)
        title = escape(f"{first.name}, {first.size}, {' and '.join(sources)}")
    else:
        title = escape(", ".join(panel.timeline.schedule.name for panel in panels))
    state = json.dumps(shown.state()).replace("<", "\\u003c")  # a name may contain </script>
    headings = [f"<h2>{escape(each)}</h2>" if len(titles) > 1 else "" for each in titles]
    sections = "\n".join(map(_section, headings, timelines))
    return encodable(f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style("page")}{style("widgets")}</style>
<header><h1>{title}</h1></header>{report and f"<section class=report>{report}</section>"}
<main><noscript><p>The picture needs JavaScript. The numbers and text below do not.</p></noscript></main>
{sections}
<script type="module">
{script()}
mount(document.querySelector("main"), {state});
</script>
</html>
""")


def save_report(report: str, shown: Interactive, path: str | os.PathLike[str]) -> None:
    """Write a page with a report, given as HTML, above timelines. See `Autopsy.save`."""
    write_text(path, page(shown, report))


def _section(heading: str, timeline: Timeline) -> str:
    """Return the numbers and orders of a timeline as HTML, below `heading`, which is HTML or empty."""
    unit = timeline.costs.unit
    numbers = [
        ("makespan", pretty(timeline.makespan, unit), "from the first start to the last end"),
        ("bubble", f"{timeline.bubble:.1%}", "idle share of all ranks’ time"),
        ("overhead", f"{timeline.overhead:.1%}", "makespan / busiest rank’s busy time − 1"),
        ("span", pretty(timeline.span, unit), "longest time from a rank’s own start to its own end"),
    ]
    rows = "".join(f"<tr><th>{name}<td>{escape(value)}<td class=meaning>{means}" for name, value, means in numbers)
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
<details><summary>Orders as CSV</summary><pre tabindex="0">{escape(timeline.schedule.to_csv())}</pre></details>
</section>"""
