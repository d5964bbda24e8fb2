"""The index and the lookup table, compared with a dictionary from keys to sets of packs."""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persistkv.errors import StoreError
from persistkv.storage.format.pack import PackedKeys, PackTable
from persistkv.storage.store.index import Index
from persistkv.storage.store.lookup_table import LookupTable

NAMESPACE = b"n" * 16
FINGERPRINTS: dict[str, Callable[[PackedKeys], bytes]] = {
    "known": lambda keys: keys.fingerprints,
    "unknown": lambda _: b"",
    "damaged": lambda _: b"?" * 27,
}


def table_of(number: int, keys: list[bytes]) -> PackTable:
    return PackTable(
        NAMESPACE, number.to_bytes(16, "big"), "raw", 0, 0, b"", PackedKeys.of(keys)
    )


def fresh(count: int, length: int = 36) -> list[bytes]:
    return [os.urandom(length) for _ in range(count)]


def colliding(count: int) -> list[bytes]:
    """Return keys of 32 bytes with one fingerprint: the first 8 bytes are those of the secret of
    xxh3."""
    return [
        bytes.fromhex("b8fe6c3923a44bbe") + os.urandom(8) + bytes(16)
        for _ in range(count)
    ]


def reader_of(index: Index) -> LookupTable:
    reader = LookupTable()
    map_table(reader, index)
    return reader


def map_table(reader: LookupTable, index: Index) -> None:
    fd, slots = index.share()
    reader.map(fd, slots)


def check(
    index: Index,
    reader: LookupTable,
    model: dict[bytes, set[bytes]],
    absent: Iterable[bytes],
) -> None:
    for key, holders in model.items():
        assert set(index.candidates(key)) == holders
        assert key in index
        assert key in reader
    keys = [*model, *absent]
    assert reader.held(keys) == [key in model for key in keys]
    assert index.absent(keys) == [key for key in keys if key not in model]
    assert len(reader) == len(index) == sum(map(len, model.values()))


@pytest.mark.parametrize("length", [1, 11, 12, 20, 36, 68])
@given(
    packs=st.lists(
        st.lists(st.integers(0, 30), min_size=1, max_size=20, unique=True),
        min_size=1,
        max_size=8,
    ),
    removals=st.lists(
        st.tuples(
            st.lists(st.integers(0, 7), max_size=4), st.sampled_from([*FINGERPRINTS])
        ),
        max_size=6,
    ),
)
def test_index_random_adds_and_removals_match_dictionary(
    length: int,
    packs: list[list[int]],
    removals: list[tuple[list[int], str]],
) -> None:
    index = Index()
    reader = reader_of(index)
    model: dict[bytes, set[bytes]] = {}
    tables = [
        table_of(number, [bytes([key]) * length for key in pack])
        for number, pack in enumerate(packs)
    ]
    index.add([*tables, *tables])
    for table in tables:
        for key in table.keys.unpack():
            model.setdefault(key, set()).add(table.pack_id)
    absent = [
        bytes([key]) * length for key in range(30) if bytes([key]) * length not in model
    ]
    check(index, reader, model, absent)
    for numbers, kind in removals:
        leaving = {
            tables[number % len(tables)].pack_id: tables[number % len(tables)]
            for number in numbers
        }
        index.remove(
            {
                **{
                    name: FINGERPRINTS[kind](table.keys)
                    for name, table in leaving.items()
                },
                b"x" * 16: b"",
            }
        )
        for key, holders in list(model.items()):
            holders.difference_update(leaving)
            if not holders:
                del model[key]
                absent.append(key)
        check(index, reader, model, absent)
    index.close()


def test_index_pack_added_again_gets_new_number() -> None:
    index = Index()
    table = table_of(1, fresh(3))
    index.add([table])
    before = index.number_of(table.pack_id)
    index.remove({table.pack_id: table.keys.fingerprints})
    assert index.number_of(table.pack_id) == 0
    index.add([table])
    assert index.number_of(table.pack_id) not in (0, before)
    index.close()


@pytest.mark.parametrize("collisions", [False, True])
def test_index_growing_under_adds_and_removals_finds_all_keys(collisions: bool) -> None:
    """The index replaces its table several times, in slices between changes; readers map each new
    table."""
    draw = random.Random(0)
    index = Index()
    reader, version = reader_of(index), index.version
    tables = [
        table_of(
            number, fresh(490, 32) + (colliding(10) if collisions else fresh(10, 32))
        )
        for number in range(120)
    ]
    held: dict[bytes, PackTable] = {}
    for table in tables:
        index.add([table])
        held[table.pack_id] = table
        if draw.random() < 0.3:
            gone = held.pop(draw.choice(list(held)))
            index.remove(
                {gone.pack_id: gone.keys.fingerprints if draw.random() < 0.5 else b""}
            )
        for _ in range(draw.randrange(3)):
            index.replace_some()
        if index.version != version:
            map_table(reader, index)
            index.release_retired()
            version = index.version
        reader.release_some()
        keys = [key for table in held.values() for key in table.keys.unpack()]
        assert all(reader.held(keys))
        assert len(reader) == len(index) == len(keys)
        some = draw.choice(list(held))
        assert all(
            some in index.candidates(key) for key in held[some].keys.unpack()[:3]
        )
    assert index.version > 0
    while index.replacing:
        index.replace_some()
    if not collisions:
        removed = [
            key
            for table in tables
            if table.pack_id not in held
            for key in table.keys.unpack()
        ]
        assert not any(reader.held([*removed, *fresh(1000)]))
    while reader.release_some():
        pass
    index.close()


def test_index_constant_key_count_keeps_its_size() -> None:
    index = Index(30_000)
    tables = [table_of(number, fresh(500)) for number in range(400)]
    index.add(tables[:60])
    slots = index.share()
    for number in range(60, 400):
        index.remove(
            {tables[number - 60].pack_id: tables[number - 60].keys.fingerprints}
        )
        index.add([tables[number]])
        index.replace_some()
    while index.replacing:
        index.replace_some()
    again = index.share()
    assert slots[1] == again[1]
    assert 0 < index.version < 8, (
        "removed entries take slots until the table is replaced"
    )
    os.close(slots[0])
    os.close(again[0])
    index.close()


def test_index_large_commits_replace_its_table_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commits of thousands of small blocks, one after another, leave no time between them: a copy
    of all entries at once would stop the host's loop, for 3 s at 7 million entries."""
    slices = [0]
    replace_some = Index.replace_some

    def count(index: Index) -> None:
        slices[-1] += 1
        replace_some(index)

    monkeypatch.setattr(Index, "replace_some", count)
    index = Index()
    for number in range(1, 100):
        slices.append(0)
        index.add([table_of(number, fresh(8192))])
        replace_some(index)
    assert index.version > 3, "the table was replaced"
    assert max(slices) <= 2
    index.close()


def lookup_memfds() -> int:
    """Return the number of this process's descriptors of lookup tables."""
    descriptors = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the directory
            target = os.readlink(f"/proc/self/fd/{name}")
            descriptors += "persistkv-lookup" in target
    return descriptors


def grow_until_replacing(index: Index) -> None:
    """Add packs until the index fills the table that replaces its present one."""
    number = 100
    while not index.replacing:
        number += 1
        index.add([table_of(number, fresh(500))])


def test_index_reload_closes_unfinished_replacement() -> None:
    index = Index()
    of_one_table = lookup_memfds()
    grow_until_replacing(index)
    index.reload([table_of(1, fresh(5))])
    while index.replacing:
        index.replace_some()
    assert lookup_memfds() == of_one_table
    index.close()


def test_index_commit_larger_than_unfinished_replacement_closes_it() -> None:
    index = Index()
    of_one_table = lookup_memfds()
    grow_until_replacing(index)
    index.add([table_of(1, fresh(1 << 20))])
    while index.replacing:
        index.replace_some()
    assert lookup_memfds() == of_one_table
    index.close()


def test_index_reload_drops_packs_not_listed() -> None:
    index = Index()
    old, new = table_of(1, fresh(5)), table_of(2, fresh(7))
    index.add([old])
    index.reload([new])
    assert index.absent(old.keys.unpack()) == old.keys.unpack()
    assert index.absent(new.keys.unpack()) == []
    assert index.pack_ids() == [new.pack_id]
    index.close()


def test_lookup_table_prefix_ends_at_first_absent_key() -> None:
    index = Index()
    reader = LookupTable()
    keys = fresh(100)
    assert reader.prefix(keys) == 0
    assert reader.prefix([]) == 0
    map_table(reader, index)
    index.add([table_of(1, keys[:70]), table_of(2, keys[71:])])
    assert reader.prefix(keys) == 70
    assert reader.prefix(keys[71:75]) == 4
    reader.clear()
    assert reader.prefix(keys) == 0
    assert len(reader) == 0
    index.close()


def test_lookup_table_collided_keys_miss_until_stored() -> None:
    index = Index()
    reader = reader_of(index)
    index.add([table_of(1, colliding(20))])
    others = colliding(20)
    assert all(reader.held(others)), "one fingerprint"
    reader.set_collisions(dict.fromkeys(others[:10], True))
    assert reader.held(others) == [False] * 10 + [True] * 10
    assert not reader.contains(others[0])
    reader.set_collisions(dict.fromkeys(others[:5], False))
    assert reader.held(others) == [True] * 5 + [False] * 5 + [True] * 10
    reader.set_collisions(dict.fromkeys(fresh(10_000), True))
    assert all(reader.held(others)), "the oldest are forgotten"
    index.close()


def test_lookup_table_map_unsealed_or_too_small_memory_raises() -> None:
    reader = LookupTable()
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    with pytest.raises(StoreError, match="sealed"):
        reader.map(fd, 100)
    index = Index()
    fd, slots = index.share()
    with pytest.raises(StoreError, match="small"):
        reader.map(fd, slots + 1)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    index.close()


def test_index_share_returns_memory_of_fixed_size_and_seals() -> None:
    index = Index()
    fd, _ = index.share()
    size = os.fstat(fd).st_size
    for other in (0, size - 4096, size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, other)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)
    index.close()


@pytest.mark.parametrize("count", [3, 100])
def test_index_adopted_keys_are_found_but_name_no_pack(count: int) -> None:
    index = Index()
    keys = fresh(count)
    index.add_adopted(keys)
    reader = reader_of(index)
    assert reader.prefix(keys) == count
    assert all(key in index for key in keys)
    assert index.first_candidates(keys) == [None] * count
    assert index.absent(keys) == keys
    index.add([table_of(1, keys[1:])])  # inserted after the adopted key
    packs: list[bytes | None] = [None, *[table_of(1, keys).pack_id] * (count - 1)]
    assert index.first_candidates(keys) == packs
    index.remove_adopted(PackedKeys.of(keys[:2]).fingerprints)
    assert reader.held(keys) == [False, *[True] * (count - 1)]
    index.remove({table_of(1, keys).pack_id: PackedKeys.of(keys[1:]).fingerprints})
    assert reader.held(keys) == [False, False, *[True] * (count - 2)]
    index.remove_adopted()
    assert (len(index), reader.prefix(keys)) == (0, 0)


def test_index_adopted_keys_survive_table_growth_but_not_reload() -> None:
    index = Index()
    adopted = fresh(1000)
    index.add_adopted(adopted)
    index.add([table_of(1, fresh(60_000))])
    while index.replacing:
        index.replace_some()
    assert index.version > 0
    assert reader_of(index).prefix(adopted) == 1000
    index.reload([])
    assert reader_of(index).held(adopted) == [False] * 1000
    assert index.reloads == 1
