"""Lookup tables of an engine that does not poll, and a host that lacks memory or descriptors."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from persistkv.memory.rows import RowBlocks
from persistkv.storage.backend import Changes
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.supervisor import State
from persistkv.storage.store import committer, loading
from persistkv.storage.store import store as store_module
from persistkv_lmdb import LmdbBackend
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import BLOCK, end, make_keys

REFRESHES = 30


@pytest.fixture
def reloads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make each refresh read the whole catalogue, as after many changes of other engines; return
    their times."""
    times: list[float] = []
    changes = LmdbBackend.changes

    def all_changes(
        backend: LmdbBackend,
        namespace: bytes,
        cursor: bytes | None,
    ) -> Changes:
        times.append(time.monotonic())
        return changes(backend, namespace, None)

    monkeypatch.setattr(LmdbBackend, "changes", all_changes)
    return times


def lookup_tables() -> int:
    """Return how many lookup tables this process, which is also the host, has open."""
    tables = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing
            if "persistkv-lookup" in os.readlink(fd):
                tables.add(fd.stat().st_ino)
    return len(tables)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def store_blocks(
    client: StoreClient, hosted: Hosted, job: int, keys: list[bytes]
) -> None:
    client.submit_store(job, "a", keys, range(len(keys)), None, len(keys) * BLOCK)
    assert hosted.finish(client, job).failed == []
    assert client.flush(60)


def test_idle_engine_host_keeps_few_lookup_tables(
    hosted: Hosted,
    tmp_path: Path,
    reloads: list[float],
) -> None:
    """The one that the engine uses, the one that was sent to it, and the present one."""
    url = f"lmdb://{tmp_path}/store"
    before = lookup_tables()
    idle = hosted.connect(url, "thread", refresh_s=0.02)
    idle.open()
    store_blocks(idle, hosted, 1, make_keys(2))
    busy = hosted.connect(url, "process")
    busy.open()
    store_blocks(busy, hosted, 1, make_keys(2, 100))
    for _ in range(3):
        already = len(reloads)
        wait_until(lambda: len(reloads) > already + REFRESHES)  # noqa: B023
        # a listing also finds tables that are opened and closed while it is made
        most = min(lookup_tables() for _ in range(10))
        # Each host has three, and builds one meanwhile; each engine, whose idle thread maps one
        # each second, releases the one before. Without a bound, 30 more come with each round.
        assert most - before <= 8
    assert all(map(idle.contains, make_keys(2))), "its table is intact"
    wait_until(lambda: idle.poll() == [] and all(map(idle.contains, make_keys(2, 100))))
    assert all(map(idle.contains, make_keys(2)))


def test_busy_engine_never_misses_held_keys_while_tables_change(
    hosted: Hosted,
    tmp_path: Path,
    reloads: list[float],
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", "thread", refresh_s=0.02)
    client.open()
    store_blocks(client, hosted, 1, make_keys(100))
    already = len(reloads)
    while len(reloads) < already + 3 * REFRESHES:
        assert all(map(client.contains, make_keys(100)))
        client.poll()


@pytest.mark.parametrize("call", ["memfd_create", "dup"])
def test_host_without_descriptors_serves_and_recovers(
    hosted: Hosted,
    tmp_path: Path,
    reloads: list[float],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url, "thread", refresh_s=0.02)
    client.open()
    store_blocks(client, hosted, 1, make_keys(2))
    busy = hosted.connect(url, "process")
    busy.open()
    with monkeypatch.context() as patch:

        def refuse(*arguments: object) -> int:
            raise OSError(errno.EMFILE, "too many open files")

        patch.setattr(os, call, refuse)
        store_blocks(busy, hosted, 1, make_keys(2, 100))
        already = len(reloads)
        wait_until(lambda: client.poll() == [] and len(reloads) > already + 3)
        client.submit_load(2, make_keys(2), range(2))
        assert hosted.finish(client, 2).failed == []
        assert client.state is State.OPEN
    wait_until(
        lambda: (
            client.poll() == []
            and all(map(client.contains, make_keys(4)[:2] + make_keys(2, 100)))
        )
    )


@pytest.mark.parametrize("kind", ["thread"])
@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_host_lack_of_memory_fails_job_only(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    error: type[Exception],
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", kind)
    client.open()
    store_blocks(client, hosted, 1, make_keys(2))

    def fail(*arguments: object, **options: object) -> NoReturn:
        raise error("too little memory")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "plan_packs", fail)
        patch.setattr(loading, "plan_reads", fail)
        client.submit_store(2, "a", make_keys(4), range(4), None, 4 * BLOCK)
        outcome = hosted.finish(client, 2)
        assert (outcome.refused, outcome.failed) == (False, make_keys(2, 2))
        client.submit_load(3, make_keys(2), range(4, 6))
        outcome = hosted.finish(client, 3)
        assert (outcome.refused, outcome.failed) == (False, make_keys(2))
    with monkeypatch.context() as patch:
        patch.setattr(committer, "make_manifest", fail)
        store_failed = make_keys(2, 10)
        client.submit_store(4, "b", store_failed, range(2), None, 2 * BLOCK)
        client.end_request(end("b", store_failed))
        assert client.flush(60)
        assert client.take_persisted() == {"b": False}
    assert client.state is State.OPEN
    store_blocks(client, hosted, 5, make_keys(4))
    client.submit_load(6, make_keys(4), range(4))
    assert hosted.finish(client, 6).failed == []


def test_host_lack_of_memory_for_copies_drops_the_job_and_later_commits_succeed(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", "thread", max_age_s=0.1)
    client.open()

    def fail(*arguments: object) -> NoReturn:
        raise MemoryError("too little memory")

    with monkeypatch.context() as patch:
        patch.setattr(RowBlocks, "gather", fail)
        client.submit_store(1, "a", make_keys(2), range(2), None, 2 * BLOCK)
        outcome = hosted.finish(client, 1)
        assert (outcome.refused, outcome.failed) == (False, make_keys(2))
    time.sleep(0.3)  # older than ``max_age_s``
    store_blocks(client, hosted, 2, make_keys(2))
    assert all(map(client.contains, make_keys(2)))
    assert client.counters.restarts == 0
