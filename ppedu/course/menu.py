"""A menu in a notebook, whose choices run a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ppedu.core import SettingError
from ppedu.course.exercises.feedback import publish
from ppedu.view.interactive import in_notebook


def choose(options: Sequence[str], run: Callable[[str], object]) -> None:
    """Show a menu, and call `run(option)` with the first option and then with each one that is picked.

    The output of the call is shown below the menu. Without a kernel that can show widgets, only the first call is made.

    Raises:
        SettingError: there are no options.
    """
    if not options:
        raise SettingError("choose needs at least one option")
    if in_notebook():
        try:
            from ipywidgets import Dropdown, Output

            from ppedu.view.named import displayed, named
        except ImportError as error:
            print(f"There is no menu, because {error.name} is not installed: pip install 'ppedu[lab]'")
        else:
            menu, shown = Dropdown(options=list(options)), Output()

            def pick(_: object = None) -> None:
                shown.clear_output()
                with shown:
                    run(menu.value)

            menu.observe(pick, "value")
            pick()
            data, _ = displayed(named([menu, shown], {".widget-dropdown select": "show"}))
            publish({**data, "text/plain": f"A menu: {', '.join(options)}."})
            return
    run(options[0])
