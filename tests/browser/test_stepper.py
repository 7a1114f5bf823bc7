"""Rehearsals, running ranks, predictions and hints in a real browser."""

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
    page.evaluate(START, "%%torchrun -n 2 --timeout 5\nimport time\ntime.sleep(60)")
    page.get_by_text("2 ranks running, 3 s… (stopped after 5 s; ■ stops now)").wait_for(timeout=60_000)
    picture(page, "running")
    page.get_by_text("the ranks were stopped because they had not ended after 5 s").wait_for()


CELLS = [
    "from dataclasses import replace\nfrom ppedu.notebook import *\nfrom ppedu.course.exercises import EXERCISES\n"
    "EXERCISES['05.1'] = replace(EXERCISES['05.1'], hints=('How long is the warm-up?', 'Count the ranks after it.'))\n"
    "predict('one piece', 20, 120)\npredict('the longest wait', ['rank 0', 'rank 3', 'all the same'])",
    "outcome('one piece', 96)\noutcome('the longest wait', 'rank 3')",
    "predictions()",
    "check_answer('05.1', None)\nhint('05.1')",
]
FOCUSED = "() => { const at = getComputedStyle(document.activeElement); return parseFloat(at.outlineWidth) === 2; }"
RUN = """async place => {
  const { content } = window.jupyterapp.shell.currentWidget;
  content.activeCellIndex = place;
  await window.jupyterapp.commands.execute('notebook:run-cell');
}"""


def test_predictions_and_hints_are_made_with_the_keyboard(notebook):
    page = notebook(CELLS)
    size = page.viewport_size
    page.set_viewport_size({"width": 1024, "height": 900})
    folded = page.locator("details", has_text="one piece: you made no prediction.")
    assert not folded.get_by_text("It is 96.").is_visible()
    folded.locator("summary").press("Enter")
    folded.get_by_text("It is 96.").wait_for()
    page.get_by_text("You made no predictions here.").wait_for()
    page.get_by_text("← drag me", exact=True).wait_for()
    handle = page.get_by_role("slider", name="one piece: your prediction, from 20 to 120?")
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.get_by_text("22", exact=True).wait_for()
    box = page.locator(".widget-readout").first.bounding_box()
    page.mouse.click(box["x"] + 5, box["y"] + 5)
    assert not page.evaluate("() => document.activeElement.isContentEditable"), "a number cannot be typed, and lost"
    handle.focus()
    assert handle.get_attribute("aria-valuetext") == "22"
    page.get_by_role("radiogroup", name="the longest wait: your prediction?").wait_for()
    for key in ("Tab", "Space", "ArrowDown"):  # the arrow must not select the next cell
        page.keyboard.press(key)
    assert page.get_by_label("rank 3").is_checked() and page.evaluate(FOCUSED)
    page.wait_for_timeout(1000)  # the page sends the slider's moves one by one, each after the answer to the one before
    for place in (1, 2):
        page.evaluate(RUN, place)
    page.get_by_text("one piece: you said 22, it is 96: 74 too low.").wait_for()
    page.get_by_text("the longest wait: you said rank 3, it is rank 3: right.").wait_for()
    assert page.locator("td", has_text="74 too low").count() == 1
    page.get_by_role("button", name="Hint 1 of 2").press("Enter")
    page.get_by_text("Hint 1 of 2: How long").wait_for()
    page.evaluate(RUN, 3)  # hints that were given stay, and are not asked for again
    page.get_by_text("Hint 1 of 2: How long").wait_for()
    page.get_by_role("button", name="Hint 2 of 2").press("Enter")
    page.get_by_text("Hint 2 of 2: Count").wait_for()
    assert page.get_by_role("button", name="No more hints").is_disabled()
    wide = page.evaluate(
        "() => [...document.querySelectorAll('.jp-OutputArea-output')].map(e => e.scrollWidth - e.clientWidth)"
    )
    assert max(wide) <= 0
    picture(page, "practice")
    page.set_viewport_size(size)
