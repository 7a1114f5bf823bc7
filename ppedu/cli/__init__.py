"""The command line, `ppedu …`, and the check of the machine that it shares with `pp.doctor`."""
