// @ts-check
// A widget without a picture, in a box of ipywidgets: it makes their controls usable with the keyboard and a screen reader.

/**
 * Keep a key from the notebook, which has shortcuts for keys without a modifier.
 * @param {Event} event
 */
function keep(event) {
  const { ctrlKey, metaKey, altKey, shiftKey } = /** @type {KeyboardEvent} */ (event);
  if (!ctrlKey && !metaKey && !altKey && !shiftKey) event.stopPropagation();
}

/**
 * Name the controls of the box around an element, and keep the notebook's shortcuts away from them. Return the function
 * that ends that.
 * @param {{ model: any, el: HTMLElement }} view
 */
function render({ model, el }) {
  el.style.display = "none";
  /** @type {Element | null} */
  let box = null;
  let frame = 0;
  const watch = new MutationObserver(name);

  function name() {
    for (const [selector, label] of Object.entries(model.get("names"))) {
      const control = box?.querySelector(selector);
      control?.setAttribute("aria-label", label);
      if (control?.matches(".widget-radio-box")) control.setAttribute("role", "radiogroup");
    }
    // A slider says the number of its stop. What is typed into the text beside it would be lost, so it cannot be edited.
    for (const slider of box?.querySelectorAll(".widget-slider") ?? []) {
      const [handle, readout] = [".noUi-handle", ".widget-readout"].map((each) => slider.querySelector(each));
      const value = readout?.textContent?.trim() ?? "";
      if (handle?.getAttribute("aria-valuetext") !== value) handle?.setAttribute("aria-valuetext", value);
      readout?.setAttribute("tabindex", "-1");
      readout?.setAttribute("contenteditable", "false");
    }
  }

  function begin() {
    box = el.closest(".widget-vbox");
    if (!box) {
      frame = requestAnimationFrame(begin); // Jupyter has not put the element on the page yet
      return;
    }
    box.classList.add("ppedu-named");
    box.addEventListener("keydown", keep);
    const attributeFilter = ["aria-valuetext"];
    watch.observe(box, { childList: true, subtree: true, characterData: true, attributes: true, attributeFilter });
    name();
  }

  begin();
  return () => {
    cancelAnimationFrame(frame);
    watch.disconnect();
    box?.removeEventListener("keydown", keep);
  };
}

export default { render };
