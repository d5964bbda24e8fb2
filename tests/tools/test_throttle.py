"""Limits on the read rate and on the share of time of a command, with a clock that only sleep and
work advance."""

from __future__ import annotations

import pytest

from persistkv_tools import progress
from persistkv_tools.progress import Throttle


class Clock:
    """Replacement of the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_throttle_without_bound_never_sleeps(clock: Clock) -> None:
    free = Throttle()
    clock.now += 5
    free.wait_after(1 << 40)
    assert clock.slept == []
    assert not free.bounded


def test_throttle_rate_limits_bytes_per_second(clock: Clock) -> None:
    bounded = Throttle(1000)
    for _ in range(10):
        clock.now += 0.1
        bounded.wait_after(500)
    assert clock.now == pytest.approx(100 + 5)
    assert bounded.bounded


def test_throttle_share_sleeps_for_rest_of_time(clock: Clock) -> None:
    """After a piece of any duration, the pause is just long enough that work takes the given share
    of the time."""
    shared = Throttle(share=0.05)
    for seconds in (0.001, 0.02, 0.04):
        clock.now += seconds
        shared.wait_after(1)
        assert clock.slept[-1] == pytest.approx(19 * seconds)
    assert shared.bounded


def test_throttle_share_slow_piece_sleeps_1_second_at_most(clock: Clock) -> None:
    shared = Throttle(share=0.05)
    clock.now += 30
    shared.wait_after(1)
    assert clock.slept == [1.0]


def test_throttle_rate_and_share_apply_stricter_bound(clock: Clock) -> None:
    both = Throttle(1000, share=0.5)
    clock.now += 0.1
    both.wait_after(1000)
    assert clock.slept == [pytest.approx(0.9)]
