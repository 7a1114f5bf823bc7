// Before anything is drawn: a shared link and an embedded page show the playground first, without the story above it.
const { classList } = document.documentElement;
classList.add("scripted");
if (location.hash.length > 1) classList.add("linked");
if (new URLSearchParams(location.search).has("embed")) classList.add("linked", "embed");
