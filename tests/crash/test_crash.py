"""A short run of the crash loop; ``make crash N=200`` runs a longer one."""

import re

import pytest

from tests.crash.running import run_module


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_nothing_acknowledged_is_lost_to_kills() -> None:
    lines = run_module("loop", "--kills", 15, "--seed", 1, "--seconds", 120)
    assert [line.split(":")[0] for line in lines] == ["inline", "extents"]
    for line in lines:
        numbers = re.fullmatch(r"\w+: 15 kills, (\d+) packs acknowledged, (\d+) evicted, .*", line)
        assert numbers is not None, line
        assert min(map(int, numbers.groups())) > 50, "the store was not full"
