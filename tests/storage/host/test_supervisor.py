"""Watchdog and restarts of the supervisor, with a clock that the test sets."""

from __future__ import annotations

import pytest

from persistkv.storage.host import supervisor
from persistkv.storage.host.supervisor import Backoff, Look, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock()
    monkeypatch.setattr(supervisor, "time", stopped)
    return stopped


def looks(dog: Watchdog, clock: Clock, *seconds: float) -> list[Look]:
    found = []
    for step in seconds:
        clock.now += step
        found.append(dog.look())
    return found


def never() -> float:
    """Return the seconds that a host waited for a CPU on an idle machine."""
    return 0.0


def test_who_is_silent_is_asked_once_and_then_given_up(clock: Clock) -> None:
    dog = Watchdog(60.0, never)
    dog.hear()
    assert looks(dog, clock, 0.0, 30.0, 0.5, 29.0, 2.0) == [Look.FINE, Look.FINE, Look.ASK, Look.FINE, Look.SILENT]


def test_an_answer_begins_all_anew(clock: Clock) -> None:
    dog = Watchdog(60.0, never)
    dog.hear()
    assert looks(dog, clock, 31.0, 29.0) == [Look.ASK, Look.FINE]
    dog.hear()
    assert looks(dog, clock, 29.0, 2.0) == [Look.FINE, Look.ASK]


def test_time_without_a_cpu_is_no_silence(clock: Clock) -> None:
    starved = iter([100.0, 160.0, 190.0, 190.0])
    dog = Watchdog(60.0, lambda: next(starved))
    dog.hear()
    assert looks(dog, clock, 31.0, 61.0, 58.0, 2.0) == [Look.ASK, Look.FINE, Look.FINE, Look.SILENT]


def test_a_call_has_ten_times_as_long() -> None:
    assert not Watchdog(60.0, never).call_hangs(600.0)
    assert Watchdog(60.0, never).call_hangs(601.0)


def test_waits_double_up_to_a_bound_until_something_works(clock: Clock) -> None:
    backoff = Backoff()
    assert backoff.over
    assert [backoff.fail() for _ in range(10)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    assert not backoff.over
    clock.now += 30.0
    assert backoff.over
    backoff.reset()
    assert backoff.fail() == 0.1
