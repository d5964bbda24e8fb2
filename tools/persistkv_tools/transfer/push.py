"""``persistkv push`` and ``pull``: contexts of a store, checked, to another store."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Annotated

import typer

from persistkv.config import StoreUrl, parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage import open_inspectable
from persistkv.storage.backend import Namespace
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.manifest import RequestManifest
from persistkv_tools import render
from persistkv_tools.catalogue import all_keys
from persistkv_tools.options import InNamespace, Json, Labels, NewerThan, OlderThan, Rate, opened, opened_if_there
from persistkv_tools.progress import Throttle, byte_progress, counted
from persistkv_tools.selection import Selection, chosen_namespaces
from persistkv_tools.transfer.export import Source, oldest_first
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


def push_(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The store to copy from.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The store to copy to, made where it is absent.")],
    namespace: InNamespace = None,
    label: Labels = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    newest: Newest = False,
    rate: Rate = None,
    json: Json = False,
) -> None:
    """Copy what another store lacks; run it again where it was cut off. Exit code 1: some requests did not get there.

    A store whose capacity has no room for it is refused: exit code 2, and nothing is written.

    Example: persistkv push lmdb:///var/cache/kv lmdb:///mnt/backup/kv?capacity=1TiB
    """
    _copy(source, target, namespace, Selection.parse(label, older_than, newer_than), rate, newest=newest, json=json)


def pull(
    target: Annotated[str, typer.Argument(metavar="DST", help="The store to copy to, made where it is absent.")],
    source: Annotated[str, typer.Argument(metavar="SRC", help="The store to copy from.")],
    namespace: InNamespace = None,
    label: Labels = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    newest: Newest = False,
    rate: Rate = None,
    json: Json = False,
) -> None:
    """Copy what this store lacks and another one has: push, seen from the other end.

    Example: persistkv pull lmdb:///var/cache/kv s3://my-bucket/kv --label user=anna --rate 100MiB
    """
    _copy(source, target, namespace, Selection.parse(label, older_than, newer_than), rate, newest=newest, json=json)


def _copy(
    source: str,
    target: str,
    namespace: str | None,
    selection: Selection,
    rate: str | None,
    *,
    newest: bool,
    json: bool,
) -> None:
    ends = [StoreUrl.parse(url) for url in (source, target)]
    if (ends[0].scheme, ends[0].location) == (ends[1].scheme, ends[1].location):
        raise ConfigurationError("DST", target, "another store than SRC")
    throttle = Throttle(None if rate is None else parse_size(rate, name="--rate"))
    with opened(source) as reading:
        namespaces = chosen_namespaces(reading, namespace)
        with opened_if_there(target) as there:
            transfer = Push(reading, namespaces, selection, there, target)
            place = place_for(transfer, there, target, reading.stats().capacity, newest=newest)
        with closing(open_inspectable(place)) as writing, byte_progress() as progress:
            took = counted(progress, "copy", transfer.content.payload_bytes, throttle)
            received = transfer.run(writing, took, newest=newest)
            capacity = writing.stats().capacity
    if json:
        render.print_json({"source": source, "target": target, "received": received, "capacity": capacity})
    else:
        print_received(received, target, place, capacity)
    if not received.complete:
        raise typer.Exit(1)


class Push(Transfer):
    """Packs and requests of a store on their way into another one.

    :param selection: only these requests, and no packs besides theirs, where it selects at all.
    :param target: the other store as it is; None: it is to be created.
    :param url: of the other store.
    :raises StoreError: one of the stores failed.
    """

    def __init__(
        self,
        source: InspectableBackend,
        namespaces: Iterable[Namespace],
        selection: Selection,
        target: InspectableBackend | None,
        url: str,
    ) -> None:
        super().__init__(url)
        self._sources: list[tuple[Source, list[RequestManifest]]] = []
        self._incomplete: list[str] = []
        for space in namespaces:
            reader = Source(source, space)
            requests = oldest_first(filter(selection.takes, source.manifests(space.id)))
            self._sources.append((reader, requests))
            self._compare(reader, requests, HeldContent(target, space.id), everything=selection == Selection())

    def _compare(self, reader: Source, requests: list[RequestManifest], held: HeldContent, *, everything: bool) -> None:
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

    def run(self, target: InspectableBackend, took: Took, *, newest: bool = False) -> Received:
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
        return finish(receivers, received)


def _push_packs(reader: Source, receiver: Receiver, packs: Iterable[bytes], took: Took) -> None:
    for pack_id in packs:
        if receiver.wants(reader.catalogue.tables[pack_id]) and (pack := reader.read(pack_id, took)) is not None:
            receiver.pack(pack)
