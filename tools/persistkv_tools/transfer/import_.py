"""``persistkv import``: check a file of ``persistkv export``, then write its content to a store."""

from __future__ import annotations

import struct
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from persistkv.config import StoreUrl
from persistkv.errors import CorruptPackError, IdentityMismatchError
from persistkv.storage import open_backend
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import (
    ManifestKeys,
    decode_manifest,
    decode_manifest_keys,
)
from persistkv.storage.format.pack import PackTable
from persistkv.storage.identity import Identity
from persistkv_tools import options, render
from persistkv_tools.options import open_if_exists
from persistkv_tools.packs import (
    OtherReleaseError,
    Packs,
    Took,
    all_keys,
    check_payload,
)
from persistkv_tools.progress import byte_progress, counted
from persistkv_tools.transfer.archive import (
    MANIFEST_LENGTH,
    NAMESPACE,
    PACK,
    REQUEST,
    ArchiveReader,
)
from persistkv_tools.transfer.export import Source
from persistkv_tools.transfer.push import Newest, Transfer, print_received


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File that persistkv export wrote.")
    ],
    url: options.Url,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Refuse a store that holds only other identities."
        ),
    ] = False,
    newest: Newest = False,
    json: options.Json = False,
) -> None:
    """Verify an export file completely, then write its content to a store, which is created if
    absent.

    Exit code 2: not everything fits the store's capacity, and --newest is not given; nothing was
    written.

    Example: persistkv import context.pkv lmdb:///var/cache/kv
    """
    StoreUrl.parse(url)
    begin = time.monotonic()
    with closing(ArchiveReader(file)) as archive, byte_progress() as progress:
        sources = verify_archive(
            archive, counted(progress, "verify", file.stat().st_size)
        )
        with open_if_exists(url) as there:
            transfer = Transfer(sources, there, url)
            place, _, _ = transfer.place(there, None, newest=newest)
        with closing(open_backend(place)) as backend:
            held = [namespace.identity for namespace in backend.namespaces()]
            differences = [
                one.identity.nearest(held)
                for one in sources
                if held and one.identity not in held
            ]
            if differences and strict:
                raise IdentityMismatchError(url, differences[0])
            took = counted(progress, "import", transfer.content.payload_bytes)
            received = transfer.run(backend, took, newest=newest)
            capacity = backend.stats().capacity
    if json:
        notices = [[str(difference) for difference in found] for found in differences]
        outcome = {
            "received": received,
            "capacity": capacity,
            "new_identities": notices,
        }
        render.print_json({"url": url, "file": str(file), **outcome})
    else:
        for found in differences:
            fields = "; ".join(map(str, found))
            render.say(
                f"{url} had no namespace of this identity; the nearest one differs in {fields}"
            )
        print_received(received, url, place, capacity, time.monotonic() - begin)
    if not received.complete:
        raise typer.Exit(1)


def verify_archive(archive: ArchiveReader, took: Took) -> list[Source]:
    """Read all of a file and check everything that a store would receive; return its content by
    namespace.

    :raises CorruptArchiveError: the file is damaged, incomplete, or of a codec that this release
        does not know.
    """
    contents: dict[bytes, _Contents] = {}
    current: _Contents | None = None
    for at, kind, body in archive.records(took):
        try:
            if kind == NAMESPACE:
                identity = Identity.decode(body)
                current = contents.setdefault(
                    identity.digest, _Contents(archive, identity)
                )
            elif kind not in (PACK, REQUEST):
                raise ValueError(f"this release does not know records of kind {kind!r}")
            elif current is None:
                raise ValueError("no namespace precedes this record")
            elif kind == PACK:
                current.add_pack(at, body)
            else:
                current.add_request(at, body)
        except (CorruptPackError, ValueError, RecursionError, struct.error) as error:
            raise archive.corrupt(at, str(error)) from None
    return [found.source for found in contents.values()]


class _Contents:
    """One namespace of a file, with the positions of its records."""

    def __init__(self, archive: ArchiveReader, identity: Identity) -> None:
        self.source = Source(identity, Packs(), [], self._keys, self._payload)
        self._archive = archive
        self._positions: dict[bytes | str, int] = {}

    def add_pack(self, at: int, body: memoryview) -> None:
        """Add a pack; raise ValueError if it is damaged, of another namespace, or cannot be
        decoded."""
        table = PackTable.parse(body)
        name = f"pack {table.pack_id.hex()}"
        if table.namespace != self.source.identity.digest:
            raise ValueError(f"{name} belongs to another namespace")
        try:
            findings = check_payload(table, _payload_of(table, body))
        except OtherReleaseError as error:
            raise ValueError(
                f"{name} cannot be decoded by this release: {error}"
            ) from None
        if findings:
            raise ValueError(f"{name}: {findings[0].detail}")
        self.source.packs.add(table)
        self._positions[table.pack_id] = at

    def add_request(self, at: int, body: memoryview) -> None:
        """Add a request; raise ValueError if its block counts are wrong, or no preceding pack holds
        a block."""
        head, rest = _split_request(body)
        manifest, keys = decode_manifest(head), decode_manifest_keys(rest)
        name = f"request {manifest.id!r}"
        if tuple(map(len, keys)) != manifest.group_blocks:
            raise ValueError(f"{name} has other numbers of blocks than it states")
        if not self.source.packs.hold(all_keys(keys)):
            raise ValueError(f"{name} names blocks that are not in the file")
        self.source.requests.append(manifest)
        self._positions[manifest.id] = at

    def _keys(self, request: str) -> ManifestKeys:
        return decode_manifest_keys(
            _split_request(self._archive.again(self._positions[request]))[1]
        )

    def _payload(self, table: PackTable, took: Took) -> Buffer:
        body = self._archive.again(self._positions[table.pack_id])
        took(table.payload_length)
        return _payload_of(table, body)


def _payload_of(table: PackTable, body: memoryview) -> memoryview:
    return body[: len(body) - len(table.encode())]


def _split_request(body: memoryview) -> tuple[memoryview, memoryview]:
    """Return the manifest and the keys of a request's record, encoded."""
    (length,) = MANIFEST_LENGTH.unpack_from(body)
    return body[MANIFEST_LENGTH.size :][:length], body[MANIFEST_LENGTH.size + length :]
