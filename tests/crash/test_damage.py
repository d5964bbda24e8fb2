"""A short run with damaged stores; ``make damage`` is a longer run."""

import re

import pytest

from tests.crash.running import run_module


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_damage_random_file_store_opens_with_valid_content_or_empty() -> None:
    (line,) = run_module("damage", "--cases", 10, "--seed", 3, "--seconds", 150)
    numbers = re.fullmatch(
        r"(\d+) damaged stores: .*, (\d+) opened with valid content, (\d+) quarantined.*",
        line,
    )
    assert numbers is not None, line
    damaged, kept, quarantined = map(int, numbers.groups())
    assert damaged == kept + quarantined
    assert min(kept, quarantined) > 0
