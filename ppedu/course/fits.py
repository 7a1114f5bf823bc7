"""`what_fits`: does a model fit on some GPUs? A control for its size, their number and the bytes of each weight."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import Any

from ppedu.core import Op
from ppedu.core.numeric import pretty
from ppedu.core.validate import require_count, require_number
from ppedu.view.interactive import in_notebook
from ppedu.view.look import COLORS, MARK

SIZES = [1, 3, 7, 13, 34, 70, 175, 405, 671, 1000]  # billions of weights
GPUS = [2**power for power in range(15)]
BYTES = {
    "2: bf16 weights": 2,
    "4: bf16 weights and gradients": 4,
    "16: weights, gradients and Adam": 16,
    "18: the same, with fp32 gradients": 18,
}
FITS, OVER = COLORS[Op.F], MARK
WIDEST = 1.65  # a bar ends at this multiple of a GPU's memory; longer ones are cut off


@dataclass(repr=False)
class WhatFits:
    """The memory that a model takes on each GPU: with the whole model on each, and with an equal share on each.

    Without a kernel it is a picture of its first state.
    """

    billions: float
    gpus: int
    bytes_each: float
    memory: float

    def rows(self) -> list[tuple[str, float]]:
        """Return what each GPU holds and its GB: for data parallel, and for a model that is cut."""
        whole = self.billions * self.bytes_each
        return [("the whole model", whole), (f"1/{self.gpus:,} of the model", whole / self.gpus)]

    def title(self) -> str:
        counted = f"{self.gpus:,} GPU{'s' * (self.gpus > 1)}"
        return (
            f"{pretty(self.billions)} billion weights at {pretty(self.bytes_each)} bytes "
            f"on {counted} of {pretty(self.memory)} GB"
        )

    def verdict(self, amount: float) -> str:
        """Return an amount in GB, and whether it fits on a GPU."""
        digits = ",.0f" if amount >= 100 else ".3g"
        return f"{amount:{digits}} GB · {'fits' if amount <= self.memory else 'over the limit'}"

    def _bars(self) -> Iterator[tuple[str, str, str, float, str]]:
        """Yield for each bar its label, its verdict, its color, its length in GPUs, and an arrow if it is cut off."""
        for held, amount in self.rows():
            color = FITS if amount <= self.memory else OVER
            length = amount / self.memory
            arrow = "→ " if length > WIDEST else ""
            yield held, self.verdict(amount), color, min(length, WIDEST), arrow

    def __repr__(self) -> str:
        rows = (f"  each GPU holds {held}: {self.verdict(amount)}" for held, amount in self.rows())
        return "\n".join([f"{self.title()}:", *rows])

    def html(self) -> str:
        """Return the bars as HTML, in the colors of the page."""
        whole = f"{100 / WIDEST:.4g}%"
        line = "position:absolute;top:0;bottom:-5px;border-left:2px dashed currentColor"
        bars = []
        for held, verdict, color, length, arrow in self._bars():
            ink = f"color-mix(in srgb, {color} 60%, currentColor)"  # legible on light and on dark pages
            wide = f"{100 * length / WIDEST:.4g}%"
            bar = f"width:{wide};height:22px;background:{color};color:white;text-align:right"
            bars.append(
                f'<div style="margin-top:10px">Each GPU holds <b>{escape(held)}</b>: '
                f'<span style="color:{ink};font-weight:bold">{verdict}</span></div>'
                f'<div style="position:relative"><div style="{bar}">{arrow}</div>'
                f'<div style="{line};left:{whole}"></div></div>'
            )
        below = f'<div style="margin-left:{whole}">{pretty(self.memory)} GB</div>'
        box = "max-width:820px;font-size:14px;line-height:1.6"
        return f'<div style="{box}"><div>{escape(self.title())}</div>{"".join(bars)}{below}</div>'

    def png(self) -> bytes:
        """Return the bars as a picture."""
        from matplotlib import rcParams
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 2.4), layout="constrained")
        ax = figure.subplots()
        for place, (held, verdict, color, length, arrow) in enumerate(self._bars()):
            ax.barh(place, length, height=0.4, color=color)
            ax.text(WIDEST - 0.01, place, arrow.strip(), color="white", fontsize=14, va="center", ha="right")
            ax.text(0, place - 0.3, f"Each GPU holds {held}:  {verdict}", fontsize=11, color=color)
        ax.axvline(1, color=rcParams["text.color"], linestyle="--", linewidth=1.2)
        ax.text(1.01, 1.52, f"{pretty(self.memory)} GB", fontsize=11)
        ax.set(xlim=(0, WIDEST), ylim=(1.55, -0.6))
        ax.set_title(self.title(), loc="left", fontsize=11)
        ax.axis("off")
        drawn = BytesIO()
        figure.savefig(drawn, format="png", dpi=110)
        return drawn.getvalue()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        static = {"text/plain": repr(self), "image/png": base64.b64encode(self.png()).decode()}
        if not in_notebook():
            return static, {}
        from ppedu.view.named import displayed

        data, metadata = displayed(self.controls())
        return {**data, **static}, metadata

    def controls(self) -> Any:
        """Return a widget with three controls and the bars, which follow them."""
        import ipywidgets

        from ppedu.view.named import named

        def slider(name: str, choices: list[Any], value: Any) -> Any:
            options = [(f"{pretty(each):>6}", each) for each in sorted({*choices, value})]
            return ipywidgets.SelectionSlider(options=options, value=value, description=name, style=style, layout=wide)

        style, wide = {"description_width": "130px"}, {"width": "min(560px, 95%)"}
        choices = BYTES if self.bytes_each in BYTES.values() else {pretty(self.bytes_each): self.bytes_each, **BYTES}
        billions = slider("billion weights", SIZES, self.billions)
        gpus = slider("GPUs", GPUS, self.gpus)
        bytes_each = ipywidgets.Dropdown(
            options=choices, value=self.bytes_each, description="bytes per weight", style=style, layout=wide
        )
        bars = ipywidgets.HTML(self.html())

        def follow(_: Any) -> None:
            self.billions, self.gpus, self.bytes_each = billions.value, gpus.value, bytes_each.value
            bars.value = self.html()

        for control in (billions, gpus, bytes_each):
            control.observe(follow, "value")
        sliders = enumerate((billions, gpus), 1)
        names = {f".widget-slider:nth-child({place}) .noUi-handle": each.description for place, each in sliders}
        return named([billions, gpus, bytes_each, bars], names)


def what_fits(billions: float = 7, gpus: int = 1, bytes_each: float = 16, memory: float = 80) -> WhatFits:
    """Show whether a model fits on some GPUs, with controls for its size, their number and the bytes of each weight.

    Counted are weights, gradients and the optimizer, not activations. The numbers are the controls' first values.

    Args:
        billions: The billions of weights of the model.
        gpus: The number of GPUs.
        bytes_each: The bytes of memory for each weight.
        memory: The GB of a GPU.

    Raises:
        SettingError: A number is not positive, or `gpus` is not a whole number.
    """
    for name, value in {"billions": billions, "bytes_each": bytes_each, "memory": memory}.items():
        require_number(name, value, lambda number: number > 0, "a positive number")
    return WhatFits(billions, require_count("gpus", gpus), bytes_each, memory)
