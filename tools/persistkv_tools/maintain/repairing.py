"""``verify --repair``: bad packs leave a store as they do where an engine reads them.

1. A pack goes only if it is bad still when nothing happened between that look and the commit.
2. The requests that name it are shortened, in the same commit, to what stands before it. One of which nothing is left
   goes. What stands behind the pack stays, to be reached again once the pack's blocks were computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.ending import ManifestMaker
from persistkv.storage.index import Index
from persistkv.storage.pack import PackTable
from persistkv.storage.shortening import NamedRequest, removal, requests_naming
from persistkv_tools.catalogue import LivePacks
from persistkv_tools.pack_check import Finding, check_pack

_ATTEMPTS = 100


class PlannedPack(msgspec.Struct, frozen=True):
    """A bad pack that is to be deleted."""

    namespace: str
    pack: str
    blocks: int
    stored_bytes: int


class PlannedRequest(msgspec.Struct, frozen=True):
    """A request that names bad packs."""

    namespace: str
    request: str
    blocks: int
    kept_blocks: int
    """Blocks before the first bad pack. 0: the request is to be deleted."""


class RepairPlan(msgspec.Struct, frozen=True):
    """Packs to delete and their requests."""

    packs: list[PlannedPack]
    requests: list[PlannedRequest]
    blocks: int
    """Of the packs."""
    stored_bytes: int


class Repaired(msgspec.Struct):
    """What a repair did."""

    packs: list[bytes] = []
    """Ids of those that it deleted."""
    shortened: set[tuple[bytes, str]] = set()
    """Namespaces and ids of requests of which something is left."""
    deleted: set[tuple[bytes, str]] = set()
    """Of those of which nothing is."""


def plan_repair(backend: Backend, spaces: Iterable[LivePacks], findings: Iterable[Finding]) -> RepairPlan:
    """Return what deleting the packs that were found bad takes with it, by what the store holds now.

    :raises StoreError: the medium failed.
    """
    packs: list[PlannedPack] = []
    requests: list[PlannedRequest] = []
    bad = {bytes.fromhex(found.pack) for found in findings if found.pack}
    for space in spaces:
        space.refresh()
        doomed = sorted(bad & space.tables.keys())
        if doomed:
            name = space.namespace.hex()
            for pack in doomed:
                table = space.tables[pack]
                packs.append(PlannedPack(name, pack.hex(), len(table.keys), table.payload_length))
            requests += _planned_requests(backend, space, doomed)
    return RepairPlan(packs, requests, sum(pack.blocks for pack in packs), sum(pack.stored_bytes for pack in packs))


def _planned_requests(backend: Backend, space: LivePacks, doomed: Sequence[bytes]) -> Iterator[PlannedRequest]:
    kept = {write.manifest.id: write.manifest.blocks for write in _removal(backend, space, doomed).manifests}
    for head in backend.manifests_naming(space.namespace, doomed):
        yield PlannedRequest(space.namespace.hex(), head.id, head.blocks, kept.get(head.id, 0))


def repair(
    backend: Backend, spaces: Iterable[LivePacks], findings: Iterable[Finding], took: Callable[[int], None]
) -> Repaired:
    """Delete the packs that were found bad, and still are.

    :param took: called with the bytes of each read.
    :raises StoreError: a deletion failed, or others wrote all the time; those before it were done.
    """
    bad = sorted({(found.namespace, found.pack) for found in findings if found.namespace and found.pack})
    done = Repaired()
    for space in spaces:
        for namespace, pack in bad:
            if namespace == space.namespace.hex():
                _delete(backend, space, bytes.fromhex(pack), done, took)
    return done


def _delete(backend: Backend, space: LivePacks, pack_id: bytes, done: Repaired, took: Callable[[int], None]) -> None:
    name = space.namespace
    for _ in range(_ATTEMPTS):
        space.refresh()
        table = space.tables.get(pack_id)
        if table is None or not check_pack(backend, table, took):
            return
        named = {(name, head.id) for head in backend.manifests_naming(name, [pack_id])}
        batch = _removal(backend, space, [pack_id])
        if not backend.commit(name, batch).stale:
            shorter = {(name, write.manifest.id) for write in batch.manifests}
            done.packs.append(pack_id)
            done.shortened = (done.shortened - named) | shorter
            done.deleted |= named - shorter
            return
    raise StoreError(f"pack {pack_id.hex()} could not be deleted: others wrote between each look and the commit")


def _removal(backend: Backend, space: LivePacks, bad: Sequence[bytes]) -> CommitBatch:
    """The commit that takes packs out of the store, as of the last look."""
    requests = requests_naming(backend, space.namespace, bad)
    tables = _tables_of(requests, [table for table in space.tables.values() if table.pack_id not in bad])
    return removal(bad, requests, _maker(requests, tables), space.cursor)


def _tables_of(requests: Iterable[NamedRequest], tables: list[PackTable]) -> list[PackTable]:
    """Those that hold blocks of the requests: an index of them all would take as much memory as an engine's."""
    wanted = {key for request in requests for group in request.keys for key in group.unpack()}
    return [table for table in tables if not wanted.isdisjoint(table.keys.unpack())]


def _maker(requests: Iterable[NamedRequest], tables: Iterable[PackTable]) -> ManifestMaker:
    index, sizes = Index(), dict[int, int]()
    for table in tables:
        index.add(table)
        sizes.update((frame.group, frame.block_bytes) for frame in table.frames)
    groups = max((len(request.keys) for request in requests), default=0)
    return ManifestMaker(index, [sizes.get(group, 0) for group in range(groups)], ())
