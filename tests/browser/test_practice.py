"""Predictions and hints in JupyterLab, with the keyboard alone, on a narrow page."""

from opened import picture

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
