"""A menu whose choices run a function."""

import pytest

from ppedu import SettingError
from ppedu.course.menu import choose


def test_without_widgets_the_first_option_runs(capsys):
    choose(["one", "two"], lambda option: print("ran", option))
    assert capsys.readouterr().out == "ran one\n"


def test_a_menu_without_options_is_refused():
    with pytest.raises(SettingError, match="at least one option"):
        choose([], print)


def test_a_pick_runs_the_function_and_replaces_its_output(kernel):
    cell = kernel(
        "import ipywidgets\n"
        "from ppedu.course.menu import choose\n"
        "ran = []\n"
        "choose(['one', 'two'], lambda option: (ran.append(option), print('ran', option)))"
    )
    assert cell.error is None and "ran" not in cell.text
    [shown] = cell.shown
    assert shown["text/plain"] == "A menu: one, two." and "application/vnd.jupyter.widget-view+json" in shown
    picked = kernel(
        "[menu] = [each for each in ipywidgets.widgets.widget._instances.values() if isinstance(each, "
        "ipywidgets.Dropdown)]\nmenu.value = 'two'\nprint(ran)"
    )
    assert "['one', 'two']" in picked.text
