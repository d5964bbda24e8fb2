"""The store that ``import``, ``push`` and ``pull`` write to: whether content fits, and writing it.

1. Whether content fits is decided before anything is written. Sizes are estimates from totals, on the safe side:
   payload, page headers, rows of the catalogue.
2. A store keeps part of its capacity free, for the next commit and for its catalogue. Content fits if that part stays
   free, so a copy evicts nothing.
3. A request is written in the commit of its last packs, and only if every block that it names is there.
4. Content that the store holds is not written again, and nothing is written twice: packs that the store evicts
   meanwhile are reported with their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import typer

from persistkv.config import MAX_PACK_BYTES, StoreUrl
from persistkv.errors import PersistKVError
from persistkv.storage import BACKENDS
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.extensions import InspectableBackend, SupportsCompaction, SupportsPolicy
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackCopy
from persistkv.storage.identity import Identity
from persistkv_tools import render
from persistkv_tools.catalogue import Catalogue

_SHOWN = 20
_PAGE_HEADERS = 64  # one page of 4 KiB for each piece of 256 KiB
_PACK_BYTES = 5 << 10  # 5 KiB: rows of a pack, and what its last page leaves free
_REQUEST_BYTES = 1280  # rows of a request
_KEY_BYTES = 80  # a key of 36 bytes in a tree whose pages are half full
_EMPTY_BYTES = 256 << 10  # 256 KiB: files of an empty store
_COMMIT_SHARE, _MOST_COMMIT_BYTES = 16, 256 << 20  # 256 MiB
_CATALOGUE_SHARES, _SMALL_CATALOGUE_BYTES = (32, 256), 8 << 20  # 8 MiB
_PAGES_BYTES = 2 << 20  # 2 MiB: catalogue pages freed by the last commits, not yet reusable
Took = Callable[[int], None]
Newest = Annotated[
    bool,
    typer.Option("--newest", help="Where not all fits, copy the newest requests that do. Exit code 1: not all did."),
]


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
    def of(cls, backend: InspectableBackend) -> Room | None:
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
        on_disk = stats.disk_bytes
        if isinstance(backend, SupportsCompaction):
            free = backend.free_space()
            on_disk -= free.catalogue_bytes + free.payload_bytes
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


class Received(msgspec.Struct):
    """Outcome of a transfer."""

    packs: int = 0
    stored_bytes: int = 0
    requests: int = 0
    packs_held: int = 0
    """Packs whose blocks the store held already."""
    requests_held: int = 0
    evicted_packs: int = 0
    """Packs that the store evicted meanwhile, of any writer."""
    incomplete: list[str] = []
    """Requests that were not written, because some of their blocks are damaged or gone."""
    missing: list[str] = []
    """Requests that were not written, because the capacity has no room for them; newest first."""
    missing_packs: int = 0
    """Packs of no request that were not written for the same reason."""
    lost: list[str] = []
    """Requests that were written, and that the store has evicted since."""
    lost_packs: int = 0
    """Packs likewise."""

    @property
    def complete(self) -> bool:
        """Whether the store holds all that it was to receive."""
        left_out = self.incomplete or self.missing or self.missing_packs
        return not (left_out or self.lost or self.lost_packs)


def _spared(capacity: int) -> int:
    """Part of a capacity that a store keeps free of content."""
    small, large = _CATALOGUE_SHARES
    catalogue = max(min(capacity // small, _SMALL_CATALOGUE_BYTES), capacity // large)
    return min(capacity // _COMMIT_SHARE, _MOST_COMMIT_BYTES) + catalogue + min(_PAGES_BYTES, capacity // 4)


def capacity_for(content_bytes: int) -> int:
    """A capacity that holds so much, in whole mebibytes."""
    wanted = content_bytes + content_bytes // 8 + (16 << 20)
    return -(-wanted // (1 << 20)) << 20


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
            requests = render.count(choice.content.requests, "request")
            raise StoreTooSmallError(
                f"{self._url} is too small: {requests} and {render.count(choice.content.packs, 'pack')} that it lacks"
                f" take {render.format_size(needed)}; of its capacity of {render.format_size(room.capacity)},"
                f" {render.format_size(room.free_bytes)} are free for them."
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


class HeldContent:
    """Content of one namespace of a target; empty if the target does not exist."""

    def __init__(self, target: InspectableBackend | None, namespace: bytes) -> None:
        self.requests: set[str] = set()
        self._keys = Catalogue(())
        if target is not None and any(space.id == namespace for space in target.namespaces()):
            self.requests.update(manifest.id for manifest in target.manifests(namespace))
            self._keys = Catalogue.of(target, namespace)

    def lacks(self, table: PackTable) -> bool:
        """Whether the pack has a block that is not there."""
        return any(key not in self._keys for key in table.keys.unpack())


def place_for(
    transfer: Transfer, there: InspectableBackend | None, url: str, least: int | None, *, newest: bool
) -> str:
    """The URL to open for writing: a store that is to be created gets a capacity that holds all of it.

    :param least: its capacity, unless the URL names one.
    :raises StoreTooSmallError: it does not fit, and not ``newest``; nothing was created or written.
    """
    if there is not None:
        transfer.choose(Room.of(there), newest=newest)
        return url
    parsed = StoreUrl.parse(url)
    driver = BACKENDS.get(parsed.scheme)
    capacity = driver.new_policy(parsed).capacity if issubclass(driver, SupportsPolicy) else None
    wanted = max(least or 0, capacity_for(transfer.content.store_bytes))
    if capacity is not None and capacity < wanted and "capacity" not in parsed.options:
        url += f"{'&' if '?' in url else '?'}capacity={wanted}"
        capacity = wanted
    transfer.choose(Room.of_new(capacity), newest=newest)
    return url


class Receiver:
    """One namespace of a store that is written to. Others may write to it meanwhile."""

    def __init__(self, backend: InspectableBackend, identity: Identity, received: Received) -> None:
        """:param received: is counted up.

        :raises StoreError: the namespace cannot be made.
        """
        self._backend = backend
        self._namespace = backend.open_namespace(identity).id
        self._received = received
        self._tables: dict[bytes, PackTable] = {}
        self._holders: dict[bytes, tuple[bytes, ...]] = {}
        """For each key, the ids of the packs that hold it."""
        self._cursor: bytes | None = None
        self._waiting: dict[bytes, PackCopy] = {}
        self._waiting_keys: dict[bytes, bytes] = {}
        self._asked: set[bytes] = set()
        self._requests = {manifest.id for manifest in backend.manifests(self._namespace)}
        self._written: list[str] = []
        self._sent: list[bytes] = []
        """A key of each pack that was written."""
        self._refresh()

    def wants(self, table: PackTable) -> bool:
        """Whether the pack has a block that is not here, asked once for each pack. If not, it counts as held."""
        if table.pack_id in self._asked:
            return False
        self._asked.add(table.pack_id)
        missing = any(key not in self._holders and key not in self._waiting_keys for key in table.keys.unpack())
        self._received.packs_held += not missing
        return missing

    def pack(self, pack: PackCopy) -> None:
        """Accept a pack, to be written now or in a later commit.

        :raises StoreError: a commit failed; those before it were done.
        """
        waiting = sum(held.raw_length for held in self._waiting.values())
        if self._waiting and waiting + pack.raw_length > MAX_PACK_BYTES:
            self.flush()
        self._waiting[pack.pack_id] = pack
        self._waiting_keys.update((key, pack.pack_id) for key in pack.keys.unpack())

    def holds(self, request: str) -> bool:
        """Whether the store has it; counted where it does."""
        self._received.requests_held += request in self._requests
        return request in self._requests

    def request(self, manifest: RequestManifest, keys: ManifestKeys) -> None:
        """Write a request with the packs that wait.

        :raises StoreError: the commit failed; those before it were done.
        """
        packs = self._packs_of([group.unpack() for group in keys])
        if packs is None:
            self._received.incomplete.append(manifest.id)
            return
        self._commit([ManifestWrite(manifest, keys, packs)])
        self._requests.add(manifest.id)
        self._written.append(manifest.id)
        self._received.requests += 1

    def flush(self) -> None:
        """Write pending packs.

        :raises StoreError: the commit failed; those before it were done.
        """
        if self._waiting:
            self._commit([])

    def check(self) -> None:
        """Report written content that the store no longer holds.

        :raises StoreError: the medium failed.
        """
        self._refresh()
        there = {manifest.id for manifest in self._backend.manifests(self._namespace)}
        self._received.lost += [name for name in self._written if name not in there]
        self._received.lost_packs += sum(key not in self._holders for key in self._sent)

    def _packs_of(self, chains: Sequence[Sequence[bytes]]) -> list[bytes] | None:
        """By the depth of the first key in each; None where a key is in no pack."""
        depths: dict[bytes, int] = {}
        for keys in chains:
            for depth, key in enumerate(keys):
                found = self._holders.get(key)
                pack = self._waiting_keys.get(key) if found is None else found[0]
                if pack is None:
                    return None
                depths[pack] = min(depth, depths.get(pack, depth))
        return sorted(depths, key=depths.__getitem__)

    def _commit(self, manifests: Sequence[ManifestWrite]) -> None:
        packs = list(self._waiting.values())
        result = self._backend.commit(self._namespace, CommitBatch(packs, manifests))
        self._sent += [pack.keys.unpack()[0] for pack in packs]
        self._waiting.clear()
        self._waiting_keys.clear()
        self._received.packs += len(packs)
        self._received.stored_bytes += sum(pack.table.payload_length for pack in packs)
        self._received.evicted_packs += len(result.evicted)
        self._refresh()

    def _refresh(self) -> None:
        found = self._backend.changes(self._namespace, self._cursor)
        self._cursor = found.cursor
        if found.reset:
            self._tables.clear()
            self._holders.clear()
        for table in [self._tables.pop(pack_id) for pack_id in found.removed if pack_id in self._tables]:
            for key in table.keys.unpack():
                self._holders[key] = tuple(pack_id for pack_id in self._holders[key] if pack_id != table.pack_id)
                if not self._holders[key]:
                    del self._holders[key]
        for table in found.added:
            if self._tables.setdefault(table.pack_id, table) is table:
                for key in table.keys.unpack():
                    self._holders[key] = (*self._holders.get(key, ()), table.pack_id)


def finish(receivers: Collection[Receiver], received: Received) -> Received:
    """Flush all receivers, then find written content that was evicted since.

    :raises StoreError: a commit failed; those before it were done.
    """
    for receiver in receivers:
        receiver.flush()
    for receiver in receivers:
        receiver.check()
    return received


def print_received(received: Received, url: str, place: str, capacity: int | None) -> None:
    """Print the outcome of a transfer.

    :param place: the URL that was opened; another one than ``url`` for a store that was created with a capacity of its
        content, which neither ``url`` nor the driver's default explains.
    :param capacity: of the store.
    """
    packs = f"{render.count(received.packs, 'pack')}, {render.format_size(received.stored_bytes)}"
    render.say(f"{render.count(received.requests, 'request')} and {packs} came to {url}")
    if received.requests_held or received.packs_held:
        held = f"{render.count(received.requests_held, 'request')} and {render.count(received.packs_held, 'pack')}"
        render.say(f"{held} were there already")
    if received.evicted_packs:
        render.say(f"{render.count(received.evicted_packs, 'pack')} of the store were evicted meanwhile")
    print_incomplete(received.incomplete)
    if received.missing or received.missing_packs:
        packs = f" and {render.count(received.missing_packs, 'pack')} of no request" * bool(received.missing_packs)
        render.say(f"no room for {render.count(len(received.missing), 'request')}{packs}:")
        _print_names(received.missing)
    if received.lost or received.lost_packs:
        lost = f"{render.count(len(received.lost), 'request')} and {render.count(received.lost_packs, 'pack')}"
        render.say(f"{lost} that came were evicted again:")
        _print_names(received.lost)
    if place != url and capacity is not None:
        render.say(f"{url} was created with a capacity of {render.format_size(capacity)}")


def _print_names(names: list[str]) -> None:
    for name in names[:_SHOWN]:
        render.say(f"  {name}")
    if len(names) > _SHOWN:
        render.say(f"  and {len(names) - _SHOWN:,} more; --json lists all")


def print_incomplete(names: list[str]) -> None:
    """Print the requests that were left out."""
    for name in names:
        render.say(f"left out, because some of its blocks are damaged or gone: {name}")
