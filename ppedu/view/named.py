"""Controls of ipywidgets that can be used with the keyboard and a screen reader."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from ppedu.view.script import file

RING = """
.ppedu-named :is(.noUi-handle, button, select, input):focus-visible { outline: 2px solid #3b76b8 !important; }
.ppedu-named .noUi-handle:focus-visible { outline-offset: 2px; }
.ppedu-named :is(button, select):focus-visible { outline-offset: -2px; }
"""


@cache
def _class() -> type:
    import anywidget
    import traitlets

    class Named(anywidget.AnyWidget):
        """The browser's side of `named`."""

        _esm = file("named")
        _css = RING
        names = traitlets.Dict().tag(sync=True)

    return Named


def named(children: Sequence[Any], names: dict[str, str]) -> Any:
    """Return a VBox of ipywidgets whose controls have names and a visible focus, and keep their keys from the notebook.

    Args:
        names: The name of each control that ipywidgets leaves without one, by its CSS selector within the box.

    Raises:
        ImportError: ipywidgets or anywidget is not installed.
    """
    from ipywidgets import VBox

    return VBox([*children, _class()(names=names)])


def displayed(box: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the MIME bundle that displays a box of `named`: its data and its metadata.

    It is made from that of the box's last widget: ipywidgets 7, the version in Colab, has none of its own, and
    anywidget adds where Colab finds its script.
    """
    data, metadata = box.children[-1]._repr_mimebundle_()
    data["application/vnd.jupyter.widget-view+json"]["model_id"] = box.model_id
    return data, metadata
