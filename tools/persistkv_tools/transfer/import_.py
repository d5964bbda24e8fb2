"""``persistkv import``: a file of export, checked, into a store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from persistkv.config import StoreUrl
from persistkv.errors import FieldDifference, IdentityMismatchError
from persistkv.storage import open_inspectable
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackCopy
from persistkv.storage.identity import Identity
from persistkv_tools import render
from persistkv_tools.catalogue import all_keys
from persistkv_tools.options import Json, Url, opened_if_there
from persistkv_tools.pack_check import OtherReleaseError, check_payload
from persistkv_tools.progress import byte_progress, counted
from persistkv_tools.transfer.archive import CorruptArchiveError, PackRecord, RequestRecord, read_archive
from persistkv_tools.transfer.target import (
    Candidate,
    HeldContent,
    Newest,
    Received,
    Receiver,
    Room,
    Took,
    Transfer,
    finish,
    place_for,
    print_received,
)


class Contents(msgspec.Struct):
    """Content of a verified file."""

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


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What persistkv export wrote.")],
    url: Url,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse where the store holds other identities only.")
    ] = False,
    newest: Newest = False,
    json: Json = False,
) -> None:
    """Verify all of a file of export, then write what it holds to a store, which is made where it is absent.

    A store whose capacity has no room for it is refused: exit code 2, and nothing is written.

    Example: persistkv import context.pkv lmdb:///var/cache/kv
    """
    StoreUrl.parse(url)
    with byte_progress() as progress:
        size = file.stat().st_size if file.is_file() else None
        contents = verify_archive(file, counted(progress, "verify", size))
        with opened_if_there(url) as there:
            transfer = Import(file, contents, there, url)
            place = place_for(transfer, there, url, None, newest=newest)
        with closing(open_inspectable(place)) as backend:
            differences = new_identities(backend, url, contents, strict=strict)
            took = counted(progress, "import", size)
            received = transfer.run(backend, took, newest=newest)
            capacity = backend.stats().capacity
    if json:
        notices = [[str(difference) for difference in found] for found in differences]
        render.print_json(
            {"url": url, "file": str(file), "received": received, "capacity": capacity, "new_identities": notices}
        )
    else:
        for found in differences:
            fields = "; ".join(map(str, found))
            render.say(f"{url} held nothing of this identity; its nearest namespace differs in {fields}")
        print_received(received, url, place, capacity)
    if not received.complete:
        raise typer.Exit(1)


def verify_archive(path: Path, took: Took) -> Contents:
    """Read all of a file and check everything that a store would receive.

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


def new_identities(
    backend: InspectableBackend, url: str, contents: Contents, *, strict: bool
) -> list[list[FieldDifference]]:
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

    def __init__(self, path: Path, contents: Contents, target: InspectableBackend | None, url: str) -> None:
        super().__init__(url)
        self._path = path
        for namespace, tables in contents.tables.items():
            held = HeldContent(target, namespace)
            lacking = {pack: table for pack, table in tables.items() if held.lacks(table)}
            orphans = dict(lacking)
            for _, manifest, packs in (found for found in contents.found if found.namespace == namespace):
                if manifest.id not in held.requests:
                    self.add(Candidate(namespace, manifest, [pack for pack in packs if pack in lacking]), tables)
                for pack in packs:
                    orphans.pop(pack, None)
            self.add_orphans(namespace, orphans.values())

    def run(self, target: InspectableBackend, took: Took, *, newest: bool = False) -> Received:
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
                    receiver.pack(PackCopy(record.table, record.payload))
            elif not receiver.holds(record.manifest.id) and (namespace, record.manifest.id) in choice.requests:
                receiver.request(record.manifest, record.keys)
        return finish(receivers.values(), received)
