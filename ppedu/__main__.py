"""`python -m ppedu …`: the command line."""

import io
import sys

from ppedu.cli.main import main

if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a question mark for a character that the terminal cannot print
    sys.exit(main())
