"""``persistkv export``: write requests of a store, with their packs, to one file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from persistkv import open_store
from persistkv.errors import ConfigurationError, FileError, MissingOptionError
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.identity import Identity
from persistkv_tools import options, render
from persistkv_tools.options import FoundRequest, Selection
from persistkv_tools.packs import (
    NamespacePacks,
    OtherReleaseError,
    Packs,
    Took,
    all_keys,
    check_pack,
)
from persistkv_tools.progress import byte_progress
from persistkv_tools.transfer.archive import STANDARD_OUTPUT, ArchiveWriter


class Source(NamedTuple):
    """Requests and packs of one namespace, to be copied from a store or a file."""

    identity: Identity
    packs: Packs
    requests: list[RequestManifest]
    """The oldest first."""
    keys: Callable[[str], ManifestKeys | None]
    """Return the keys of a request by its id; None if they are gone or damaged."""
    read: Callable[[PackTable, Took], Buffer | None]
    """Return the verified payload of a pack; None if it is damaged, gone, or of an unknown
    codec."""

    @classmethod
    def of(
        cls, backend: Backend, namespace: Namespace, requests: Iterable[RequestManifest]
    ) -> Source:
        """Return a source for some requests of a namespace in a store."""
        found = sorted(requests, key=lambda manifest: (manifest.created, manifest.id))

        def read(table: PackTable, took: Took) -> Buffer | None:
            payload = bytearray()
            try:
                return None if check_pack(backend, table, took, payload) else payload
            except OtherReleaseError:
                return None

        def keys(name: str) -> ManifestKeys | None:
            return backend.manifest_keys(namespace.id, [name])[0]

        return cls(
            namespace.identity, NamespacePacks(backend, namespace.id), found, keys, read
        )

    def stored_bytes(self, backend: Backend) -> int:
        """Return the payload bytes of the packs that the requests name; each pack counts once."""
        chains = (
            backend.catalogue(self.identity.digest).chain(manifest.id) or ()
            for manifest in self.requests
        )
        tables = self.packs.tables
        return sum(
            tables[pack].payload_length
            for pack in set().union(*chains)
            if pack in tables
        )

    def complete(self, keys: ManifestKeys | None) -> bool:
        """Return whether packs hold all keys of a request; False if ``keys`` is None."""
        return keys is not None and self.packs.hold(all_keys(keys))


class Sent(msgspec.Struct):
    """Totals of the content of a file that an export wrote."""

    namespaces: int = 0
    requests: int = 0
    packs: int = 0
    stored_bytes: int = 0
    incomplete: list[str] = []
    """Ids of requests that were left out, because some of their blocks are damaged or gone."""


def export(
    url: options.Url,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write; -: standard output."
        ),
    ],
    requests: options.RequestIds = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Export all requests.")
    ] = False,
    label: options.Labels = None,
    namespace: options.InNamespace = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file.")
    ] = False,
    rate: options.Rate = None,
    json: options.Json = False,
) -> None:
    """Write requests and their packs to a file that any store can import. Exit code 1: damaged
    requests were left out.

    Example: persistkv export lmdb:///var/cache/kv 0c4de6a0 -o context.pkv
    """
    if not (requests or everything or label):
        raise MissingOptionError("export", "requests, --label or --all")
    to_pipe = output == STANDARD_OUTPUT
    if to_pipe and (json or sys.stdout.isatty()):
        reason = (
            "--json uses standard output" if json else "standard output is a terminal"
        )
        raise ConfigurationError("--output", "-", f"a file, because {reason}")
    if output.exists() and not force and not to_pipe:
        raise FileError(
            "write", output, FileExistsError("the file exists; --force replaces it")
        )
    selection, begin = Selection.parse(label), time.monotonic()
    with open_store(url) as store, byte_progress() as progress:
        sent = store.export(
            output,
            selection,
            requests=requests or [],
            namespace=namespace,
            rate=rate,
            progress=progress,
        )
    if json:
        render.print_json({"url": url, "file": str(output), "exported": sent})
    else:
        packs = f"{render.count(sent.packs, 'pack')} ({render.format_size(sent.stored_bytes)})"
        to = "standard output" if to_pipe else output
        spent = render.format_pace(sent.stored_bytes, time.monotonic() - begin)
        render.say(
            f"exported {render.count(sent.requests, 'request')} with {packs} to {to} {spent}",
            stderr=to_pipe,
        )
        print_incomplete(sent.incomplete, stderr=to_pipe)
    if sent.incomplete:
        raise typer.Exit(1)


def export_requests(
    backend: Backend,
    found: Iterable[FoundRequest],
    writer: ArchiveWriter,
    begin: Callable[[int], Took],
) -> Sent:
    """Write requests with their packs, each pack once and whole, with blocks of other requests;
    leave out requests with blocks that are damaged or gone.

    :param begin: called with the total of bytes to read; returns the function to call with the
        bytes of each read.
    """
    by_namespace: dict[bytes, list[FoundRequest]] = {}
    for request in found:
        by_namespace.setdefault(request.namespace.id, []).append(request)
    sources = [
        Source.of(backend, some[0].namespace, [one.manifest for one in some])
        for some in by_namespace.values()
    ]
    sent = Sent(namespaces=len(sources))
    took = begin(sum(source.stored_bytes(backend) for source in sources))
    for source in sources:
        writer.namespace(source.identity)
        written: dict[bytes, bool] = {}
        for manifest in source.requests:
            keys = source.keys(manifest.id)
            is_complete = source.complete(keys)
            for pack in (
                source.packs.in_order(keys) if keys is not None and is_complete else ()
            ):
                if pack not in written:
                    table = source.packs.tables[pack]
                    payload = source.read(table, took)
                    if payload is not None:
                        writer.pack(table, payload)
                        sent.packs += 1
                        sent.stored_bytes += table.payload_length
                    written[pack] = payload is not None
                is_complete = is_complete and written[pack]
            if keys is not None and is_complete:
                writer.request(manifest, keys)
                sent.requests += 1
            else:
                sent.incomplete.append(manifest.id)
    return sent


def print_incomplete(names: list[str], *, stderr: bool = False) -> None:
    for name in names:
        render.say(
            f"left out, because some of its blocks are damaged or missing: {name}",
            stderr=stderr,
        )
