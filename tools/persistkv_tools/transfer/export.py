"""``persistkv export``: contexts of a store, to one file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from persistkv.config import parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage.backend import Namespace
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack_writer import PackCopy
from persistkv_tools import render
from persistkv_tools.catalogue import Catalogue, all_keys
from persistkv_tools.options import InNamespace, Json, Labels, Rate, Url, opened
from persistkv_tools.pack_check import OtherReleaseError, check_pack
from persistkv_tools.progress import Throttle, byte_progress, counted
from persistkv_tools.selection import FoundRequest, Selection, chosen_requests
from persistkv_tools.transfer.archive import ArchiveWriter
from persistkv_tools.transfer.target import Took, print_incomplete


class Sent(msgspec.Struct):
    """Content of a written file."""

    namespaces: int = 0
    requests: int = 0
    packs: int = 0
    stored_bytes: int = 0
    incomplete: list[str] = []
    """Requests that were left out, because some of their blocks are damaged or gone."""


def export(
    url: Url,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")],
    requests: Annotated[
        list[str] | None, typer.Argument(metavar="[REQUEST]...", help="Ids; their first letters are enough.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All requests.")] = False,
    label: Labels = None,
    namespace: InNamespace = None,
    force: Annotated[bool, typer.Option("--force", help="Take the place of a file that is there.")] = False,
    rate: Rate = None,
    json: Json = False,
) -> None:
    """Write contexts to one file that any store can import. Exit code 1: some are damaged and were left out.

    Example: persistkv export lmdb:///var/cache/kv 0c4de6a0 -o context.pkv
    """
    if not (requests or everything or label):
        raise ConfigurationError("export", url, "requests, --label or --all")
    if output.exists() and not force:
        raise ConfigurationError("--output", str(output), "a file that is not there yet, or --force")
    throttle = Throttle(None if rate is None else parse_size(rate, name="--rate"))
    with opened(url) as backend:
        found = chosen_requests(backend, requests or [], Selection.parse(label), namespace)
        with byte_progress() as progress, ArchiveWriter(output) as writer:
            sent = export_requests(backend, found, writer, counted(progress, "export", None, throttle))
    if json:
        render.print_json({"url": url, "file": str(output), "exported": sent})
    else:
        packs = f"{render.count(sent.packs, 'pack')}, {render.format_size(sent.stored_bytes)}"
        render.say(f"{render.count(sent.requests, 'request')} with {packs} to {output}")
        print_incomplete(sent.incomplete)
    if sent.incomplete:
        raise typer.Exit(1)


class Source:
    """One namespace of a store that is read from."""

    def __init__(self, backend: InspectableBackend, namespace: Namespace) -> None:
        self._backend = backend
        self.namespace = namespace
        self.catalogue = Catalogue.of(backend, namespace.id)

    def keys(self, request: str) -> ManifestKeys | None:
        """The keys of a request; None where they are gone or do not read."""
        return self._backend.manifest_keys(self.namespace.id, [request])[0]

    def holds(self, keys: ManifestKeys) -> bool:
        """Whether each key is in a pack."""
        return all(key in self.catalogue for key in all_keys(keys))

    def packs_of(self, keys: ManifestKeys) -> list[bytes]:
        """One for each key, those nearest to the begin of the context first."""
        return self.catalogue.packs_in_order([group.unpack() for group in keys])

    def read(self, pack_id: bytes, took: Took) -> PackCopy | None:
        """A checked pack; None where it is damaged, gone, or of another release."""
        table, payload = self.catalogue.tables[pack_id], bytearray()
        try:
            findings = check_pack(self._backend, table, took, payload)
        except OtherReleaseError:
            return None
        return None if findings else PackCopy(table, payload)


def export_requests(
    backend: InspectableBackend, found: Iterable[FoundRequest], writer: ArchiveWriter, took: Took
) -> Sent:
    """Write requests with their packs, each pack once. A pack is written whole, including blocks of other requests.

    :raises StoreError: the medium failed.
    """
    sent = Sent()
    by_namespace: dict[bytes, tuple[Namespace, list[RequestManifest]]] = {}
    for request in found:
        by_namespace.setdefault(request.namespace.id, (request.namespace, []))[1].append(request.manifest)
    for namespace, manifests in by_namespace.values():
        writer.namespace(namespace.identity)
        sent.namespaces += 1
        source = Source(backend, namespace)
        written: dict[bytes, bool] = {}
        for manifest in oldest_first(manifests):
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
    source: Source, pack_id: bytes, writer: ArchiveWriter, written: dict[bytes, bool], sent: Sent, took: Took
) -> bool:
    """Write a pack that is not written yet; whether it is in the file."""
    if pack_id not in written:
        pack = source.read(pack_id, took)
        written[pack_id] = pack is not None
        if pack is not None:
            writer.pack(source.catalogue.tables[pack_id], pack.payload)
            sent.packs += 1
            sent.stored_bytes += pack.table.payload_length
    return written[pack_id]


def oldest_first(manifests: Iterable[RequestManifest]) -> list[RequestManifest]:
    return sorted(manifests, key=lambda manifest: (manifest.created, manifest.id))
