"""How soon engines see each other's commits, whatever ``latest`` says and whoever merges."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from persistkv.storage.blobs import RefusedError
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.shared.format import (
    NONCE_BYTES,
    Latest,
    decode_latest,
    encode,
    open_object,
    seal_object,
)
from tests.storage.shared.model import newer
from tests.storage.shared.town import (
    NAMES,
    NAMESPACE,
    START,
    Engine,
    Town,
    pack,
    town_of,
)

SEEN_S = 6.0
"""Seconds until others see a commit, whether the engine that merges is alive or dead."""
LONGEST_S = 14.0
"""Seconds until others see the commit of an engine that is alive and that the merger does not
merge."""
UNREAD_S = 820.0
"""Seconds until others see the commit of a dead engine that the merger cannot read."""


def put_latest(town: Town, time: float, *recent: tuple[str, int]) -> None:
    """Overwrite ``latest`` as another program would that knows the format."""
    latest = Latest(bytes(NONCE_BYTES), time, recent)
    body = encode(latest)
    town.server.put(NAMES.latest, [seal_object(NAMES.latest, body, PLAIN, NAMESPACE)])


def seconds_until_seen(
    town: Town,
    reader: Engine,
    pack_id: bytes,
    at_most: float,
    *,
    forge: bool = False,
) -> float:
    """Let time pass until a reader shows a pack; infinity: not within ``at_most`` seconds.

    :param forge: whether another program writes ``latest`` all the time.
    """
    begin = town.now
    use(reader)
    while pack_id not in reader.held():
        if town.now - begin > at_most:
            return math.inf
        if forge:
            put_latest(town, START + town.now)
        town.run(0.25)
    return town.now - begin


def use(engine: Engine) -> None:
    """Let an engine look for commits of others, as one in use does."""
    engine.backend.read(NAMESPACE, [])


def keep_committing(town: Town, writer: Engine, seconds: float, first: int) -> None:
    """Let an engine commit every two seconds."""
    for number in range(int(seconds / 2)):
        writer.store(pack(first + number, blocks=1, block_bytes=16))
        town.run(2)


def start_merger(town: Town, first: int = 1000) -> Engine:
    """Return an engine that merges for all."""
    merger = town.engine()
    keep_committing(town, merger, 20, first)
    return merger


def test_engine_that_adds_its_segment_to_latest_leaves_merging_to_the_writer(
    town: Town,
) -> None:
    engine = town.engine()
    engine.store(pack(1))
    town.run(6)
    merged = START + town.now
    put_latest(town, merged)  # another engine has merged at the same time
    town.run(3)
    body = open_object(NAMES.latest, town.data(NAMES.latest), PLAIN, NAMESPACE)
    latest = decode_latest(body)
    assert [name for name, _ in latest.recent] == town.names("/index/")
    assert (latest.writer, latest.time) == (bytes(NONCE_BYTES), merged)


@pytest.mark.parametrize("content", [b"", b"junk", b"junk" * 100_000])
def test_commit_beside_junk_in_latest_is_seen_in_time(
    town: Town,
    content: bytes,
) -> None:
    writer, reader = town.engine(), town.engine()
    for engine in (writer, reader):
        engine.blobs.before(
            "read",
            lambda name: (
                town.server.put(name, [content]) if name == NAMES.latest else None
            ),
        )
    writer.store(pack(1))
    # without ``latest``, a reader finds it in its list of the index
    assert seconds_until_seen(town, reader, pack(1).pack_id, 80) <= 80


def test_commit_while_latest_is_forged_is_seen_in_bounded_time(town: Town) -> None:
    writer = town.engine()
    reader = start_merger(town)
    writer.store(pack(1))
    seen_s = seconds_until_seen(town, reader, pack(1).pack_id, 80, forge=True)
    assert seen_s <= 80
    town.run(LONGEST_S)
    assert town.names("/inbox/") == []


@pytest.mark.parametrize("time", [0.0, START + 1e9, math.inf, -math.inf, math.nan])
def test_latest_with_a_wrong_time_delays_no_commit(town: Town, time: float) -> None:
    writer, reader = town.engine(), town.engine()
    town.run(5)
    put_latest(town, time)
    writer.store(pack(1))
    assert seconds_until_seen(town, reader, pack(1).pack_id, SEEN_S) <= SEEN_S


@pytest.mark.parametrize("size", [-(1 << 40), -5, 0, 1, 1 << 40])
def test_latest_with_a_wrong_size_costs_only_itself(town: Town, size: int) -> None:
    writer, reader = town.engine(), town.engine()
    name = NAMES.new_index(1, START, random.Random(1))
    town.server.put(name, [b"junk"])
    put_latest(town, START, (name, size))
    town.run(5)
    writer.store(pack(1))
    assert seconds_until_seen(town, reader, pack(1).pack_id, SEEN_S) <= SEEN_S


@pytest.mark.parametrize("seed", range(10))
def test_commit_after_the_death_of_the_merger_is_seen_in_time(
    tmp_path: Path,
    seed: int,
) -> None:
    with town_of(tmp_path, seed) as town:
        writer, reader = town.engine(), town.engine()
        merger = start_merger(town)
        town.run(town.random.uniform(0, 3))
        before = town.data(NAMES.latest)
        merger.store(pack(1))
        while town.data(NAMES.latest) == before:
            town.run(0.02)
        town.kill(merger)
        writer.store(pack(2))
        seen_s = seconds_until_seen(town, reader, pack(2).pack_id, SEEN_S)
        assert seen_s <= SEEN_S


@pytest.mark.parametrize("seed", range(10))
def test_commit_of_the_merger_before_its_death_is_seen_in_time(
    tmp_path: Path,
    seed: int,
) -> None:
    with town_of(tmp_path, seed) as town:
        writer, reader = town.engine(), town.engine()
        merger = start_merger(town)
        for number in range(10):
            writer.store(pack(100 + number, blocks=1, block_bytes=16))
            keep_committing(town, merger, 2, 2000 + number)
            use(reader)
        town.run(town.random.uniform(0, 2))
        merger.store(pack(1))
        town.kill(merger)
        town.kill(writer)
        seen_s = seconds_until_seen(town, reader, pack(1).pack_id, SEEN_S)
        assert seen_s <= SEEN_S


def test_commit_while_the_merger_is_paused_is_seen_in_time(town: Town) -> None:
    writer, reader = town.engine(), town.engine()
    merger = start_merger(town)
    town.engines.remove(merger)
    for number in range(3):
        writer.store(pack(number))
        seen_s = seconds_until_seen(town, reader, pack(number).pack_id, SEEN_S)
        assert seen_s <= SEEN_S
        for _ in range(60):
            use(reader)
            town.run(20)
    town.engines.append(merger)  # it resumes, with a view of an hour ago
    merger.store(pack(5))
    writer.store(pack(6))
    assert seconds_until_seen(town, reader, pack(5).pack_id, SEEN_S) <= SEEN_S
    assert seconds_until_seen(town, reader, pack(6).pack_id, SEEN_S) <= SEEN_S


def refuse(engine: Engine, name: str) -> None:
    """Let an engine not read an object, as a rule for this object does."""
    engine.blobs.fail("read", RefusedError("forbidden"), only=name.__eq__)


def test_commit_that_the_merger_cannot_read_is_merged_by_its_writer(
    town: Town,
) -> None:
    writer, reader = town.engine(), town.engine()
    merger = start_merger(town)
    writer.store(pack(1))
    (commit,) = town.names("/inbox/")
    refuse(merger, commit)
    for number in range(int(LONGEST_S) * 2):
        merger.store(pack(100 + number, blocks=1, block_bytes=16))
        town.run(0.5)
    assert pack(1).pack_id in reader.held()
    assert commit not in town.names("/inbox/")


def test_commit_of_a_dead_engine_that_the_merger_cannot_read_is_seen_and_merged(
    town: Town,
) -> None:
    writer, reader = town.engine(), town.engine()
    merger = start_merger(town)
    writer.store(pack(1))
    town.kill(writer)
    (commit,) = town.names("/inbox/")
    refuse(merger, commit)
    for number in range(int(UNREAD_S / 2)):
        merger.store(pack(100 + number, blocks=1, block_bytes=16))
        use(reader)
        town.run(2)
    assert pack(1).pack_id in reader.held()
    assert pack(1).pack_id in merger.held()
    assert commit not in town.names("/inbox/")


def test_engine_that_follows_reads_no_commit_that_is_merged_soon(town: Town) -> None:
    writer = start_merger(town)
    reader = town.engine(read_only=True)
    before = reader.calls("read", "/inbox/")
    for minute in range(12):
        keep_committing(town, writer, 60, 2000 + 100 * minute)
        use(reader)
    assert reader.calls("list", "/inbox/") > 2
    assert reader.calls("read", "/inbox/") == before


def test_commit_that_nobody_can_read_makes_no_merge_due(town: Town) -> None:
    engines = [town.engine() for _ in range(3)]
    engines[0].store(pack(1))
    town.run(120)
    for number in range(3):
        name = NAMES.new_commit(random.Random(number))
        data = [b"junk", newer(name, NAMESPACE), b""][number]
        town.server.put(name, [data])
    town.server.put(f"{NAMES.inbox}junk", [b"no name of a commit"])
    town.run(600)
    before = [engine.calls("list", "/inbox/") for engine in engines]
    town.run(3600)
    for engine, calls in zip(engines, before, strict=True):
        # an idle engine lists every five minutes
        assert engine.calls("list", "/inbox/") - calls <= 17
