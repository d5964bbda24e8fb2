"""Execution of a copy.

1. A request is written in the commit of its last packs, and only if every block that it names is
   there.
2. Content that the target holds is not written. Nothing is written twice: if the target evicts
   copied packs during the copy, they and their requests are only reported.
3. Every pack is verified while it is read. A damaged one is never copied.
4. The quotas of the target apply: content of a tenant that does not fit is left out.
"""

from __future__ import annotations

import msgspec

from persistkv.config import MAX_PACK_BYTES
from persistkv.errors import QuotaExceededError
from persistkv.storage.backend import (
    Backend,
    CommitBatch,
    CommitResult,
    ManifestWrite,
)
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack_writer import PackCopy
from persistkv.storage.inspection.pack_tables import NamespacePacks, all_keys
from persistkv.storage.inspection.requests import request_ids
from persistkv_tools.packs import OnBytes
from persistkv_tools.transfer.plan import Copied, CopyPlan, Source
from persistkv_tools.transfer.room import TargetRoom


def run_plan(
    plan: CopyPlan,
    target: Backend,
    url: str,
    on_bytes: OnBytes,
) -> Copied:
    """Copy the content of a plan, requests oldest first. Other processes may write meanwhile.

    :param url: URL of the target, for errors.
    :param on_bytes: called with the number of bytes of each read of the source.
    :raises StoreTooSmallError: the content does not fit; nothing was written.
    :raises StoreError: a store failed; earlier commits stay in effect, and the next copy skips
        their content.
    """
    # check the room again, because the target may have been filled since the plan was made
    plan.check_room(TargetRoom.of(target), url)
    copied = plan.initial_outcome()
    writers = []
    for source in plan.sources:
        writer = _NamespaceWriter(target, source, copied, on_bytes)
        writers.append(writer)
        _write_source(plan, source, writer)
    # check at the end, because writes to a later namespace may evict packs of an earlier one
    for writer in writers:
        writer.record_losses()
    return copied


def _write_source(
    plan: CopyPlan,
    source: Source,
    writer: _NamespaceWriter,
) -> None:
    """Write the packs and requests of one namespace."""
    # Write packs that no request names first. Packs of requests are used after them, and so they
    # are evicted later.
    for owner, pack in plan.orphans:
        if owner is source:
            writer.add_pack(pack)
    for request in plan.missing:
        if request.source is source:
            writer.add_request(request.manifest)
    writer.flush()


class _NamespaceWriter:
    """Writes to one namespace of the target.

    :param backend: target, open for writing.
    :param source: requests and packs to copy.
    :param copied: outcome of the copy, which each commit updates.
    :param on_bytes: called with the number of bytes of each read of the source.
    """

    def __init__(
        self,
        backend: Backend,
        source: Source,
        copied: Copied,
        on_bytes: OnBytes,
    ) -> None:
        self._backend = backend
        self._source = source
        self._copied = copied
        self._on_bytes = on_bytes
        self._namespace = backend.open_namespace(source.namespace.identity).id
        self._packs = NamespacePacks(backend, self._namespace)
        """Packs that the target holds, and those that wait for the next commit."""
        self._waiting: list[PackCopy] = []
        """Packs for the next commit."""
        self._read_packs: set[bytes] = set()
        """Ids of the source's packs that were read, so that none is read twice."""
        self._written_requests: list[str] = []
        """Ids of the requests that were written."""
        self._written_keys: list[bytes] = []
        """One key of each pack that was written."""
        self._held_requests = self._present()
        """Ids of the requests that the target held before the copy."""

    def add_pack(self, pack: bytes) -> None:
        """Read a pack for the next commit, if the target lacks any of its blocks; only count it if
        it is damaged or gone.

        Packs that wait already are committed first if they would be too large together with it.
        """
        table = self._source.packs.tables[pack]
        if pack in self._read_packs:
            return
        if self._packs.hold_all(table.keys.unpack()):
            return
        # never read a pack twice: one that the target evicts again would be copied for ever
        self._read_packs.add(pack)
        payload = self._source.read(table, self._on_bytes)
        if payload is None:
            self._copied.damaged_packs += 1
            return
        waiting_bytes = sum(waiting.raw_length for waiting in self._waiting)
        if waiting_bytes + table.raw_length > MAX_PACK_BYTES:
            self.flush()
        copy = PackCopy(table, payload, self._backend.seal)
        self._waiting.append(copy)
        # the pack counts as held from now on, under the id that it gets in the target
        copied = msgspec.structs.replace(table, pack_id=copy.pack_id)
        self._packs.add(copied)

    def add_request(self, manifest: RequestManifest) -> None:
        """Commit a request with those of its packs that the target lacks, and with other waiting
        packs. If it is held already, or incomplete, it is only counted."""
        if manifest.id in self._held_requests:
            self._copied.requests_held += 1
            return
        keys = self._source.keys(manifest.id)
        if keys is not None:
            for pack in self._source.packs.in_order(keys):
                self.add_pack(pack)
        # Some blocks are missing if a pack is damaged, or was evicted by source or target
        # meanwhile. The request would name blocks that nobody can load.
        if keys is None or not self._packs.hold_all(all_keys(keys)):
            self._copied.incomplete.append(manifest.id)
            return
        packs = self._packs.in_order(keys)
        self._commit([ManifestWrite(manifest, keys, packs)])

    def flush(self) -> None:
        """Commit the packs that wait."""
        if self._waiting:
            self._commit([])

    def record_losses(self) -> None:
        """Record which of the written requests and packs the target no longer holds."""
        self._packs.refresh()
        held = self._present()
        for name in self._written_requests:
            if name not in held:
                self._copied.lost.append(name)
        for key in self._written_keys:
            if not self._packs.hold_all([key]):
                self._copied.lost_packs += 1

    def _present(self) -> set[str]:
        """Return the ids of the requests that the target holds now."""
        return set(request_ids(self._backend, self._namespace))

    def _commit(self, manifests: list[ManifestWrite]) -> None:
        """Commit the packs that wait, and these requests; leave out content of tenants whose quota
        it does not fit."""
        batch = CommitBatch(self._waiting, manifests)
        self._waiting = []
        while batch.packs or batch.manifests:
            try:
                result = self._backend.commit(self._namespace, batch)
            except QuotaExceededError as error:
                # this attempt has written nothing: repeat it without the tenant's content
                batch = self._without_tenant(batch, error.tenant)
                continue
            self._count_written(batch, result)
            # Remove the packs that were added in advance: the commit may have evicted some at once.
            # The refresh below adds those that the target holds.
            for pack in batch.packs:
                self._packs.remove(pack.pack_id)
            break
        self._packs.refresh()

    def _without_tenant(self, batch: CommitBatch, tenant: str) -> CommitBatch:
        """Return the batch without the content of a tenant, whose quota it exceeds; count this
        content as not copied."""
        packs = []
        for pack in batch.packs:
            if pack.tenant != tenant:
                packs.append(pack)
                continue
            self._copied.refused_packs += 1
            self._packs.remove(pack.pack_id)
        manifests = []
        for write in batch.manifests:
            if write.manifest.tenant != tenant:
                manifests.append(write)
                continue
            self._copied.incomplete.append(write.manifest.id)
        return CommitBatch(packs, manifests)

    def _count_written(self, batch: CommitBatch, result: CommitResult) -> None:
        """Count the content that a commit has written."""
        self._copied.packs += len(batch.packs)
        self._copied.evicted_packs += len(result.evicted)
        for pack in batch.packs:
            self._copied.stored_bytes += pack.table.payload_length
            # ``record_losses`` looks for this key. The id of the pack would not do, because another
            # pack with the same blocks may replace this one.
            first_key = pack.keys.unpack()[0]
            self._written_keys.append(first_key)
        for write in batch.manifests:
            self._written_requests.append(write.manifest.id)
            self._copied.requests += 1
