"""Plan of a copy: the content of a store that another one lacks, and whether it fits there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from persistkv.config import StoreUrl, with_option
from persistkv.errors import PersistKVError
from persistkv.storage import BACKENDS
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.inspection.pack_tables import NamespacePacks, all_keys
from persistkv.storage.inspection.requests import request_ids
from persistkv_tools import render
from persistkv_tools.packs import OnBytes, UnknownCodecError, checked_pieces
from persistkv_tools.transfer.room import TargetRoom, capacity_for, store_bytes


class StoreTooSmallError(PersistKVError):
    """The capacity of a store has no room for the content to copy; nothing was written."""


class Copied(msgspec.Struct):
    """Outcome of a copy."""

    packs: int = 0
    """Number of packs that were copied."""
    stored_bytes: int = 0
    """Payload bytes of ``packs``."""
    requests: int = 0
    """Number of requests that were copied."""
    packs_held: int = 0
    """Number of packs that were not copied, because the target held all their blocks already."""
    requests_held: int = 0
    """Number of requests that were not copied, because the target held them already."""
    evicted_packs: int = 0
    """Packs that the commits of the copy evicted from the target, whether they were copied by it or
    not."""
    damaged_packs: int = 0
    """Number of packs that were not copied, because they are damaged, gone, or of a codec that this
    release does not know."""
    refused_packs: int = 0
    """Number of packs that were not copied, because they do not fit the quota of their tenant in
    the target."""
    incomplete: list[str] = []
    """Ids of requests that were not copied, because some of their blocks are damaged or gone, or do
    not fit a quota."""
    lost: list[str] = []
    """Ids of requests that were copied, and that the target no longer held at the end."""
    lost_packs: int = 0
    """Number of packs that were copied, and that the target no longer held at the end."""

    @property
    def complete(self) -> bool:
        """Whether the target holds all requests and packs that were to be copied."""
        left_out = self.incomplete or self.damaged_packs or self.refused_packs
        return not (left_out or self.lost or self.lost_packs)


class Source:
    """Requests and packs of one namespace of a store, to be copied."""

    def __init__(
        self,
        backend: Backend,
        namespace: Namespace,
        requests: Iterable[RequestManifest],
    ) -> None:
        self.namespace = namespace
        self.packs = NamespacePacks(backend, namespace.id)
        """All packs of the namespace, as of now."""
        self.requests = sorted(requests, key=_age_order)
        """Requests to copy, the oldest first."""
        self._backend = backend

    def keys(self, request: str) -> ManifestKeys | None:
        """Return the keys of a request by its id; None if they are gone or damaged."""
        return self._backend.manifest_keys(self.namespace.id, [request])[0]

    def read(self, table: PackTable, on_bytes: OnBytes) -> bytearray | None:
        """Return the verified payload of a pack; None if it is damaged, gone, or of an unknown
        codec."""
        payload = bytearray()
        is_damaged = False
        try:
            for stored, defects in checked_pieces(self._backend, table, on_bytes):
                payload += stored
                is_damaged |= bool(defects)
                del stored  # a piece at a time is in memory
        except UnknownCodecError:
            return None
        return None if is_damaged else payload


class Missing(NamedTuple):
    """A request that the target lacks."""

    source: Source
    manifest: RequestManifest
    packs: list[bytes]
    """Ids of the packs that hold a block of the request, and some block that the target lacks."""


class CopyTarget(NamedTuple):
    """Where a copy is written."""

    url: str
    """URL to open the target with. For a new target, it may name a capacity that holds the
    content."""
    capacity: int | None
    """Bytes; None: unlimited."""


class CopyPlan:
    """The content of sources that a target lacks.

    :param target: open for reading; None: it does not exist yet.
    :param everything: also copy packs that no request names.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        target: Backend | None,
        *,
        everything: bool,
    ) -> None:
        self.sources = sources
        self.missing: list[Missing] = []
        """Requests that the target lacks, by source, the oldest first."""
        self.orphans: list[tuple[Source, bytes]] = []
        """Ids of packs that no request names."""
        self.tables: dict[tuple[bytes, bytes], PackTable] = {}
        """Tables of all packs to copy, by namespace id and pack id."""
        self._counted = Copied()
        """Part of the outcome that is known before the copy: content that the target holds, and
        requests without some of their packs."""
        for source in sources:
            self._compare(source, target, everything=everything)

    @property
    def payload_bytes(self) -> int:
        return sum(table.payload_length for table in self.tables.values())

    @property
    def store_bytes(self) -> int:
        """Bytes that the content takes in the target, estimated from above."""
        return _store_bytes(self.missing, self.tables.values())

    def initial_outcome(self) -> Copied:
        """Return the outcome of the copy before it writes anything, as a copy that may be
        changed."""
        incomplete = list(self._counted.incomplete)
        return msgspec.structs.replace(self._counted, incomplete=incomplete)

    def expected(self) -> Copied:
        """Return the outcome of the copy if no store changes meanwhile and no pack is damaged."""
        return msgspec.structs.replace(
            self._counted,
            packs=len(self.tables),
            requests=len(self.missing),
            stored_bytes=self.payload_bytes,
        )

    def check_room(self, room: TargetRoom | None, url: str) -> None:
        """Raise ``StoreTooSmallError`` if the content does not fit.

        :param room: room in the target; None: unlimited.
        :param url: URL of the target, for the error.
        """
        if room is None or self.store_bytes <= room.free_bytes:
            return
        content = counts(len(self.missing), len(self.tables))
        advice = "Prune it, or give it a larger capacity"
        newest = self._newest_that_fit(room.free_bytes)
        if newest:
            advice += f"; the newest that fit are chosen with --newest {newest}"
        raise StoreTooSmallError(
            f"{url} is too small: {content} to copy take"
            f" {render.format_size(self.store_bytes)}, and"
            f" {render.format_size(room.free_bytes)} of its capacity"
            f" of {render.format_size(room.capacity)} are free. {advice}"
        )

    def place(
        self,
        target: Backend | None,
        url: str,
        source_capacity: int | None,
    ) -> CopyTarget:
        """Return where to write the content.

        If the default capacity of a new target is too small for the content, or below that of the
        source, the returned URL names a larger one. A capacity that the URL names is not changed.

        :param target: open for reading; None: it does not exist yet.
        :raises StoreTooSmallError: the content does not fit; nothing was created or written.
        """
        if target is not None:
            room = TargetRoom.of(target)
            self.check_room(room, url)
            return CopyTarget(url, None if room is None else room.capacity)

        parsed = StoreUrl.parse(url)
        capacity = BACKENDS.get(parsed.scheme).new_policy(parsed).capacity
        if capacity is None:
            return CopyTarget(url, None)
        # choose at least the source's capacity, because later copies bring more of its content
        wanted = max(source_capacity or 0, capacity_for(self.store_bytes))
        target_url = url
        if capacity < wanted and "capacity" not in parsed.options:
            target_url = with_option(url, "capacity", wanted)
            capacity = wanted
        # the new store is empty
        self.check_room(TargetRoom(capacity), url)
        return CopyTarget(target_url, capacity)

    def _compare(
        self,
        source: Source,
        target: Backend | None,
        *,
        everything: bool,
    ) -> None:
        """Add the requests and packs of a source that the target lacks, and count those that it
        holds.

        :param everything: also add orphans, which are packs that no request of the source names.
        """
        comparison = _compared(source, target)
        lacking_packs = comparison.lacking_packs
        # only packs that the target lacks are copied, so other orphans need not be found
        finds_orphans = everything and bool(lacking_packs)
        packs_of_missing: set[bytes] = set()
        packs_of_requests: set[bytes] = set()
        for manifest in source.requests:
            is_held = manifest.id in comparison.held_requests
            if is_held:
                self._counted.requests_held += 1
                # the keys of a held request show only which packs are no orphans
                if not finds_orphans:
                    continue
            keys = source.keys(manifest.id)
            packs_of_requests |= source.packs.holders_of(all_keys(keys))
            if not is_held:
                packs_of_missing |= self._add_request(
                    source, manifest, keys, lacking_packs
                )

        selected_packs = packs_of_missing
        if everything:
            selected_packs = set(source.packs.tables)
            self._add_orphans(source, lacking_packs - packs_of_requests)
        self._counted.packs_held += len(selected_packs - lacking_packs)

    def _add_orphans(self, source: Source, orphans: set[bytes]) -> None:
        """Add packs that no request names."""
        for pack in sorted(orphans):
            self.orphans.append((source, pack))
            self._add_table(source, pack)

    def _add_request(
        self,
        source: Source,
        manifest: RequestManifest,
        keys: ManifestKeys | None,
        lacking: set[bytes],
    ) -> set[bytes]:
        """Add a request that the target lacks; return the ids of its packs.

        :param keys: keys of the request; None: they are gone or damaged.
        :param lacking: ids of the source's packs with blocks that the target lacks.
        """
        # a request with unreadable keys, or with blocks that the source has lost, is not copied
        if keys is None or not source.packs.hold_all(all_keys(keys)):
            self._counted.incomplete.append(manifest.id)
            return set()
        packs = source.packs.in_order(keys)
        to_copy = [pack for pack in packs if pack in lacking]
        self.missing.append(Missing(source, manifest, to_copy))
        for pack in to_copy:
            self._add_table(source, pack)
        return set(packs)

    def _add_table(self, source: Source, pack: bytes) -> None:
        """Add a pack to those to copy."""
        key = (source.namespace.id, pack)
        self.tables[key] = source.packs.tables[pack]

    def _newest_that_fit(self, free_bytes: int) -> int:
        """Return how many of the newest requests of all sources fit into this room together.
        Requests that the target holds are counted, as the option ``--newest`` counts them, and take
        no room."""
        missing: dict[tuple[bytes, str], Missing] = {}
        for request in self.missing:
            key = (request.source.namespace.id, request.manifest.id)
            missing[key] = request
        newest_first = self._newest_first()
        # packs that were counted for newer requests: a shared pack takes room only once
        counted: set[tuple[bytes, bytes]] = set()
        for num_newer, (namespace, request_id) in enumerate(newest_first):
            to_copy = missing.get((namespace, request_id))
            if to_copy is None:  # the target holds the request, or it cannot be copied
                continue
            of_request = {(namespace, pack) for pack in to_copy.packs}
            new_packs = of_request - counted
            tables = [self.tables[pack] for pack in new_packs]
            free_bytes -= _store_bytes([to_copy], tables)
            if free_bytes < 0:
                return num_newer
            counted |= new_packs
        return len(newest_first)

    def _newest_first(self) -> list[tuple[bytes, str]]:
        """Return (namespace id, request id) of the requests of all sources, newest first."""
        by_age: list[tuple[float, str, bytes]] = []
        for source in self.sources:
            for manifest in source.requests:
                created, request_id = _age_order(manifest)
                by_age.append((created, request_id, source.namespace.id))
        by_age.sort(reverse=True)
        return [(namespace, request_id) for _, request_id, namespace in by_age]


def counts(requests: int, packs: int) -> str:
    """Return the numbers with their nouns: ``2 requests and 1 pack``."""
    return f"{render.count(requests, 'request')} and {render.count(packs, 'pack')}"


class _Compared(NamedTuple):
    """Result of the comparison of one namespace in the source and in the target."""

    held_requests: set[str]
    """Ids of the requests that the target holds."""
    lacking_packs: set[bytes]
    """Ids of the source's packs with blocks that the target lacks."""


def _compared(source: Source, target: Backend | None) -> _Compared:
    """Return which requests of the source's namespace the target holds, and which packs it
    lacks."""
    namespace = source.namespace.id
    if target is None or not target.holds(namespace):
        return _Compared(held_requests=set(), lacking_packs=set(source.packs.tables))
    held_requests = set(request_ids(target, namespace))
    held_packs = NamespacePacks(target, namespace)
    return _Compared(held_requests, _lacking(source.packs, held_packs))


def _lacking(packs: NamespacePacks, target_packs: NamespacePacks) -> set[bytes]:
    """Return the ids of the packs with keys that the packs of the target do not hold."""
    lacking = set()
    for pack, table in packs.tables.items():
        if not target_packs.hold_all(table.keys.unpack()):
            lacking.add(pack)
    return lacking


def _age_order(manifest: RequestManifest) -> tuple[float, str]:
    """Return a sort key that puts the oldest request first."""
    return manifest.created, manifest.id


def _store_bytes(requests: Sequence[Missing], packs: Iterable[PackTable]) -> int:
    """Return an upper estimate of the bytes that requests and packs take in a store."""
    tables = list(packs)  # a list, because it is iterated twice
    payload_bytes = sum(table.payload_length for table in tables)
    # a key is stored in the table of its pack, and also in each request that names it
    num_keys = sum(len(table.keys) for table in tables)
    num_keys += sum(request.manifest.blocks for request in requests)
    return store_bytes(payload_bytes, len(tables), len(requests), num_keys)
