"""Size of the index and of what merges write, whatever its length: segments include older ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from persistkv.storage.format.codec import Buffer
from persistkv.storage.shared.format import BASE_LEVEL
from tests.storage.shared.town import NAMES, Engine, Town, pack


def store_each(town: Town, engine: Engine, seeds: range) -> None:
    """Let an engine commit packs one by one, each of which is merged alone."""
    for seed in seeds:
        engine.store(pack(seed))
        town.run(5)


def reads_of_new_engine(town: Town) -> int:
    """Return the number of index objects that an engine reads that knows nothing."""
    engine = town.engine()
    reads = engine.calls("read", "/index/")
    assert len(engine.held()) > 0
    town.stop(engine)
    return reads


def test_new_engine_after_many_merges_reads_few_objects(town: Town) -> None:
    first = town.engine()
    most = 0
    for begin in range(0, 240, 20):
        store_each(town, first, range(begin, begin + 20))
        most = max(most, reads_of_new_engine(town))
    assert most <= 10


def test_merges_write_each_byte_a_few_times(town: Town) -> None:
    first = town.engine()
    written: dict[str, int] = {}
    put = first.blobs.inner.put

    def recorded(name: str, pieces: Sequence[Buffer]) -> float:
        written[name] = sum(len(piece) for piece in pieces)
        return put(name, pieces)

    first.blobs.inner.put = recorded  # type: ignore[method-assign]
    store_each(town, first, range(200))
    content = sum(size for name, size in written.items() if "/inbox/" in name)
    assert (
        sum(size for name, size in written.items() if "/index/" in name) < 10 * content
    )


def is_base(name: str) -> bool:
    return NAMES.level(name) >= BASE_LEVEL


def test_base_is_written_only_when_segments_exceed_a_quarter_of_it(
    town: Town,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persistkv.storage.shared.index.merge.LEAST_BASE_BYTES", 4096)
    first = town.engine()
    for begin, end in ((1000, 1550), (1550, 1600)):
        first.store(*(pack(seed) for seed in range(begin, end)))
        town.run(10)
    (base,) = (name for name in town.names("/index/") if is_base(name))
    store_each(town, first, range(100))
    assert [name for name in town.names("/index/") if is_base(name)] == [base]
    store_each(town, first, range(100, 200))
    assert len([name for name in town.names("/index/") if is_base(name)]) == 2
    assert len(town.fresh()) == 800


def test_included_segments_are_deleted_after_ten_minutes(town: Town) -> None:
    first = town.engine()
    store_each(town, first, range(8))
    old = town.names("/index/")
    assert len(old) == 8
    town.run(500)
    assert town.names("/index/") == old
    town.run(300)
    assert len(town.names("/index/")) <= 4
    assert len(town.fresh()) == 8


def test_segments_of_a_killed_engine_are_included_and_deleted_by_another_one(
    town: Town,
) -> None:
    first = town.engine()
    store_each(town, first, range(20))
    old = set(town.names("/index/"))
    town.kill(first)
    second = town.engine()
    for seed in range(20, 80):
        second.store(pack(seed))
        town.run(30)
    assert not old & set(town.names("/index/"))
    assert reads_of_new_engine(town) <= 10
    assert len(town.fresh()) == 80


def test_reader_that_stops_for_nine_minutes_within_a_list_finds_all_segments(
    town: Town,
) -> None:
    first = town.engine()
    store_each(town, first, range(7))
    listed = town.names("/index/")
    late = town.engine(opens=False)

    def pause(subject: str) -> None:
        late.blobs.clear_faults()
        store_each(town, first, range(7, 40))
        town.run(540 - 33 * 5)

    late.blobs.before("read", lambda name: pause(name) if "/index/" in name else None)
    late.open()
    assert set(listed) <= set(town.names("/index/"))
    assert len(late.held()) >= 7


def test_segment_that_is_missing_or_damaged_is_not_included(town: Town) -> None:
    first = town.engine()
    store_each(town, first, range(4))
    second = town.engine()
    missing, *_ = town.names("/index/")
    town.kill(first)
    town.server.delete([missing])
    damaged = town.names("/index/")[-1]
    town.server.put(damaged, [b"damaged" * 20])
    before = set(town.names("/index/"))
    store_each(town, second, range(4, 40))
    for name in town.names("/index/"):
        if name not in before:
            assert not {missing, damaged} & set(town.delta(name).includes)
    assert len(second.held()) == 40
