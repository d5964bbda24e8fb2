"""A short run of the crash loop; ``make crash N=200`` is a longer run."""

import re

import pytest

from tests.crash.running import run_module


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_crash_loop_killed_writers_keep_acknowledged_packs() -> None:
    lines = run_module("loop", "--kills", 6, "--seed", 1, "--seconds", 45)
    assert [line.split(":")[0] for line in lines] == ["inline", "extents"]
    for line in lines:
        numbers = re.fullmatch(
            r"\w+: (\d+) kills, (\d+) packs acknowledged, (\d+) evicted, .*", line
        )
        assert numbers is not None, line
        assert min(map(int, numbers.groups())) > 0, (
            "no kill, acknowledged pack or eviction"
        )
