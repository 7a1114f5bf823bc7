// Python in a worker. The page starts it from a blob, so that the page's content security policy holds here, too.
const here = (/** @type {string} */ name) => new URL(name, import.meta.url).href;

/** Load Python and a program, take away what reaches out, and answer questions one after the other.
 * @param {string} program "playground" or "cells" */
export async function start(program) {
  const { loadPyodide } = await import(here("pyodide/pyodide.mjs"));
  const archive = fetch(here(`${program}.zip`)).then((response) => response.arrayBuffer());
  const python = await loadPyodide({ indexURL: here("pyodide/") });
  python.unpackArchive(await archive, "zip", { extractDir: "/home/pyodide" });
  const answers = python.pyimport(program).start();
  disarm();
  self.addEventListener("message", ({ data }) => {
    const [number] = data.split(" ", 1);
    self.postMessage(`${number} ${answers.ask(data.slice(number.length + 1))}`);
  });
  self.postMessage("0 {}");
}

/** Code from links and readers can reach this scope by `import js`: leave nothing that stores, sends or starts. */
function disarm() {
  const names = [
    "caches", "indexedDB", "fetch", "XMLHttpRequest", "WebSocket", "EventSource", "WebTransport", "BroadcastChannel",
    "Worker", "SharedWorker", "importScripts", "navigator", "FileReaderSync", "webkitRequestFileSystem",
    "webkitRequestFileSystemSync", "Notification", "RTCPeerConnection", "cookieStore",
  ];
  for (let scope = /** @type {any} */ (self); scope; scope = Object.getPrototypeOf(scope)) {
    for (const name of names) delete scope[name];
  }
  const post = self.postMessage.bind(self);
  self.postMessage = (/** @type {any} */ data) => post(String(data));
}
