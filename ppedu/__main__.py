"""The console command `ppedu`, and `python -m ppedu`."""

import io
import sys

from ppedu.cli.main import main


def run() -> int:
    """Run the command that this process was started with, and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a question mark for a character that the terminal cannot print
    return main()


if __name__ == "__main__":
    sys.exit(run())
