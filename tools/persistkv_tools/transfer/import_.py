"""``persistkv import``: check a file of ``persistkv export``, then write its content to a store."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from persistkv.config import StoreUrl
from persistkv.errors import IdentityMismatchError
from persistkv.storage import open_inspectable
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import ManifestKeys
from persistkv.storage.format.pack import PackTable
from persistkv.storage.identity import Identity
from persistkv_tools import options, render
from persistkv_tools.options import open_if_exists
from persistkv_tools.packs import OtherReleaseError, Packs, Took, all_keys, check_payload
from persistkv_tools.progress import byte_progress, counted
from persistkv_tools.transfer.archive import ArchiveReader, PackRecord, RequestRecord
from persistkv_tools.transfer.export import Source
from persistkv_tools.transfer.push import Newest, Transfer, print_received


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that persistkv export wrote.")],
    url: options.Url,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a store that holds only other identities.")] = False,
    newest: Newest = False,
    json: options.Json = False,
) -> None:
    """Verify an export file completely, then write its content to a store, which is created if absent.

    Exit code 2: not everything fits the store's capacity, and --newest is not given; nothing was written.

    Example: persistkv import context.pkv lmdb:///var/cache/kv
    """
    StoreUrl.parse(url)
    begin = time.monotonic()
    with closing(ArchiveReader(file)) as archive, byte_progress() as progress:
        sources = verify_archive(archive, counted(progress, "verify", file.stat().st_size))
        with open_if_exists(url) as there:
            transfer = Transfer(sources, there, url)
            place, _, _ = transfer.place(there, None, newest=newest)
        with closing(open_inspectable(place)) as backend:
            held = [namespace.identity for namespace in backend.namespaces()]
            differences = [one.identity.nearest(held) for one in sources if held and one.identity not in held]
            if differences and strict:
                raise IdentityMismatchError(url, differences[0])
            took = counted(progress, "import", transfer.content.payload_bytes)
            received = transfer.run(backend, took, newest=newest)
            capacity = backend.stats().capacity
    if json:
        notices = [[str(difference) for difference in found] for found in differences]
        outcome = {"received": received, "capacity": capacity, "new_identities": notices}
        render.print_json({"url": url, "file": str(file), **outcome})
    else:
        for found in differences:
            fields = "; ".join(map(str, found))
            render.say(f"{url} had no namespace of this identity; the nearest one differs in {fields}")
        print_received(received, url, place, capacity, time.monotonic() - begin)
    if not received.complete:
        raise typer.Exit(1)


def verify_archive(archive: ArchiveReader, took: Took) -> list[Source]:
    """Read all of a file and check everything that a store would receive; return its content by namespace.

    :raises CorruptArchiveError: the file is damaged, incomplete, or of a codec that this release does not know.
    """
    contents: dict[bytes, _Contents] = {}
    current: _Contents | None = None
    for at, record in archive.records(took):
        if isinstance(record, Identity):
            current = contents.setdefault(record.digest, _Contents(archive, record))
        elif current is None:
            raise archive.corrupt(at, "no namespace precedes this record")
        elif isinstance(record, PackRecord):
            current.add_pack(at, record)
        else:
            current.add_request(at, record)
    return [found.source for found in contents.values()]


class _Contents:
    """One namespace of a file, with the positions of its records."""

    def __init__(self, archive: ArchiveReader, identity: Identity) -> None:
        self.source = Source(identity, Packs(), [], self._keys, self._payload)
        self._archive = archive
        self._positions: dict[bytes | str, int] = {}

    def add_pack(self, at: int, record: PackRecord) -> None:
        """Check a pack and add it.

        :raises CorruptArchiveError: the pack is damaged, of another namespace, or cannot be decoded.
        """
        table = record.table
        name = f"pack {table.pack_id.hex()}"
        if table.namespace != self.source.identity.digest:
            raise self._archive.corrupt(at, f"{name} belongs to another namespace")
        try:
            findings = check_payload(table, record.payload)
        except OtherReleaseError as error:
            raise self._archive.corrupt(at, f"{name} cannot be decoded by this release: {error}") from None
        if findings:
            raise self._archive.corrupt(at, f"{name}: {findings[0].detail}")
        self.source.packs.add(table)
        self._positions[table.pack_id] = at

    def add_request(self, at: int, record: RequestRecord) -> None:
        """Check a request and add it.

        :raises CorruptArchiveError: its manifest states other numbers of blocks than it has keys, or no preceding pack
            holds one of the keys.
        """
        name = f"request {record.manifest.id!r}"
        if tuple(map(len, record.keys)) != record.manifest.group_blocks:
            raise self._archive.corrupt(at, f"{name} has other numbers of blocks than it states")
        if not self.source.packs.hold(all_keys(record.keys)):
            raise self._archive.corrupt(at, f"{name} names blocks that are not in the file")
        self.source.requests.append(record.manifest)
        self._positions[record.manifest.id] = at

    def _keys(self, request: str) -> ManifestKeys | None:
        record = self._archive.again(self._positions[request])
        return record.keys if isinstance(record, RequestRecord) else None

    def _payload(self, table: PackTable, took: Took) -> Buffer | None:
        record = self._archive.again(self._positions[table.pack_id])
        took(table.payload_length)
        return record.payload if isinstance(record, PackRecord) else None
