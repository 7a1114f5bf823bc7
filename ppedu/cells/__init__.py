"""`%%torchrun`: a cell comes in, runs on ranks, and its output, pictures and values appear in the notebook.

`magic` has the commands, `output` and `screen` show what ranks print, and `figures` draws their pictures.
"""
