// Compiles the Python that the front page starts with, in the Python of the page: `node compiled.mjs FOLDER`.
import { readFileSync } from "node:fs";
import { argv } from "node:process";
import { loadPyodide } from "../node_modules/pyodide/pyodide.mjs";

// The same bytes each time, and without the columns of the code, which take up a quarter and serve only error messages.
const python = await loadPyodide({ env: { PYTHONHASHSEED: "0", PYTHONNODEBUGRANGES: "1" } });
python.mountNodeFS("/site", argv[2]);
python.runPython(readFileSync(new URL("compiled.py", import.meta.url), "utf8"));
