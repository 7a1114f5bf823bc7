"""The boxes of controls, as they are displayed in Colab, which has ipywidgets 7 and loads widgets' scripts itself."""

import sys
from types import ModuleType, SimpleNamespace

import anywidget._util
import ipywidgets
import pytest

from ppedu.course import fits, stepper
from ppedu.notebook import rehearse
from ppedu.view.named import displayed, named

VIEW = "application/vnd.jupyter.widget-view+json"
SCRIPT = "https://ssl.gstatic.com/manager.min.js"


@pytest.fixture
def colab(monkeypatch):
    """Colab's module, and ipywidgets without what version 7 lacks."""
    output = ModuleType("google.colab.output")
    vars(output).update(
        enable_custom_widget_manager=lambda: setattr(output, "_widgets", SimpleNamespace(_installed_url=SCRIPT))
    )
    monkeypatch.setitem(sys.modules, "google.colab.output", output)
    monkeypatch.delattr(ipywidgets.Widget, "_repr_mimebundle_")
    anywidget._util.enable_custom_widget_manager_once.cache_clear()
    yield
    anywidget._util.enable_custom_widget_manager_once.cache_clear()


def test_a_box_is_displayed_in_colab(colab):
    box = named([ipywidgets.IntSlider()], {})
    data, metadata = displayed(box)
    assert data[VIEW] == {"version_major": 2, "version_minor": 1, "model_id": box.model_id}
    assert metadata == {VIEW: {"colab": {"custom_widget_manager": {"url": SCRIPT}}}}


def test_objects_with_controls_keep_what_colab_needs(colab, monkeypatch):
    for module in (fits, stepper):
        monkeypatch.setattr(module, "in_notebook", lambda: True)
    for each in (fits.what_fits(), rehearse(lambda me: None, 2)):
        data, metadata = each._repr_mimebundle_()
        assert VIEW in data and metadata[VIEW]["colab"]
