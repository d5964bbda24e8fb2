"""The index of one namespace: which packs may hold a key. It keeps only 64-bit hashes of keys
(fingerprints), in a sealed memfd that the host process writes and the engine maps read-only
(``lookup_table``), and pack numbers.

1. The memory is a hash table (``fingerprints``), then the number of entries. An entry never moves
   within its table. ``EMPTY`` ends a probe; ``GONE`` replaces a removed entry that probes must
   pass. At most 60 % of the slots are not empty, up to 80 % while a larger table is being filled.
2. An entry is a pair of fingerprint and pack. A key in several packs has several entries, and so do
   colliding keys.
3. A fingerprint proves nothing: a probe may find a key that is not held. Callers compare full keys
   before they use a block.
4. A reader needs no lock: a slot is written with one 8-byte instruction. A probe that races with a
   write may miss.
5. Adopted keys are entries without a pack: keys of another namespace, for readers of the table.
   They make a key readable (``in``), but the methods that return packs do not find them.
6. A large index is saved when its store closes: loading the file takes a fifth of the time of
   reading the catalogue. It names a position in the change log, and is used only if the log still
   has all later changes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.format.files import replace_file
from persistkv.storage.format.pack import ID_BYTES, PackedKeys, PackTable
from persistkv.storage.format.seal import Seal
from persistkv.storage.store.fingerprints import (
    EMPTY,
    FEW,
    GONE,
    SEALS,
    SLICE_BYTES,
    Fps,
    Ints,
    advance,
    fingerprint_of,
    first_slots,
    matches,
    stored_fingerprints,
    table_bytes,
    unpack_fingerprints,
)

logger = logging.getLogger(__name__)

# share of used slots when a table holds as many keys as it was made for
_FIRST_FILL = 0.5
# share of used slots above which entries are copied to a larger table, in slices
_FILL = 0.6
_MOST_FILL = 0.8  # share of used slots above which all entries are copied at once
_LEAST_KEYS = 1 << 15  # keys for which the smallest table has room
_AT_ONCE = 1 << 17  # keys per step of a bulk insertion: its arrays stay in the cache
_SLICE_SLOTS = 1 << 15  # slots copied per step of a replacement: about 3 ms
# keys that may be added for each slice of a replacement. One of S slots takes 3.8e-5 S slices, and
# its table has room for 0.2 S further keys: 5,200 for each slice.
_KEYS_PER_SLICE = 4096
# slots of a new table whose memory is allocated per step: 3 MiB, because each takes 12 bytes, 8 for
# its fingerprint and 4 for its pack number
_PREFAULTED_SLOTS = 1 << 18
_ADOPTED = 0xFFFFFFFF  # in place of a pack number, in entries of adopted keys
_MOST_NUMBER = _ADOPTED - 1  # largest number of a pack
# number of dicts over which packs are spread: with a million packs, each grows in 0.1 ms
_PARTS = 256

# entries from which on an index is saved: the catalogue of a smaller store is read in 0.1 s
SAVED_FROM = 1 << 16
# magic, fingerprint bits, bytes of the cursor, packs, entries
_HEADER = struct.Struct("<8sIIQQ")
_MAGIC = b"PKVINDX1"
_BITS = 64  # bits of a fingerprint
_PACK_NUMBER = np.dtype("<u4")
_ENTRY = np.dtype([("fingerprint", "<u8"), ("pack", _PACK_NUMBER)])

_PackNumberArray = npt.NDArray[np.uint32]


class _FingerprintTable:
    """Hash table: fingerprints in a memfd, and in private memory the pack number of each slot."""

    def __init__(self, keys: int) -> None:
        """:param keys: number of keys to expect; the table has about twice as many slots."""
        slots = int(max(keys, _LEAST_KEYS) / _FIRST_FILL)
        # an odd number, so that all bits of a fingerprint take part in the choice of its slot
        self.slots = slots | 1
        num_bytes = table_bytes(self.slots)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.fd = os.memfd_create("persistkv-lookup", flags)
        os.ftruncate(self.fd, num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._memory = mmap.mmap(self.fd, num_bytes)
        words = np.frombuffer(self._memory, np.uint64)
        self.fingerprints = words[: self.slots]
        """View of the shared memory: the fingerprint in each slot, ``EMPTY`` or ``GONE``."""
        self._num_entries = words[self.slots :]
        """View of the shared memory: one element, the number of entries."""
        self.packs = np.zeros(self.slots, np.uint32)
        """Number of each slot's pack (``Index.number_of``); 0: no entry."""
        self.used = 0
        """Number of slots that are not empty: entries and ``GONE``."""
        self._released = 0
        """Bytes of the memory that ``release_some`` has released."""

    @property
    def live(self) -> int:
        """Number of entries."""
        return int(self._num_entries[0])

    def prefault(self, start: int, stop: int) -> None:
        """Allocate the memory of slots of a new table. Allocation during insertions would be much
        slower."""
        self.fingerprints[start:stop] = EMPTY
        self.packs[start:stop] = 0

    def room(self, fill: float) -> int:
        """Return how many more slots may be used until their share is ``fill``; negative if it is
        larger already."""
        return int(self.slots * fill) - self.used

    def insert(
        self,
        fingerprints: Fps,
        pack_numbers: _PackNumberArray,
    ) -> Ints:
        """Add an entry for each fingerprint and pack number; return their slots."""
        probed = first_slots(fingerprints, self.slots)
        # indices of the entries that have no slot yet
        left = np.arange(len(fingerprints))
        while len(left):
            slots = probed[left]
            values = self.fingerprints[slots]
            is_free = values <= GONE  # or EMPTY
            # Several entries may have reached one free slot. Each writes its index in the place of
            # the pack number; the one that is read back gets the slot, and the others continue.
            self.packs[slots[is_free]] = left[is_free]
            has_won = is_free & (self.packs[slots] == left)

            slots_won = slots[has_won]
            winners = left[has_won]
            was_empty = values[has_won] == EMPTY
            self.used += int(np.count_nonzero(was_empty))
            # write the fingerprint last, because it makes the entry visible to the engine
            self.packs[slots_won] = pack_numbers[winners]
            self.fingerprints[slots_won] = fingerprints[winners]
            left = left[~has_won]
            advance(probed, left, self.slots)
        self._num_entries[0] += np.uint64(len(probed))
        return probed

    def find(self, fingerprints: Fps, pack: int) -> Ints:
        """Return the slots of the pack's entries with these fingerprints, each slot once.

        :param pack: number of the pack, or ``_ADOPTED``.
        """
        probed = first_slots(fingerprints, self.slots)
        # indices of the fingerprints whose probes have not ended
        left = np.arange(len(fingerprints))
        found: list[Ints] = [left[:0]]  # an empty array, in case of no fingerprints
        while len(left):
            slots = probed[left]
            values = self.fingerprints[slots]
            has_fingerprint = values == fingerprints[left]
            is_of_pack = self.packs[slots] == pack
            found.append(slots[has_fingerprint & is_of_pack])
            # a probe continues behind a hit: several keys of a pack may share a fingerprint
            left = left[values != EMPTY]
            advance(probed, left, self.slots)
        all_slots = np.sort(np.concatenate(found))
        # equal fingerprints have found the same slots; NumPy's ``unique`` would drop the copies,
        # after 100 ms for its imports
        is_first = np.ones(len(all_slots), np.bool_)
        is_first[1:] = all_slots[1:] != all_slots[:-1]
        return all_slots[is_first]

    def remove(self, slots: Ints) -> None:
        """Remove the entries in these slots, which must be distinct."""
        self.fingerprints[slots] = GONE
        self.packs[slots] = 0
        self._num_entries[0] -= np.uint64(len(slots))
        self._reclaim_gone(slots)

    def _reclaim_gone(self, slots: Ints) -> None:
        """Change ``GONE`` to ``EMPTY`` in slots that an empty slot follows, because no probe must
        pass them: first in these slots, then in the slots before them. Otherwise, a table whose
        packs are evicted and replaced would fill up with ``GONE``."""
        while len(slots):
            is_gone = self.fingerprints[slots] == GONE
            following = (slots + 1) % self.slots
            ends_probes = self.fingerprints[following] == EMPTY
            emptied = slots[is_gone & ends_probes]
            self.fingerprints[emptied] = EMPTY
            self.used -= len(emptied)
            # go on with the slots before: an empty slot follows them now
            slots = (emptied - 1) % self.slots

    def packs_of(self, fingerprint: int) -> Iterator[int]:
        """Yield the pack number of each entry with this fingerprint."""
        slot = fingerprint % self.slots
        while found := int(self.fingerprints[slot]):
            if found == fingerprint:
                yield int(self.packs[slot])
            slot = (slot + 1) % self.slots

    def release_some(self) -> bool:
        """Release a slice of the memory. A reader that still maps it finds empty slots there.
        Return False, and close the table, if it was the last slice.
        """
        left = len(self._memory) - self._released
        num_bytes = min(SLICE_BYTES, left)
        self._memory.madvise(mmap.MADV_REMOVE, self._released, num_bytes)
        self._released += num_bytes
        if num_bytes < left:
            return True
        self.close()
        return False

    def close(self) -> None:
        """Close the descriptor; idempotent. The memory is released when no process maps it any
        more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _PackNumbers:
    """Ids and numbers of packs. They are spread over many dicts, because one dict of a million
    entries needs 50 ms to grow, and delays the event loop."""

    def __init__(self) -> None:
        self._numbers: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        """Pack id → number, in the dict that the hash of the id selects."""
        self._ids: list[dict[int, bytes]] = [{} for _ in range(_PARTS)]
        """Number → pack id, in the dict that the number selects."""

    def __len__(self) -> int:
        return sum(map(len, self._ids))

    def put(self, pack_id: bytes, number: int) -> None:
        numbers = self._numbers[hash(pack_id) % _PARTS]
        numbers[pack_id] = number
        ids = self._ids[number % _PARTS]
        ids[number] = pack_id

    def pop(self, pack_id: bytes) -> int:
        """Remove a pack and return its number; 0 if it is absent."""
        numbers = self._numbers[hash(pack_id) % _PARTS]
        number = numbers.pop(pack_id, 0)
        ids = self._ids[number % _PARTS]
        ids.pop(number, None)
        return number

    def number(self, pack_id: bytes) -> int:
        """Return the number of a pack; 0 if it is absent."""
        numbers = self._numbers[hash(pack_id) % _PARTS]
        return numbers.get(pack_id, 0)

    def id(self, number: int) -> bytes | None:
        ids = self._ids[number % _PARTS]
        return ids.get(number)

    def numbers(self) -> Iterator[int]:
        return chain.from_iterable(self._ids)

    def ids(self) -> Iterator[bytes]:
        """Yield the ids of all packs, in the order of ``numbers``."""
        return chain.from_iterable(ids.values() for ids in self._ids)


class HeldPack:
    """A pack of the index and its key table. Immutable."""

    __slots__ = ("keys", "number", "pack_id", "places", "table")

    def __init__(self, table: PackTable, number: int) -> None:
        self.table = table
        self.pack_id = table.pack_id
        """The pack's id, 16 bytes."""
        self.number = number
        """The pack's ``Index.number_of`` when this object was made; 0: the index did not hold
        it."""
        self.keys = tuple(table.keys.unpack())
        """Keys of all blocks, frame after frame."""
        places = zip(self.keys, range(len(self.keys)), strict=True)
        self.places: Mapping[bytes, int] = dict(places)
        """Position of each key in ``keys``."""


class Index:
    """Index of a namespace: finds the packs that may hold a key, by its fingerprint. Not
    thread-safe."""

    def __init__(self, most_keys: int | None = None) -> None:
        """:param most_keys: keys that fit the store's capacity: the table gets room for more only
        if the index holds more; None: unknown."""
        self._most_keys = most_keys
        self._table = _FingerprintTable(0)
        """The table in use, for lookups and changes."""
        self._new: _FingerprintTable | None = None
        """A larger table that will replace ``_table``: both get new entries meanwhile."""
        self._prefaulted = 0
        """Number of slots of ``_new`` whose memory is allocated."""
        self._copied = 0
        """Number of slots of ``_table`` whose entries are in ``_new``."""
        self._retired: list[_FingerprintTable] = []
        """Replaced tables that the reader may map: at most the one that the reader uses, and the
        one that was shared last."""
        self._unmapped: list[_FingerprintTable] = []
        """Replaced tables that no reader maps any more, to be released in slices."""
        self._shared: _FingerprintTable | None = None
        """The table that was shared last; None: there is no reader."""
        self._packs = _PackNumbers()
        self._last = 0
        """The number that was assigned last to a pack."""
        self._num_adopted = 0
        """Number of entries of ``_table`` for adopted keys."""
        self.reloads = 0
        """Number of calls of ``reload``, each of which removes the adopted keys."""
        self.version = 0
        """Increases when the table is replaced: readers must map the new one."""

    def __contains__(self, key: bytes) -> bool:
        numbers = self._table.packs_of(fingerprint_of(key))
        # no pack has the number 0, which a slot of a removed entry may show
        return any(numbers)

    def __len__(self) -> int:
        """Number of entries: blocks in all packs, and adopted keys."""
        return self._table.live

    def pack_ids(self) -> list[bytes]:
        """Return the ids of all packs."""
        return list(self._packs.ids())

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self._packs)

    def number_of(self, pack_id: bytes) -> int:
        """Return the pack's number in this index; 0 if the index lacks the pack. A pack that was
        removed and added again has another number."""
        return self._packs.number(pack_id)

    def candidates(self, key: bytes) -> list[bytes]:
        """Return the ids of all packs that hold a key with the same fingerprint."""
        numbers = dict.fromkeys(self._table.packs_of(fingerprint_of(key)))
        # an entry of an adopted key has no pack: its id is None
        ids = map(self._packs.id, numbers)
        return [pack_id for pack_id in ids if pack_id is not None]

    def first_candidates(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return ``candidates`` of each key, but only the first; None if there is none."""
        if len(keys) < FEW:
            return [self._first_candidate(key) for key in keys]
        table = self._table
        wanted = stored_fingerprints(keys)
        found, slots = matches(table.fingerprints, table.slots, wanted)
        if not found.any():
            return [None] * len(keys)
        # for each key, the number of the first pack that has its fingerprint; 0: there is none
        numbers = np.where(found, table.packs[slots], 0)
        number_of_each = numbers.tolist()
        # look up each number once, because consecutive keys are mostly in one pack
        distinct = set(number_of_each)
        # the id is None for 0 and _ADOPTED, which are numbers of no pack
        id_of = {number: self._packs.id(number) for number in distinct}
        first = [id_of[number] for number in number_of_each]
        if self._num_adopted:
            # the first entry is that of an adopted key: search the later ones for a pack
            adopted = np.flatnonzero(numbers == _ADOPTED)
            for position in adopted.tolist():
                first[position] = self._first_candidate(keys[position])
        return first

    def _first_candidate(self, key: bytes) -> bytes | None:
        return next(iter(self.candidates(key)), None)

    def absent(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys, in order, whose fingerprints no pack has."""
        keys = list(keys)
        packs = self.first_candidates(keys)
        return [key for key, pack in zip(keys, packs, strict=True) if pack is None]

    # Changes

    def reload(
        self,
        tables: Iterable[PackTable],
        blocks: int | None = None,
    ) -> None:
        """Replace the whole content, adopted keys included. If iterating over ``tables`` raises,
        some packs are missing.

        :param blocks: estimated number of blocks in ``tables``. None: all tables are read into
            memory to count their blocks.
        """
        if blocks is None:
            tables = list(tables)
            blocks = sum(len(table.keys) for table in tables)
        # allocate before any change, because memory can be short
        new = _FingerprintTable(self._size_for(blocks))
        new.prefault(0, new.slots)
        self._packs = _PackNumbers()
        self._num_adopted = 0
        self.reloads += 1
        # an unfinished replacement would copy entries of the old table
        self._abandon_replacement()
        self._replace(new)
        self.add(tables)

    def _size_for(self, keys: int) -> int:
        """Return for how many keys to make a table that begins with ``keys`` entries: half as many
        more, unless the capacity of the store bounds them."""
        size = max(keys * 3 // 2, _LEAST_KEYS)
        if self._most_keys is None:
            return size
        bounded = min(size, self._most_keys)
        return max(keys, bounded)

    def add(self, tables: Iterable[PackTable]) -> None:
        """Add packs by their tables; packs that the index has already are ignored."""
        batch: dict[int, PackedKeys] = {}
        num_keys = 0
        for table in tables:
            if self._packs.number(table.pack_id):
                continue
            number = self._assign_number(table.pack_id)
            batch[number] = table.keys
            num_keys += len(table.keys)
            if num_keys >= _AT_ONCE:
                self._insert_packs(batch)
                batch = {}
                num_keys = 0
        self._insert_packs(batch)

    def _insert_packs(self, batch: Mapping[int, PackedKeys]) -> None:
        """Insert the keys of packs.

        :param batch: number of each pack → its keys.
        """
        keys_of_packs = list(batch.values())
        counts = list(map(len, keys_of_packs))
        numbers = np.array(list(batch), np.uint32)
        packs = np.repeat(numbers, counts)
        keys = PackedKeys.unpack_all(keys_of_packs)
        self._insert_entries(stored_fingerprints(keys), packs)

    def _assign_number(self, pack_id: bytes) -> int:
        """Assign a number to a new pack. Numbers are not reused before all others were used, so
        that a caller notices when a pack was removed and added again."""
        number = _next_number(self._last)
        # numbers repeat after four billion packs, so a number may be in use
        while self._packs.id(number) is not None:
            number = _next_number(number)
        self._last = number
        # A copy in memory of its own: the original is among short-lived objects of the parser,
        # whose memory could not be returned to the system.
        own_id = bytes(bytearray(pack_id))
        self._packs.put(own_id, number)
        return number

    def _insert_entries(self, fingerprints: Fps, packs: _PackNumberArray) -> None:
        """Insert entries. Begin to replace a table that becomes too full, and continue a
        replacement that has begun."""
        # the entries do not fit into this table: replace it at once, not in slices
        if len(packs) > self._table.room(_MOST_FILL):
            self._begin_replacement(more=len(packs))
            while self._new is not None:
                self.replace_some()
        slots = self._table.insert(fingerprints, packs)
        is_too_full = self._table.room(_FILL) < 0
        if self._new is not None:
            # Slots before ``_copied`` have been copied: insert their entries into the new table,
            # too. Entries in later slots will be copied with them.
            is_copied = slots < self._copied
            self._new.insert(fingerprints[is_copied], packs[is_copied])
            # The committer replaces a slice in each of its rounds. Commits of many blocks need more
            # slices, so that the new table is complete before this one is full.
            for _ in range(len(packs) // _KEYS_PER_SLICE):
                self.replace_some()
        elif is_too_full:
            self._begin_replacement(more=0)

    def remove(self, packs: Mapping[bytes, bytes]) -> None:
        """Remove packs; unknown ids are ignored. If fingerprints are missing or wrong, as after
        damage, all slots are searched, which is slow; one search serves all such packs.

        :param packs: pack id → fingerprints of its keys (``PackedKeys.fingerprints``).
        """
        searched: list[int] = []
        for pack_id, fingerprints in packs.items():
            number = self._packs.pop(pack_id)
            if not number:  # unknown
                continue
            wanted = unpack_fingerprints(fingerprints)
            slots_of = [table.find(wanted, number) for table in self._tables]
            # if the fingerprints are right, the table in use (the first one) has as many entries
            num_found = len(slots_of[0])
            are_right = len(wanted) > 0 and num_found == len(wanted)
            if not are_right:
                searched.append(number)
                continue
            for table, slots in zip(self._tables, slots_of, strict=True):
                table.remove(slots)
        if searched:
            self._search_and_remove(searched)

    def _search_and_remove(self, numbers: Sequence[int]) -> None:
        """Remove the entries of packs, given by their numbers, by a search of all slots."""
        wanted = np.array(numbers, np.uint32)
        for table in self._tables:
            is_wanted = np.isin(table.packs, wanted)
            table.remove(np.flatnonzero(is_wanted))

    @property
    def _tables(self) -> list[_FingerprintTable]:
        """The table in use, then the one that will replace it: removals apply to both."""
        if self._new is None:
            return [self._table]
        return [self._table, self._new]

    def add_adopted(self, keys: Sequence[bytes]) -> None:
        """Add keys of another namespace's packs, so that lookups find them."""
        if keys:
            self._num_adopted += len(keys)
            packs = np.full(len(keys), _ADOPTED, np.uint32)
            self._insert_entries(stored_fingerprints(keys), packs)

    def remove_adopted(self, fingerprints: bytes | None = None) -> None:
        """Remove adopted keys, given as ``PackedKeys.fingerprints``; None: all of them, by a
        search of all slots."""
        for table in self._tables:
            if fingerprints is None:
                slots = np.flatnonzero(table.packs == _ADOPTED)
            else:
                wanted = unpack_fingerprints(fingerprints)
                slots = table.find(wanted, _ADOPTED)
            table.remove(slots)
            # count once: the other table has copies of the same entries
            if table is self._table:
                self._num_adopted -= len(slots)

    # The file

    def save(
        self,
        path: Path,
        cursor: bytes,
        seal: Seal,
        name: bytes,
    ) -> None:
        """Write the index to a file for the next opening, unless it has fewer than 65,536 entries.
        A failure is only logged; the old file remains.

        :param cursor: position in the change log up to which the index has all changes.
        :param seal: of the store. It seals the file, because a fingerprint shows to a reader who
            guesses a prompt that the guess is right.
        :param name: names the kind and namespace of the file, which opens only under this name.
        """
        # adopted keys are not saved: the next opening adopts them again
        if self._num_adopted:
            self.remove_adopted()
        if len(self) < SAVED_FROM:
            return
        pack_bytes = len(self._packs) * (ID_BYTES + _PACK_NUMBER.itemsize)
        num_bytes = len(self) * _ENTRY.itemsize + pack_bytes
        try:
            space = os.statvfs(path.parent)
            free_bytes = space.f_bavail * space.f_frsize
            # leave space for blocks, which matter more than a fast opening
            if num_bytes > free_bytes // 2:
                raise StoreError(
                    f"it takes {num_bytes} bytes, more than half of the free space"
                )
            content = b"".join(self._saved_content(cursor))
            replace_file(path, [seal.sealed(name, content)])
        except (OSError, StoreError, MemoryError, OverflowError) as error:
            logger.info("the index is not saved in %s: %s", path, error)

    def _saved_content(self, cursor: bytes) -> Iterator[bytes]:
        """Yield the content of the file: header, cursor, numbers and ids of the packs, entries.
        Only the table in use is saved, without empty slots."""
        num_packs = len(self._packs)
        yield _HEADER.pack(_MAGIC, _BITS, len(cursor), num_packs, len(self))
        yield cursor
        numbers = np.fromiter(self._packs.numbers(), np.uint32, num_packs)
        yield numbers.astype(_PACK_NUMBER).tobytes()
        yield from self._packs.ids()
        table = self._table
        for start in range(0, table.slots, _AT_ONCE):
            packs = table.packs[start : start + _AT_ONCE]
            # a pack number of 0 marks a slot without an entry
            slots = start + np.flatnonzero(packs)
            entries = np.empty(len(slots), _ENTRY)
            entries["fingerprint"] = table.fingerprints[slots]
            entries["pack"] = table.packs[slots]
            yield entries.tobytes()

    def load(
        self,
        path: Path,
        seal: Seal,
        name: bytes,
    ) -> bytes | None:
        """Fill an empty index from a file that ``save`` wrote, and return its cursor; None if the
        file is absent or damaged. The index is still empty then.

        :param seal: of the store.
        :param name: the name that ``save`` was given.
        """
        try:
            data = seal.opened(name, _read_saved(path))
        except FileNotFoundError:
            return None
        except (OSError, CorruptPackError) as error:
            logger.info("the index is not loaded from %s: %s", path, error)
            return None
        if len(data) < _HEADER.size:
            return None
        magic, bits, cursor_bytes, num_packs, num_entries = _HEADER.unpack_from(data)
        if magic != _MAGIC or bits != _BITS:
            return None
        # the seal has verified the content, so its lengths are those that ``_saved_content`` wrote
        numbers_at = _HEADER.size + cursor_bytes
        ids_at = numbers_at + _PACK_NUMBER.itemsize * num_packs
        entries_at = ids_at + ID_BYTES * num_packs
        cursor = data[_HEADER.size : numbers_at]
        packed_numbers = data[numbers_at:ids_at]
        packed_ids = data[ids_at:entries_at]
        numbers = np.frombuffer(packed_numbers, _PACK_NUMBER).tolist()
        ids = PackedKeys(packed_ids, ID_BYTES).unpack()
        for pack_id, number in zip(ids, numbers, strict=True):
            self._packs.put(pack_id, number)

        # new packs get numbers after those of the file
        self._last = max(numbers, default=0)
        entries = np.frombuffer(data, _ENTRY, count=num_entries, offset=entries_at)
        self._load_entries(entries)
        return cursor

    def _load_entries(self, entries: npt.NDArray[np.void]) -> None:
        """Replace the table by one with these entries.

        :param entries: array of ``_ENTRY``.
        """
        size = self._size_for(len(entries))
        table = _FingerprintTable(size)
        table.prefault(0, table.slots)
        for start in range(0, len(entries), _AT_ONCE):
            some = entries[start : start + _AT_ONCE]
            # copies, because a field of ``some`` is not contiguous
            fingerprints = some["fingerprint"].copy()
            pack_numbers = some["pack"].copy()
            table.insert(fingerprints, pack_numbers)
        self._replace(table)

    # Replacement of the table

    @property
    def replacing(self) -> bool:
        """Whether ``replace_some`` has work to do."""
        return self._new is not None or bool(self._unmapped)

    def _begin_replacement(self, more: int) -> None:
        """Make the table that replaces the one in use, with room for ``more`` further keys;
        ``replace_some`` fills it. If such a table exists, it is kept, unless it is too small."""
        keys = self._table.live + more
        if self._new is not None and self._new.room(_FILL) >= keys:
            return
        # allocate before any change, because memory can be short
        new = _FingerprintTable(self._size_for(keys))
        self._abandon_replacement()
        self._new = new
        self._prefaulted = 0
        self._copied = 0

    def _abandon_replacement(self) -> None:
        """Release the table that is being filled, if there is one."""
        if self._new is not None:
            self._release(self._new)
            self._new = None

    def replace_some(self) -> None:
        """Work a few ms on the replacement of a table that is too full: allocate the new one, copy
        entries, or release the old one. Call it again while ``replacing``.
        """
        new = self._new
        if new is None:
            self._release_unmapped()
        elif self._prefaulted < new.slots:
            self._prefault_some(new)
        else:
            self._copy_some(new)

    def _release_unmapped(self) -> None:
        """Release a slice of the old tables that no reader maps."""
        if self._unmapped:
            is_left = self._unmapped[0].release_some()
            if not is_left:
                del self._unmapped[0]

    def _prefault_some(self, new: _FingerprintTable) -> None:
        """Allocate the memory of a slice of the new table."""
        stop = self._prefaulted + _PREFAULTED_SLOTS
        new.prefault(self._prefaulted, stop)
        self._prefaulted = stop

    def _copy_some(self, new: _FingerprintTable) -> None:
        """Copy a slice of the entries to the new table; after the last one, use it."""
        old = self._table
        stop = self._copied + _SLICE_SLOTS
        packs = old.packs[self._copied : stop]
        fingerprints = old.fingerprints[self._copied : stop]
        is_entry = packs != 0
        new.insert(fingerprints[is_entry], packs[is_entry])
        self._copied = stop
        if self._copied >= old.slots:
            self._new = None
            self._replace(new)

    def _replace(self, new: _FingerprintTable) -> None:
        """Use another table. The old one is kept while the engine may still map it."""
        old = self._table
        self._table = new
        self.version += 1
        if self._shared is None:  # no engine maps a table
            old.close()
        elif old is self._shared:
            # keep it until ``release_retired``
            self._retired.append(old)
        else:
            # it was never shared, so no engine maps it
            self._release(old)

    def _release(self, table: _FingerprintTable) -> None:
        """Release a table that no reader maps: the first slice now, the others in calls of
        ``replace_some``."""
        is_left = table.release_some()
        if is_left:
            self._unmapped.append(table)

    def share(self) -> tuple[int, int]:
        """Return a new descriptor of the table, which the caller must close, and the number of
        slots. The table is kept until ``release_retired`` says that its reader has mapped a later
        one.
        """
        fd = os.dup(self._table.fd)
        self._shared = self._table
        return fd, self._table.slots

    def release_retired(self) -> None:
        """Release replaced tables. Call it when the engine has mapped the table that was shared
        last, which is kept. Large tables are only queued; ``replace_some`` releases them in slices.
        """
        retired = self._retired
        self._retired = []
        for table in retired:
            # the engine still maps this table, although it was replaced since
            if table is self._shared:
                self._retired.append(table)
            else:
                self._release(table)

    def close(self) -> None:
        """Close all descriptors; idempotent. Mappings of readers stay valid."""
        for table in (*self._tables, *self._retired, *self._unmapped):
            table.close()
        # only ``_table`` stays: its memory still answers lookups
        self._new = None
        self._retired = []
        self._unmapped = []


def _next_number(number: int) -> int:
    """Return the pack number after this one; the first one, 1, follows the last one."""
    return number % _MOST_NUMBER + 1


def _read_saved(path: Path) -> bytes:
    """Return the content of a file that ``Index.save`` wrote."""
    # a link or FIFO in a store must not make the engine read another file, or wait
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        # ``read`` returns None for a FIFO without data
        return file.read() or b""
