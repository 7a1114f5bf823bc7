"""Real runs: traces come in; timelines, reasons for the length of a step, and what would be faster, go out.

`load` reads them with `profiler`, `csv_table` and `saved` into a `run`; `autopsy` explains, `predict` and `calibrate`
foresee.
This package imports core, sim and zoo alone, and so nothing but the standard library.
"""
