"""Limits on the read rate and on the share of time of a command, with a clock that only sleep and work advance."""

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
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_without_a_bound_it_never_sleeps(clock):
    free = Throttle()
    clock.now += 5
    free.took(1 << 40)
    assert clock.slept == []
    assert not free.bounded


def test_bytes_a_second(clock):
    bounded = Throttle(1000)
    for _ in range(10):
        clock.now += 0.1
        bounded.took(500)
    assert clock.now == pytest.approx(100 + 5)
    assert bounded.bounded


def test_a_share_of_the_time(clock):
    """After a piece of any duration, the pause is so long that the work takes the given share of the total time."""
    shared = Throttle(share=0.05)
    for seconds in (0.001, 0.02, 0.04):
        clock.now += seconds
        shared.took(1)
        assert clock.slept[-1] == pytest.approx(19 * seconds)
    assert shared.bounded


def test_one_slow_piece_is_not_waited_for_for_minutes(clock):
    shared = Throttle(share=0.05)
    clock.now += 30
    shared.took(1)
    assert clock.slept == [1.0]


def test_the_stricter_of_both_bounds_counts(clock):
    both = Throttle(1000, share=0.5)
    clock.now += 0.1
    both.took(1000)
    assert clock.slept == [pytest.approx(0.9)]
