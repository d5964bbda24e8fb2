"""Deletion of single blocks from a namespace.

Packs are immutable and hold many blocks, so a pack with other blocks is replaced by a new one
without the deleted blocks.

Two processes may replace the same pack, each without its own keys: both new packs would hold what
the other process has deleted. So one commit writes the new pack and deletes the old one, if it is
still held; otherwise the deletion begins again. If more than 64 requests name the old pack, their
manifests need several commits: the first one writes the new pack, and the last one deletes the old
one. A deletion by another process between them can be undone by the new pack.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from persistkv.errors import StoreError, TenantForgottenError
from persistkv.memory.rows import ByteArray, StagedBlocks, runs
from persistkv.memory.scattered import ScatteredBlocks
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack import UNKNOWN_DEPTH, PackedKeys
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.records import StoreCounters, StoreOptions
from persistkv.storage.store.commit_queue import CommitQueue
from persistkv.storage.store.committer import Committer
from persistkv.storage.store.index import HeldPack
from persistkv.storage.store.loading import Loader
from persistkv.storage.store.manifests import (
    SHORTENED_AT_ONCE,
    NamedRequest,
    keys_of_requests,
    read_requests,
    shortening_batch,
)
from persistkv.storage.store.namespace_view import NamespaceView

_MOST_ATTEMPTS = 10
"""Bound on the attempts to delete, and to commit a replacement, while other processes replace the
same packs."""


class Deleter:
    """Deletes blocks of one namespace: deletes or replaces the packs that hold them. For the tasks
    of one event loop."""

    def __init__(
        self,
        view: NamespaceView,
        committer: Committer,
        queue: CommitQueue,
        options: StoreOptions,
        make_writer: Callable[[Sequence[Section], str], PackWriter],
    ) -> None:
        """:param make_writer: returns a new pack of these blocks of a tenant."""
        self._view = view
        self._committer = committer
        self._make_writer = make_writer
        self._memory = ScatteredBlocks(view.block_bytes)
        """Buffers for the blocks that are kept, while they are read."""
        # give it counters of its own, because these blocks are not loaded for the engine
        self._loader = Loader(
            view,
            self._memory,
            queue,
            StoreCounters(),
            options,
            sources=lambda: [view],
        )

    async def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Delete blocks from all packs that hold them; return the keys that were held. See
        ``Store.delete``."""
        # wait until no task changes the catalogue
        async with self._committer.turn:
            try:
                return await self._delete_everywhere(frozenset(keys))
            except TenantForgottenError as error:
                # the backend raises this once only, so the accepted content must be dropped now
                self._committer.forget(error.tenants)
                raise
            finally:
                # have the owner of the store publish the changed index and the report
                self._committer.changed.set()

    async def _delete_everywhere(self, keys: frozenset[bytes]) -> set[bytes]:
        """Delete the packs that hold any of the keys, until none is left; return the keys that were
        held."""
        deleted: set[bytes] = set()
        for _ in range(_MOST_ATTEMPTS):
            await self._refresh()
            packs = await self._view.packs_with(keys)
            # ``needs_repair``: the table of a pack could not be read. Perhaps another process has
            # replaced the pack during the search, which has then missed the new pack.
            if not packs and not self._view.needs_repair:
                return deleted
            for pack in packs:
                deleted.update(keys.intersection(pack.keys))
            await self._delete_from_packs(packs, keys)
        raise StoreError(
            f"other processes replaced or stored the blocks during {_MOST_ATTEMPTS} attempts to "
            f"delete them"
        )

    async def _delete_from_packs(
        self, packs: Sequence[HeldPack], keys: frozenset[bytes]
    ) -> None:
        """Delete blocks from packs: delete a pack if it holds no others, else replace it by a new
        one. A pack that another process replaces meanwhile is left."""
        whole_packs: list[HeldPack] = []
        other_packs: list[HeldPack] = []
        for pack in packs:
            chosen = whole_packs if keys.issuperset(pack.keys) else other_packs
            chosen.append(pack)
        if whole_packs:
            # no new pack, because no block is kept
            await self._replace(whole_packs, writer=None, keys=keys)
        # one pack at a time, because the blocks that are kept need memory
        for pack in other_packs:
            await self._rewrite_without(pack, keys)

    async def _rewrite_without(self, pack: HeldPack, keys: frozenset[bytes]) -> None:
        """Replace a pack by one without these keys."""
        try:
            sections = await self._kept_sections(pack, keys)
        except StoreError:
            # If another process has replaced the pack meanwhile, its bytes are gone. That is no
            # error: the caller searches again, and finds the new pack.
            await self._refresh()
            if await self._may_be_held([pack.pack_id], keys):
                raise
            return
        writer = None
        if sections:
            writer = self._make_writer(sections, pack.table.tenant)
        try:
            await self._replace([pack], writer, keys)
        finally:
            if writer is not None:
                writer.release()

    async def _kept_sections(
        self,
        pack: HeldPack,
        keys: Collection[bytes],
    ) -> list[Section]:
        """Read the blocks of a pack that are kept; return them as copies, in sections.

        :raises StoreError: a block could not be read and verified.
        """
        sections: list[Section] = []
        start = 0
        for frame in pack.table.frames:
            of_frame = pack.keys[start : start + frame.block_count]
            start += frame.block_count
            kept = [place for place, key in enumerate(of_frame) if key not in keys]
            if not kept:
                continue
            # consecutive blocks stay in one frame; ``first`` and ``stop`` count within the old
            # frame
            for first, stop in runs(kept):
                run_keys = of_frame[first:stop]
                blocks = await self._read_kept(run_keys, frame.block_bytes)
                depth = frame.depth
                if depth != UNKNOWN_DEPTH:
                    depth += first
                section = Section(
                    group=frame.group,
                    block_bytes=frame.block_bytes,
                    keys=run_keys,
                    source=StagedBlocks([blocks]),
                    depth=depth,
                )
                sections.append(section)
        return sections

    async def _read_kept(self, keys: Sequence[bytes], block_bytes: int) -> ByteArray:
        """Return blocks as an array of shape (len(keys), block_bytes)."""
        blocks = np.empty((len(keys), block_bytes), np.uint8)
        # the loader fills places by number; here, each place is one row of the array
        views = [[block.data] for block in blocks]
        places = self._memory.add(views)
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
        keys: frozenset[bytes],
    ) -> None:
        """Delete packs, write the new pack with their other blocks, if there are any, and remove
        the keys from the manifests that name the packs: in one commit, unless there are many
        manifests.

        If another process has deleted one of the packs, write nothing: ``_delete_everywhere``
        searches again.

        :param writer: the new pack, with all other blocks of ``packs``; None: there are none.
        """
        new_packs: list[PackWriter] = []
        new_id = b""
        if writer is not None:
            new_packs.append(writer)
            new_id = writer.pack_id
        old_ids = [pack.pack_id for pack in packs]
        replaced = dict.fromkeys(old_ids, new_id)
        for _ in range(_MOST_ATTEMPTS):
            if await self._try_replace(replaced, new_packs, keys, is_checked=True):
                return
        # Other processes commit so often that each check fails. Go on without it: it is unlikely
        # that one of them deletes blocks of the same packs at this moment.
        await self._try_replace(replaced, new_packs, keys, is_checked=False)

    async def _try_replace(
        self,
        replaced: Mapping[bytes, bytes],
        new_packs: Sequence[PackWriter],
        keys: Collection[bytes],
        *,
        is_checked: bool,
    ) -> bool:
        """Replace packs as ``_replace`` does. Return True if this process has deleted them, or
        another one has deleted one of them; False: the check failed, and they may still be held.

        :param replaced: id of each pack to delete → id of the new pack with its other blocks; empty
            bytes: it has no other blocks.
        :param is_checked: whether the backend refuses to delete the packs if another process has
            deleted one of them since they were looked up. Some drivers refuse it after any commit
            of another process.
        """
        cursor = await self._refresh()
        if not await self._may_be_held(replaced, keys):
            return True
        batches = await self._replacing_commits(replaced, keys)
        if is_checked:
            # check in the last commit, which deletes the packs; earlier ones only write manifests
            last = batches[-1]
            batches[-1] = replace(last, seen=cursor, needs=list(replaced))
        # write the new packs in the first batch, because manifests of all batches may name them
        batches[0] = replace(batches[0], packs=new_packs)
        for batch in batches:
            result = await self._view.commit(batch)
            if result.stale:
                return False
            # Do not follow the cursor: the refresh that takes place instead also removes the
            # deleted packs from the index.
            await self._view.apply_own_commit(batch.packs, result, follows_cursor=False)
        return True

    async def _refresh(self) -> bytes | None:
        """Apply the changes of other processes to the index. Return the position in the change log
        up to which it is complete; None: unknown."""
        await self._view.refresh()
        # the index lacks packs whose read has failed until ``repair`` has decided about them
        await self._view.repair()
        return self._view.cursor

    async def _may_be_held(
        self,
        pack_ids: Iterable[bytes],
        keys: Collection[bytes],
    ) -> bool:
        """Return False if the store lacked one of these packs at the last refresh.

        :param keys: the keys to delete. Each of the packs holds at least one, so a search for the
            keys finds the packs.
        """
        if self._view.needs_repair:
            # some packs are undecided: the store may hold them although the index lacks them
            return True
        packs = await self._view.packs_with(keys)
        held = {pack.pack_id for pack in packs}
        return held.issuperset(pack_ids)

    async def _replacing_commits(
        self,
        replaced: Mapping[bytes, bytes],
        keys: Collection[bytes],
    ) -> list[CommitBatch]:
        """Return the commits that replace packs: they rewrite the manifests that name these packs,
        without the deleted keys, and the last one deletes the packs.

        A manifest without any key left is not written: it is deleted with the packs, which it still
        names.

        :param replaced: id of each pack to delete → id of the new pack with its other blocks; empty
            bytes: it has no other blocks.
        :param keys: the deleted keys.
        :returns: at least one.
        """
        view = self._view
        backend = view.backend
        packs = list(replaced)
        queries = await view.call(partial(backend.catalogue, view.namespace))
        # heads of manifests; their keys are read below, for 64 manifests at a time
        heads = await view.call(partial(queries.manifests_naming, packs))
        batches: list[CommitBatch] = []
        for start in range(0, len(heads), SHORTENED_AT_ONCE):
            some = heads[start : start + SHORTENED_AT_ONCE]
            read = partial(read_requests, backend, view.namespace, some)
            named = await view.call(read)
            requests = [_request_without(request, keys) for request in named]
            # a rewritten manifest names the packs that hold its keys after the replacement
            pack_of = await self._packs_after(replaced, keys_of_requests(requests))
            # None: no check for other commits; ``_try_replace`` adds the check to the last batch
            batch = shortening_batch(requests, pack_of, view.block_bytes, seen=None)
            batches.append(batch)
        if not batches:
            batches.append(CommitBatch())
        # The packs are listed as ``bad``, although their bytes are good: both ``bad`` and
        # ``deletions`` delete the old manifests that name them. ``deletions`` would also delete the
        # packs that follow in these manifests; ``bad`` keeps them.
        batches[-1] = replace(batches[-1], bad=packs)
        return batches

    async def _packs_after(
        self,
        replaced: Mapping[bytes, bytes],
        keys: Sequence[bytes],
    ) -> dict[bytes, bytes]:
        """Return, for each key that is held after the replacement of packs, the id of its pack.

        :param replaced: id of each deleted pack → id of the new pack with its other blocks; empty
            bytes: it has no other blocks.
        """
        found = await self._view.pack_of(keys)
        pack_of: dict[bytes, bytes] = {}
        for key, pack_id in found.items():
            kept_in = replaced.get(pack_id, pack_id)
            if kept_in:  # empty if the pack is deleted without a replacement
                pack_of[key] = kept_in
        return pack_of


def _request_without(request: NamedRequest, keys: Collection[bytes]) -> NamedRequest:
    """Return a request without these keys."""
    groups = []
    for group in request.keys:
        kept = [key for key in group.unpack() if key not in keys]
        groups.append(PackedKeys.of(kept))
    return request._replace(keys=tuple(groups))
