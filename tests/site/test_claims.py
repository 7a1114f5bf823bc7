"""The page of claims prints what refutes them; `tests/papers` tests the same without the site."""

import sys
from pathlib import Path

import pytest

import ppedu as pp

sys.path.insert(0, str(Path(__file__).parents[2] / "site"))
from claims import CLAIMS

# For each claim, in the order of the page, what its code must print.
PRINTED = [
    ["p=4, m=8: said 16.7%, 1f1b 27.3%, gpipe 27.3%", "p=8, m=32: said 10.0%, 1f1b 17.9%, gpipe 17.9%"],
    ["gpipe: 42.9%", "1f1b: 42.9%"],
    ["gpipe, p=4, m=8: said 0.375, at most 0.250"],
    ["as gpipe: True", "as 1f1b: False"],
    ["there is no microbatch 8", "3F0 is never run"],
    ["legal: True", "makespan: 36 instead of 22"],
    ["deadlock: rank 0 waits"],
    ["legal: True", "deadlock"],
    ["0.1090"],
    ["interleaved, p=4: said 10, 11 if", "stp, p=4: said 12, 13 if I frees everything, 15 if W does"],
]


@pytest.mark.parametrize("claim, printed", [*zip(CLAIMS, PRINTED, strict=True)])
def test_the_code_prints_what_refutes_the_claim(claim, printed):
    text, made = claim.run()
    assert all(each in text for each in printed), text
    assert (made is None) == (not claim.shown)
    if made:
        assert pp.check(made) == []
