"""Schedules that random histories have found, one test each."""

from __future__ import annotations

from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.samples import sample_pack
from tests.storage.shared.simulation import (
    DAY_S,
    HOUR_S,
    Hang,
    Process,
    SimulatedBlobs,
    World,
)
from tests.storage.shared.town import NAMESPACE, Town


def test_commit_of_a_killed_engine_is_merged_by_a_running_one(town: Town) -> None:
    first, second = town.engine(), town.engine()
    pack = sample_pack(NAMESPACE, 1)
    first.store(pack)
    town.kill(first)
    town.run(900)
    assert second.held() == {pack.pack_id}
    assert town.names("/inbox/") == []


def test_commit_of_a_killed_engine_with_a_date_in_the_future_is_merged(
    town: Town,
) -> None:
    second = town.engine()
    town.server_ahead_s = 200 * DAY_S
    first = town.engine()
    first.store(sample_pack(NAMESPACE, 1))
    town.kill(first)
    town.server_ahead_s = 0.0
    for _ in range(90):
        # the reply shows the right date again
        second.backend.publish_status("second", b"idle")
        town.run(10)
    assert town.names("/inbox/") == []


def test_own_commit_in_a_base_of_another_engine_ends_the_merges_of_its_writer(
    town: Town,
) -> None:
    first, second = town.engine(), town.engine()
    first.store(sample_pack(NAMESPACE, 1))
    town.engines.remove(first)  # it is suspended
    second.store(sample_pack(NAMESPACE, 2))
    town.run(6)
    second.store(sample_pack(NAMESPACE, 3))
    town.run(6)
    second.backend.opened_namespace(NAMESPACE).merger.write_base()
    town.run(900)
    town.engines.append(first)
    town.run(60)
    before = first.calls("list", "/inbox/")
    town.run(600)
    assert len(first.held()) == 3
    assert first.calls("list", "/inbox/") - before <= 20


def test_deleted_object_that_latest_names_is_requested_at_most_once(town: Town) -> None:
    first = town.engine()
    for seed in range(4):
        first.store(sample_pack(NAMESPACE, seed))
        town.run(6)
    first.backend.opened_namespace(NAMESPACE).merger.write_base()
    town.run(2 * HOUR_S)
    second = town.engine()
    town.run(60)
    before = second.calls("read", "/index/")
    town.run(2 * HOUR_S)
    assert len(second.held()) == 4
    assert second.calls("read", "/index/") - before <= 4


def test_commit_while_a_merge_hangs_returns(tmp_path: Path) -> None:
    world = World(0)
    took: list[float] = []

    def program(process: Process) -> None:
        options = SharedOptions(cache=str(tmp_path))
        backend = SharedBackend(
            SimulatedBlobs(process), options, clock=process, background=False
        )
        namespace = backend.open_namespace(sample_identity()).id
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
        world.hangs.append(Hang("LIST", "/inbox/", HOUR_S, before=True))

        def work() -> None:
            while not took:
                process.sleep(backend.step())

        process.spawn(work)
        while world.hangs:
            process.sleep(0.5)
        began = world.now
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
        took.append(world.now - began)
        process.sleep(2 * HOUR_S)
        backend.close()

    Process(world, "engine", program)
    world.run()
    world.end()
    assert took[0] < 10.0


def test_commit_that_needs_room_while_a_sweep_hangs_returns(tmp_path: Path) -> None:
    world = World(0)
    took: list[float] = []

    def program(process: Process) -> None:
        options = SharedOptions(cache=str(tmp_path), capacity=40_000)
        backend = SharedBackend(
            SimulatedBlobs(process), options, clock=process, background=False
        )
        namespace = backend.open_namespace(sample_identity()).id
        while world.now < 70.0:  # the limits are known after a minute
            process.sleep(backend.step())
        world.hangs.append(Hang("LIST", "/packs/", HOUR_S, before=True))

        def sweep() -> None:
            backend.opened_namespace(namespace).sweep()

        process.spawn(sweep)
        while world.hangs:
            process.sleep(0.5)
        began = world.now
        for seed in range(5):
            backend.commit(namespace, CommitBatch([sample_pack(namespace, seed)]))
        took.append(world.now - began)
        process.sleep(2 * HOUR_S)
        backend.close()

    Process(world, "engine", program)
    world.run()
    world.end()
    assert took[0] < 10.0


def test_commit_that_was_suspended_for_a_day_names_no_pack(tmp_path: Path) -> None:
    world = World(0)
    world.hangs.append(Hang("PUT", "/packs/", 26 * HOUR_S, before=False))

    def program(process: Process) -> None:
        options = SharedOptions(cache=str(tmp_path))
        backend = SharedBackend(
            SimulatedBlobs(process), options, clock=process, background=False
        )
        namespace = backend.open_namespace(sample_identity()).id
        with pytest.raises(StoreError, match="12 hours"):
            backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))

    Process(world, "engine", program)
    world.run()
    world.end()
    assert world.medium.names("/inbox/") == []


def test_handle_that_never_reached_the_medium_raises_only_store_errors(
    tmp_path: Path,
) -> None:
    world = World(0)

    def program(process: Process) -> None:
        process.cut_off_until = HOUR_S
        options = SharedOptions(cache=str(tmp_path))
        backend = SharedBackend(
            SimulatedBlobs(process), options, clock=process, background=False
        )
        namespace = backend.open_namespace(sample_identity()).id
        assert list(backend.changes(namespace, None).added) == []
        for call in (
            lambda: backend.catalogue(namespace).manifests(),
            lambda: backend.tables(namespace, [bytes(16)]),
            lambda: backend.manifest_keys(namespace, ["request"]),
            lambda: backend.read(namespace, []),
        ):
            try:
                assert list(call()) in ([], [None])
            except StoreError:
                continue
        backend.close()

    Process(world, "engine", program)
    world.run()
    world.end()
