// @ts-check
// What all pages of the book share: which lessons were read, and copies of the pages, which need no network.

const KEPT = "ppedu.read"; // all that is stored: the numbers of the lessons that were read, in this browser only
const row = document.querySelector(".lessons");
const links = [...(row?.querySelectorAll("a") ?? [])];
const here = links.findIndex((link) => link.hasAttribute("aria-current")) + 1;

/** Return the numbers of the lessons that were read. @returns {Set<number>} */
function known() {
  try {
    const numbers = JSON.parse(localStorage.getItem(KEPT) ?? "[]");
    return new Set(Array.isArray(numbers) ? numbers.filter((each) => links[each - 1]) : []);
  } catch {
    return new Set(); // damaged, or the browser keeps nothing
  }
}

/** Mark the lessons that were read. */
function show() {
  const numbers = known();
  for (const [index, link] of links.entries()) {
    const done = numbers.has(index + 1);
    link.classList.toggle("read", done);
    link.setAttribute("aria-label", `${link.title}${done ? " (read)" : ""}`);
  }
  const words = row?.querySelector("p");
  if (words) words.textContent = numbers.size ? `${numbers.size} of ${links.length} lessons read` : "";
}

/** Remember that this page's lesson was read: its end was seen, or its exercises are solved. */
export function read() {
  if (!here) return;
  try {
    localStorage.setItem(KEPT, JSON.stringify([...known().add(here)].toSorted((one, other) => one - other)));
  } catch {
    return; // the browser keeps nothing
  }
  show();
}

show();
addEventListener("storage", show);
const end = document.querySelector(".related-pages");
if (here && end) new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && read()).observe(end);

const { serviceWorker } = navigator; // without it, each page needs the network
serviceWorker?.register(new URL("sw.js", import.meta.url)).catch(() => {});
serviceWorker?.ready.then(({ active }) => active?.postMessage("keep the book")).catch(() => {});
