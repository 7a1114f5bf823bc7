"""How fast the site is, in Chromium and, where it is installed, in Firefox: `make bench`."""

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import websocket
from opened import CHROMIUM, ROOT
from playwright.sync_api import sync_playwright

from ppedu.view.link import encode

sys.path.insert(0, str(ROOT / "site"))
import make_site
import serve

ROUNDS = 5
LIVE = """new Promise(done => {
  const look = setInterval(() => {
    if (!document.querySelector('#shown .ppedu')?.dataset.painted) return;
    clearInterval(look);
    done(performance.now());
  }, 5);
})"""
PICTURE = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
# The longest time for which the page did not answer; and how often it asked another site for something.
BLOCKED = """new Promise(done => {
  new PerformanceObserver(list => done(Math.max(0, ...list.getEntries().map(each => each.duration))))
    .observe({type: 'longtask', buffered: true});
  setTimeout(() => done(0), 500);
})"""
FOREIGN = """performance.getEntriesByType('resource').filter(each =>
  !/^(blob|data):/.test(each.name) && !each.name.startsWith(location.origin)).length"""
OPENED = """new Promise(done => {
  location.hash = %s;
  const look = setInterval(() => {
    if (!document.querySelector('#shown')?.textContent.includes('messages')) return;
    clearInterval(look);
    done(true);
  }, 5);
})"""
REDRAWN = """new Promise(done => {
  const root = document.querySelector('#shown .ppedu'), before = root.dataset.painted, begun = performance.now();
  location.hash = %s;
  const look = setInterval(() => {
    const wrong = document.querySelector('#status.wrong');
    if (!wrong && document.querySelector('#shown .ppedu').dataset.painted === before) return;
    clearInterval(look);
    done(wrong ? wrong.textContent : performance.now() - begun);
  }, 2);
})"""
SIZES = ((4, 8), (8, 32), (64, 256))
Evaluate = Callable[[str], Any]


class Counted(serve.Handler):
    """Counts the bytes that it sends."""

    sent = 0

    def do_GET(self) -> None:
        write = self.wfile.write

        def count(data: bytes) -> int:
            Counted.sent += len(data)
            return write(data)

        self.wfile.write = count
        super().do_GET()


@contextmanager
def chromium(address: str) -> Iterator[Evaluate]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address)
        yield lambda code: page.evaluate(f"() => {code}")
        browser.close()


@contextmanager
def firefox(address: str) -> Iterator[Evaluate]:
    """Drive Firefox by WebDriver BiDi, which it speaks without another program."""
    numbers = itertools.count(1)
    with tempfile.TemporaryDirectory() as profile:
        command = ["firefox-esr", "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "9333"]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                try:
                    line = websocket.create_connection("ws://127.0.0.1:9333/session", timeout=120, suppress_origin=True)
                    break
                except OSError:
                    time.sleep(0.3)

            def call(method: str, **params: Any) -> Any:
                number = next(numbers)
                line.send(json.dumps({"id": number, "method": method, "params": params}))
                while (answer := json.loads(line.recv())).get("id") != number:
                    pass
                return answer["result"]

            call("session.new", capabilities={})
            context = call("browsingContext.getTree")["contexts"][0]["context"]
            call("browsingContext.navigate", context=context, url=address, wait="complete")
            yield lambda code: call("script.evaluate", expression=code, target={"context": context}, awaitPromise=True)[
                "result"
            ].get("value")
        finally:
            running.kill()
            running.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "site")
        begun = time.monotonic()
        make_site.build(target)
        built = time.monotonic() - begun
        plain, compressed = make_site.sizes(target)
        print(f"built in {built:.0f} s: {plain / 1e6:.1f} MB, {compressed / 1e6:.1f} MB compressed")
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Counted, directory=str(target))) as running:
            threading.Thread(target=running.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{running.server_port}/"
            for open_ in (chromium, firefox):
                if open_ is firefox and not shutil.which("firefox-esr"):
                    print("firefox: not installed")
                    continue
                Counted.sent = 0
                with open_(address) as evaluate:
                    live = evaluate(LIVE)
                    first = evaluate(PICTURE) / 1e3
                    print(f"{open_.__name__}: first picture {first:.2f} s, first live timeline {live / 1e3:.1f} s")
                    print(f"  sent {Counted.sent / 1e6:.2f} MB; requests to other sites: {evaluate(FOREIGN)}")
                    evaluate(OPENED % json.dumps(f"#{encode('compare', {})}"))
                    for ranks, microbatches in SIZES:
                        times = []
                        for turn in range(ROUNDS):
                            sizes = {"ranks": str(ranks), "microbatches": str(microbatches)}
                            costs = f"forward=1, backward=2, latency={turn / 10}"
                            link = encode("compare", {"schedules": "interleaved", "costs": costs, **sizes})
                            times.append(evaluate(REDRAWN % json.dumps(f"#{link}")))
                        blocked = f"{evaluate(BLOCKED):.0f} ms" if open_ is chromium else "not known"
                        print(
                            f"  redraw of interleaved, {ranks}x{microbatches}: {sorted(times)[ROUNDS // 2]:.0f} ms; "
                            f"longest time without an answer to a click so far: {blocked}"
                        )
            running.shutdown()


if __name__ == "__main__":
    main()
