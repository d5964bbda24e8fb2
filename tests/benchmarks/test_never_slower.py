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
    assert max(ratios) <= 1.05


@pytest.mark.parametrize(
    "medium", list(changing_media()), ids=lambda medium: medium.name
)
def test_medium_that_stalls_or_slows_delays_few_requests(medium: Medium) -> None:
    for speed, seed in itertools.product(PREFILL_SPEEDS, (1, 2, 3)):
        served, last_mistake = serve_all(medium, speed, seed)
        computed = percentile(served.computed, 0.99)
        assert percentile(served.decided, 0.99) <= 1.2 * computed
        assert last_mistake <= medium.between[1] + 10


@pytest.mark.parametrize(
    ("name", "speed", "seed"),
    [
        ("bucket 500 ms 10000 MB/s", 10_000, 9),
        ("bucket 2000 ms 10000 MB/s", 10_000, 8),
        ("bucket 500 ms 10000 MB/s", 10_000, 27),
        ("bucket 50 ms 100 MB/s", 2_000, 35),
    ],
)
def test_no_size_is_refused_or_tried_for_ever(name: str, speed: int, seed: int) -> None:
    """Runs in which an unlikely beginning once hid for good which way is faster."""
    (medium,) = [medium for medium in static_media() if medium.name == name]
    served, _ = serve_all(medium, speed, seed)
    assert max(ratio for _, ratio in p50_ratios(served)) < 1.1


@pytest.mark.parametrize("seed", [12, 30])
def test_medium_that_is_fast_again_is_used_again(seed: int) -> None:
    for medium in changing_media():
        _, last_mistake = serve_all(medium, 10_000, seed)
        assert last_mistake <= medium.between[1] + 10
