"""Ranks on other hosts, which are reached by ssh or Slurm.

    kernel: RankPool ── remote: the launcher ──┬─ ssh alpha ── relay ── zygote ── ranks 0, 1
                                               └─ ssh beta ─── relay ── zygote ── ranks 2, 3

Reading order: place (what `--on` says), channel (messages between here and a host), relay (what runs on a host),
network (its addresses), host and slurm (how it is reached), remote (which looks like any launcher to the pool).
"""
