"""Quotas and totals of tenants after kills; ``make crash-quotas N=200`` is a longer run."""

import re

import pytest

from tests.crash.quotas import PLACEMENTS
from tests.crash.running import run_module


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_quotas_and_totals_are_exact_after_200_kills(placement: str) -> None:
    (line,) = run_module(
        "quotas", "--kills", 200, "--seed", 1, "--placement", placement
    )
    numbers = re.fullmatch(r"\w+: (\d+) kills, (\d+) commits, (\d+) .*", line)
    assert numbers is not None, line
    kills, commits, lowered = map(int, numbers.groups())
    assert kills >= 200, line
    assert commits > kills // 2, line
    assert lowered > 0, "no lowered quota was left to the next engine"
