"""Expiry by ttl while the machine's clocks are wrong, jump, or are corrected."""

from __future__ import annotations

import logging
import time

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import tables
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import Opener

DAY_S = 86_400
HOUR_S = 3_600
MINUTE_S = 60


class Machine:
    """Simulated clocks of a machine."""

    def __init__(self) -> None:
        self.wall = 2_000_000_000.0
        self.since_boot = 50_000.0

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.since_boot += seconds

    def reboot(self, *, off_s: float, error_s: float = 0.0) -> None:
        """Simulate a machine that boots after ``off_s`` seconds with a wall clock that is wrong by
        ``error_s``."""
        self.wall += off_s + error_s
        self.since_boot = 10.0

    def clock_gettime(self, which: int) -> float:
        return self.since_boot if which == time.CLOCK_BOOTTIME else 0.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(time, "time", lambda: found.wall)
    monkeypatch.setattr(time, "clock_gettime", found.clock_gettime)
    return found


@pytest.fixture
def week(open_store: Opener) -> LmdbBackend:
    """A store whose content expires after a week."""
    return open_store("?ttl=7d")


@pytest.fixture
def namespace(week: LmdbBackend, identity: Identity) -> bytes:
    return week.open_namespace(identity).id


def put(backend: LmdbBackend, namespace: bytes, seed: int) -> bytes:
    pack = sample_pack(namespace, seed)
    backend.commit(
        namespace,
        CommitBatch([pack], [sample_manifest(f"r{seed}", seed, packs=[pack.pack_id])]),
    )
    return pack.pack_id


def commit_empty(backend: LmdbBackend, namespace: bytes, count: int = 3) -> None:
    """Make empty commits, each of which lets the store expire old content."""
    for _ in range(count):
        backend.commit(namespace, CommitBatch())


def test_commit_wall_clock_jumps_ahead_expires_nothing(
    week: LmdbBackend,
    namespace: bytes,
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    packs = {put(week, namespace, seed) for seed in range(20)}
    machine.wall += 8 * DAY_S
    commit_empty(week, namespace)
    put(week, namespace, 50)
    assert packs < set(tables(week, namespace))
    warnings = [
        record for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert len(warnings) == 1
    assert "+691200 s" in warnings[0].getMessage()


def test_commit_wall_clock_stays_ahead_expires_after_elapsed_time(
    week: LmdbBackend,
    namespace: bytes,
    machine: Machine,
) -> None:
    old = put(week, namespace, 1)
    machine.wall += 8 * DAY_S
    commit_empty(week, namespace)
    machine.advance(6 * DAY_S)
    young = put(week, namespace, 2)
    assert set(tables(week, namespace)) == {old, young}
    machine.advance(2 * DAY_S)
    commit_empty(week, namespace)
    assert set(tables(week, namespace)) == {young}


def test_commit_wall_clock_was_ahead_expires_after_elapsed_time(
    week: LmdbBackend,
    namespace: bytes,
    machine: Machine,
) -> None:
    machine.wall += 3000 * DAY_S
    future = put(week, namespace, 1)
    machine.wall -= 3000 * DAY_S
    present = put(week, namespace, 2)
    machine.advance(6 * DAY_S)
    commit_empty(week, namespace)
    assert set(tables(week, namespace)) == {future, present}
    machine.advance(2 * DAY_S)
    commit_empty(week, namespace)
    assert tables(week, namespace) == {}
    assert list(week.catalogue(namespace).manifests()) == []


def test_commit_wall_clock_set_back_slightly_expires_after_elapsed_time(
    week: LmdbBackend,
    namespace: bytes,
    machine: Machine,
) -> None:
    put(week, namespace, 1)
    machine.wall -= 600
    put(week, namespace, 2)
    machine.advance(7 * DAY_S + 700)
    commit_empty(week, namespace)
    assert tables(week, namespace) == {}


def test_commit_after_downtime_expires_once_clock_is_confirmed(
    week: LmdbBackend,
    namespace: bytes,
    machine: Machine,
) -> None:
    pack = put(week, namespace, 1)
    machine.reboot(off_s=8 * DAY_S)
    commit_empty(week, namespace)
    machine.advance(HOUR_S / 2)
    commit_empty(week, namespace)
    assert set(tables(week, namespace)) == {pack}
    machine.advance(HOUR_S)
    commit_empty(week, namespace)
    assert tables(week, namespace) == {}


def test_commit_wrong_boot_clock_is_corrected_expires_nothing_early(
    week: LmdbBackend,
    namespace: bytes,
    machine: Machine,
) -> None:
    pack = put(week, namespace, 1)
    machine.reboot(off_s=DAY_S, error_s=300 * DAY_S)
    commit_empty(week, namespace)
    machine.advance(2 * MINUTE_S)
    machine.wall -= 300 * DAY_S
    commit_empty(week, namespace)
    machine.advance(2 * HOUR_S)
    commit_empty(week, namespace)
    assert set(tables(week, namespace)) == {pack}
    machine.advance(6 * DAY_S)
    commit_empty(week, namespace)
    assert tables(week, namespace) == {}, "a day of downtime and six of uptime"


def test_uses_after_clock_jump_return_wall_clock_times(
    week: LmdbBackend,
    namespace: bytes,
    machine: Machine,
) -> None:
    put(week, namespace, 1)
    machine.wall += 8 * DAY_S
    machine.advance(HOUR_S)
    put(week, namespace, 2)
    machine.advance(10)
    (use,) = week.catalogue(namespace).uses(["r2"])
    assert use is not None
    assert machine.wall - use.last_used == pytest.approx(10, abs=1)


def test_commits_of_many_requests_expire_as_many(
    week: LmdbBackend,
    namespace: bytes,
    machine: Machine,
) -> None:
    """Requests of contexts that the store holds already: manifests without new packs."""
    packs = [put(week, namespace, 1)]
    for batch in range(20):
        numbers = range(1000 * batch, 1000 * batch + 100)
        requests = [sample_manifest(f"r{number}", packs=packs) for number in numbers]
        week.commit(namespace, CommitBatch(manifests=requests))
        machine.advance(DAY_S)
    # those of eight days, and of the one that expires during the next commits
    assert week.stats().requests <= 900
