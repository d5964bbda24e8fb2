"""One namespace of an open backend: its blocking calls, the index of durable keys, the report to
the engine, manifests.

One task at a time may await the methods that commit, refresh or repair, so that the index applies
changes in order. Any task may await ``holders``.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from persistkv.config import RowLayout
from persistkv.errors import (
    QuotaExceededError,
    StoreError,
    StoreFullError,
    TenantForgottenError,
)
from persistkv.memory.budget import no_collections, trim_heap
from persistkv.storage.backend import Backend, Changes, CommitBatch, CommitResult
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackedKeys, PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv.storage.format.seal import Seal
from persistkv.storage.records import StoreCounters, StoreOptions, StoreReport
from persistkv.storage.store.index import HeldPack, Index
from persistkv.storage.store.lookup_table import change_collisions
from persistkv.storage.store.manifests import (
    SHORTENED_AT_ONCE,
    keys_of_requests,
    read_requests,
    shortening_batch,
)
from persistkv.storage.threads import StoreThreads

logger = logging.getLogger(__name__)

_FAILURE_LOG_S = 60.0  # minimum seconds between warnings that blocks are dropped
# attempts to delete damaged packs; a commit of another process makes an attempt fail
_QUARANTINE_ATTEMPTS = 3
_MOST_RECENT_KEYS = 16_384  # maximum keys of the packs whose tables are kept: 3 MB
_READ_AT_ONCE = 4
"""Number of tables of a local store up to which the caller's thread reads them, in 0.1 to 0.3 ms.
Another thread would begin 0.2 to 1.8 ms later, or after all parts of queued load jobs."""

T = TypeVar("T")


class _Suspect(NamedTuple):
    """A pack that may be damaged."""

    table: PackTable
    bad_frames: int
    """Number of frames that did not verify; 0 once ``StoreCounters`` contains them."""


@dataclass
class _RepairWork:
    """Packs that a read or a lookup of their tables has found missing or damaged."""

    suspects: dict[bytes, _Suspect] = field(default_factory=dict)
    """Packs, by id, that were removed from the index because a read of them failed, until the
    backend reports their removal or replacement, or ``_quarantine`` deletes or restores them."""
    undecided: bool = False
    """Whether ``_quarantine`` has to decide about some of ``suspects``."""
    unread: dict[bytes, int] = field(default_factory=dict)
    """Number in the index of each pack, by id, whose table could not be read."""
    index_lacks: bool = False
    """Whether packs were removed from the index that the store may still hold, because their tables
    are unreadable. Then the index is not saved."""


class _RecentTables:
    """Key tables that were read or written last, by the number of their pack in the index. Above
    16,384 keys in all, the tables that were added first are dropped."""

    def __init__(self) -> None:
        self._packs: OrderedDict[int, HeldPack] = OrderedDict()
        self._keys = 0
        """Number of keys in all tables."""

    def get(self, number: int) -> HeldPack | None:
        return self._packs.get(number)

    def add(self, pack: HeldPack) -> None:
        """Keep the table of a pack, unless the index does not contain the pack (number 0)."""
        if not pack.number or pack.number in self._packs:
            return
        self._packs[pack.number] = pack
        self._keys += len(pack.keys)
        # drop the oldest packs; the newest pack stays, however large it is
        while self._keys > _MOST_RECENT_KEYS and len(self._packs) > 1:
            _, oldest = self._packs.popitem(last=False)
            self._keys -= len(oldest.keys)


@dataclass
class _IndexFile:
    """File in which the index of a namespace is saved between two openings."""

    path: Path
    name: bytes
    """Name under which the content is sealed."""
    seal: Seal
    """Seal of the store."""
    saved: bytes | None = None
    """Position in the change log of the index in the file; None: no valid file."""

    def save(self, index: Index, cursor: bytes | None) -> None:
        """Save an index, unless its position in the change log is unknown (None), or is that of the
        index in the file."""
        if cursor is not None and cursor != self.saved:
            index.save(self.path, cursor, self.seal, self.name)


class NamespaceView:
    """One namespace of an open backend, with the index of its durable keys and its report. Not
    thread-safe."""

    def __init__(
        self,
        backend: Backend,
        namespace: bytes,
        threads: StoreThreads,
        counters: StoreCounters,
        layout: RowLayout,
        options: StoreOptions,
    ) -> None:
        """Read the catalogue into the index, on the caller's thread. Its keys are not in the
        report.

        :param threads: run the blocking calls; the caller closes them.

        :raises StoreError: the catalogue could not be read; the backend stays open.
        """
        self.backend = backend
        self.namespace = namespace
        self.threads = threads
        self.index = Index(_most_keys(backend, layout))
        self.cursor: bytes | None = None
        """Position in the backend's change log up to which the index is complete. None: unknown, so
        the next refresh reads the whole catalogue."""
        self.report = StoreReport()
        self._counters = counters
        self._announced: dict[bytes, PackedKeys] | None = {} if options.events else None
        """Keys of the packs that were reported as stored, by pack id: other processes that remove
        a pack do not name its keys. None: no events."""
        self.block_bytes = [group.block_bytes for group in layout.groups]
        """Raw bytes of one block of each KV cache group."""
        self._recent = _RecentTables()
        self._collisions: dict[bytes, None] = {}
        """Ordered set of the keys that are not held although held keys have their fingerprints, as
        ``_search_all_candidates`` found; at most 4,096."""
        self._repair_work = _RepairWork()
        self._failures_logged_at: dict[str, float] = {}
        """Kind of failure (``log_failure``) → monotonic time of its last warning."""
        self._file: _IndexFile | None = None
        """Where the index is saved; None: nowhere."""
        try:
            with no_collections():
                changes = self._load_index()
                self._apply_changes(changes)
        except BaseException:
            self.index.close()
            raise
        # begin with an empty report: it names changes since the opening only
        self.report = StoreReport()
        # return the memory of the parsed tables to the system: about 50 bytes per block
        trim_heap()

    def _load_index(self) -> Changes:
        """Load the index from its file, and return the changes since then; without a file, the
        whole catalogue."""
        path = self.backend.index_file(self.namespace)
        if path is not None:
            name = b"index of " + self.namespace
            # keep the seal, because ``close`` saves the index after the backend is closed, which
            # then has no seal
            seal = self.backend.seal
            self.cursor = self.index.load(path, seal, name)
            self._file = _IndexFile(path, name, seal, self.cursor)
        changes = self.backend.changes(self.namespace, self.cursor)
        if path is not None and changes.reset:
            # If there is a file, it is too old or damaged. Delete it, because its cursor could
            # become valid again if the store is restored from a copy.
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return changes

    def close(self, *, saves: bool = True) -> None:
        """Close the backend, then save the index, unless it may lack packs that the store holds.
        Idempotent.

        :param saves: False: do not save the index.
        """
        self.backend.close()
        file = self._file
        self._file = None
        # nothing is written to a store that is opened for reading only
        is_writable = self.backend.capabilities.writable
        work = self._repair_work
        is_whole = not work.suspects and not work.index_lacks
        if file is not None and saves and is_writable and is_whole:
            file.save(self.index, self.cursor)
        self.index.close()

    async def call(self, call: Callable[[], T]) -> T:
        """Run a blocking call with ``StoreThreads.write``.

        :raises StoreError: the call raised an exception of any kind; one of another kind is the
            ``__cause__``.
        """
        with _as_store_errors():
            return await self.threads.write(call)

    async def read_changes(self, cursor: bytes | None) -> Changes:
        """Return ``Backend.changes`` after a position, with all tables in memory. Raises as
        ``call``."""
        read = partial(_changes, self.backend, self.namespace, cursor)
        return await self.call(read)

    def commit(self, batch: CommitBatch) -> Awaitable[CommitResult]:
        """Run ``Backend.commit`` as ``call`` does. When it has ended, no thread reads the blocks of
        its packs."""
        commit = partial(_commit_once, self.backend, self.namespace, batch)
        return self.call(commit)

    def log_failure(self, error: StoreError) -> None:
        """Log a failure as a warning that new blocks are dropped, at most once per minute and kind:
        a full store fails often, and must not hide a failed one."""
        kind = "the store failed"
        if isinstance(error, StoreFullError):
            kind = "the store is full"
        elif isinstance(error, QuotaExceededError):
            kind = "a tenant is at its quota"
        now = time.monotonic()
        logged_at = self._failures_logged_at.get(kind, -math.inf)
        if now - logged_at >= _FAILURE_LOG_S:
            self._failures_logged_at[kind] = now
            # log the error as text: a log record with it would keep its traceback, and so the
            # memory of blocks, alive
            logger.warning("%s (%s): new blocks are dropped", kind, str(error))

    async def refresh(self) -> None:
        """Apply the changes of other processes.

        :raises StoreError: the index is unchanged, or memory or descriptors are short and it lacks
            packs until the next refresh, which reads the whole catalogue.
        """
        changes = await self.read_changes(self.cursor)
        # no ``await`` inside, so that no other task sees an index with only some of the changes
        with self._changing_index():
            self._apply_changes(changes)

    async def refresh_or_log(self) -> None:
        """Call ``refresh``, and log a ``StoreError`` instead of raising it."""
        try:
            await self.refresh()
        except StoreError as error:
            self.log_failure(error)

    @contextmanager
    def _changing_index(self) -> Iterator[None]:
        """Convert a lack of memory or descriptors to ``StoreError``, and have the next refresh
        reload the index."""
        try:
            yield
        except (OSError, MemoryError) as error:
            self.cursor = None
            raise StoreError(
                f"the index is incomplete: {error or 'no memory is left'}"
            ) from error

    def _apply_changes(self, changes: Changes) -> None:
        """Apply changes of the catalogue to the index, and report them."""
        if changes.reset:
            self._reload(changes)
        else:
            self._remove_packs(changes.removed)
            self._add_packs(list(changes.added))
        self.cursor = changes.cursor

    def _reload(self, changes: Changes) -> None:
        """Replace the content of the index by the whole catalogue, and report the packs that are
        gone."""
        is_first_load = len(self.index) == 0
        if self._announced is not None and not is_first_load:
            # The report is incomplete: it does not name the keys of packs that are new in the
            # catalogue, nor of gone packs that the store held before it was opened.
            self.report.lost = True
        # Forget all suspects: those that are still held are in the index again, and a later read
        # decides about them.
        self._repair_work.suspects.clear()
        self.index.reload(changes.added, changes.blocks)
        self._announce_gone()

    def _add_packs(self, tables: Sequence[PackTable]) -> None:
        """Add packs to the index, and report their keys. A suspect, which is a pack whose read has
        failed, counts as intact again."""
        for table in tables:
            self._repair_work.suspects.pop(table.pack_id, None)
            # unpack full keys, which takes time, only if events or known collisions need them
            if self._announced is not None or self._collisions:
                keys = table.keys.unpack()
                # Lookups treat a key in ``_collisions`` as absent, although a held key has its
                # fingerprint. Now a pack stores the key, so lookups must find it.
                stored_now = [key for key in keys if key in self._collisions]
                self._set_collisions(stored_now, collided=False)
                self._announce(table, keys)
        # change the index after the reports, which name only keys that the index lacks
        self.index.add(tables)

    def _announce(self, table: PackTable, keys: Sequence[bytes]) -> None:
        """Report a new pack's keys as stored, except those that other packs hold already; do
        nothing if events are disabled."""
        if self._announced is None:
            return
        is_new = self.index.number_of(table.pack_id) == 0
        if is_new:
            self._announced[table.pack_id] = table.keys
            absent = self.index.absent(keys)
            self.report.add(stored=absent)

    def _announce_gone(self) -> None:
        """Report the packs as removed that were reported as stored and that the reloaded index
        lacks."""
        if self._announced is None:
            return
        # iterate over a copy, because the loop removes entries
        for pack_id, packed in list(self._announced.items()):
            if self.index.number_of(pack_id) == 0:
                del self._announced[pack_id]
                absent = self.index.absent(packed.unpack())
                self.report.add(removed=absent)

    def _remove_packs(self, packs: Mapping[bytes, PackTable | bytes]) -> None:
        """Remove packs from the index, and report their keys as removed; if the keys of a pack are
        not known, mark the report as incomplete.

        :param packs: pack id → the pack's table, or ``PackedKeys.fingerprints`` if the caller does
            not have it.
        """
        fingerprints: dict[bytes, bytes] = {}
        # pack id → keys of the pack; None if they are not known
        removed: dict[bytes, PackedKeys | None] = {}
        for pack_id, content in packs.items():
            # a removed pack is no suspect; the caller ``suspect`` adds its packs after this call
            self._repair_work.suspects.pop(pack_id, None)
            number = self.index.number_of(pack_id)
            if not number:  # the index lacks the pack already
                continue
            if isinstance(content, PackTable):
                removed[pack_id] = content.keys
                fingerprints[pack_id] = content.keys.fingerprints
            else:
                removed[pack_id] = self._keys_of(pack_id, number)
                fingerprints[pack_id] = content
        self.index.remove(fingerprints)
        # announce after the removal: keys that other packs hold can still be loaded
        self._announce_removed(removed)

    def _announce_removed(self, removed: Mapping[bytes, PackedKeys | None]) -> None:
        """Report the keys of removed packs, except those that other packs hold; do nothing if
        events are disabled.

        :param removed: pack id → its keys; None: they are not known.
        """
        if self._announced is None:
            return
        for pack_id, keys in removed.items():
            self._announced.pop(pack_id, None)
            if keys is None:
                self.report.lost = True
            else:
                absent = self.index.absent(keys.unpack())
                self.report.add(removed=absent)

    def _keys_of(self, pack_id: bytes, number: int) -> PackedKeys | None:
        """Return the keys of a pack if they are in memory; None if not.

        :param number: of the pack in the index.
        """
        if self._announced is not None and pack_id in self._announced:
            return self._announced[pack_id]
        recent = self._recent.get(number)
        return None if recent is None else recent.table.keys

    # Full keys

    async def holders(self, keys: Sequence[bytes]) -> list[HeldPack | None]:
        """Return, for each key, a pack that holds it; None if no pack does. Compares full keys, not
        fingerprints.

        :raises StoreError: the key tables could not be read.
        """
        candidates = self.index.first_candidates(keys)
        found: list[HeldPack | None] = [None] * len(keys)
        # look up each pack once, because consecutive keys are mostly in one pack
        distinct = dict.fromkeys(filter(None, candidates))
        if not distinct:
            return found
        packs = await self._packs_by_id(distinct)
        # places of the keys that the first pack with their fingerprint does not hold, or whose
        # table could not be read: further packs may have the fingerprint
        unsure: list[int] = []
        for place, pack_id in enumerate(candidates):
            if pack_id is None:
                continue
            pack = packs.get(pack_id)
            if pack is not None and keys[place] in pack.places:
                found[place] = pack
            else:
                unsure.append(place)
        if unsure:
            unsure_keys = [keys[place] for place in unsure]
            others = await self._search_all_candidates(unsure_keys)
            for place, pack in zip(unsure, others, strict=True):
                found[place] = pack
        return found

    async def _search_all_candidates(
        self, keys: Sequence[bytes]
    ) -> list[HeldPack | None]:
        """Return, for each key, the pack that holds it, of all packs with its fingerprint; None if
        no pack does. A key that is certainly in no pack is remembered as a collision: lookups no
        longer find it.
        """
        candidates = [self.index.candidates(key) for key in keys]
        packs = await self._packs_by_id(chain.from_iterable(candidates))
        found: list[HeldPack | None] = []
        collided: list[bytes] = []
        for key, pack_ids in zip(keys, candidates, strict=True):
            holder = _first_holder(key, pack_ids, packs)
            found.append(holder)
            # a pack whose table could not be read may hold the key
            are_all_read = packs.keys() >= set(pack_ids)
            if holder is None and are_all_read:
                collided.append(key)
        self._set_collisions(collided, collided=True)
        return found

    async def _packs_by_id(self, pack_ids: Iterable[bytes]) -> dict[bytes, HeldPack]:
        """Return these packs by id, without those whose tables are missing or damaged, about which
        ``repair`` decides."""
        numbers = {pack_id: self.index.number_of(pack_id) for pack_id in pack_ids}
        found: dict[bytes, HeldPack] = {}
        unread: list[bytes] = []  # packs whose tables are not in memory
        for pack_id, number in numbers.items():
            recent = self._recent.get(number)
            if recent is None:
                unread.append(pack_id)
            else:
                found[pack_id] = recent
        if not unread:
            return found
        # Use the numbers from before the read: if a pack is replaced during the read, callers
        # notice that its number is not that of the index any more.
        for table in await self._read_tables(unread):
            number = numbers[table.pack_id]
            pack = HeldPack(table, number)
            self._recent.add(pack)
            found[table.pack_id] = pack
        for pack_id in unread:
            if pack_id not in found:
                self._repair_work.unread[pack_id] = numbers[pack_id]
        return found

    async def _read_tables(self, pack_ids: Sequence[bytes]) -> Sequence[PackTable]:
        """Read the tables of packs; a few of a local store on the event loop's thread, which is
        faster (``_READ_AT_ONCE``)."""
        read = partial(self.backend.tables, self.namespace, pack_ids)
        is_remote = self.backend.capabilities.remote
        with _as_store_errors():
            if len(pack_ids) <= _READ_AT_ONCE and not is_remote:
                return read()
            (tables,) = await self.threads.read([read])
            return tables

    async def packs_with(self, keys: Iterable[bytes]) -> list[HeldPack]:
        """Return every pack that holds one of these keys. If the table of a pack that may hold one
        is missing or damaged, ``needs_repair`` is true afterwards.

        :raises StoreError: the key tables could not be read.
        """
        keys = list(keys)
        candidates: dict[bytes, None] = {}
        for key in keys:
            of_key = self.index.candidates(key)
            candidates.update(dict.fromkeys(of_key))
        packs = await self._packs_by_id(candidates)
        holding: list[HeldPack] = []
        for pack in packs.values():
            # a candidate has the fingerprint of a key, but may lack the key itself
            if not pack.places.keys().isdisjoint(keys):
                holding.append(pack)
        return holding

    @property
    def needs_repair(self) -> bool:
        """Whether ``repair`` has work to do."""
        return self._repair_work.undecided or bool(self._repair_work.unread)

    async def repair(self) -> None:
        """Decide about packs that a read, or a lookup of their tables, found missing or damaged.
        Failures are logged.

        :raises TenantForgottenError: see ``Backend.commit``.
        """
        if self._repair_work.unread:
            await self._drop_unread()
        if self._repair_work.undecided:
            await self._quarantine()

    async def _drop_unread(self) -> None:
        """Refresh, and remove from the index the packs whose tables are damaged or no longer held,
        unless they were added since the failed lookup or the medium fails.
        """
        unread = self._repair_work.unread
        self._repair_work.unread = {}
        await self.refresh_or_log()
        unchanged: list[bytes] = []
        for pack_id, number in unread.items():
            # another number: the pack was removed, and perhaps added again, since the lookup
            if self.index.number_of(pack_id) == number:
                unchanged.append(pack_id)
        if not unchanged:
            return
        read = partial(self.backend.tables, self.namespace, unchanged)
        try:
            tables = await self.call(read)
        except StoreError:
            # a later lookup finds the packs again, and tries to read them
            return
        readable = {table.pack_id for table in tables}
        unreadable = [pack_id for pack_id in unchanged if pack_id not in readable]
        # the store may still hold the packs, so ``close`` must not save the index without them
        self._repair_work.index_lacks = True
        # pass empty fingerprints, because they are not known: the index searches all its slots
        self._remove_packs(dict.fromkeys(unreadable, b""))

    def _set_collisions(
        self,
        keys: Sequence[bytes],
        *,
        collided: bool,
    ) -> None:
        """Remember, or forget, that keys collide: other keys with their fingerprints are held, but
        not they. Report the change to the engine, whose lookups see fingerprints only."""
        if keys:
            changes = dict.fromkeys(keys, collided)
            change_collisions(self._collisions, changes)
            self.report.collisions.update(changes)

    async def apply_own_commit(
        self,
        packs: Sequence[NewPack],
        result: CommitResult,
        *,
        follows_cursor: bool,
    ) -> None:
        """Apply the result of this store's own commit of these packs to the index, the counters and
        the report.

        :param follows_cursor: whether it is certain that no other process committed between
            ``cursor`` and this commit. If not, this method refreshes.
        """
        try:
            with self._changing_index():
                is_complete = self._apply_commit_to_index(packs, result, follows_cursor)
        except StoreError as error:
            self.log_failure(error)
            return
        if not is_complete:
            await self.refresh_or_log()

    def _apply_commit_to_index(
        self,
        packs: Sequence[NewPack],
        result: CommitResult,
        follows_cursor: bool,
    ) -> bool:
        """Apply the result of a commit; return whether the index is complete without a refresh.

        :param follows_cursor: whether it is certain that no other process committed between
            ``cursor`` and this commit.
        """
        self._counters.commits += 1
        # a pack that the backend held already was not written, and the index may lack it
        are_all_written = all(pack.written for pack in packs)
        is_complete = follows_cursor and are_all_written
        # set before the index changes: if a change fails, ``_changing_index`` resets it to None
        if is_complete:
            self.cursor = result.cursor
        elif follows_cursor:
            # The refresh must read the whole catalogue: no change after the cursor names the pack
            # that was not written.
            self.cursor = None
        for pack in packs:
            if pack.written:
                self._add_written(pack.table)
            else:
                self._counters.held_blocks += len(pack.keys)
        self._remove_evicted(result)
        return is_complete

    def _add_written(self, table: PackTable) -> None:
        """Add and count a pack that this store wrote."""
        self._add_packs([table])
        number = self.index.number_of(table.pack_id)
        self._recent.add(HeldPack(table, number))
        self._counters.stored_blocks += len(table.keys)
        self._counters.stored_raw_bytes += table.raw_length
        self._counters.stored_bytes += table.payload_length

    def _remove_evicted(self, result: CommitResult) -> None:
        """Remove and count the packs of this namespace that a commit evicted."""
        evicted: dict[bytes, PackTable] = {}
        for pack in result.evicted:
            if pack.namespace == self.namespace:
                evicted[pack.pack_id] = pack
                self._counters.evicted_blocks += len(pack.keys)
        if evicted:
            self._remove_packs(evicted)

    def suspect(
        self,
        packs: Sequence[HeldPack],
        bad_frames: Mapping[bytes, int],
    ) -> None:
        """Remove from the index the packs of which a read failed; ``repair`` decides about them. A
        pack that was replaced since that read is kept.

        :param bad_frames: number of frames of each pack, by id, that did not verify. ``repair``
            counts them if the store still holds the pack.
        """
        bad: dict[bytes, PackTable] = {}
        for pack in packs:
            # another number: the pack was removed, and perhaps added again, since the read
            if self.index.number_of(pack.pack_id) == pack.number:
                bad[pack.pack_id] = pack.table
        self._remove_packs(bad)
        for pack_id, table in bad.items():
            suspect = _Suspect(table, bad_frames.get(pack_id, 0))
            self._repair_work.suspects[pack_id] = suspect
        self._repair_work.undecided = True

    async def _quarantine(self) -> None:
        """Refresh, and delete the suspected packs that no process has removed or replaced since, if
        the store is writable. A manifest that names such a pack is shortened to the blocks before
        it.

        If the refresh fails, all suspects are restored to the index: a later read shows whether
        they are bad. If a deletion fails, or other processes commit during each attempt, they stay
        out of the index.
        """
        # reset before the work: a read that fails during the work sets it again
        self._repair_work.undecided = False
        suspects = self._repair_work.suspects
        for _ in range(_QUARANTINE_ATTEMPTS):
            try:
                # the refresh removes packs from ``suspects`` that were removed or written again
                await self.refresh()
            except StoreError as error:
                # it is unknown whether the suspects are unchanged: restore them to the index
                self.log_failure(error)
                tables = [suspect.table for suspect in suspects.values()]
                self._add_packs(tables)
                return
            # an attempt may find further suspects; the frames of each are counted once
            self._count_bad_frames()
            bad = list(suspects)
            if not bad or not self.backend.capabilities.writable:
                return
            is_decided = await self._delete_bad(bad)
            # otherwise another process has committed: refresh, and try again
            if is_decided:
                return

    def _count_bad_frames(self) -> None:
        """Count the bad frames of the suspects, each once. The packs are still held, so these
        frames are damaged, and not those of another pack."""
        suspects = self._repair_work.suspects
        for pack_id, suspect in suspects.items():
            self._counters.verification_failures += suspect.bad_frames
            suspects[pack_id] = suspect._replace(bad_frames=0)

    async def _delete_bad(self, bad: Sequence[bytes]) -> bool:
        """Delete packs, and apply the deletion to the index.

        :returns: False: none is deleted, because another process has committed since the last
            refresh, and may have replaced them. True: they are deleted, or the store has failed,
            which is logged; then they stay suspects.
        """
        try:
            batch = await self._shorten_manifests(bad)
            if batch is None:
                return False
            # The refresh has found the packs unchanged. ``seen`` is its position, or that of the
            # last commit of ``_shorten_manifests``, so the backend refuses if another process has
            # committed.
            deletion = replace(batch, bad=bad, seen=self.cursor)
            result = await self.commit(deletion)
        except TenantForgottenError:
            # this is no failure of the store: the caller drops the blocks of the tenant
            raise
        except StoreError as error:
            self.log_failure(error)
        else:
            if result.stale:
                return False
            for pack_id in bad:
                self._repair_work.suspects.pop(pack_id, None)
            names = ", ".join(pack_id.hex() for pack_id in bad)
            logger.warning(
                "deleted packs whose bytes do not verify: %s; their blocks will be computed again",
                names,
            )
        # apply the deletion to the index; after a failure, the changes of other processes
        await self.refresh_or_log()
        return True

    async def _shorten_manifests(self, bad: Sequence[bytes]) -> CommitBatch | None:
        """Shorten the manifests that name these packs, in commits of at most ``SHORTENED_AT_ONCE``
        manifests. The last commit is not executed but returned, so that the caller can delete the
        packs with it. Return None if another process has committed since the last refresh.
        """
        open_queries = partial(self.backend.catalogue, self.namespace)
        queries = await self.call(open_queries)
        # heads of manifests; their keys are read for one batch after the other
        heads = await self.call(partial(queries.manifests_naming, bad))
        batch = CommitBatch()
        for start in range(0, len(heads), SHORTENED_AT_ONCE):
            # commit the previous batch, because another one follows
            if batch.manifests:
                result = await self.commit(batch)
                if result.stale:
                    return None
                # ``apply_own_commit`` moves ``cursor`` behind this commit, because an older cursor
                # would make the next commit stale
                await self.apply_own_commit([], result, follows_cursor=True)
            batch = await self._read_shortening_batch(
                heads[start : start + SHORTENED_AT_ONCE]
            )
        return batch

    async def _read_shortening_batch(
        self, heads: Sequence[RequestManifest]
    ) -> CommitBatch:
        """Return the commit that shortens these manifests to the part before the bad packs, which
        the index lacks."""
        read = partial(read_requests, self.backend, self.namespace, heads)
        requests = await self.call(read)
        pack_of = await self.pack_of(keys_of_requests(requests))
        return shortening_batch(requests, pack_of, self.block_bytes, self.cursor)

    async def pack_of(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return, for each of these keys that is held, the id of a pack that holds it. Raises as
        ``holders``."""
        if not keys:
            return {}
        holders = await self.holders(keys)
        found: dict[bytes, bytes] = {}
        for key, pack in zip(keys, holders, strict=True):
            if pack is not None:
                found[key] = pack.pack_id
        return found


def _first_holder(
    key: bytes,
    pack_ids: Iterable[bytes],
    packs: Mapping[bytes, HeldPack],
) -> HeldPack | None:
    """Return the first of the packs with these ids that holds a key. None: none does, of those that
    ``packs`` contains.

    :param packs: id → pack; packs whose tables could not be read are missing.
    """
    for pack_id in pack_ids:
        pack = packs.get(pack_id)
        if pack is not None and key in pack.places:
            return pack
    return None


def _most_keys(backend: Backend, layout: RowLayout) -> int | None:
    """Estimate how many blocks fit into the store, without regard to its codec. None: unbounded or
    unknown."""
    capacity = None
    with suppress(StoreError):
        capacity = backend.policy().capacity
    if capacity is None:
        return None
    return capacity // min(group.block_bytes for group in layout.groups)


def _changes(
    backend: Backend,
    namespace: bytes,
    cursor: bytes | None,
) -> Changes:
    """Call ``Backend.changes``, and read all tables of added packs into memory."""
    changes = backend.changes(namespace, cursor)
    # a list, so that the tables are read now, on the thread of the call
    return replace(changes, added=list(changes.added))


@contextmanager
def _as_store_errors() -> Iterator[None]:
    """Convert exceptions other than ``StoreError`` to one, so that a lack of memory or a bug in a
    driver fails only the call."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error


def _commit_once(
    backend: Backend, namespace: bytes, batch: CommitBatch
) -> CommitResult:
    """Commit a batch once. Afterwards, also after a failure, no thread reads the blocks of its
    packs."""
    # the packs may have been written in part by an earlier attempt
    for writer in batch.packs:
        writer.restart()
    try:
        return backend.commit(namespace, batch)
    finally:
        for writer in batch.packs:
            writer.end_reads()
