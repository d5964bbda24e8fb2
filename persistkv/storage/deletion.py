"""Deletion of single blocks from a namespace.

Packs are immutable and hold many blocks, so a pack with other blocks is replaced: the others are
written to a new pack before the old one is deleted. A process that dies between the two steps
leaves the deleted blocks readable, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from persistkv.errors import StoreError
from persistkv.memory.rows import ByteArray, StagedBlocks, runs
from persistkv.memory.scattered import ScatteredBlocks
from persistkv.storage.backend import CommitBatch
from persistkv.storage.commit_queue import CommitQueue
from persistkv.storage.committer import Committer
from persistkv.storage.format.pack import UNKNOWN_DEPTH, PackedKeys
from persistkv.storage.format.pack_writer import PackWriter, Segment
from persistkv.storage.index import HeldPack
from persistkv.storage.loading import Loader
from persistkv.storage.namespace_view import (
    SHORTENED_AT_ONCE,
    NamedRequest,
    NamespaceView,
    read_requests,
    shortened,
)
from persistkv.storage.records import StoreCounters, StoreOptions


class Deleter:
    """Deletes blocks of one namespace. For the tasks of one event loop."""

    def __init__(
        self,
        catalogue: NamespaceView,
        committer: Committer,
        queue: CommitQueue,
        options: StoreOptions,
        make_writer: Callable[[Sequence[Segment]], PackWriter],
    ) -> None:
        """:param make_writer: returns a new pack of these blocks."""
        self._catalogue = catalogue
        self._committer = committer
        self._make_writer = make_writer
        self._memory = ScatteredBlocks(catalogue.block_bytes)
        # counters of its own: the engine does not load these blocks
        self._loader = Loader(
            catalogue,
            self._memory,
            queue,
            StoreCounters(),
            options,
            lambda: [catalogue],
        )

    async def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Delete blocks from all packs that hold them; return the keys that were held. See
        ``Store.delete``."""
        async with self._committer.turn:
            try:
                await self._catalogue.refresh()
                return await self._delete(frozenset(keys))
            finally:
                # the owner has to learn of the deletions
                self._committer.changed.set()

    async def _delete(self, keys: frozenset[bytes]) -> set[bytes]:
        packs = await self._catalogue.packs_with(keys)
        deleted: set[bytes] = set()
        whole: list[HeldPack] = []
        for pack in packs:
            deleted.update(keys.intersection(pack.keys))
            if keys.issuperset(pack.keys):
                whole.append(pack)
        if whole:
            await self._replace(whole, None, keys)
        # one by one: each needs memory for the blocks that are kept
        for pack in packs:
            if pack not in whole:
                await self._rewrite(pack, keys)
        return deleted

    async def _rewrite(self, pack: HeldPack, keys: Collection[bytes]) -> None:
        """Replace a pack by one without these keys."""
        segments = await self._kept_segments(pack, keys)
        writer = self._make_writer(segments) if segments else None
        try:
            await self._replace([pack], writer, keys)
        finally:
            if writer is not None:
                writer.release()

    async def _kept_segments(
        self, pack: HeldPack, keys: Collection[bytes]
    ) -> list[Segment]:
        """Read the blocks of a pack that are kept.

        :raises StoreError: a block could not be read and verified.
        """
        segments: list[Segment] = []
        start = 0
        for frame in pack.table.frames:
            of_frame = pack.keys[start : start + frame.block_count]
            start += frame.block_count
            kept = [place for place, key in enumerate(of_frame) if key not in keys]
            # consecutive blocks stay in one frame
            for first, stop in runs(kept) if kept else ():
                blocks = await self._read(of_frame[first:stop], frame.block_bytes)
                depth = frame.depth
                if depth != UNKNOWN_DEPTH:
                    depth += first
                segments.append(
                    Segment(
                        frame.group,
                        frame.block_bytes,
                        of_frame[first:stop],
                        StagedBlocks([blocks]),
                        depth,
                    )
                )
        return segments

    async def _read(self, keys: Sequence[bytes], block_bytes: int) -> ByteArray:
        """Return blocks as an array of shape (len(keys), block_bytes)."""
        blocks = np.empty((len(keys), block_bytes), np.uint8)
        places = self._memory.add([block.data] for block in blocks)
        try:
            outcome = await self._loader.read(keys, places)
        finally:
            self._memory.remove(places)
        if outcome.failed:
            raise StoreError(
                f"{len(outcome.failed)} other blocks of a pack cannot be read: it is not deleted"
            )
        return blocks

    async def _replace(
        self,
        packs: Sequence[HeldPack],
        writer: PackWriter | None,
        keys: Collection[bytes],
    ) -> None:
        """Write a pack, if there is one, then delete others, and remove the keys from the manifests
        that name them."""
        replaced = {pack.pack_id: b"" for pack in packs}
        if writer is not None:
            await self._commit(CommitBatch([writer]), [writer])
            for pack in packs:
                replaced[pack.pack_id] = writer.pack_id
        for batch in await self._manifests_without(replaced, keys):
            await self._commit(batch, [])

    async def _manifests_without(
        self, replaced: Mapping[bytes, bytes], keys: Collection[bytes]
    ) -> list[CommitBatch]:
        """Return the commits that write the manifests of these packs without the deleted keys. The
        last one deletes the packs.

        :param replaced: id of each pack → id of the pack with its other blocks; empty: none.
        """
        catalogue, backend = self._catalogue, self._catalogue.backend
        packs = list(replaced)
        queries = await catalogue.call(partial(backend.catalogue, catalogue.namespace))
        heads = await catalogue.call(partial(queries.manifests_naming, packs))
        batches: list[CommitBatch] = []
        for start in range(0, len(heads), SHORTENED_AT_ONCE):
            some = heads[start : start + SHORTENED_AT_ONCE]
            read = partial(read_requests, backend, catalogue.namespace, some)
            requests = [_without(named, keys) for named in await catalogue.call(read)]
            found = await catalogue.pack_of(_all_keys(requests))
            pack_of: dict[bytes, bytes] = {}
            for key, pack_id in found.items():
                kept_in = replaced.get(pack_id, pack_id)
                if kept_in:
                    pack_of[key] = kept_in
            batches.append(shortened(requests, pack_of, catalogue.block_bytes, None))
        last = batches.pop() if batches else CommitBatch()
        # not ``deletions``: packs after them in their manifests are kept
        batches.append(CommitBatch(manifests=last.manifests, pins=last.pins, bad=packs))
        return batches

    async def _commit(self, batch: CommitBatch, writers: Sequence[PackWriter]) -> None:
        """Commit, and apply the result to the index.

        :raises StoreError: the commit failed.
        """
        result = await self._catalogue.commit(batch)
        await self._catalogue.committed(writers, result, followed=False)


def _without(request: NamedRequest, keys: Collection[bytes]) -> NamedRequest:
    """Return a request without these keys."""
    groups = []
    for group in request.keys:
        kept = [key for key in group.unpack() if key not in keys]
        groups.append(PackedKeys.of(kept))
    return request._replace(keys=tuple(groups))


def _all_keys(requests: Iterable[NamedRequest]) -> list[bytes]:
    """Return the keys of requests, each once."""
    keys: dict[bytes, None] = {}
    for request in requests:
        for group in request.keys:
            keys.update(dict.fromkeys(group.unpack()))
    return list(keys)
