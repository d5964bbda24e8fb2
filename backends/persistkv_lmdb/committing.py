"""How a batch gets into a bounded file.

LMDB uses the pages that a transaction freed again in the second one after it. So a batch cannot be written over what it
evicts itself: each commit evicts for the ones that follow. Where that was not enough (a large batch, a small store,
pages that lie too scattered, a disk that is smaller than the capacity), short transactions evict, one more lets their
pages age, and the batch is tried again.
"""

from __future__ import annotations

from collections.abc import Callable

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch, CommitResult, ManifestWrite
from persistkv.storage.pack import FRAME_BYTES, PackTable, PackWriter
from persistkv_lmdb.commit import Commit, Evicted
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.layout import Transaction, manifest_row, used_bytes
from persistkv_lmdb.pieces import page_bytes

_EVICTED_AT_ONCE = 512
"""Packs and manifests that one transaction evicts at most: tens of milliseconds."""
_TRANSACTIONS = 8
"""Transactions that evict for one batch at most; a store whose capacity was lowered shrinks over many commits."""
_MORE = (0, 2, 8, 32)
"""How much is evicted for a batch that found no room, one after the other: first what the capacity asks for, then that
many times its bytes, because free pages do not help where they do not lie side by side."""
_MAX_AHEAD = 256 << 20  # 256 MiB: a commit of 128 MiB, and the one before it, whose pages are not free yet
_EXPIRED_AT_ONCE = 64
_ROWS_BYTES = 1 << 10
"""1 KiB: what a pack or a manifest takes in the catalogue, beside table, head and keys."""


class _NothingLeftError(StoreFullError):
    """Not even all that may be evicted is enough."""


class Committing:
    """One batch on its way into the store. Used once."""

    def __init__(self, environment: Environment, ttl_s: float | None, namespace: bytes, batch: CommitBatch) -> None:
        self._environment = environment
        self._ttl_s = ttl_s
        self._namespace = namespace
        self._batch = batch
        self._seen = batch.seen
        self._evicted: list[PackTable] = []
        self._goals: dict[int, int] = {}  # for each of _MORE, what is used is to be at most
        named = [pack_id for write in batch.manifests for pack_id in write.packs]
        self._keep = {namespace + pack_id for pack_id in [*named, *(pack.pack_id for pack in batch.packs)]}
        self._keep.update(manifest_row(namespace, write.manifest.id) for write in batch.manifests)

    def run(self) -> CommitResult:
        """Commit; see ``Backend.commit``."""
        try:
            return self._write()
        except StoreFullError as error:
            if not (self._batch.packs or self._batch.manifests):
                raise
            full = error
        for more in _MORE:
            if not self._make_room(more):
                return self._stale()
            try:
                return self._write()
            except StoreFullError as error:
                full = error
        raise full

    def _full(self, need: int) -> StoreFullError:
        capacity = self._environment.capacity
        return StoreFullError(f"{self._environment.path}: {need} bytes do not fit a capacity of {capacity} bytes")

    def _write(self) -> CommitResult:
        """The batch in one transaction.

        :raises StoreFullError: there is no room; nothing was done.
        """
        environment = self._environment
        with environment.transaction(write=True) as transaction:
            commit = self._begin(transaction)
            if commit is None:
                return self._stale()
            room = environment.limit_bytes() - environment.pending_bytes(transaction)
            if (need := self._need(commit)) and used_bytes(transaction) + need > room:
                raise StoreFullError(
                    f"{environment.path}: {need} bytes do not fit a capacity of {environment.capacity}"
                )
            commit.apply(self._batch)
            if self._ttl_s is not None:
                commit.expire(self._ttl_s, _EXPIRED_AT_ONCE)
            if commit.grew:
                commit.evict(_below(transaction, _spared(environment.limit_bytes())), _EVICTED_AT_ONCE)
            commit.finish()
            if commit.grew and used_bytes(transaction) > environment.limit_bytes():
                raise self._full(need)
            environment.note_freed(transaction, commit.freed)
        return CommitResult(commit.state.cursor, [*self._evicted, *commit.evicted])

    def _make_room(self, more: int) -> bool:
        """Evict what the batch needs, in short transactions.

        :param more: 0 for what the capacity asks for. Else the pages that are free were of no use: as many times the
            batch's bytes beside them, within the file as it is.
        :returns: whether the caller has still seen all that happened.
        :raises StoreFullError: nothing is left that may be evicted.
        """
        at_most = _EVICTED_AT_ONCE
        for _ in range(_TRANSACTIONS):
            try:
                ended = self._evict_some(more, at_most)
            except _NothingLeftError:
                raise
            except StoreFullError:
                if at_most == 1:
                    raise
                at_most = 1  # a full disk has no pages for a larger transaction: to delete takes some, too
                self._environment.age()
                continue
            if ended is None:
                return False
            if ended is not Evicted.SOME:
                break
            at_most = min(4 * at_most, _EVICTED_AT_ONCE)
        self._environment.age()
        return True

    def _evict_some(self, more: int, at_most: int) -> Evicted | None:
        """One transaction of ``_make_room``; None where others committed meanwhile."""
        environment = self._environment
        with environment.transaction(write=True) as transaction:
            commit = self._begin(transaction)
            if commit is None:
                return None
            commit.touch(self._batch.touches)
            need = self._need(commit)
            limit = environment.limit_bytes(as_it_is=more > 0)
            goal = self._goals.setdefault(more, min(_spared(limit) - need, used_bytes(transaction) - more * need))
            ended = commit.evict(_below(transaction, goal), at_most)
            too_much = used_bytes(transaction) + need > limit
            if ended is Evicted.ALL and (too_much or not (self._evicted or commit.freed)):
                raise _NothingLeftError(str(self._full(need)))
            commit.finish()
        self._evicted += commit.evicted
        if self._seen is not None:
            self._seen = commit.state.cursor
        return ended

    def _begin(self, transaction: Transaction) -> Commit | None:
        """None where others committed after what the caller has seen."""
        commit = Commit(transaction, self._namespace, self._keep)
        return None if self._seen is not None and self._seen != commit.state.cursor else commit

    def _stale(self) -> CommitResult:
        """What was evicted meanwhile is among the changes since then."""
        return CommitResult(self._batch.seen or b"", stale=True)

    def _need(self, commit: Commit) -> int:
        """Bytes of pages that the batch adds, roughly and rather too many; the share for deletions takes the rest."""
        packs = sum(map(_pack_bytes, commit.missing(self._batch.packs)))
        return packs + sum(map(_manifest_bytes, self._batch.manifests))


def _below(transaction: Transaction, goal: int) -> Callable[[], bool]:
    return lambda: used_bytes(transaction) <= goal


def _spared(limit: int) -> int:
    """A limit that leaves room for the commits that follow."""
    return limit - min(limit // 16, _MAX_AHEAD)


def _pack_bytes(pack: PackWriter) -> int:
    frames = sum(-(-len(s.keys) // max(1, FRAME_BYTES // s.block_bytes)) for s in pack.segments)
    table = 64 * frames + len(pack.keys.data) + len(pack.keys.lengths)
    return page_bytes(pack.raw_length + PAGE_BYTES * frames) + 2 * table + _ROWS_BYTES


def _manifest_bytes(write: ManifestWrite) -> int:
    keys = sum(len(keys.data) + len(keys.lengths) for keys in write.keys)
    return 2 * (keys + 160 * len(write.packs)) + _ROWS_BYTES
