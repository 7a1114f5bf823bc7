"""Real runs: traces come in; timelines, reasons for the length of a step, and what would be faster, go out.

`run` reads them with `profiler`, `csv_table` and `saved`; `autopsy` explains, `predict` and `calibrate` foresee.
This package imports core, sim and zoo alone, and so nothing but the standard library.
"""
