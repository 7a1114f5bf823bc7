"""Rehearsals and running ranks in a real browser."""

from opened import picture

REHEARSE = """from ppedu.notebook import rehearse

def both_receive_first(me):
    other = 1 - me.rank
    me.recv(other)
    me.send("a tensor", other)

rehearse(both_receive_first, ranks=2)"""


def test_a_rehearsal_is_stepped_through_with_the_number_and_played(notebook):
    page = notebook([REHEARSE])
    card, number = page.locator(".widget-html").filter(has_text="of 3."), page.get_by_role("spinbutton", name="step")
    assert card.inner_text().startswith("Step 1 of 3. Rank 0 calls recv(1) and waits for rank 1.")
    assert "has not begun" in card.inner_text()
    number.fill("2")
    number.press("Enter")
    card.get_by_text("Rank 1 calls recv(0) and waits for rank 0.").wait_for()
    picture(page, "rehearsal")
    page.get_by_role("button", name="play or pause").press("Enter")
    card.get_by_text("Deadlock: rank 0 waits for rank 1, and rank 1 waits for rank 0.").wait_for()


CHOOSE = "from ppedu.course.menu import choose\nchoose(['one', 'two', 'three'], lambda name: print(f'this is {name}'))"


def test_controls_keep_the_keys_of_the_notebook(notebook):
    page = notebook([CHOOSE, "from ppedu.notebook import what_fits\nwhat_fits(7, 1)"])
    menu = page.get_by_role("combobox", name="show")
    menu.focus()
    for key in ("ArrowDown", "ArrowDown", "b"):
        page.keyboard.press(key)
    page.get_by_text("this is three").wait_for()
    for name in ("billion weights", "GPUs"):
        page.get_by_role("slider", name=name).press("ArrowRight")
    page.get_by_text("13 billion weights at 16 bytes on 2 GPUs of 80 GB").wait_for()
    page.get_by_role("combobox", name="bytes per weight").press("ArrowUp")
    page.get_by_text("13 billion weights at 4 bytes on 2 GPUs of 80 GB").wait_for()
    assert page.evaluate("() => window.jupyterapp.shell.currentWidget.content.widgets.length") == 2, "b inserts a cell"


START = """source => {
  const shared = window.jupyterapp.shell.currentWidget.model.sharedModel;
  shared.insertCells(shared.cells.length, [{ cell_type: 'code', metadata: {}, source }]);
  void window.jupyterapp.commands.execute('notebook:run-all-cells');
}"""


def test_a_cell_with_ranks_that_hang_shows_for_how_long(notebook):
    page = notebook(["%load_ext ppedu"])
    page.evaluate(START, "%%torchrun -n 2 --timeout 7\nimport time\ntime.sleep(60)")
    page.get_by_text("2 ranks running, 5 s… (stopped after 7 s; ■ stops now)").wait_for(timeout=60_000)
    picture(page, "running")
    page.get_by_text("the ranks were stopped because they had not ended after 7 s").wait_for()
