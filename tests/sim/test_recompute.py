"""R in time and memory: against replays that share nothing with ppedu, and published schedules."""

import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ppedu as pp
from ppedu import Costs, simulate

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
