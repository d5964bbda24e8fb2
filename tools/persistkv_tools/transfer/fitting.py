"""Whether content fits a store: decided before anything is written to it.

1. Sizes are estimates from totals, on the safe side: payload, page headers, rows of the catalogue.
2. A store keeps part of its capacity free, for the next commit and for its catalogue. Content fits if that part stays
   free, so a copy evicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from persistkv.errors import PersistKVError
from persistkv.storage.backend import Backend
from persistkv.storage.manifest import RequestManifest
from persistkv.storage.pack import PackTable
from persistkv_tools.render import count, format_size

_PAGE_HEADERS = 64  # one page of 4 KiB for each piece of 256 KiB
_PACK_BYTES = 5 << 10  # 5 KiB: rows of a pack, and what its last page leaves free
_REQUEST_BYTES = 1280  # rows of a request
_KEY_BYTES = 80  # a key of 36 bytes in a tree whose pages are half full
_EMPTY_BYTES = 256 << 10  # 256 KiB: files of an empty store
_COMMIT_SHARE, _MOST_COMMIT_BYTES = 16, 256 << 20  # 256 MiB
_CATALOGUE_SHARES, _SMALL_CATALOGUE_BYTES = (32, 256), 8 << 20  # 8 MiB
_PAGES_BYTES = 2 << 20  # 2 MiB: catalogue pages freed by the last commits, not yet reusable


class StoreTooSmallError(PersistKVError):
    """The capacity of a store has no room for the content to copy; nothing was written."""


class Content(msgspec.Struct):
    """Totals of packs and requests."""

    payload_bytes: int = 0
    packs: int = 0
    blocks: int = 0
    requests: int = 0
    named_blocks: int = 0
    """Blocks of the requests."""

    def add_pack(self, table: PackTable) -> None:
        """Count one more pack."""
        self.payload_bytes += table.payload_length
        self.packs += 1
        self.blocks += len(table.keys)

    def add_request(self, manifest: RequestManifest) -> None:
        """Count one more request."""
        self.requests += 1
        self.named_blocks += manifest.blocks

    @property
    def store_bytes(self) -> int:
        """Upper bound of its size in a store."""
        rows = self.packs * _PACK_BYTES + self.requests * _REQUEST_BYTES
        keys = (self.blocks + self.named_blocks) * _KEY_BYTES
        return self.payload_bytes + self.payload_bytes // _PAGE_HEADERS + rows + keys


class Room(NamedTuple):
    """A store with a capacity."""

    capacity: int
    held_bytes: int
    """Size of its content, catalogue rows included."""

    @classmethod
    def of(cls, backend: Backend) -> Room | None:
        """The room of an open store; None without a capacity.

        :raises StoreError: the totals do not read.
        """
        stats = backend.stats()
        if stats.capacity is None:
            return None
        content = Content(stats.stored_bytes, stats.packs, stats.blocks)
        for namespace in backend.namespaces():
            for manifest in backend.manifests(namespace.id):
                content.add_request(manifest)
        free = backend.free_space()
        on_disk = stats.disk_bytes - (0 if free is None else free.catalogue_bytes + free.payload_bytes)
        # A killed writer leaves files longer than their content, until the next commit.
        return cls(stats.capacity, min(on_disk, content.store_bytes + _EMPTY_BYTES))

    @classmethod
    def of_new(cls, capacity: int | None) -> Room | None:
        """The room of a store that is to be created."""
        return None if capacity is None else cls(capacity, _EMPTY_BYTES)

    @property
    def free_bytes(self) -> int:
        """Size of content that can be added without an eviction."""
        return max(0, self.capacity - _spared(self.capacity) - self.held_bytes)


def _spared(capacity: int) -> int:
    """Part of a capacity that a store keeps free of content."""
    small, large = _CATALOGUE_SHARES
    catalogue = max(min(capacity // small, _SMALL_CATALOGUE_BYTES), capacity // large)
    return min(capacity // _COMMIT_SHARE, _MOST_COMMIT_BYTES) + catalogue + min(_PAGES_BYTES, capacity // 4)


def capacity_for(content_bytes: int) -> int:
    """A capacity that holds so much, in whole mebibytes."""
    wanted = content_bytes + content_bytes // 8 + (16 << 20)
    return -(-wanted // (1 << 20)) << 20


class Candidate(NamedTuple):
    """A request to copy."""

    namespace: bytes
    manifest: RequestManifest
    packs: list[bytes]
    """Ids of the packs that hold its blocks and that the target lacks."""


class Choice(NamedTuple):
    """Part of a transfer that is copied."""

    requests: set[tuple[bytes, str]]
    """(namespace, id)"""
    packs: set[tuple[bytes, bytes]]
    """(namespace, pack id)"""
    content: Content
    missing: list[str]
    """Ids of the requests that do not fit, newest first."""
    orphans: list[tuple[bytes, bytes]]
    """Of the packs, those of no request."""
    missing_packs: int
    """Packs of no request that do not fit."""

    def orphans_of(self, namespace: bytes) -> list[bytes]:
        """Ids of the packs of no request in a namespace."""
        return [pack for space, pack in self.orphans if space == namespace]


class Transfer:
    """Content that a target lacks.

    :param url: of the target, for messages.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._candidates: list[Candidate] = []
        self._orphans: list[tuple[bytes, bytes]] = []
        self._tables: dict[tuple[bytes, bytes], PackTable] = {}

    def add(self, candidate: Candidate, tables: Mapping[bytes, PackTable]) -> None:
        """A request, with the tables of its packs."""
        self._candidates.append(candidate)
        self._tables.update(((candidate.namespace, pack), tables[pack]) for pack in candidate.packs)

    def add_orphans(self, namespace: bytes, tables: Iterable[PackTable]) -> None:
        """Packs of no request."""
        for table in tables:
            self._orphans.append((namespace, table.pack_id))
            self._tables[namespace, table.pack_id] = table

    @property
    def content(self) -> Content:
        """All of it."""
        return self._everything().content

    def choose(self, room: Room | None, *, newest: bool) -> Choice:
        """All of it if it fits; otherwise, with ``newest``, the newest requests that do.

        :param room: of the target; None: it has no capacity.
        :raises StoreTooSmallError: it does not fit, and not ``newest``.
        """
        choice = self._everything()
        needed = choice.content.store_bytes
        if room is None or needed <= room.free_bytes:
            return choice
        if not newest:
            raise StoreTooSmallError(
                f"{self._url} is too small: {count(choice.content.requests, 'request')} and"
                f" {count(choice.content.packs, 'pack')} that it lacks take {format_size(needed)}; of its capacity of"
                f" {format_size(room.capacity)}, {format_size(room.free_bytes)} are free for them."
                " Prune it, give it a larger capacity, or copy the newest requests that fit with --newest"
            )
        return self._newest(lambda content: content.store_bytes <= room.free_bytes)

    def _everything(self) -> Choice:
        content = Content()
        for candidate in self._candidates:
            content.add_request(candidate.manifest)
        for table in self._tables.values():
            content.add_pack(table)
        requests = {(candidate.namespace, candidate.manifest.id) for candidate in self._candidates}
        return Choice(requests, set(self._tables), content, [], self._orphans, 0)

    def _newest(self, fits: Callable[[Content], bool]) -> Choice:
        choice = Choice(set(), set(), Content(), [], [], len(self._orphans))
        content = choice.content
        for namespace, manifest, packs in sorted(self._candidates, key=_age, reverse=True):
            fresh = [(namespace, pack) for pack in packs if (namespace, pack) not in choice.packs]
            wider = msgspec.structs.replace(content)
            wider.add_request(manifest)
            for pack in fresh:
                wider.add_pack(self._tables[pack])
            if fits(wider):
                content = wider
                choice.packs.update(fresh)
                choice.requests.add((namespace, manifest.id))
            else:
                choice.missing.append(manifest.id)
        return choice._replace(content=content)


def _age(candidate: Candidate) -> tuple[float, str]:
    return candidate.manifest.created, candidate.manifest.id
