"""Serve the site on this machine, compressed as GitHub Pages does: `make site-serve`."""

import argparse
import gzip
from contextlib import suppress
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMPRESSED = {".css", ".html", ".js", ".json", ".mjs", ".svg", ".wasm"}


@cache
def compressed(path: Path) -> bytes:
    return gzip.compress(path.read_bytes(), 6)


class Handler(SimpleHTTPRequestHandler):
    def guess_type(self, path: str) -> str:  # type: ignore[override]
        known = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm"}
        return known.get(Path(path).suffix) or super().guess_type(path)

    def handle(self) -> None:
        with suppress(ConnectionError):  # a browser that closes a page does not wait for its files
            super().handle()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if path.suffix not in COMPRESSED or not path.is_file() or "gzip" not in self.headers.get("Accept-Encoding", ""):
            super().do_GET()
            return
        content = compressed(path)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def server(folder: Path, port: int = 0, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Return a server of a folder; port 0 is any free port."""
    return ThreadingHTTPServer((host, port), partial(Handler, directory=str(folder)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1] / "build" / "site")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves everyone on the network")
    options = parser.parse_args()
    with server(options.folder, options.port, options.host) as running:
        print(f"http://{options.host}:{running.server_port}/ (Ctrl+C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            running.serve_forever()
