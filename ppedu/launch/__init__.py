"""Ranks as processes: a program and a number of ranks come in, and the output and the values of each rank come out.

Reading order: rank (what a rank does), launcher, zygote and agent (the processes that start ranks), environment and
resources, hang and failure (error messages), pool (the owner's side), exchange (values and pictures), jobs (for a
cluster's queue), hosts (ranks on other machines). No module imports the course or a widget.
"""
