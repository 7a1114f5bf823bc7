// Python in a worker. The page starts it from a blob, so that the page's content security policy holds here, too.

/** Load Python and the package, take away what reaches out, and answer questions one after the other. */
export async function start() {
  const here = (/** @type {string} */ name) => new URL(name, import.meta.url).href;
  const { loadPyodide } = await import(here("pyodide/pyodide.mjs"));
  const archive = fetch(here("ppedu.zip")).then((response) => response.arrayBuffer());
  const python = await loadPyodide({ indexURL: here("pyodide/") });
  python.unpackArchive(await archive, "zip", { extractDir: "/home/pyodide" });
  const playground = python.pyimport("playground").Playground();
  disarm();
  self.onmessage = ({ data }) => self.postMessage(playground.ask(data));
  self.postMessage(JSON.stringify({ ready: true }));
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
