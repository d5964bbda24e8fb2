"""A short run with damaged stores; ``make damage`` is a longer run."""

import re

import pytest

from tests.crash.running import run_module


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_damaged_stores_open_with_what_is_right_or_empty() -> None:
    (line,) = run_module("damage", "--cases", 24, "--seed", 3, "--seconds", 150)
    numbers = re.fullmatch(r"(\d+) damaged stores: .*, (\d+) moved aside, (\d+) opened with what is right.*", line)
    assert numbers is not None, line
    done, moved, kept = map(int, numbers.groups())
    assert done == moved + kept
    assert min(moved, kept) > 0
