"""``persistkv export``, ``import`` and ``push``: contexts from one place to another, checked on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from persistkv.errors import FieldDifference, IdentityMismatchError
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.pack import PackTable
from persistkv.storage.stored_pack import StoredPack
from persistkv_tools.catalogue import Catalogue, all_keys
from persistkv_tools.pack_check import OtherReleaseError, check_payload, read_pack
from persistkv_tools.selection import FoundRequest, Selection
from persistkv_tools.transfer.archive import ArchiveWriter, CorruptArchiveError, PackRecord, RequestRecord, read_archive
from persistkv_tools.transfer.fitting import Candidate, Room, Transfer
from persistkv_tools.transfer.receiving import Received, Receiver

Took = Callable[[int], None]


class Sent(msgspec.Struct):
    """What was written to a file."""

    namespaces: int = 0
    requests: int = 0
    packs: int = 0
    stored_bytes: int = 0
    incomplete: list[str] = []
    """Requests that were left out, because some of their blocks are damaged or gone."""


class Contents(msgspec.Struct):
    """What a file holds, all of it verified."""

    namespaces: list[Identity] = []
    tables: dict[bytes, dict[bytes, PackTable]] = {}
    """For each namespace, the tables of its packs by their ids."""
    found: list[Candidate] = []
    """Its requests, each with all packs that hold its blocks."""

    @property
    def packs(self) -> int:
        """Packs of all namespaces."""
        return sum(map(len, self.tables.values()))

    @property
    def requests(self) -> int:
        """Requests of all namespaces."""
        return len(self.found)


class _Source:
    """One namespace of a store that is read from."""

    def __init__(self, backend: Backend, namespace: Namespace) -> None:
        self._backend = backend
        self.namespace = namespace
        self.catalogue = Catalogue.of(backend, namespace.id)

    def keys(self, request: str) -> ManifestKeys | None:
        """The keys of a request; None where they are gone or do not read."""
        return self._backend.manifest_keys(self.namespace.id, request)

    def holds(self, keys: ManifestKeys) -> bool:
        """Whether each key is in a pack."""
        return all(key in self.catalogue for key in all_keys(keys))

    def packs_of(self, keys: ManifestKeys) -> list[bytes]:
        """One for each key, those nearest to the begin of the context first."""
        return self.catalogue.packs_in_order([group.unpack() for group in keys])

    def read(self, pack_id: bytes, took: Took) -> StoredPack | None:
        """A checked pack; None where it is damaged, gone, or of another release."""
        try:
            return read_pack(self._backend, self.catalogue.tables[pack_id], took)[0]
        except OtherReleaseError:
            return None


class _Held:
    """Content of one namespace of a target; empty if the target does not exist."""

    def __init__(self, target: Backend | None, namespace: bytes) -> None:
        self.requests: set[str] = set()
        self._keys = Catalogue(())
        if target is not None and any(space.id == namespace for space in target.namespaces()):
            self.requests.update(manifest.id for manifest in target.manifests(namespace))
            self._keys = Catalogue.of(target, namespace)

    def lacks(self, table: PackTable) -> bool:
        """Whether the pack has a block that is not there."""
        return any(key not in self._keys for key in table.keys.unpack())


def export_requests(backend: Backend, found: Iterable[FoundRequest], writer: ArchiveWriter, took: Took) -> Sent:
    """Write requests with their packs, each pack once. A pack is written whole, whoever else's blocks it holds.

    :raises StoreError: the medium failed.
    """
    sent = Sent()
    by_namespace: dict[bytes, tuple[Namespace, list[RequestManifest]]] = {}
    for request in found:
        by_namespace.setdefault(request.namespace.id, (request.namespace, []))[1].append(request.manifest)
    for namespace, manifests in by_namespace.values():
        writer.namespace(namespace.identity)
        sent.namespaces += 1
        source = _Source(backend, namespace)
        written: dict[bytes, bool] = {}
        for manifest in _oldest_first(manifests):
            keys = source.keys(manifest.id)
            if (
                keys is not None
                and source.holds(keys)
                and all(_export_pack(source, pack, writer, written, sent, took) for pack in source.packs_of(keys))
            ):
                writer.request(manifest, keys)
                sent.requests += 1
            else:
                sent.incomplete.append(manifest.id)
    return sent


def _export_pack(
    source: _Source, pack_id: bytes, writer: ArchiveWriter, written: dict[bytes, bool], sent: Sent, took: Took
) -> bool:
    """Write a pack that is not written yet; whether it is in the file."""
    if pack_id not in written:
        pack = source.read(pack_id, took)
        written[pack_id] = pack is not None
        if pack is not None:
            writer.pack(source.catalogue.tables[pack_id], pack.payload)
            sent.packs += 1
            sent.stored_bytes += pack.payload_length
    return written[pack_id]


def _oldest_first(manifests: Iterable[RequestManifest]) -> list[RequestManifest]:
    return sorted(manifests, key=lambda manifest: (manifest.created, manifest.id))


def verify_archive(path: Path, took: Took) -> Contents:
    """Read all of a file and check what a store would be given.

    :raises CorruptArchiveError: something in it is wrong.
    """
    contents = Contents()
    held: dict[bytes, dict[bytes, bytes]] = {}
    current = b""
    for record in read_archive(path, took):
        if isinstance(record, Identity):
            current = record.digest
            held.setdefault(current, {})
            contents.namespaces.append(record)
            contents.tables.setdefault(current, {})
        elif isinstance(record, PackRecord):
            _check_pack_record(path, record, current)
            for key in record.table.keys.unpack():
                held[current].setdefault(key, record.table.pack_id)
            contents.tables[current][record.table.pack_id] = record.table
        else:
            packs = _checked_packs(path, record, held.get(current, {}))
            contents.found.append(Candidate(current, record.manifest, packs))
    return contents


def _check_pack_record(path: Path, record: PackRecord, namespace: bytes) -> None:
    name = record.table.pack_id.hex()
    if record.table.namespace != namespace:
        raise CorruptArchiveError(f"{path}: pack {name} is not of the namespace that it stands in")
    try:
        findings = check_payload(record.table, record.payload)
    except OtherReleaseError as error:
        raise CorruptArchiveError(f"{path}: pack {name} cannot be decoded by this release: {error}") from None
    if findings:
        raise CorruptArchiveError(f"{path}: pack {name}: {findings[0].detail}")


def _checked_packs(path: Path, record: RequestRecord, held: Mapping[bytes, bytes]) -> list[bytes]:
    """Ids of the packs that hold a request's blocks."""
    name = record.manifest.id
    if tuple(map(len, record.keys)) != record.manifest.group_blocks:
        raise CorruptArchiveError(f"{path}: request {name!r} has other blocks than its head says")
    packs = dict.fromkeys(map(held.get, all_keys(record.keys)))
    if None in packs:
        raise CorruptArchiveError(f"{path}: request {name!r} names blocks that are not in the file")
    return [pack for pack in packs if pack is not None]


def new_identities(backend: Backend, url: str, contents: Contents, *, strict: bool) -> list[list[FieldDifference]]:
    """For each namespace of a file that a store has no part of yet, how it differs from the nearest one there.

    :raises IdentityMismatchError: there is one, and ``strict``.
    """
    held = [namespace.identity for namespace in backend.namespaces()]
    found = [identity.nearest(held) for identity in contents.namespaces if held and identity not in held]
    if found and strict:
        raise IdentityMismatchError(url, found[0])
    return found


class Import(Transfer):
    """A verified file on its way into a store.

    :param target: the store as it is; None: it is to be created.
    :param url: of the store.
    """

    def __init__(self, path: Path, contents: Contents, target: Backend | None, url: str) -> None:
        super().__init__(url)
        self._path = path
        for namespace, tables in contents.tables.items():
            held = _Held(target, namespace)
            lacking = {pack: table for pack, table in tables.items() if held.lacks(table)}
            orphans = dict(lacking)
            for _, manifest, packs in (found for found in contents.found if found.namespace == namespace):
                if manifest.id not in held.requests:
                    self.add(Candidate(namespace, manifest, [pack for pack in packs if pack in lacking]), tables)
                for pack in packs:
                    orphans.pop(pack, None)
            self.add_orphans(namespace, orphans.values())

    def run(self, target: Backend, took: Took, *, newest: bool = False) -> Received:
        """Write all of it, or the newest requests that fit.

        :raises StoreTooSmallError: it does not fit, and not ``newest``; nothing was written.
        :raises CorruptArchiveError: the file changed meanwhile; earlier commits are good.
        :raises StoreError: a commit failed; those before it were done.
        """
        choice = self.choose(Room.of(target), newest=newest)
        received = Received(missing=choice.missing, missing_packs=choice.missing_packs)
        receivers: dict[bytes, Receiver] = {}
        receiver: Receiver | None = None
        namespace = b""
        for record in read_archive(self._path, took):
            if isinstance(record, Identity):
                if receiver is not None:
                    receiver.flush()
                namespace = record.digest
                if namespace not in receivers:
                    receivers[namespace] = Receiver(target, record, received)
                receiver = receivers[namespace]
            elif receiver is None:
                raise CorruptArchiveError(f"{self._path}: it names no namespace")
            elif isinstance(record, PackRecord):
                if receiver.wants(record.table) and (namespace, record.table.pack_id) in choice.packs:
                    receiver.pack(StoredPack(record.table, record.payload))
            elif not receiver.holds(record.manifest.id) and (namespace, record.manifest.id) in choice.requests:
                receiver.request(record.manifest, record.keys)
        return _finish(receivers.values(), received)


class Push(Transfer):
    """Packs and requests of a store on their way into another one.

    :param selection: only these requests, and no packs besides theirs, where it selects at all.
    :param target: the other store as it is; None: it is to be created.
    :param url: of the other store.
    :raises StoreError: one of the stores failed.
    """

    def __init__(
        self, source: Backend, namespaces: Iterable[Namespace], selection: Selection, target: Backend | None, url: str
    ) -> None:
        super().__init__(url)
        self._sources: list[tuple[_Source, list[RequestManifest]]] = []
        self._incomplete: list[str] = []
        for space in namespaces:
            reader = _Source(source, space)
            requests = _oldest_first(filter(selection.takes, source.manifests(space.id)))
            self._sources.append((reader, requests))
            self._compare(reader, requests, _Held(target, space.id), everything=selection == Selection())

    def _compare(self, reader: _Source, requests: list[RequestManifest], held: _Held, *, everything: bool) -> None:
        namespace, tables = reader.namespace.id, reader.catalogue.tables
        lacking = {pack for pack, table in tables.items() if held.lacks(table)}
        orphans = set(lacking) if everything else set()
        for manifest in requests:
            if manifest.id in held.requests and not orphans:
                continue
            keys = reader.keys(manifest.id)
            if keys is not None:
                orphans -= reader.catalogue.packs_holding(all_keys(keys))
            if manifest.id in held.requests:
                continue
            if keys is None or not reader.holds(keys):
                self._incomplete.append(manifest.id)
            else:
                packs = [pack for pack in reader.packs_of(keys) if pack in lacking]
                self.add(Candidate(namespace, manifest, packs), tables)
        self.add_orphans(namespace, [tables[pack] for pack in sorted(orphans)])

    def run(self, target: Backend, took: Took, *, newest: bool = False) -> Received:
        """Copy all of it, or the newest requests that fit. Requests follow packs of no request, the oldest first.

        :raises StoreTooSmallError: it does not fit, and not ``newest``; nothing was written.
        :raises StoreError: one of the stores failed; earlier commits are good, and are not repeated by the next run.
        """
        choice = self.choose(Room.of(target), newest=newest)
        received = Received(
            incomplete=list(self._incomplete), missing=choice.missing, missing_packs=choice.missing_packs
        )
        receivers = []
        for reader, requests in self._sources:
            namespace = reader.namespace.id
            receivers.append(receiver := Receiver(target, reader.namespace.identity, received))
            _push_packs(reader, receiver, choice.orphans_of(namespace), took)
            for manifest in requests:
                if receiver.holds(manifest.id) or (namespace, manifest.id) not in choice.requests:
                    continue
                keys = reader.keys(manifest.id)
                if keys is None:
                    received.incomplete.append(manifest.id)
                else:
                    _push_packs(reader, receiver, reader.packs_of(keys), took)
                    receiver.request(manifest, keys)
            receiver.flush()
        return _finish(receivers, received)


def _push_packs(reader: _Source, receiver: Receiver, packs: Iterable[bytes], took: Took) -> None:
    for pack_id in packs:
        if receiver.wants(reader.catalogue.tables[pack_id]) and (pack := reader.read(pack_id, took)) is not None:
            receiver.pack(pack)


def _finish(receivers: Collection[Receiver], received: Received) -> Received:
    for receiver in receivers:
        receiver.flush()
    for receiver in receivers:
        receiver.check()
    return received
