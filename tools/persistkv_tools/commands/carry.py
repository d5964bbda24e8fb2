"""``persistkv export``, ``import``, ``push`` and ``pull``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from persistkv.config import StoreUrl, parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage.backend import Backend
from persistkv.storage.registry import BACKENDS, open_backend
from persistkv_tools import render
from persistkv_tools.archive import ArchiveWriter
from persistkv_tools.carrying import Import, Push, export_requests, new_identities, verify_archive
from persistkv_tools.fitting import Room, Transfer, capacity_for
from persistkv_tools.options import (
    InNamespace,
    Json,
    Labels,
    NewerThan,
    OlderThan,
    Rate,
    Url,
    opened,
    opened_if_there,
)
from persistkv_tools.progress import byte_progress, counted
from persistkv_tools.receiving import Received
from persistkv_tools.selection import FoundRequest, Selection, chosen_namespaces, find_request
from persistkv_tools.throttle import Throttle

_SHOWN = 20
Newest = Annotated[
    bool,
    typer.Option("--newest", help="Where not all fits, copy the newest requests that do. Exit code 1: not all did."),
]


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
        found = _found(backend, requests or [], Selection.parse(label), namespace)
        with byte_progress() as progress, ArchiveWriter(output) as writer:
            sent = export_requests(backend, found, writer, counted(progress, "export", None, throttle))
    if json:
        render.print_json({"url": url, "file": str(output), "exported": sent})
    else:
        packs = f"{render.count(sent.packs, 'pack')}, {render.format_size(sent.stored_bytes)}"
        render.say(f"{render.count(sent.requests, 'request')} with {packs} to {output}")
        _print_incomplete(sent.incomplete)
    if sent.incomplete:
        raise typer.Exit(1)


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
        contents = verify_archive(file, counted(progress, "verify", size, Throttle(None)))
        with opened_if_there(url) as there:
            transfer = Import(file, contents, there, url)
            place = _place(transfer, there, url, None, newest=newest)
        with closing(open_backend(place)) as backend:
            differences = new_identities(backend, url, contents, strict=strict)
            took = counted(progress, "import", size, Throttle(None))
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
        _print_received(received, url)
        _print_capacity(url, place, capacity)
    if not received.complete:
        raise typer.Exit(1)


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
            place = _place(transfer, there, target, reading.stats().capacity, newest=newest)
        with closing(open_backend(place)) as writing, byte_progress() as progress:
            took = counted(progress, "copy", transfer.content.payload_bytes, throttle)
            received = transfer.run(writing, took, newest=newest)
            capacity = writing.stats().capacity
    if json:
        render.print_json({"source": source, "target": target, "received": received, "capacity": capacity})
    else:
        _print_received(received, target)
        _print_capacity(target, place, capacity)
    if not received.complete:
        raise typer.Exit(1)


def _place(transfer: Transfer, there: Backend | None, url: str, least: int | None, *, newest: bool) -> str:
    """The URL to open for writing: a store that is to be created gets a capacity that holds all of it.

    :param least: its capacity, unless the URL names one.
    :raises StoreTooSmallError: it does not fit, and not ``newest``; nothing was created or written.
    """
    if there is not None:
        transfer.choose(Room.of(there), newest=newest)
        return url
    parsed = StoreUrl.parse(url)
    driver = BACKENDS.get(parsed.scheme)
    capacity = driver.new_capacity(parsed)
    wanted = max(least or 0, capacity_for(transfer.content.store_bytes))
    if capacity is not None and capacity < wanted and "capacity" not in parsed.options:
        url += f"{'&' if '?' in url else '?'}capacity={wanted}"
        capacity = wanted
    transfer.choose(Room.of_new(capacity), newest=newest)
    return url


def _found(backend: Backend, names: list[str], selection: Selection, namespace: str | None) -> list[FoundRequest]:
    if names:
        return list(
            {found.manifest.id: found for found in (find_request(backend, n, namespace) for n in names)}.values()
        )
    return [
        FoundRequest(space, manifest)
        for space in chosen_namespaces(backend, namespace)
        for manifest in backend.manifests(space.id)
        if selection.takes(manifest)
    ]


def _print_received(received: Received, url: str) -> None:
    packs = f"{render.count(received.packs, 'pack')}, {render.format_size(received.stored_bytes)}"
    render.say(f"{render.count(received.requests, 'request')} and {packs} came to {url}")
    if received.requests_held or received.packs_held:
        held = f"{render.count(received.requests_held, 'request')} and {render.count(received.packs_held, 'pack')}"
        render.say(f"{held} were there already")
    if received.evicted_packs:
        render.say(f"{render.count(received.evicted_packs, 'pack')} of the store were evicted meanwhile")
    _print_incomplete(received.incomplete)
    if received.missing or received.missing_packs:
        packs = f" and {render.count(received.missing_packs, 'pack')} of no request" * bool(received.missing_packs)
        render.say(f"no room for {render.count(len(received.missing), 'request')}{packs}:")
        _print_names(received.missing)
    if received.lost or received.lost_packs:
        lost = f"{render.count(len(received.lost), 'request')} and {render.count(received.lost_packs, 'pack')}"
        render.say(f"{lost} that came were evicted again:")
        _print_names(received.lost)


def _print_capacity(url: str, place: str, capacity: int | None) -> None:
    """A capacity that neither the URL nor the driver's default explains."""
    if place != url and capacity is not None:
        render.say(f"{url} was created with a capacity of {render.format_size(capacity)}")


def _print_names(names: list[str]) -> None:
    for name in names[:_SHOWN]:
        render.say(f"  {name}")
    if len(names) > _SHOWN:
        render.say(f"  and {len(names) - _SHOWN:,} more; --json lists all")


def _print_incomplete(names: list[str]) -> None:
    for name in names:
        render.say(f"left out, because some of its blocks are damaged or gone: {name}")
