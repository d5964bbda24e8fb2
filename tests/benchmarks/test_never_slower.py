"""The simulation of loads on slow and failing media: exact, because its clock and noise are."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.never_slower import (
    PREFILL_SPEEDS,
    Medium,
    changing_media,
    p50_ratios,
    percentile,
    serve_all,
    static_media,
)


@pytest.mark.parametrize("medium", list(static_media()), ids=lambda medium: medium.name)
def test_requests_are_as_fast_as_better_reference(medium: Medium) -> None:
    ratios = []
    for speed in PREFILL_SPEEDS:
        served, _ = serve_all(medium, speed, seed=1)
        ratios += [ratio for _, ratio in p50_ratios(served)]
    assert max(ratios) < 1.09
    assert sum(1 for ratio in ratios if ratio > 1.05) <= 2


@pytest.mark.parametrize(
    "medium", list(changing_media()), ids=lambda medium: medium.name
)
def test_medium_that_stalls_or_slows_delays_few_requests(medium: Medium) -> None:
    for speed, seed in itertools.product(PREFILL_SPEEDS, (1, 2, 3)):
        served, last_mistake = serve_all(medium, speed, seed)
        computed = percentile(served.computed, 0.99)
        assert percentile(served.decided, 0.99) <= 1.2 * computed
        assert last_mistake <= medium.between[1] + 10
