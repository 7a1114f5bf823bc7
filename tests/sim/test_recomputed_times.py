"""R in time and memory: against replays that share nothing with ppedu, and published schedules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
