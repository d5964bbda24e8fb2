"""One open namespace of one store: put, contains, read into rows, manifests, flush.

Invariants of this file:

1. A key is in the index exactly where a committed pack holds it and no read has found that pack bad.
2. Rows handed to ``put`` are read until it says they are free, or until the next ``commit`` returns.
3. Rows handed to ``read`` hold what was stored under their keys, or their keys are in the answer. Nothing in between.
4. Failure of a commit costs the blocks in it, never the store: they are dropped, counted, and stay absent.

What was used (read, touched, offered though it is held, named by a manifest) goes to the backend with the next commit:
it is evicted last. Used from one thread. Everything that came or went is collected in ``news`` until it is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from persistkv.base import OffloadKey, get_offload_group_idx
from persistkv.errors import IdentityMismatchError, StoreError, StoreFullError
from persistkv.storage.backend import Backend, CommitBatch, CommitResult, ManifestWrite
from persistkv.storage.codec import parse_codec
from persistkv.storage.identity import Identity
from persistkv.storage.index import HeldPack, Index
from persistkv.storage.keys import PackedKeys
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.pack import MAX_PACK_BYTES, UNKNOWN_DEPTH, PackWriter, Segment
from persistkv.storage.planning import DIRECT_BYTES, Block, plan_packs
from persistkv.storage.reading import read_blocks
from persistkv.storage.records import News, RequestEnd, StoreCounters, StoreOptions
from persistkv.storage.rows import Rows
from persistkv.storage.staging import Staging

logger = logging.getLogger(__name__)

_STALE_RETRIES = 2
_TOUCH_S = 2.0  # seconds that uses wait for a commit to go along with
_MAX_TOUCHED = 4096  # packs whose use waits, at most: some 10 µs each in the commit that takes them
_EXPIRE_S = 30.0  # seconds between commits that do nothing else than let the backend expire what is old
_COMPLAIN_S = 60.0  # seconds between warnings that blocks are dropped


class Store:
    """See the top of this file."""

    def __init__(self, backend: Backend, identity: Identity, rows: Rows, options: StoreOptions, *, url: str) -> None:
        """Open a namespace of an open backend, which this object then owns.

        :raises ConfigurationError: a bad codec; nothing was written.
        :raises IdentityMismatchError: ``strict_identity``, and there are other identities only; nothing was written.
        :raises StoreError: as ``Backend.open_namespace``.
        """
        self.codec = parse_codec(options.codec)
        self.options = options
        self.rows = rows
        self.counters = StoreCounters()
        self.news = News()
        self.index = Index()
        self.notice = _notice(backend, identity, options, url)
        """What differs from the nearest namespace, where this one is new beside others; else empty."""
        self.namespace = backend.open_namespace(identity).id
        self._backend = backend
        self._staging = Staging(options.staging_bytes, options.max_age_s)
        self._direct: list[PackWriter] = []
        self._flying: set[bytes] = set()
        self._ends: list[RequestEnd] = []
        self._touched: dict[bytes, None] = {}
        self._committed_at = time.monotonic()
        self._complained_at: float | None = None
        self._cursor: bytes | None = None
        self._refreshed = 0.0
        self.refresh()

    # What is there

    def contains(self, key: bytes) -> bool:
        """Whether the key is durable here and can be read."""
        return key in self.index

    def took(self, key: bytes) -> bool:
        """Whether the key's bytes are durable or copied: its row is not needed any more."""
        return key in self.index or key in self._staging

    def refresh(self) -> None:
        """Learn what others committed and deleted. Not durable-making, cheap where nothing happened."""
        changes = self._backend.changes(self.namespace, self._cursor)
        if changes.reset and len(self.index):
            self._gone(list(self.index))
            self.index = Index()
        self._gone(self.index.remove_all(changes.removed))
        for table in changes.added:
            self.news.stored += self.index.add(table)
        self._cursor = changes.cursor
        self._refreshed = time.monotonic()

    # Writing

    def put(self, request: str, keys: Sequence[bytes], block_ids: Sequence[int], depths: Sequence[int] | None) -> bool:
        """Take blocks out of rows: what is held is passed over, small packs are copied, large ones wait for ``commit``.

        :param depths: for each key, the blocks of its group before it; None where nobody can tell.
        :returns: whether the rows are free already; else they are read until the next ``commit`` has returned.
        :raises ValueError: a row or a group that does not exist; nothing was taken.
        """
        self.rows.check(block_ids)
        blocks = self._absent(keys, block_ids, depths)
        self.counters.held_blocks += len(keys) - len(blocks)
        if len(blocks) < len(keys):
            self.touch(keys)
        waits = any(key in self._flying for key in keys)
        for pack in plan_packs(self.rows, blocks):
            if pack.raw_length < DIRECT_BYTES:
                for segment in pack.segments:
                    self._staging.add(request, segment)
            else:
                self._add_direct(pack.segments)
                waits = True
        return not waits

    def touch(self, keys: Iterable[bytes]) -> None:
        """Blocks were used; those that are not held are passed over. Durable with the next commit."""
        locate = self.index.locate
        for key in keys:
            if len(self._touched) >= _MAX_TOUCHED:
                return
            if (found := locate(key)) is not None:
                self._touched[found[0].pack_id] = None

    def _absent(self, keys: Sequence[bytes], block_ids: Sequence[int], depths: Sequence[int] | None) -> list[Block]:
        index, staging, flying = self.index, self._staging, self._flying
        blocks: dict[bytes, Block] = {}
        for position, key in enumerate(keys):
            if key in index or key in staging or key in flying or key in blocks:
                continue
            group = get_offload_group_idx(OffloadKey(key))
            if group >= len(self.rows.layout.groups):
                raise ValueError(f"key of group {group}; there are {len(self.rows.layout.groups)} groups")
            depth = UNKNOWN_DEPTH if depths is None else depths[position]
            blocks[key] = Block(key, group, block_ids[position], depth)
        return list(blocks.values())

    def _add_direct(self, segments: Sequence[Segment]) -> None:
        writer = PackWriter(self.namespace, self.codec, segments)
        self._direct.append(writer)
        for segment in segments:
            self._flying.update(segment.keys)

    def end_request(self, end: RequestEnd) -> None:
        """The request stores nothing more: at the next ``commit`` what it staged is written, with its manifest.

        :raises ValueError: it has not as many chains of keys as there are groups; nothing was taken.
        """
        if len(end.group_keys) != len(self.rows.layout.groups):
            raise ValueError(f"keys of {len(end.group_keys)} groups; there are {len(self.rows.layout.groups)}")
        self._ends.append(end)

    @property
    def waiting_bytes(self) -> int:
        """Raw bytes that the next ``commit`` writes for certain."""
        return sum(writer.raw_length for writer in self._direct) + self._staging.due_bytes()

    def wants_commit(self) -> bool:
        """Whether something is to be written now."""
        return bool(self._direct or self._ends or self._staging.due())

    def seconds_to_work(self) -> float:
        """How long the owner may sleep before ``commit`` or ``refresh`` is called for."""
        if self.wants_commit():
            return 0.0
        refresh = max(0.0, self._refreshed + self.options.refresh_s - time.monotonic())
        aged = self._staging.seconds_to_due()
        return min(refresh, self._seconds_to_upkeep(), refresh if aged is None else aged)

    def _seconds_to_upkeep(self) -> float:
        """How long until uses are to be written, or the backend is to be given a chance to expire what is old."""
        return max(0.0, self._committed_at + (_TOUCH_S if self._touched else _EXPIRE_S) - time.monotonic())

    def commit(self, *, everything: bool = False) -> None:
        """Write what waits, together; it is durable on return, or it was dropped and counted.

        A transaction takes at most one large pack's worth: what it writes is in memory until it ends.

        :param everything: also what is staged and not due yet.
        """
        ends, self._ends = self._ends, []
        due = set(self._staging.requests() if everything else self._staging.due())
        due.update(name for end in ends for name in self._stagers(end))
        staged = [PackWriter(self.namespace, self.codec, s) for name in due if (s := self._staging.take(name))]
        writers, self._direct = self._direct + staged, []
        if writers or ends or self._touched or not self._seconds_to_upkeep():
            slices = _slices(writers) or [[]]
            for part in slices[:-1]:
                self._write(part, ())
            self._write(slices[-1], ends)
            self._touched = {}
            self._committed_at = time.monotonic()
        self._flying.clear()

    def _stagers(self, end: RequestEnd) -> Iterable[str]:
        owners = {self._staging.owner(key) for keys in end.group_keys for key in keys}
        return (owner for owner in owners | {end.request} if owner is not None)

    def _write(self, writers: Sequence[PackWriter], ends: Sequence[RequestEnd]) -> None:
        """Together; where that does not fit, one by one, so that one pack too many costs only itself."""
        if self._try_commit(writers, ends):
            return
        for writer in writers:
            if (len(writers) == 1 and not ends) or not self._try_commit([writer], ()):
                self._drop(writer)
        for end in ends:
            if not self._try_commit((), [end]):
                self.news.persisted.append((end.request, False))

    def _try_commit(self, writers: Sequence[PackWriter], ends: Sequence[RequestEnd]) -> bool:
        try:
            for retries_left in reversed(range(_STALE_RETRIES + 1)):
                writers = [writer for writer in writers if not self._holds_all(writer)]
                manifests = self._manifests(writers, ends)
                result = self._backend.commit(
                    self.namespace,
                    CommitBatch(
                        writers,
                        [manifest for manifest, _ in manifests if manifest is not None],
                        touches=list(self._touched),
                        seen=self._cursor if retries_left else None,
                    ),
                )
                if not result.stale:
                    break
                self.refresh()
        except StoreError as error:
            self._complain(error)
            self._refresh_or_log()  # room may have been made although it was not enough
            return False
        self._committed(writers, result, followed=bool(retries_left))
        self._touched = {}
        self.news.persisted += [(end.request, whole) for end, (_, whole) in zip(ends, manifests, strict=True)]
        return True

    def _holds_all(self, writer: PackWriter) -> bool:
        return all(key in self.index for segment in writer.segments for key in segment.keys)

    def _committed(self, writers: Sequence[PackWriter], result: CommitResult, *, followed: bool) -> None:
        """:param followed: nobody committed between our last look and this commit: its cursor is ours."""
        self.counters.commits += 1
        unknown = not all(writer.written for writer in writers)
        if followed and not unknown:
            self._cursor = result.cursor
        for writer in writers:
            if not writer.written:
                continue
            table = writer.table
            self.news.stored += self.index.add(table)
            self.counters.stored_blocks += len(table.keys)
            self.counters.stored_raw_bytes += table.raw_length
            self.counters.stored_bytes += table.payload_length
        for evicted in result.evicted:
            if evicted.namespace == self.namespace:
                self.counters.evicted_blocks += len(evicted.keys)
                self._gone(self.index.remove(evicted.pack_id, evicted.keys.unpack()))
        if unknown and followed:
            self._cursor = None  # the backend holds a pack that our index does not know: learn it anew
        if unknown or not followed:
            self._refresh_or_log()

    def _gone(self, keys: Sequence[bytes]) -> None:
        """News tells what is there in the end: a key that came and went since it was last taken only went."""
        gone = set(keys)
        if gone and not gone.isdisjoint(self.news.stored):
            self.news.stored = [key for key in self.news.stored if key not in gone]
        self.news.removed += keys

    def _drop(self, writer: PackWriter) -> None:
        self.counters.dropped_blocks += len(writer.keys)
        self.counters.dropped_bytes += writer.raw_length

    def _manifests(
        self, writers: Sequence[PackWriter], ends: Sequence[RequestEnd]
    ) -> list[tuple[ManifestWrite | None, bool]]:
        """For each end what is written of it, and whether that is the whole context."""
        if not ends:
            return []
        coming = {key: writer.pack_id for writer in writers for segment in writer.segments for key in segment.keys}
        return [self._manifest(end, coming) for end in ends]

    def _manifest(self, end: RequestEnd, coming: Mapping[bytes, bytes]) -> tuple[ManifestWrite | None, bool]:
        """The manifest of what is durable with this commit: each group's longest prefix; and whether it is whole."""
        kept = [self._prefix(keys, coming) for keys in end.group_keys]
        whole = list(map(len, kept)) == list(map(len, end.group_keys))
        if not any(kept):
            return None, whole
        keys: ManifestKeys = tuple(PackedKeys.of(chain) for chain in kept)
        groups = self.rows.layout.groups
        manifest = RequestManifest(
            id=end.manifest_id,
            created=time.time(),
            tokens=end.tokens if whole else min(end.tokens, min(map(len, kept)) * end.block_size),
            group_blocks=tuple(map(len, kept)),
            raw_bytes=sum(len(chain) * group.block_bytes for chain, group in zip(kept, groups, strict=True)),
            ordered=end.ordered,
            labels=end.labels,
        )
        return ManifestWrite(manifest, keys, self._packs_of(kept, coming)), whole

    def _packs_of(self, chains: Sequence[Sequence[bytes]], coming: Mapping[bytes, bytes]) -> list[bytes]:
        """The packs that hold the keys of all groups, by the depth of the first one in each."""
        packs: dict[bytes, int] = {}
        for chain in chains:
            for depth, key in enumerate(chain):
                found = self.index.locate(key)
                pack_id = coming[key] if found is None else found[0].pack_id
                packs[pack_id] = min(depth, packs.get(pack_id, depth))
        return sorted(packs, key=packs.__getitem__)

    def _prefix(self, keys: list[bytes], coming: Mapping[bytes, bytes]) -> list[bytes]:
        for position, key in enumerate(keys):
            if key not in self.index and key not in coming:
                return keys[:position]
        return keys

    # Reading

    def read(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[bytes]:
        """Fill rows with the blocks of keys, verified.

        :returns: the keys that could not be served; what their rows hold is undefined. A bad pack is deleted, once a
            second look at the catalogue has shown that it was not merely replaced.
        :raises ValueError: a row that does not exist; nothing was written.
        """
        self.rows.check(block_ids)
        self.touch(keys)
        wanted = list(zip(keys, block_ids, strict=True))
        outcome = read_blocks(self._backend, self.namespace, self.index, self.rows, wanted)
        self.counters.verification_failures += outcome.bad_frames
        self.counters.missed_blocks += len(outcome.failed)
        self.counters.loaded_blocks += len(keys) - len(outcome.failed)
        self.counters.loaded_bytes += outcome.raw_bytes
        if outcome.suspects:
            self._quarantine(outcome.suspects.values())
        return outcome.failed

    def _quarantine(self, suspects: Iterable[HeldPack]) -> None:
        """Packs that others deleted or replaced are learnt anew; those that are still the same leave the store."""
        self._refresh_or_log()
        bad = [pack.pack_id for pack in suspects if self.index.holds(pack)]
        if not bad:
            return
        self._gone(self.index.remove_all(bad))
        names = ", ".join(pack_id.hex() for pack_id in bad)
        logger.warning("deleting packs whose bytes do not verify: %s; their blocks will be computed again", names)
        try:
            self._backend.commit(self.namespace, CommitBatch(deletions=bad))
        except StoreError as error:
            self._complain(error)
        self._refresh_or_log()  # what could only be reached through them went too, and others may have committed

    def _refresh_or_log(self) -> None:
        try:
            self.refresh()
        except StoreError as error:
            self._complain(error)

    def _complain(self, error: StoreError) -> None:
        """Warn, but once a minute: a full store would fill the log instead."""
        now = time.monotonic()
        if self._complained_at is None or now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            kind = "the store is full" if isinstance(error, StoreFullError) else "the store failed"
            logger.warning("%s (%s); what it was given is dropped", kind, error)

    # The rest

    def tick(self) -> None:
        """Commit what is due and look for what others stored, where it is time."""
        if self.wants_commit() or not self._seconds_to_upkeep():
            self.commit()
        if time.monotonic() - self._refreshed >= self.options.refresh_s:
            self._refreshed = time.monotonic()
            self._refresh_or_log()

    def flush(self) -> None:
        """Write everything that was taken; durable on return, or dropped and counted."""
        self.commit(everything=True)

    @property
    def staged_bytes(self) -> int:
        """Raw bytes of copies that wait to be written."""
        return self._staging.num_bytes

    @property
    def backend(self) -> Backend:
        """The open driver, for manifests and totals."""
        return self._backend

    def take_news(self) -> News:
        """What came and went since the last call."""
        news, self.news = self.news, News()
        return news

    def close(self) -> None:
        """Write what was taken, then release the backend; idempotent."""
        try:
            self.flush()
        finally:
            self._backend.close()


def _notice(backend: Backend, identity: Identity, options: StoreOptions, url: str) -> str:
    others = [namespace.identity for namespace in backend.namespaces()]
    if not others or identity in others:
        return ""
    differences = identity.nearest(others)
    if options.strict_identity:
        raise IdentityMismatchError(url, differences)
    return f"{url} holds nothing of this identity yet; the nearest namespace differs in " + "; ".join(
        map(str, differences)
    )


def _slices(writers: Sequence[PackWriter]) -> list[list[PackWriter]]:
    """Packs that are written in one transaction each."""
    slices: list[list[PackWriter]] = []
    size = 0
    for writer in writers:
        if not slices or size + writer.raw_length > MAX_PACK_BYTES:
            slices.append([])
            size = 0
        slices[-1].append(writer)
        size += writer.raw_length
    return slices
