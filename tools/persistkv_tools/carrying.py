"""``persistkv export``, ``import`` and ``push``: contexts from one place to another, checked on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from persistkv.errors import FieldDifference, IdentityMismatchError
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.stored_pack import StoredPack
from persistkv_tools.archive import ArchiveWriter, PackRecord, RequestRecord, read_archive
from persistkv_tools.catalogue import Catalogue, all_keys
from persistkv_tools.errors import CorruptArchiveError
from persistkv_tools.pack_check import OtherReleaseError, check_payload
from persistkv_tools.receiving import Received, Receiver
from persistkv_tools.selection import FoundRequest, Selection
from persistkv_tools.stored_pack import read_pack

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
    packs: int = 0
    requests: int = 0
    stored_bytes: int = 0


class _Source:
    """One namespace of a store that is read from."""

    def __init__(self, backend: Backend, namespace: Namespace, took: Took) -> None:
        self._backend = backend
        self._namespace = namespace.id
        self._took = took
        self.catalogue = Catalogue.of(backend, namespace.id)

    def keys(self, request: str) -> ManifestKeys | None:
        """Of a request; None where they are gone, do not read, or some are in no pack."""
        keys = self._backend.manifest_keys(self._namespace, request)
        held = keys is not None and all(key in self.catalogue for key in all_keys(keys))
        return keys if held else None

    def packs_of(self, keys: ManifestKeys) -> list[bytes]:
        """One for each key, those nearest to the begin of the context first."""
        return self.catalogue.packs_in_order([group.unpack() for group in keys])

    def orphans(self) -> list[bytes]:
        """The packs that no request names."""
        found = set(self.catalogue.tables)
        for manifest in self._backend.manifests(self._namespace):
            keys = self._backend.manifest_keys(self._namespace, manifest.id)
            if keys is not None:
                found -= self.catalogue.packs_holding(all_keys(keys))
        return sorted(found)

    def read(self, pack_id: bytes) -> StoredPack | None:
        """A checked pack; None where it is damaged, gone, or of another release."""
        try:
            return read_pack(self._backend, self.catalogue.tables[pack_id], self._took)[0]
        except OtherReleaseError:
            return None


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
        source = _Source(backend, namespace, took)
        written: dict[bytes, bool] = {}
        for manifest in sorted(manifests, key=lambda manifest: (manifest.created, manifest.id)):
            keys = source.keys(manifest.id)
            if keys is not None and all(
                _export_pack(source, pack, writer, written, sent) for pack in source.packs_of(keys)
            ):
                writer.request(manifest, keys)
                sent.requests += 1
            else:
                sent.incomplete.append(manifest.id)
    return sent


def _export_pack(
    source: _Source, pack_id: bytes, writer: ArchiveWriter, written: dict[bytes, bool], sent: Sent
) -> bool:
    """Write a pack that is not written yet; whether it is in the file."""
    if pack_id not in written:
        pack = source.read(pack_id)
        written[pack_id] = pack is not None
        if pack is not None:
            writer.pack(source.catalogue.tables[pack_id], pack.payload)
            sent.packs += 1
            sent.stored_bytes += pack.payload_length
    return written[pack_id]


def verify_archive(path: Path, took: Took) -> Contents:
    """Read all of a file and check what a store would be given.

    :raises CorruptArchiveError: something in it is wrong.
    """
    contents = Contents()
    held: dict[bytes, set[bytes]] = {}
    current = b""
    for record in read_archive(path, took):
        if isinstance(record, Identity):
            current = record.digest
            held.setdefault(current, set())
            contents.namespaces.append(record)
        elif isinstance(record, PackRecord):
            _check_pack_record(path, record, current)
            held[current].update(record.table.keys.unpack())
            contents.packs += 1
            contents.stored_bytes += record.table.payload_length
        else:
            _check_request(path, record, held.get(current, set()))
            contents.requests += 1
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


def _check_request(path: Path, record: RequestRecord, held: set[bytes]) -> None:
    name = record.manifest.id
    if tuple(map(len, record.keys)) != record.manifest.group_blocks:
        raise CorruptArchiveError(f"{path}: request {name!r} has other blocks than its head says")
    if not held.issuperset(all_keys(record.keys)):
        raise CorruptArchiveError(f"{path}: request {name!r} names blocks that are not in the file")


def new_identities(backend: Backend, url: str, contents: Contents, *, strict: bool) -> list[list[FieldDifference]]:
    """For each namespace of a file that a store has no part of yet, how it differs from the nearest one there.

    :raises IdentityMismatchError: there is one, and ``strict``.
    """
    held = [namespace.identity for namespace in backend.namespaces()]
    found = [identity.nearest(held) for identity in contents.namespaces if held and identity not in held]
    if found and strict:
        raise IdentityMismatchError(url, found[0])
    return found


def import_archive(backend: Backend, path: Path, took: Took) -> Received:
    """Write what a file holds, which was verified.

    :raises CorruptArchiveError: the file changed meanwhile; what was committed is good.
    :raises StoreError: a commit failed; those before it were done.
    """
    received = Received()
    receiver: Receiver | None = None
    for record in read_archive(path, took):
        if isinstance(record, Identity):
            if receiver is not None:
                receiver.flush()
            receiver = Receiver(backend, record, received)
        elif receiver is None:
            raise CorruptArchiveError(f"{path}: it names no namespace")
        elif isinstance(record, PackRecord):
            if receiver.wants(record.table):
                receiver.pack(StoredPack(record.table, record.payload))
        elif not receiver.holds(record.manifest.id):
            receiver.request(record.manifest, record.keys)
    if receiver is not None:
        receiver.flush()
    return received


def push(
    source: Backend,
    target: Backend,
    namespaces: Iterable[Namespace],
    selection: Selection,
    took: Took,
) -> Received:
    """Copy what the target lacks: packs that no request names, then requests, the oldest first, so that a small target
    keeps the newest.

    :param selection: only these requests, and no packs besides theirs, where it selects at all.
    :raises StoreError: one of the stores failed; what was committed is good, and is not copied again.
    """
    received = Received()
    for namespace in namespaces:
        receiver = Receiver(target, namespace.identity, received)
        reader = _Source(source, namespace, took)
        if selection == Selection():
            _push_packs(reader, receiver, reader.orphans())
        for manifest in _oldest_first(source, namespace, selection):
            if not receiver.holds(manifest.id):
                _push_request(reader, receiver, manifest, received)
        receiver.flush()
    return received


def _push_request(reader: _Source, receiver: Receiver, manifest: RequestManifest, received: Received) -> None:
    keys = reader.keys(manifest.id)
    if keys is None:
        received.incomplete.append(manifest.id)
    else:
        _push_packs(reader, receiver, reader.packs_of(keys))
        receiver.request(manifest, keys)


def _push_packs(reader: _Source, receiver: Receiver, packs: Iterable[bytes]) -> None:
    for pack_id in packs:
        if receiver.wants(reader.catalogue.tables[pack_id]) and (pack := reader.read(pack_id)) is not None:
            receiver.pack(pack)


def _oldest_first(backend: Backend, namespace: Namespace, selection: Selection) -> Iterator[RequestManifest]:
    found = [manifest for manifest in backend.manifests(namespace.id) if selection.takes(manifest)]
    return iter(sorted(found, key=lambda manifest: (manifest.created, manifest.id)))
