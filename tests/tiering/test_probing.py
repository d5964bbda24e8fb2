"""Times of the probes of a store."""

from __future__ import annotations

from persistkv.tiering.probing import PROBE_S, ProbeTimer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_probe_timer_distances_grow_to_five_seconds() -> None:
    clock = Clock()
    timer = ProbeTimer(clock)
    begun = []
    for _ in range(200):
        if timer.begin():
            begun.append(clock.now - 1000)
            timer.end()
        clock.now += 0.1
    assert [round(at) for at in begun] == [0, 1, 3, 7, 12, 17]


def test_probe_timer_one_probe_runs_at_once() -> None:
    clock = Clock()
    timer = ProbeTimer(clock)
    assert timer.begin()
    clock.now += PROBE_S
    assert not timer.begin()
    timer.end()
    assert timer.begin()


def test_probe_timer_reset_makes_next_probe_due_after_one_second() -> None:
    """A store that loads long prefixes and declines short ones is not read for each of these."""
    clock = Clock()
    timer = ProbeTimer(clock)
    for _ in range(3):
        assert timer.begin()
        timer.end()
        clock.now += 5.0
    timer.reset()
    assert not timer.is_due
    assert not timer.begin()
    clock.now += 1.0
    assert timer.is_due
    assert timer.begin()
    timer.end()
    clock.now += 1.0
    assert timer.begin(), "the distances begin again"
