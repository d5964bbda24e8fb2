"""The index against a plain dictionary of sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persistkv.memory.rows import StagedBlocks
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackWriter, Segment
from persistkv.storage.index import Index

NAMESPACE = b"n" * 16


def table_of(keys: list[bytes], block_bytes: int = 8) -> PackTable:
    writer = PackWriter(
        NAMESPACE,
        RawCodec(),
        [Segment(0, block_bytes, keys, StagedBlocks([np.zeros((len(keys), block_bytes), np.uint8)]))],
    )
    for _ in writer.stream():
        pass
    return writer.table


packs = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), min_size=1, max_size=8)


@given(packs=packs, removals=st.lists(st.lists(st.integers(0, 7), max_size=4), max_size=6))
def test_behaves_like_a_dictionary_of_sets(packs: list[list[int]], removals: list[list[int]]) -> None:
    index = Index()
    model: dict[bytes, set[bytes]] = {}
    tables = [table_of([bytes((number,)) * 6 for number in pack]) for pack in packs]
    added: set[bytes] = set()
    for table in tables:
        fresh = {key for key in table.keys.unpack() if key not in model}
        if table.pack_id in added:
            fresh = set()
        assert set(index.add(table)) == fresh
        added.add(table.pack_id)
        for key in table.keys.unpack():
            model.setdefault(key, set()).add(table.pack_id)
    for numbers in removals:
        leaving = {tables[number % len(tables)].pack_id for number in numbers}
        gone = index.remove_all([*leaving, bytes(16)])
        expected = [key for key, holders in model.items() if holders <= leaving]
        for key in expected:
            del model[key]
        for holders in model.values():
            holders -= leaving
        assert sorted(gone) == sorted(expected)
    assert set(index) == set(model)
    assert len(index) == len(model)
    for key, holders in model.items():
        pack = index.pack_of(key)
        assert pack is not None
        assert index.holds(pack)
        assert pack.pack_id in holders
        table = next(table for table in tables if table.pack_id == pack.pack_id)
        assert pack.keys == tuple(table.keys.unpack())
        assert pack.frames == table.frames


def test_a_pack_that_was_replaced_is_another() -> None:
    index = Index()
    table = table_of([b"a" * 6])
    index.add(table)
    before = index.pack_of(b"a" * 6)
    assert before is not None
    index.remove_all([table.pack_id])
    assert index.pack_of(b"a" * 6) is None
    index.add(table)
    assert not index.holds(before)
