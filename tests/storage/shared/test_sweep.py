"""A sweep while another engine moves the name of an old pack: the rules protect it, and without
them it is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.samples import sample_pack
from tests.storage.shared.planted import PLANTED
from tests.storage.shared.simulation import (
    HOUR_S,
    MINUTE_S,
    Hang,
    Process,
    SimulatedBlobs,
    World,
)
from tests.storage.shared.town import NAMESPACE

_SEEDS = range(12)  # in which half of a list a name is depends on the seed


def opened(process: Process, directory: Path) -> SharedBackend:
    options = SharedOptions(cache=str(directory / process.name))
    backend = SharedBackend(
        SimulatedBlobs(process), options, clock=process, background=False
    )
    backend.open_namespace(sample_identity())
    return backend


def store(backend: SharedBackend, seed: int) -> None:
    backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, seed)]))


def lost_while_a_commit_is_merged(seed: int, directory: Path) -> bool:
    """Let a sweep hang before it lists the inbox, while another engine merges a commit that is a
    day old.

    :returns: whether a pack is lost.
    """
    world = World(seed)

    def sweep(process: Process) -> None:
        backend = opened(process, directory)
        process.sleep(26 * HOUR_S)
        world.hangs.append(
            Hang("LIST", "/inbox/", MINUTE_S, before=True, follows="/swept")
        )
        backend.opened_namespace(NAMESPACE).sweep()

    def merge(process: Process) -> None:
        process.sleep(MINUTE_S)
        backend = opened(process, directory)
        store(backend, 1)
        process.sleep(26 * HOUR_S - 30.0)  # nobody merges the commit for a day
        backend.step()

    return _is_lost(world, sweep, merge)


def lost_while_a_base_is_written(seed: int, directory: Path) -> bool:
    """Let a sweep hang between the halves of its first list of the index, while another engine
    writes a base and deletes what the base includes.

    :returns: whether a pack is lost.
    """
    world = World(seed)

    def sweep(process: Process) -> None:
        backend = opened(process, directory)
        process.sleep(26 * HOUR_S)
        world.hangs.append(
            Hang("LIST", "/index/", HOUR_S, before=False, follows="/swept")
        )
        backend.opened_namespace(NAMESPACE).sweep()

    def merge(process: Process) -> None:
        process.sleep(MINUTE_S)
        backend = opened(process, directory)
        for number in range(2):
            store(backend, number)
            process.sleep(20.0)
            backend.step()
        process.sleep(26 * HOUR_S - MINUTE_S)
        backend.opened_namespace(NAMESPACE).merger.write_base()
        process.sleep(20 * MINUTE_S)
        backend.step()  # deletes what the base includes

    return _is_lost(world, sweep, merge)


def _is_lost(world: World, *programs: Callable[[Process], None]) -> bool:
    for number, program in enumerate(programs):
        Process(world, f"engine{number}", program)
    world.run()
    world.end()
    assert not world.hangs
    return any("/packs/" in name for name in world.medium.deleted)


MOVES = {"order": lost_while_a_commit_is_merged, "once": lost_while_a_base_is_written}
"""For each rule of the sweep, the schedule from which it protects."""


@pytest.mark.parametrize("rule", sorted(MOVES))
def test_sweep_while_names_move_deletes_no_named_pack(
    tmp_path: Path,
    rule: str,
) -> None:
    assert not any(MOVES[rule](seed, tmp_path / str(seed)) for seed in _SEEDS)


@pytest.mark.parametrize("rule", sorted(MOVES))
def test_sweep_without_its_rule_deletes_a_named_pack(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
) -> None:
    PLANTED[rule](monkeypatch)
    assert any(MOVES[rule](seed, tmp_path / str(seed)) for seed in _SEEDS)
