"""Resuming what a crash cut off: requests that a nearer store of the same engine holds, and this one lacks.

An engine with several stores gives what it computes to each of them. When everything dies while one of them still
writes, the nearer one has it all. So once after a start the newest requests there are looked at, and packs are copied
from it, as they are.

1. It is bounded: the requests of the last hour that the nearer store saw, so many of them, and so many bytes.
2. It stands back: one pack a turn, and no turn while anything else is to be written.
3. What it leaves out is no loss: whoever uses it has it written here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from persistkv.errors import CorruptPackError, PersistKVError
from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite, ReadSpan
from persistkv.storage.catalogue import Catalogue
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.medium import Medium
from persistkv.storage.pack import PackTable, frame_seed, verify_frame
from persistkv.storage.registry import open_backend
from persistkv.storage.stored_pack import StoredPack

logger = logging.getLogger(__name__)

_RECENT_S = 3600.0
_MOST_REQUESTS = 256
_MOST_BYTES = 4 << 30  # 4 GiB
_PAUSE_S = 15.0
_ATTEMPTS = 40


@dataclass
class _Request:
    """A request of the nearer store."""

    manifest: RequestManifest
    keys: ManifestKeys
    blocks: list[bytes]
    """Its keys, the ones nearest to the begin of the context first, all groups beside each other."""
    packs: deque[PackTable] = field(default_factory=deque)
    """Those that are left to be copied."""


class Resumption:
    """See the top of this file. Its turns are begun with ``Executor.begin_write``."""

    def __init__(self, medium: Medium, catalogue: Catalogue, url: str) -> None:
        """:param url: the nearer store, which is only read."""
        self._medium = medium
        self._catalogue = catalogue
        self._url = url
        self._near: Backend | None = None
        self._requests: deque[_Request] | None = None
        self._ended = False
        self._attempts_left = _ATTEMPTS
        self._not_before = 0.0
        self.copied_bytes = 0
        """Of payload."""

    @property
    def seconds_to_turn(self) -> float | None:
        """How long until the next turn is to be begun; None: there is nothing left to do."""
        return None if self._ended else max(0.0, self._not_before - time.monotonic())

    async def turn(self) -> None:
        """Do the next piece of it. A failure is tried again a while later, some times."""
        if self._ended:
            return
        try:
            if self._requests is None:
                await self._survey()
            else:
                await self._go_on(self._requests)
        except PersistKVError as error:
            self._attempts_left -= 1
            self._not_before = time.monotonic() + _PAUSE_S
            if not self._attempts_left:
                logger.warning("what a crash may have cut off is not copied from %s (%s)", self._where, error)
                self.stop()

    @property
    def _where(self) -> str:
        return self._url.partition("?")[0]

    def stop(self) -> None:
        """Begin no turn any more."""
        self._ended = True

    def close(self) -> None:
        """Let go of the nearer store. No turn may run."""
        self.stop()
        if self._near is not None:
            self._near.close()
            self._near = None

    async def _survey(self) -> None:
        write, index = self._medium.executor.write, self._catalogue.index
        if self._near is None:
            self._near = await write(partial(open_backend, self._url, read_only=True))
        found = await write(partial(_newest, self._near, self._medium.namespace))
        lacking = [request for request in found if not all(key in index for key in request.blocks)]
        wanted = {key for request in lacking for key in request.blocks if key not in index}
        packs = await write(partial(_packs_of, self._near, self._medium.namespace, wanted)) if wanted else {}
        for request in lacking:
            held = {packs[key].pack_id: packs[key] for key in request.blocks if key in packs}
            request.packs.extend(held.values())
        self._requests = deque(lacking)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._requests or self.copied_bytes >= _MOST_BYTES:
            if self.copied_bytes:
                logger.info("%d bytes that a crash had cut off were copied from %s", self.copied_bytes, self._where)
            self.stop()

    async def _go_on(self, requests: deque[_Request]) -> None:
        """A pack, or the end of a request."""
        request = requests[0]
        if not request.packs:
            await self._write_manifest(request)
            requests.popleft()
        else:
            await self._copy(request.packs[0])
            request.packs.popleft()
        self._end_if_done()

    async def _copy(self, table: PackTable) -> None:
        index, near = self._catalogue.index, self._near
        if near is None or all(key in index for key in table.keys.unpack()):
            return
        pack = await self._medium.executor.write(partial(_read, near, table))
        if pack is not None:
            await self._commit(CommitBatch([pack]))
            self.copied_bytes += pack.payload_length

    async def _write_manifest(self, request: _Request) -> None:
        """Only where all that it names is here."""
        index = self._catalogue.index
        packs = [pack.pack_id for key in request.blocks if (pack := index.pack_of(key)) is not None]
        if len(packs) == len(request.blocks):
            write = ManifestWrite(request.manifest, request.keys, list(dict.fromkeys(packs)))
            await self._commit(CommitBatch(manifests=[write]))

    async def _commit(self, batch: CommitBatch) -> None:
        result = await self._medium.commit(batch)
        await self._catalogue.committed(batch.packs, result, followed=False)


def _newest(near: Backend, namespace: bytes) -> list[_Request]:
    """The newest requests that the store holds, newest first; none where it knows no such namespace."""
    if namespace not in [held.id for held in near.namespaces()]:
        return []
    manifests = sorted(near.manifests(namespace), key=lambda manifest: manifest.created, reverse=True)
    since = manifests[0].created - _RECENT_S if manifests else 0.0
    found = []
    for manifest in manifests[:_MOST_REQUESTS]:
        keys = near.manifest_keys(namespace, manifest.id) if manifest.created >= since else None
        if keys is not None:
            found.append(_Request(manifest, keys, _in_order(keys)))
    return found


def _in_order(keys: ManifestKeys) -> list[bytes]:
    depths = [(depth, key) for group in keys for depth, key in enumerate(group.unpack())]
    return [key for _, key in sorted(depths, key=lambda pair: pair[0])]


def _packs_of(near: Backend, namespace: bytes, wanted: Collection[bytes]) -> dict[bytes, PackTable]:
    """For each of the keys, a pack that holds it."""
    return {key: table for table in near.changes(namespace, None).added for key in table.keys.unpack() if key in wanted}


def _read(near: Backend, table: PackTable) -> StoredPack | None:
    """A pack; None where it is gone, does not verify, or is of another release."""
    payload = bytearray(table.payload_length)
    view = memoryview(payload)
    if near.read(table.namespace, [ReadSpan(table.pack_id, 0, [view])]) != [True]:
        return None
    keys = table.keys.unpack()
    ends = accumulate(frame.block_count for frame in table.frames)
    try:
        for frame, end in zip(table.frames, ends, strict=True):
            seed = frame_seed(table.namespace, b"".join(keys[end - frame.block_count : end]))
            verify_frame(frame, view[frame.offset : frame.offset + frame.stored_length], seed)
        return StoredPack(table, payload)
    except CorruptPackError:
        return None
