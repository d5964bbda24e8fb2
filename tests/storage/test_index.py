"""The index against a plain dictionary of sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persistkv.storage.codec import RawCodec
from persistkv.storage.index import Index
from persistkv.storage.pack import PackTable, PackWriter, Segment, frame_seed
from persistkv.storage.rows import StagedBlocks

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


@given(packs=packs, removals=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=10))
def test_behaves_like_a_dictionary_of_sets(packs: list[list[int]], removals: list[tuple[int, bool]]) -> None:
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
    for number, with_keys in removals:
        table = tables[number % len(tables)]
        gone = index.remove(table.pack_id, table.keys.unpack() if with_keys else None)
        expected = [key for key, holders in model.items() if holders == {table.pack_id}]
        for key in expected:
            del model[key]
        for holders in model.values():
            holders.discard(table.pack_id)
        assert sorted(gone) == sorted(expected)
    assert set(index) == set(model)
    assert len(index) == len(model)
    for key, holders in model.items():
        found = index.locate(key)
        assert found is not None
        pack, position = found
        assert pack.pack_id in holders
        table = next(table for table in tables if table.pack_id == pack.pack_id)
        assert table.keys.unpack()[position] == key


@given(packs=packs, numbers=st.lists(st.integers(0, 7), max_size=10))
def test_many_go_as_they_would_one_by_one(packs: list[list[int]], numbers: list[int]) -> None:
    at_once, one_by_one = Index(), Index()
    tables = [table_of([bytes((number,)) * 6 for number in pack]) for pack in packs]
    for table in tables:
        at_once.add(table)
        one_by_one.add(table)
    removed = [tables[number % len(tables)] for number in numbers]
    expected = [key for table in removed for key in one_by_one.remove(table.pack_id, table.keys.unpack())]
    assert sorted(at_once.remove_all([table.pack_id for table in removed] + [bytes(16)])) == sorted(expected)
    assert set(at_once) == set(one_by_one)
    for key in at_once:
        found = at_once.locate(key)
        assert found is not None
        assert found[0].pack_id not in {table.pack_id for table in removed}


def test_frames_know_their_blocks_and_seeds() -> None:
    keys = [bytes((number,)) * 20 for number in range(5)]
    table = table_of(keys, block_bytes=600 << 10)  # one block a frame
    index = Index()
    index.add(table)
    found = index.locate(keys[3])
    assert found is not None
    pack, position = found
    assert (position, pack.frame_of(position)) == (3, 3)
    assert pack.seeds[3] == frame_seed(NAMESPACE, keys[3])


def test_a_pack_that_is_not_known_is_passed_over() -> None:
    index = Index()
    assert index.remove(b"?" * 16) == []
    assert index.locate(b"?") is None
