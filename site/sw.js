// Keeps the site's files, so that it opens without a network after the first visit. VERSION changes with any file.
const VERSION = "%VERSION%";
/** @type {string[]} the text of all pages of the book, and what they and the search need */
const BOOK = JSON.parse('%BOOK%');
const sw = /** @type {any} */ (self);

sw.addEventListener("install", () => sw.skipWaiting());

sw.addEventListener("activate", (/** @type {any} */ event) =>
  event.waitUntil(
    (async () => {
      for (const name of await caches.keys()) if (name !== VERSION) await caches.delete(name);
      await sw.clients.claim();
    })(),
  ),
);

sw.addEventListener("fetch", (/** @type {any} */ event) => {
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  if (request.method === "GET" && origin === location.origin && !pathname.endsWith("/ppedu-class.zip")) {
    event.respondWith(answer(request)); // the zip has all the rest once more
  }
});

sw.addEventListener("message", (/** @type {any} */ event) => {
  if (event.data === "keep the book") event.waitUntil(keep(BOOK));
});

/** Keep files that are not kept yet. One that cannot be fetched now is left for later. @param {string[]} names */
async function keep(names) {
  const cache = await caches.open(VERSION);
  for (const name of names) {
    if (!(await cache.match(name, { ignoreSearch: true }))) await cache.add(name).catch(() => {});
  }
}

/** Return a kept file, or fetch and keep it. @param {Request} request */
async function answer(request) {
  const cache = await caches.open(VERSION);
  const kept = await cache.match(request, { ignoreSearch: true });
  if (kept) return kept;
  const response = await fetch(request);
  if (response.ok) await cache.put(request, response.clone());
  return response;
}
