"""A mark for tests that not every supported release of PyTorch can pass."""

import pytest

from ppedu.engine.ranks.versions import lack


def needs(feature):
    """Return the mark that skips a test on releases that lack a feature of `ppedu.engine.ranks.versions`."""
    return pytest.mark.skipif(bool(lack(feature)), reason=lack(feature))
