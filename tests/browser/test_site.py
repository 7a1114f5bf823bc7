"""The site in a real browser, from a local server: front page, lessons, gallery; what a reader's code cannot do."""

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
import zipfile
from pathlib import Path

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from opened import ROOT, save_picture
from playwright.sync_api import expect
from strategies import slow

import ppedu as pp
from ppedu.core.numeric import pretty
from ppedu.view.link import decode, encode
from ppedu.zoo.registry import published

sys.path.insert(0, str(ROOT / "site"))
import make_site
import serve
from claims import CLAIMS

FAULTS = {"serious", "critical"}
QUIET = re.compile("^(The schedule is legal\\.( .*)?)?$")
EVERY = {"schedule": "zb-v", "ranks": "3", "microbatches": "5", "forward": "1.5", "backward": "2.5", "latency": "0.25"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The built site."""
    if not all((ROOT / "node_modules" / name).exists() for name in ("pyodide", "@fontsource")):
        if not shutil.which("npm"):
            pytest.skip("the site has Python for the browser and its font from npm, which is not installed")
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=ROOT, check=True, capture_output=True)
    folder = tmp_path_factory.mktemp("site") / "site"
    make_site.build(folder)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    """The address of the site."""
    with serve.server(folder) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()


@contextlib.contextmanager
def visits(chromium, address):
    """Yield `visit(fragment)`, which opens the playground; requests to other origins and errors are wrong.

    Without a service worker, which would fetch the whole book for each visit, unless `service_workers` is "allow".
    """
    contexts, wrong = [], []
    usual = {"viewport": {"width": 1280, "height": 900}, "service_workers": "block"}

    def visit(fragment="", path="", **options):
        context = chromium.new_context(**{**usual, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(error))
        page.on("request", lambda request: request.url.startswith((address, "blob:", "data:")) or wrong.append(request))
        page.goto(f"{address}{path}#{fragment}")
        if path:
            return page
        expect(page.locator("#status")).to_have_text(re.compile("^$|[.]$"), timeout=30_000)
        page.wait_for_function("() => !document.querySelector('#status').textContent.startsWith('Python is loading')")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def visit(chromium, address):
    with visits(chromium, address) as visit:
        yield visit


@pytest.fixture(scope="module")
def playground(chromium, address):
    """One page for all tests that do not need a new one, since Python takes seven seconds to load."""
    with visits(chromium, address) as visit:
        yield visit(service_workers="allow")


def follow(page, fragment):
    """Open a link on a page that is open."""
    page.evaluate("fragment => { location.hash = fragment; }", fragment)


def run(page, text):
    """Write text into the editor, and have it checked."""
    page.get_by_role("tab", name="write your own").click()
    editor = page.get_by_label("a generator, or a line of actions")
    editor.fill(text)
    page.get_by_role("button", name="check and draw").click()
    return editor


def test_the_keyboard_alone(playground):
    """Comes first: on a page that has just been opened, the focus is at its beginning."""
    page = playground

    def tab_to(wanted):
        for _ in range(30):
            if wanted.evaluate("node => node === document.activeElement"):
                return
            page.keyboard.press("Tab")
        raise AssertionError("the keyboard does not get there")

    tab_to(page.get_by_role("tab", name="explore"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    editor = page.get_by_label("a generator, or a line of actions")
    editor.wait_for()
    tab_to(editor)
    page.keyboard.press("Control+A")
    page.keyboard.type("0F0 0B0\n1F0 1B0")
    tab_to(page.get_by_role("button", name="check and draw"))
    page.keyboard.press("Enter")
    expect(page.locator("#report")).to_contain_text("The schedule is legal.")


UNEXPLAINED = """([texts, numbers]) => [...document.querySelectorAll(texts)].flatMap(each => {
  const copy = each.cloneNode(true);
  for (const why of copy.querySelectorAll(".ppedu-why, .ppedu-reason")) why.remove();
  return copy.textContent.match(new RegExp(numbers, "g")) ?? [];
})"""
OF_STORY = [".told > p, .count > p", r"(?<!GPU )\b[\d.]+\b"]  # but for GPU 0 and 1F1B
OF_VIEWS = [".ppedu-note, #report :is(p, td)", r"[\d.]+ ?(%|points|ms|[KMG]B)"]


def opens(page, number):
    """Click on a number, and return what it says, once Escape has led back to it."""
    number.click()
    said = page.locator(".ppedu-reason:popover-open").inner_text()
    page.keyboard.press("Escape")
    expect(number).to_be_focused()
    return said


def numbers(page):
    """Return the story's numbers by their words."""
    lines = [line.split("\n") for line in page.locator(".count > p").all_inner_texts()]
    return {words: number for number, words in lines}


def test_the_story_counts_what_formulas_say_and_the_keyboard_changes_it(visit):
    page = visit(path="index.html")
    page.locator("#one canvas").first.wait_for(state="attached")
    slider = page.locator(".amount input")
    slider.focus()
    for gpus in range(1, 5):
        assert numbers(page) == {
            f"{'more than' if 256 / gpus > 80 else 'fits into'} a GPU’s 80 GB": f"{256 / gpus:.0f} GB"
        }
        assert page.evaluate(UNEXPLAINED, OF_STORY) == []
        page.keyboard.press("ArrowRight")
    told, count, peaks = (page.locator(f"{each} .ppedu-why") for each in (".told", ".count", "#two"))
    assert "2 for the weight and 2 for its gradient" in opens(page, told.get_by_text("16", exact=True))
    assert "256 GB / 4 = 64 GB" in opens(page, count.get_by_text("64 GB"))
    page.get_by_role("button", name="Cut").focus()
    page.keyboard.press("ArrowRight")
    assert numbers(page) == {"idle": "75%"}
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name="Send many")).to_be_focused()
    for step, name in enumerate(("Send many", "Hold less")):
        page.get_by_role("button", name=name).press("Enter")
        slider.focus()
        page.keyboard.press("Home")
        for m in range(1, 17):
            bubble = f"{100 * 3 / (m + 3):.1f}".removesuffix(".0") + "%"
            held = {"held by GPipe": str(m), "held by 1F1B": str(min(m, 4)), "idle in both": bubble}
            assert numbers(page) == (held if step else {"idle": bubble})
            drawn = page.locator(".scene.now .ppedu-panel").last
            assert f"4 GPUs, {m} microbatch" in (drawn.get_attribute("aria-label") or "")
            assert page.evaluate(UNEXPLAINED, OF_STORY) == []
            page.keyboard.press("ArrowRight")
    assert "4 GPUs × 57 = 228. They work for 192 of it: 36 / 228 = 3 / 19" in opens(page, count.get_by_text("15.8%"))
    assert "By GPU: 4, 3, 2, 1." in opens(page, count.get_by_text("4", exact=True))
    assert peaks.count() == 2 * 4
    assert "GPU 3 first holds 1 at 3, with 1 F begun." in opens(page, peaks.last)


def test_the_story_plays_only_when_it_is_asked_to(visit):
    page = visit(path="index.html", reduced_motion="reduce")
    page.locator("#one canvas").first.wait_for(state="attached")
    page.clock.install()
    current = page.locator(".steps [aria-current]")
    page.clock.run_for(30_000)
    expect(current).to_have_text("Cut")
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(3000)
    assert page.locator(".amount input").input_value() == "3"
    page.clock.run_for(5000)
    expect(current).to_have_text("Send one")
    page.locator(".count .ppedu-why").click()
    page.clock.run_for(30_000)
    expect(current).to_have_text("Send one")
    expect(page.locator(".ppedu-reason:popover-open")).to_contain_text("36 / 48 = 3 / 4 = 75.0%")
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(30_000)
    expect(current).to_have_text("Send one")


def test_the_story_in_any_size_and_light(visit):
    page = visit(path="index.html")
    page.locator("#one canvas").first.wait_for(state="attached")
    for width in (360, 1366):
        page.set_viewport_size({"width": width, "height": 768})
        for scheme, name in (("light", "Hold less"), ("dark", "Cut")):
            page.emulate_media(color_scheme=scheme)
            page.get_by_role("button", name=name).click()
            page.locator(".count .ppedu-why").first.click()
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, name
            if (width, scheme) in ((360, "light"), (1366, "dark")):  # it takes seconds
                assert [each["id"] for each in Axe().run(page).response["violations"]] == [], (width, scheme, name)
            page.keyboard.press("Escape")


def test_doors_lead_to_lesson_1_and_to_the_playground(playground, address):
    page = playground
    first = page.get_by_role("link", name="Learn").get_attribute("href")
    assert page.request.get(f"{address}{first}").ok
    page.get_by_role("link", name="Ask about my run").click()
    expect(page.get_by_role("tab", name="plan")).to_have_attribute("aria-selected", "true", timeout=30_000)
    expect(page.get_by_role("heading", name="Playground")).to_be_in_viewport()
    question = page.locator("[name=question]")
    page.get_by_label("GB of a GPU").fill("40")
    page.get_by_label("GB of a GPU").press("Enter")
    expect(page.locator("#playground.searching")).to_have_count(1)  # what is shown is dimmed
    expect(question).to_have_value(re.compile("^memory = 40e9  # bytes", re.MULTILINE))
    question.fill('machine = "h100"\n[plan]\nranks = 4\nmicrobatches = [8, 16]')
    expect(page.get_by_label("ranks")).to_have_value("4")
    expect(page.locator("form label.number:visible")).to_have_count(1)
    page.get_by_role("link", name="Play with schedules").click()
    expect(page.get_by_role("tab", name="explore")).to_have_attribute("aria-selected", "true", timeout=30_000)
    page.get_by_role("banner").get_by_role("link", name="playground").click()
    expect(page.get_by_role("heading", name="Playground")).to_be_in_viewport()


def test_a_link_shows_the_playground_first(visit):
    page = visit(path="index.html", fragment="i1ZKrSjIyS9KVdKpro0FAA")
    expect(page.locator("#story")).to_be_hidden()
    page.get_by_role("link", name="What is this?").click()
    expect(page.get_by_role("heading", name="Pipeline parallelism")).to_be_in_viewport()
    expect(page.locator(".count")).to_contain_text("GB")


REASONS = {  # by view: a number in its tables and sentences, and words that it opens
    "compare": ("48", "8 microbatches × 3 × 2"),
    "plan": (re.compile(r"^[\d.]+ points$"), "If all stages took the mean time"),
    "proven best": ("intervals and counters", "no schedule is shorter"),
}


def test_every_view_has_a_link_and_no_fault(playground):
    page = playground
    for name in ("compare", "differences", "puzzle", "plan", "proven best", "write your own", "explore"):
        before = page.url
        page.get_by_role("tab", name=name).click()
        page.wait_for_function("before => location.href !== before", arg=before, timeout=60_000)
        expect(page.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")
        expect(page.locator("#shown .ppedu canvas").first).to_be_visible(timeout=60_000)  # a plan takes seconds
        expect(page.locator("#status:not(.wrong)")).to_have_text(QUIET)
        faults = Axe().run(page).response["violations"]
        assert [each["id"] for each in faults if each["impact"] in FAULTS] == [], name
        assert page.evaluate(UNEXPLAINED, OF_VIEWS) == (["80 GB"] if name == "plan" else []), (
            "but what a reader has given"
        )
        if name in REASONS:
            number, said = REASONS[name]
            page.locator("main table, #report p").get_by_role("button", name=number).first.click()
            expect(page.locator(".ppedu-reason:popover-open")).to_contain_text(said)
            page.keyboard.press("Escape")


def test_the_paper_that_introduced_a_schedule_is_beside_its_name(playground):
    playground.get_by_role("tab", name="explore").click()
    for name, paper in (("1f1b", "2006.09503"), ("zb-v", "2401.10241")):
        playground.get_by_label("schedule", exact=True).select_option(name)
        link = playground.get_by_role("link", name=f"arXiv {paper}")
        expect(link).to_have_attribute("href", f"https://arxiv.org/abs/{paper}")
        expect(playground.get_by_role("link", name=name, exact=True)).to_be_visible()
    playground.get_by_label("schedule", exact=True).select_option("1f1b")


def test_a_number_says_where_it_comes_from(playground):
    page = playground
    page.get_by_role("tab", name="explore").click()
    words = page.locator(".ppedu-reason:popover-open")
    for number, said in (
        (page.locator(".ppedu-note").get_by_role("button", name="27.3%").first, "36 / 132 = 3 / 11 = 27.3%"),
        (page.get_by_role("button", name="makespan 33"), "11 F take 11 and 11 B take 22"),
    ):
        number.click()
        expect(words).to_contain_text(said)
        expect(words.get_by_role("link", name="arXiv 2104.04473")).to_have_attribute(
            "href", "https://arxiv.org/abs/2104.04473"
        )
        above, below = number.bounding_box(), words.bounding_box()
        assert below["y"] >= above["y"] + above["height"] or above["y"] >= below["y"] + below["height"]
        assert [each["id"] for each in Axe().run(page).response["violations"]] == []
        page.keyboard.press("Escape")
        expect(words).to_have_count(0)
        expect(number).to_be_focused()
        page.keyboard.press("Enter")
        expect(words).to_be_visible()
        page.mouse.click(5, 5)
        expect(words).to_have_count(0)


def test_the_pointer_gets_from_an_action_to_the_numbers_of_its_forecast(playground):
    page = playground
    page.get_by_role("tab", name="puzzle").click()
    page.get_by_role("button", name="place 0F0").hover()
    number = page.locator(".ppedu-cost .ppedu-why", has_text="%")
    box = number.bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 3, steps=20)  # over other actions
    page.mouse.click(box["x"] + 3, box["y"] + 3)
    expect(page.locator(".ppedu-reason:popover-open")).to_contain_text("All ranks work for")
    page.keyboard.press("Escape")


def test_an_example_opens(playground):
    page = playground
    page.get_by_role("tab", name="write your own").click()
    page.get_by_role("link", name="a deadlock").click()
    expect(page.locator("#report")).to_contain_text("The schedule is not legal")
    expect(page.get_by_label("a generator, or a line of actions")).to_have_value(re.compile("^0F0"))


def test_a_change_is_undone(playground):
    playground.get_by_role("tab", name="compare").click()
    expect(playground.locator("#shown")).to_contain_text("messages")
    field, first = playground.get_by_label("microbatches", exact=True), playground.url
    playground.wait_for_timeout(900)  # faster changes are one
    field.fill("12")
    field.press("Enter")
    playground.wait_for_function("first => location.href !== first", arg=first)
    playground.get_by_role("button", name="undo").click()
    expect(field).to_have_value("8")
    assert playground.url == first


DRAWN = "() => [...document.querySelectorAll('#shown canvas')].map(each => each.toDataURL())"


FUMBLED = (
    "[role=tab]:not([data-view=plan])",  # a plan takes seconds
    "#examples a",
    "[role=toolbar] button:not([aria-haspopup], [aria-label=play])",
    ".ppedu-bar [type=checkbox]",
    ".ppedu-bar select",
    ".ppedu-settings select",
    ".ppedu-settings [type=range]",
    "#shown .ppedu-panel",
)
FUMBLE = """([selector, n]) => {
  const found = [...document.querySelectorAll(selector)].filter(each => each.checkVisibility() && !each.disabled);
  const node = found[n % found.length];
  if (!node) return;
  if (node.matches(".ppedu-panel")) {
    node.focus();
    for (const key of ["ArrowRight", "ArrowDown", "Enter"]) node.dispatchEvent(new KeyboardEvent("keydown", { key }));
  } else if (node.matches("[type=range]")) {
    node.stepUp();
    node.dispatchEvent(new Event("input", { bubbles: true }));
  } else if (node.matches("select")) {
    node.selectedIndex = n % node.options.length;
    node.dispatchEvent(new Event("change", { bubbles: true }));
  } else node.click();
}"""


@pytest.mark.parametrize("seed", [0, *slow([1, 2])])
def test_a_copied_link_shows_the_same_picture_whatever_was_shown_before(playground, seed):
    page, dice = playground, random.Random(seed)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    steps = [(dice.choice(FUMBLED), dice.randrange(99), dice.choice([0, 0, 30, 120])) for _ in range(16)]

    def fumble(some):
        """Do what a reader may do, mostly before Python has answered."""
        for selector, n, wait in some:
            page.evaluate(FUMBLE, [selector, n])
            page.wait_for_timeout(wait)

    fumble([(FUMBLED[0], seed, 200), *steps[:10]])
    page.locator("#copied").evaluate("node => { node.textContent = ''; }")
    page.get_by_role("button", name="copy link").click()
    expect(page.locator("#copied")).to_have_text("Copied.")
    page.mouse.move(0, 0)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    before, link = page.evaluate(DRAWN), page.evaluate("navigator.clipboard.readText()").partition("#")[2]
    fumble(steps[10:])
    follow(page, "")
    follow(page, link)
    same = f"before => JSON.stringify(({DRAWN})()) === before"
    page.wait_for_function(same, arg=json.dumps(before, separators=(",", ":")), timeout=10_000)


def test_the_button_that_copies_a_link_is_beside_the_one_that_saves(playground):
    page = playground
    follow(page, "")
    share, save = (page.get_by_role("button", name=name) for name in ("copy link", "save a picture"))
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        expect(page.get_by_role("toolbar").get_by_role("button", name="copy link")).to_be_visible()
        left, right = save.bounding_box(), share.bounding_box()
        assert left["y"] == right["y"] and 0 < right["x"] - left["x"] - left["width"] < 10
    save.focus()
    page.keyboard.press("ArrowRight")
    expect(share).to_be_focused()


def test_a_link_made_in_python_opens_the_same_picture(playground, address):
    timeline = pp.simulate(pp.schedule("zb-v", 4, 6), pp.Costs(forward=2, latency=0.5, weight_memory=0.5))
    follow(playground, timeline.link(address).partition("#")[2])
    expect(playground.locator("#report")).to_contain_text(f"makespan {float(timeline.makespan):g}")
    assert playground.get_by_label("a generator, or a line of actions").input_value().startswith("0F0,")


def test_a_first_visit_takes_few_bytes(folder):
    """As a web server sends them, all files but those of the book, the gallery, the lessons' Python and a class."""
    others = {"book", "schedules", "cells.zip", "ppedu-class.zip"}
    files = [path for each in folder.iterdir() if each.name not in others for path in (each, *each.rglob("*"))]
    read = {path: serve.compressed if path.suffix in serve.COMPRESSED else Path.read_bytes for path in files}
    assert sum(len(read[path](path)) for path in files if path.is_file()) < 6.5e6


PLAUSIBLE = """
import ast, asyncio, base64, bisect, calendar, collections, concurrent.futures, contextlib, copy, csv, dataclasses, \\
    datetime, decimal, enum, fractions, functools, graphlib, hashlib, heapq, html, inspect, io, itertools, json, \\
    logging, math, numbers, operator, os, pathlib, pickle, pprint, queue, random, re, secrets, shlex, statistics, \\
    string, struct, subprocess, sys, tempfile, textwrap, threading, time, timeit, traceback, types, typing, warnings

def mine(rank, ranks, microbatches):
    help(min)
    raise ValueError(pp.__file__ + typing.__file__)
"""


def test_a_reader_can_import_what_a_schedule_may_need(playground):
    """Modules that the page starts with come compiled."""
    run(playground, PLAUSIBLE)
    expect(playground.locator("#status")).to_contain_text(re.compile("ppedu/__init__.pyc.*/typing.pyc"))


def test_a_wrong_and_a_stuck_schedule(playground):
    page = playground
    run(page, "0F0 0B0\n1B0 1F0")
    expect(page.locator("#report")).to_contain_text("The schedule is not legal")
    expect(page.locator("#status.wrong")).to_contain_text("1B0 needs 1F0")
    expect(page.locator("#report svg")).to_be_visible()
    expect(page.locator("#shown .ppedu-panel")).to_have_attribute("aria-label", re.compile("^(?!.*makespan).*2 ranks"))
    run(page, "0F0 0X0")
    expect(page.locator("#status")).to_contain_text("'0X0'")
    run(page, "0F0 0B0\n1F0 1B0")
    expect(page.locator("#report")).to_contain_text("The schedule is legal.")


def test_a_verdict_is_on_the_text_and_the_text_stays(playground):
    page, status = playground, playground.locator("#status")
    page.get_by_role("tab", name="write your own").click()
    page.get_by_role("link", name="1F1B by hand").click()
    expect(page.get_by_label("placement")).to_have_value("loop")
    expect(status).to_contain_text("This is 1f1b. 3 ranks")
    editor = run(page, "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    expect(status).to_have_text("The schedule is legal. This is gpipe. 2 ranks and 2 microbatches, as typed.")
    editor.press_sequentially(" 1B1")
    expect(status).to_contain_text("Not checked yet")
    expect(page.locator(".stale #shown")).to_have_count(1)
    typed = editor.input_value()
    page.get_by_role("tab", name="explore").click()
    expect(status).to_have_text("")
    page.get_by_role("tab", name="write your own").click()
    expect(status).to_contain_text("Not checked yet")  # and not run, as it may never end
    assert editor.input_value() == typed
    editor.press("Control+Enter")
    expect(status).to_contain_text("The schedule is not legal. Rank 1")
    editor.fill("0F0 0B0")
    editor.press("Control+Enter")
    expect(status).to_contain_text("The schedule is legal.")
    expect(page.locator(".stale")).to_have_count(0)


def test_an_endless_generator_is_stopped_and_the_last_view_returns(playground):
    page = playground
    run(page, "0F0 0B0\n1F0 1B0")
    expect(page.locator("#report")).to_contain_text("The schedule is legal.")
    editor = run(page, "def forever(rank, ranks, microbatches):\n    while True:\n        pass")
    page.get_by_role("button", name="stop").click(timeout=10_000)
    expect(page.locator("#status")).to_contain_text("Not checked yet", timeout=30_000)
    expect(page.locator("#report")).to_contain_text("The schedule is legal.")
    assert "forever" in editor.input_value()  # a reader's text is not lost


HOSTILE = """
import js
said = []
for attack in (
    lambda: js.fetch("http://127.0.0.1:9/"),
    lambda: js.XMLHttpRequest.new(),
    lambda: js.WebSocket.new("ws://127.0.0.1:9/"),
    lambda: js.indexedDB.open("x"),
    lambda: js.caches.open("x"),
    lambda: js.Worker.new("worker.js"),
    lambda: js.importScripts("http://127.0.0.1:9/x.js"),
    lambda: js.navigator.serviceWorker,
    lambda: js.eval("1"),
    lambda: js.Function.new("return 1")(),
    lambda: js.BroadcastChannel.new("x"),
):
    try:
        attack()
        said.append("done")
    except BaseException:
        said.append("refused")
js.postMessage('{"ready": true}')
js.postMessage('{"view": "<img src=x onerror=alert(1)>", "inputs": [], "link": "x", "report": ["<b>x</b>"]}')
js.postMessage('{"view": "write", "inputs": [], "link": "javascript:alert(1)", "report": ["<b>x</b>"]}')
js.postMessage('nonsense')

def mine(rank, ranks, microbatches):
    raise ValueError(" ".join(said))
"""


def test_hostile_code_reaches_nothing(playground):
    kept = "async () => [await caches.keys(), (await indexedDB.databases()).length, localStorage.length]"
    page = playground
    page.evaluate("async () => { await navigator.serviceWorker.ready; }")
    before = page.evaluate(kept)
    run(page, HOSTILE)
    expect(page.locator("#status")).to_contain_text("ValueError: refused")
    assert "done" not in page.inner_text("#status")
    assert page.locator("img[src=x], #playground b").count() == 0
    assert page.evaluate(kept) == before and before[1:] == [0, 0]
    run(page, "0F0 0B0\n1F0 1B0")
    expect(page.locator("#status:not(.wrong)")).to_have_text(QUIET)
    expect(page.locator("#report")).to_contain_text("The schedule is legal.")


def test_a_damaged_link_and_a_huge_text_get_a_sentence(playground):
    page = playground
    follow(page, "damaged")
    expect(page.locator("#status")).to_contain_text("the link is damaged", timeout=30_000)
    page.get_by_role("tab", name="explore").click()
    expect(page.locator("#status:not(.wrong)")).to_have_text(QUIET)
    run(page, "0F0 " * 50_000)
    expect(page.locator("#status")).to_contain_text("typo", timeout=30_000)


def test_a_phone_opens_a_link_and_needs_no_network_on_its_second_visit(playground, visit, address):
    """Fingers open each view, and nothing is wider than the screen."""
    follow(playground, pp.simulate(pp.schedule("1f1b", 4, 5)).link(address).partition("#")[2])
    expect(playground.locator("#shown")).to_contain_text("ranks=4, microbatches=5")
    playground.get_by_label("ranks", exact=True).first.fill("3")
    playground.wait_for_function("() => document.querySelector('#shown').textContent.includes('ranks=3')")
    phone = {"viewport": {"width": 400, "height": 800}, "has_touch": True, "is_mobile": True}
    fragment, options = playground.url.partition("#")[2], {"color_scheme": "dark", "service_workers": "allow"}
    page = visit(fragment, "index.html", **options, **phone)
    page.evaluate("async () => { await navigator.serviceWorker.ready; }")
    page.reload()  # what was fetched before the service worker came is kept now
    expect(page.locator("#shown")).to_contain_text("ranks=3", timeout=60_000)
    for name in ("write your own", "proven best", "explore"):
        before = page.url
        page.get_by_role("tab", name=name).tap()
        page.wait_for_function("before => location.href !== before", arg=before)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 400, name
    page.context.set_offline(True)
    page.reload()
    expect(page.locator("#shown .ppedu")).to_be_visible(timeout=60_000)
    page.get_by_role("tab", name="compare").tap()
    expect(page.locator("#shown")).to_contain_text("messages")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 400


OWN = {"ppedu-class.zip", "article.html"}  # the zip is not in itself; another test has written the article


def test_a_class_needs_the_zip_and_python_alone(folder, tmp_path):
    """The server from the zip sends each file of the site; the wheel has the lessons, the homework no solutions."""
    with zipfile.ZipFile(folder / "ppedu-class.zip") as archive:
        archive.extractall(tmp_path)
    home = tmp_path / "ppedu-class"
    command = [sys.executable, "-I", "-S", "serve.py", "site", "--port", "0"]
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True) as running:
        address = running.stdout.readline().split()[0]
        for path in folder.rglob("*"):
            if path.suffix in {*serve.COMPRESSED, ".zip"} - {".svg"} and path.name not in OWN:
                with urllib.request.urlopen(address + path.relative_to(folder).as_posix()) as answer:
                    assert answer.read() == path.read_bytes(), path
        running.send_signal(signal.SIGINT)
    (wheel,) = home.glob("ppedu-*.whl")
    lessons = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    with zipfile.ZipFile(wheel) as archive:
        packed = [name.rpartition("/")[2] for name in archive.namelist() if name.endswith(".ipynb")]
    assert sorted(packed) == lessons
    assert sorted(path.name for path in (home / "homework").glob("*.ipynb")) == lessons[1:]
    assert "solution_" not in (home / "homework/05_1f1b.ipynb").read_text()
    assert wheel.name in (home / "START.txt").read_text()


def test_the_gallery_shows_each_published_schedule(visit, playground, address):
    page = visit(path="schedules/")
    expect(page.locator(".gallery li")).to_have_count(len(published()))
    page.get_by_role("link", name="zb-v", exact=True).click()
    expect(page.locator("main")).to_contain_text("arXiv 2401.10241")
    for row in page.locator("table").first.locator("tbody tr").all():
        _, formula, simulated, _ = row.locator("td").all_inner_texts()
        assert formula in (simulated, "–")
    opened = page.get_by_role("link", name="Open it in the playground").evaluate("link => link.href")
    assert opened.startswith((f"{address}#", f"{address}index.html#"))
    follow(playground, opened.partition("#")[2])
    expect(playground.locator("#shown")).to_contain_text("pp.schedule('zb-v'")
    page.get_by_role("link", name="claims we could not confirm").click()
    expect(page.locator("section")).to_have_count(len(CLAIMS))
    for opened in page.get_by_role("link", name="Open the schedule in the playground").all():
        decode((opened.get_attribute("href") or "").partition("#")[2])


def test_an_entry_of_the_gallery_is_live(visit):
    page = visit(path="schedules/zb-v.html")
    page.get_by_role("button", name="Watch it build up").click()
    expect(page.get_by_role("button", name="pause")).to_be_visible()
    assert page.locator("figure > img").is_hidden()
    for ranks, microbatches in ((2, 3), (6, 24), (16, 32)):
        page.get_by_label("ranks", exact=True).fill(str(ranks))
        page.get_by_label("microbatches", exact=True).fill(str(microbatches))
        expect(page.locator("[name=makespan]")).to_have_text(
            pretty(pp.theory.makespan("zb-v", ranks, microbatches).value)
        )
        expect(page.locator("[name=peak]")).to_have_text(str(pp.theory.peak("zb-v", ranks, microbatches).value[0]))
    page.get_by_label("microbatches", exact=True).fill("30")  # fewer than 2p-1, for which the formula does not hold
    expect(page.locator("[name=makespan]")).to_have_text("–")


def test_a_page_of_the_gallery_is_a_sheet_of_paper(visit):
    page = visit(path="schedules/zb-v.html")
    expect(page.locator("figure.live")).to_be_visible()
    assert len(re.findall(rb"/Type */Page\b", page.pdf(prefer_css_page_size=True))) == 1


def test_bars_show_which_lessons_were_read(visit):
    page = visit(path="book/notebooks/05_1f1b.html")
    bars = page.get_by_role("navigation", name="lessons").get_by_role("link")
    expect(bars).to_have_count(16)
    expect(page.locator(".lessons .read")).to_have_count(0)
    onward = page.get_by_role("link", name="Next: 6 · Why do ranks hang?")  # it is at the end of the page
    onward.scroll_into_view_if_needed()
    expect(page.locator(".lessons .read")).to_have_count(1)
    onward.click()
    expect(page.locator(".lessons [aria-current]")).to_have_accessible_name("6 · Why do ranks hang?")
    expect(page.locator(".lessons .read")).to_have_accessible_name("5 · 1F1B: is it faster? (read)")
    assert page.evaluate("() => ({ ...localStorage })") == {"ppedu.read": "[5]"}
    page.evaluate("() => localStorage.setItem('ppedu.read', 'damaged')")
    page.reload()
    expect(page.locator(".lessons .read")).to_have_count(0)


TOO_WIDE = """() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const code = [...document.querySelectorAll(".cell_input pre")];
  return code.filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText);
}"""


LESSONS = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
PAGES = ["../../schedules/zb-v", "../../schedules/", "../docs/guide", *LESSONS[::8]]


@pytest.mark.parametrize("paths", [PAGES, *slow([[name for name in LESSONS if name not in PAGES]])], ids=["", "others"])
def test_code_fits_and_no_page_is_wider_than_a_phone(visit, paths):
    page = visit(path="schedules/")
    folder = page.url.partition("schedules")[0] + "book/notebooks/"
    for path in paths:
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(f"{folder}{path}{'' if path.endswith('/') else '.html'}", wait_until="domcontentloaded")
        assert page.evaluate(TOO_WIDE) == [], path
        page.set_viewport_size({"width": 360, "height": 800})
        page.wait_for_function(
            "() => document.documentElement.scrollWidth <= 360"
        )  # once the widget has been drawn again


def test_a_lesson_and_an_entry_can_be_read_by_all(visit):
    for path in ("book/notebooks/05_1f1b.html", "schedules/zb-v.html"):
        page = visit(path=path)
        page.evaluate("() => document.fonts.ready.then(() => null)")
        assert page.evaluate("() => document.fonts.check('16px \"Source Serif 4\"')")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert [each["id"] for each in Axe().run(page).response["violations"]] == [], (path, scheme)


def test_a_lesson_runs_in_its_page_and_a_reader_writes_into_it(visit):
    lesson = visit(path="book/notebooks/05_1f1b.html")
    lesson.get_by_role("button", name="run this lesson").click()
    expect(lesson.locator(".live")).to_contain_text("Edit a cell", timeout=60_000)
    assert lesson.locator(".wrong").count() == 0 and lesson.locator(".recorded").count() == 6
    assert lesson.locator(".cell_output .ppedu canvas").count() >= 2
    assert not [each["id"] for each in Axe().run(lesson).response["violations"] if each["impact"] in FAULTS]
    first = lesson.get_by_role("textbox", name="code of cell 1", exact=True)
    first.fill("predict('a number', 0, 40)")
    first.press("Shift+Enter")
    asked = lesson.get_by_role("group").filter(has=lesson.get_by_role("spinbutton")).first
    asked.get_by_role("spinbutton").fill("20")
    asked.get_by_role("spinbutton").press("Tab")
    first.fill("outcome('a number', 31)\nprint(6 * 7)")
    first.press("Shift+Enter")
    output = lesson.locator(".cell_output").first
    expect(output).to_contain_text("you said 20")
    expect(output).to_contain_text("42")
    assert output.locator("img").count() == 0  # it was drawn by other code
    # What a reader writes stays text, and can be stopped.
    first.fill("print('<img src=x onerror=alert(1)>')\nimport js\njs.postMessage('1 {}')\njs.fetch('/')")
    first.press("Shift+Enter")
    expect(output).to_contain_text("AttributeError")
    assert lesson.locator("img[src=x]").count() == 0
    first.fill("while True: pass")
    first.press("Shift+Enter")
    lesson.get_by_role("button", name="stop").click(timeout=10_000)
    expect(lesson.locator(".live")).to_contain_text("Stopped")
    first.fill("print(6 * 7)")
    first.press("Shift+Enter")
    expect(output).to_contain_text("42", timeout=30_000)


KEPT = """async name => {
  while (!(await caches.match(name))) await new Promise(resolve => setTimeout(resolve, 50));
}"""


def test_the_book_is_searched_without_a_network(visit):
    page = visit(path="book/docs/losses.html", service_workers="allow")
    page.evaluate(KEPT, "/widgets.js")  # the last file that is kept
    page.context.set_offline(True)
    page.get_by_role("textbox", name="Search").fill("makespan")
    page.keyboard.press("Enter")
    expect(page.locator("#search-results")).to_contain_text("matching the search query", timeout=20_000)
    assert page.locator("#search-results li").count() > 3
    page.locator("#search-results li a").first.click()
    expect(page.locator("article h1")).to_be_visible()


def test_the_reference_names_what_is_public(visit):
    page = visit(path="book/reference/ppedu.html")
    for name in ("Schedule", "simulate", "plan"):
        expect(page.locator(f"[id='ppedu.{name}']")).to_be_visible()
    page = visit(path="book/reference/ppedu.search.html")  # with a class and functions, like the longer pages
    assert not [each["id"] for each in Axe().run(page).response["violations"] if each["impact"] in FAULTS]


def test_a_saved_picture_names_the_address_that_shows_it_unless_it_is_too_long_to_type(playground, address):
    home = address.removeprefix("http://")
    short, long = (encode("explore", settings) for settings in ({"schedule": "gpipe"}, EVERY))
    for link, name, printed in ((short, "gpipe-4x8", f"{home}#{short}"), (long, "zb-v-3x5", home)):
        follow(playground, link)
        expect(playground.locator("#shown .ppedu-code pre")).to_contain_text(f"'{name.rpartition('-')[0]}'")
        saved = save_picture(playground, "SVG")
        assert f">{printed}</text>" in saved.path().read_text()
        assert saved.suggested_filename == f"{name}.svg"


def test_a_timeline_can_be_embedded_and_taken_into_a_notebook(playground, folder, address):
    timeline = pp.simulate(pp.schedule("zb-v", 4, 6))
    page = playground
    follow(page, timeline.link(address).partition("#")[2])
    expect(page.locator("#shown")).to_contain_text("pp.schedule('zb-v', ranks=4, microbatches=6)")
    with page.expect_download() as download:
        page.get_by_role("button", name="save as a notebook").click()
    book = nbformat.read(download.value.path(), as_version=4)
    nbformat.validate(book)
    scope = {}
    exec(book.cells[1].source, scope)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="copy to embed").click()
    expect(page.locator("#copied")).to_have_text("Copied.")
    text = page.evaluate("navigator.clipboard.readText()")
    (folder / "article.html").write_text(text)
    page.goto(f"{address}article.html")
    frame = page.frame_locator("iframe")
    expect(frame.locator("#shown .ppedu canvas").first).to_be_visible(timeout=30_000)
    expect(frame.get_by_role("link", name="open in the playground")).to_be_visible()
    assert frame.get_by_role("tab").count() == 0 and frame.locator("#story").is_hidden()
