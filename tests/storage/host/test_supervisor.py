"""Watchdog and restarts of the supervisor, with a clock that the test sets."""

from __future__ import annotations

import math
import os
import threading

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import HostError
from persistkv.storage.host import supervisor
from persistkv.storage.host.connection import Connection
from persistkv.storage.host.hosts import Host, ThreadHost
from persistkv.storage.host.protocol import Hello
from persistkv.storage.host.supervisor import Supervisor, Watchdog
from persistkv.storage.records import StoreOptions

FINE, ASK, SILENT = "fine", "ask", "silent"


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


def check_after(
    dog: Watchdog,
    clock: Clock,
    *seconds: float,
    load_due: bool = False,
) -> list[str]:
    found = []
    pings: list[float] = []
    for step in seconds:
        clock.now += step
        asked = len(pings)
        silent = dog.is_silent(lambda: pings.append(clock.now), load_due=load_due)
        found.append(SILENT if silent else ASK if len(pings) > asked else FINE)
    return found


def no_cpu_wait() -> float:
    """Return the seconds that a host waited for a CPU on an idle machine."""
    return 0.0


def test_watchdog_silent_host_is_pinged_once_then_reported_silent(clock: Clock) -> None:
    dog = Watchdog(60.0, no_cpu_wait)
    dog.restart_timer()
    assert check_after(dog, clock, 0.0, 30.0, 0.5, 29.0, 2.0) == [
        FINE,
        FINE,
        ASK,
        FINE,
        SILENT,
    ]


def test_watchdog_answer_restarts_timer(clock: Clock) -> None:
    dog = Watchdog(60.0, no_cpu_wait)
    dog.restart_timer()
    assert check_after(dog, clock, 31.0, 29.0) == [ASK, FINE]
    dog.restart_timer()
    assert check_after(dog, clock, 29.0, 2.0) == [FINE, ASK]


def test_watchdog_excludes_time_without_cpu(clock: Clock) -> None:
    starved = iter([100.0, 160.0, 190.0, 190.0])
    dog = Watchdog(60.0, lambda: next(starved))
    dog.restart_timer()
    assert check_after(dog, clock, 31.0, 61.0, 58.0, 2.0) == [ASK, FINE, FINE, SILENT]


def test_watchdog_load_due_shortens_limit_to_two_seconds(clock: Clock) -> None:
    dog = Watchdog(60.0, no_cpu_wait)
    dog.restart_timer()
    assert check_after(dog, clock, 1.0, 0.1, 0.9, 0.2, load_due=True) == [
        FINE,
        ASK,
        FINE,
        SILENT,
    ]


def test_watchdog_load_due_keeps_shorter_limit(clock: Clock) -> None:
    dog = Watchdog(1.0, no_cpu_wait)
    dog.restart_timer()
    assert check_after(dog, clock, 0.6, 0.6, load_due=True) == [ASK, SILENT]


def test_watchdog_load_is_late_two_seconds_after_its_deadline(clock: Clock) -> None:
    dog = Watchdog(60.0, no_cpu_wait)
    found = []
    for deadline, now in [
        (1005.0, 1004.0),
        (1005.0, 1005.5),
        (1005.0, 1007.0),
        (1006.0, 1008.0),  # the first load has ended
        (1006.0, 1009.5),
        (1006.0, 1010.1),
    ]:
        clock.now = now
        found.append(dog.is_late(deadline))
    assert found == [False, False, False, False, False, True]
    assert not dog.is_late(math.inf)


def test_watchdog_late_load_excludes_time_without_cpu(clock: Clock) -> None:
    starved = iter([0.0, 3.0, 3.0])
    dog = Watchdog(60.0, lambda: next(starved))
    found = []
    for now in (1001.0, 1004.0, 1006.5):
        clock.now = now
        found.append(dog.is_late(1000.0))
    assert found == [False, False, True]


def test_watchdog_call_hangs_after_ten_times_limit() -> None:
    assert not Watchdog(60.0, no_cpu_wait).call_hangs(600.0)
    assert Watchdog(60.0, no_cpu_wait).call_hangs(601.0)


class BrokenHost(Host):
    """A host process that cannot be started."""

    name = "broken"
    restartable = True
    idle_look_s = 0.0

    def start(self) -> Connection:
        raise HostError("no memory")

    def wait(self, timeout_s: float) -> bool:
        return True

    def release(self) -> None:
        pass


def test_supervisor_restart_delay_doubles_up_to_bound_until_success(
    clock: Clock,
) -> None:
    layout = RowLayout(4096, (GroupLayout(((0, 4096),)),))
    broken = Supervisor(
        BrokenHost(),
        Hello("", b"", layout, StoreOptions()),
        watchdog_s=60.0,
        least_start_s=60.0,
    )
    for delay in [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]:
        assert broken.maybe_restart()
        clock.now += 0.9 * delay
        assert not broken.maybe_restart()
        clock.now += 0.2 * delay


class MortalHost(BrokenHost):
    """A host that starts; the test ends it."""

    def start(self) -> Connection:
        return Connection()


def test_supervisor_restart_delay_is_reset_by_health_only(clock: Clock) -> None:
    layout = RowLayout(4096, (GroupLayout(((0, 4096),)),))
    mortal = Supervisor(
        MortalHost(),
        Hello("", b"", layout, StoreOptions()),
        watchdog_s=60.0,
        least_start_s=60.0,
    )
    for delay, open_s in [(0.1, 1), (0.2, 59), (0.4, 0), (0.1, 60), (0.2, 59)]:
        assert mortal.maybe_restart()
        mortal.opened()
        clock.now += open_s
        mortal.mark_lost()
        assert mortal.detect_exit()
        clock.now += 0.9 * delay
        assert not mortal.maybe_restart()
        clock.now += 0.2 * delay


def test_thread_host_failed_start_leaves_no_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    host = ThreadHost(memoryview(bytearray(4096)))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError):
        host.start()
    host.release()
    with pytest.raises(HostError):
        host.start()
    assert sorted(os.listdir("/proc/self/fd")) == before
