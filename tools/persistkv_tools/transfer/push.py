"""``persistkv push`` and ``pull``, and the code that ``import`` shares with them: copy checked
requests to a store.

1. Whether content fits is decided before anything is written. Sizes are upper estimates, from
   totals: payload, page headers, rows of the catalogue.
2. A store keeps part of its capacity free, for the next commit and for its catalogue. Content fits
   if that part stays free, so a copy evicts nothing.
3. A request is written in the commit of its last packs, and only if every block that it names is
   there.
4. Content that the store holds already is not written. Nothing is written twice: if the store
   evicts copied packs during the transfer, they and their requests are only reported.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import typer

from persistkv import open_store
from persistkv.config import MAX_PACK_BYTES, StoreUrl
from persistkv.errors import PersistKVError
from persistkv.storage import BACKENDS
from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackCopy
from persistkv_tools import options, render
from persistkv_tools.options import STORE_VARIABLE, Selection
from persistkv_tools.packs import NamespacePacks, Packs, Took, all_keys
from persistkv_tools.progress import byte_progress
from persistkv_tools.transfer.export import Source, print_incomplete

_SHOWN = 20
_PAGE_HEADERS = 64  # one page of 4 KiB for each piece of 256 KiB
# 5 KiB: catalogue rows of a pack, and the unused part of its last page
_PACK_BYTES = 5 << 10
_REQUEST_BYTES = 1280  # catalogue rows of a request
_KEY_BYTES = 80  # a key of 36 bytes in a tree whose pages are half full
_EMPTY_BYTES = 256 << 10  # 256 KiB: files of an empty store
_COMMIT_SHARE, _MOST_COMMIT_BYTES = 16, 256 << 20  # 256 MiB
_CATALOGUE_SHARES, _SMALL_CATALOGUE_BYTES = (32, 256), 8 << 20  # 8 MiB
# 2 MiB: catalogue pages freed by the last commits, not yet reusable
_PAGES_BYTES = 2 << 20
# 1 MiB, with these pages and empty files; in a store below 4/3 MiB, 3/4 of it
_LEAST_CATALOGUE_BYTES = 1 << 20
_TARGET_HELP = "Store to copy to; created if absent."
Newest = Annotated[
    bool,
    typer.Option(
        "--newest",
        help="If not everything fits, copy the newest requests that fit. Exit code 1: some did "
        "not.",
    ),
]


class StoreTooSmallError(PersistKVError):
    """The capacity of a store has no room for the content to copy; nothing was written."""


def push(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Store to copy from.",
            envvar=STORE_VARIABLE,
            show_default=False,
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help=_TARGET_HELP)],
    namespace: options.InNamespace = None,
    label: options.Labels = None,
    older_than: options.OlderThan = None,
    newer_than: options.NewerThan = None,
    newest: Newest = False,
    rate: options.Rate = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be copied.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Copy content that another store lacks. If a run is interrupted, the next one copies the rest.

    Exit code 1: some requests were not copied. Exit code 2: not everything fits the other store's
    capacity, and --newest is not given; nothing was written.

    Example: persistkv push lmdb:///var/cache/kv lmdb:///mnt/backup/kv?capacity=1TiB
    """
    selection, begin = Selection.parse(label, older_than, newer_than), time.monotonic()
    with open_store(source) as store, byte_progress() as progress:
        pushed = store.push(
            target,
            selection,
            namespace=namespace,
            newest=newest,
            rate=rate,
            dry_run=dry_run,
            progress=progress,
        )
    if json:
        totals = {
            "dry_run": dry_run,
            "received": pushed.received,
            "capacity": pushed.capacity,
        }
        render.print_json({"source": source, "target": target, **totals})
    else:
        seconds = None if dry_run else time.monotonic() - begin
        print_received(pushed.received, target, pushed.url, pushed.capacity, seconds)
    if not pushed.received.complete:
        raise typer.Exit(1)


def pull(
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST", help=_TARGET_HELP, envvar=STORE_VARIABLE, show_default=False
        ),
    ],
    source: Annotated[str, typer.Argument(metavar="SRC", help="Store to copy from.")],
    **chosen: object,
) -> None:
    """Copy content from another store that this store lacks: push in the other direction.

    Example: persistkv pull lmdb:///var/cache/kv s3://my-bucket/kv --label user=anna --rate 100MiB
    """
    push(source, target, **chosen)  # type: ignore[arg-type]


_push, _pull = (inspect.signature(function, eval_str=True) for function in (push, pull))
pull.__signature__ = _pull.replace(  # type: ignore[attr-defined]
    parameters=[
        *list(_pull.parameters.values())[:2],
        *list(_push.parameters.values())[2:],
    ]
)


def _store_bytes(payload_bytes: int, packs: int, requests: int, keys: int) -> int:
    """Return an upper bound of the bytes that content takes in a store. Keys are those in packs and
    in requests."""
    rows = packs * _PACK_BYTES + requests * _REQUEST_BYTES + keys * _KEY_BYTES
    return payload_bytes + -(-payload_bytes // _PAGE_HEADERS) + rows


class Room(NamedTuple):
    """Capacity of a store, and the bytes of it that content and catalogue rows take."""

    capacity: int
    held_bytes: int = _EMPTY_BYTES

    @classmethod
    def of(cls, backend: Backend) -> Room | None:
        """Return the room in an open store; None if its size is unlimited."""
        stats = backend.stats()
        if stats.capacity is None:
            return None
        named = sum(
            manifest.blocks
            for space in backend.namespaces()
            for manifest in backend.catalogue(space.id).manifests()
        )
        content_bytes = _store_bytes(
            stats.stored_bytes, stats.packs, stats.requests, stats.blocks + named
        )
        on_disk = stats.disk_bytes
        free = backend.free_space()
        if free is not None:
            on_disk -= free.catalogue_bytes + free.payload_bytes
        # A killed writer leaves files longer than their content, until the next commit.
        held_bytes = min(on_disk, content_bytes + _EMPTY_BYTES)
        return cls(stats.capacity, max(held_bytes, stats.stored_bytes + _EMPTY_BYTES))

    @property
    def free_bytes(self) -> int:
        """Bytes that can be added without an eviction: capacity less content and reserves for
        catalogue and commits."""
        small, large = _CATALOGUE_SHARES
        catalogue = max(
            min(self.capacity // small, _SMALL_CATALOGUE_BYTES), self.capacity // large
        )
        least = min(_LEAST_CATALOGUE_BYTES, self.capacity // 4 * 3) - _EMPTY_BYTES
        spared = max(catalogue + min(_PAGES_BYTES, self.capacity // 4), least)
        commits = min(self.capacity // _COMMIT_SHARE, _MOST_COMMIT_BYTES)
        return max(0, self.capacity - spared - commits - self.held_bytes)


def capacity_for(content_bytes: int) -> int:
    """Return the capacity for a new store that is to hold this content: bytes, a multiple of 1
    MiB."""
    wanted = content_bytes + content_bytes // 8 + (16 << 20)
    return -(-wanted // (1 << 20)) << 20


class Received(msgspec.Struct):
    """Outcome of a push, pull or import."""

    packs: int = 0
    stored_bytes: int = 0
    requests: int = 0
    packs_held: int = 0
    """Number of packs that were not copied, because the target held all their blocks already."""
    requests_held: int = 0
    evicted_packs: int = 0
    """Packs that the commits of the transfer evicted from the target, whether they were copied by
    it or not."""
    incomplete: list[str] = []
    """Ids of requests that were not written, because some of their blocks are damaged or gone."""
    missing: list[str] = []
    """Ids of requests that were not written, because the target's capacity has no room for them;
    newest first."""
    missing_packs: int = 0
    """Number of packs that no request names and for which the target's capacity has no room; they
    were not written."""
    lost: list[str] = []
    """Ids of requests that were written, and that the target no longer held at the end of the
    transfer."""
    lost_packs: int = 0
    """Number of packs that were written, and that the target no longer held at the end of the
    transfer."""

    @property
    def complete(self) -> bool:
        """Whether the target holds all requests and packs that were to be copied."""
        left_out = self.incomplete or self.missing or self.missing_packs
        return not (left_out or self.lost or self.lost_packs)


class Pushed(NamedTuple):
    """Outcome of a push."""

    received: Received
    url: str
    """URL that the target was opened with. For a new target, it may name a capacity that holds the
    content."""
    capacity: int | None
    """Capacity of the target in bytes; None: unlimited."""


class Candidate(NamedTuple):
    """A request that the target lacks."""

    source: Source
    manifest: RequestManifest
    packs: list[bytes]
    """Ids of the packs that hold a block of the request, and some block that the target lacks."""


class Choice(NamedTuple):
    """Requests and packs of a transfer that are to be copied."""

    candidates: list[Candidate]
    orphans: list[tuple[Source, bytes]]
    """Packs that no request names."""
    tables: dict[tuple[bytes, bytes], PackTable]
    """Tables of all packs to copy, by (namespace id, pack id)."""
    missing: Sequence[str] = ()
    """Ids of the requests that do not fit, newest first."""

    @property
    def payload_bytes(self) -> int:
        return sum(table.payload_length for table in self.tables.values())

    @property
    def store_bytes(self) -> int:
        keys = sum(len(table.keys) for table in self.tables.values())
        keys += sum(candidate.manifest.blocks for candidate in self.candidates)
        return _store_bytes(
            self.payload_bytes, len(self.tables), len(self.candidates), keys
        )


class Transfer:
    """Finds the content of sources that a target store lacks, and copies it; with ``everything``,
    also packs that no request names. The target is open for reading; None: it does not exist yet.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        target: Backend | None,
        url: str,
        *,
        everything: bool = True,
    ) -> None:
        self._url = url
        self._sources = sources
        self._received = Received()
        self.content = Choice([], [], {})
        """All content that the target lacks."""
        for source in sources:
            self._compare(source, target, everything=everything)

    def _compare(
        self, source: Source, target: Backend | None, *, everything: bool
    ) -> None:
        namespace, held, names = source.identity.digest, Packs(), set[str]()
        if target is not None and target.holds(namespace):
            held = NamespacePacks(target, namespace)
            names = {
                manifest.id for manifest in target.catalogue(namespace).manifests()
            }
        tables = source.packs.tables
        lacking = {
            pack for pack, table in tables.items() if not held.hold(table.keys.unpack())
        }
        orphans, needed = (set(lacking), set(tables)) if everything else (set(), set())
        for manifest in source.requests:
            is_held = manifest.id in names
            self._received.requests_held += is_held
            keys = source.keys(manifest.id) if orphans or not is_held else None
            orphans -= source.packs.holding(all_keys(keys or ()))
            if is_held:
                continue
            if keys is None or not source.complete(keys):
                self._received.incomplete.append(manifest.id)
            else:
                packs = source.packs.in_order(keys)
                needed.update(packs)
                lacks = [pack for pack in packs if pack in lacking]
                self.content.candidates.append(Candidate(source, manifest, lacks))
                self.content.tables.update(
                    {(namespace, pack): tables[pack] for pack in lacks}
                )
        self._received.packs_held += len(needed - lacking)
        self.content.orphans.extend((source, pack) for pack in sorted(orphans))
        self.content.tables.update(
            {(namespace, pack): tables[pack] for pack in orphans}
        )

    def choose(self, room: Room | None, *, newest: bool) -> Choice:
        """Return the content to copy: all of it if it fits; otherwise, with ``newest``, the newest
        requests that fit, without packs that no request names. After a request that does not fit,
        older ones are tried.

        :param room: room in the target; None: unlimited.
        :raises StoreTooSmallError: the content does not fit, and ``newest`` is false.
        """
        content = self.content
        if room is None or content.store_bytes <= room.free_bytes:
            return content
        if not newest:
            raise StoreTooSmallError(
                f"{self._url} is too small: "
                f"{_counts(len(content.candidates), len(content.tables))} to copy take"
                f" {render.format_size(content.store_bytes)}, and "
                f"{render.format_size(room.free_bytes)} of its capacity"
                f" of {render.format_size(room.capacity)} are free."
                " Prune it, give it a larger capacity, or copy the newest requests that fit "
                "with --newest"
            )
        chosen, free_bytes, missing = Choice([], [], {}), room.free_bytes, list[str]()
        for candidate in sorted(
            content.candidates,
            key=lambda one: (one.manifest.created, one.manifest.id),
            reverse=True,
        ):
            names = {
                (candidate.source.identity.digest, pack) for pack in candidate.packs
            } - chosen.tables.keys()
            wanted = Choice(
                [candidate], [], {name: content.tables[name] for name in names}
            )
            if wanted.store_bytes <= free_bytes:
                free_bytes -= wanted.store_bytes
                chosen.candidates.append(candidate)
                chosen.tables.update(wanted.tables)
            else:
                missing.append(candidate.manifest.id)
        chosen.candidates.reverse()
        return chosen._replace(missing=missing)

    def place(
        self, there: Backend | None, least: int | None, *, newest: bool
    ) -> tuple[str, int | None, Choice]:
        """Return the URL to open the target with for writing, the target's capacity, and the
        content to copy.

        If the default capacity of a new target (``there`` is None) is too small for the content, or
        below ``least`` bytes, the returned URL names a larger one. A capacity that the URL names
        already is not changed.

        :raises StoreTooSmallError: the content does not fit, and ``newest`` is false; nothing was
            created or written.
        """
        if there is not None:
            room = Room.of(there)
            return (
                self._url,
                None if room is None else room.capacity,
                self.choose(room, newest=newest),
            )
        url, parsed = self._url, StoreUrl.parse(self._url)
        driver = BACKENDS.get(parsed.scheme)
        capacity = driver.new_policy(parsed).capacity
        wanted = max(least or 0, capacity_for(self.content.store_bytes))
        if (
            capacity is not None
            and capacity < wanted
            and "capacity" not in parsed.options
        ):
            url += f"{'&' if '?' in url else '?'}capacity={wanted}"
            capacity = wanted
        return (
            url,
            capacity,
            self.choose(None if capacity is None else Room(capacity), newest=newest),
        )

    def planned(self, choice: Choice) -> Received:
        """Return the outcome that ``run`` will have if no store changes meanwhile and no pack is
        damaged."""
        totals = {"packs": len(choice.tables), "requests": len(choice.candidates)}
        return msgspec.structs.replace(
            self._begun(choice), **totals, stored_bytes=choice.payload_bytes
        )

    def _begun(self, choice: Choice) -> Received:
        missing_packs = len(self.content.orphans) - len(choice.orphans)
        return msgspec.structs.replace(
            self._received, missing=list(choice.missing), missing_packs=missing_packs
        )

    def run(self, target: Backend, took: Took, *, newest: bool = False) -> Received:
        """Copy all content or, with ``newest``, the newest requests that fit. Requests are copied
        oldest first.

        :raises StoreTooSmallError: the content does not fit, and ``newest`` is false; nothing was
            written.
        :raises StoreError: a store failed; earlier commits stay in effect, and the next transfer
            skips their content. The same holds for a CorruptArchiveError: the file to import
            changed meanwhile.
        """
        choice = self.choose(Room.of(target), newest=newest)
        received, receivers = self._begun(choice), []
        for source in self._sources:
            receivers.append(receiver := _Receiver(target, source, received, took))
            for place, pack in choice.orphans:
                if place is source:
                    receiver.pack(pack)
            for candidate in choice.candidates:
                if candidate.source is source:
                    receiver.request(candidate.manifest)
            receiver.flush()
        for receiver in receivers:
            receiver.check()
        return received


class _Receiver:
    """Writes to one namespace of the target, as other processes may do meanwhile. Commits update
    ``received``."""

    def __init__(
        self, backend: Backend, source: Source, received: Received, took: Took
    ) -> None:
        self._backend = backend
        self._source = source
        self._received = received
        self._took = took
        self._namespace = backend.open_namespace(source.identity).id
        self._packs = NamespacePacks(backend, self._namespace)
        """Packs that the target holds, and those that wait for the next commit."""
        self._waiting: list[PackCopy] = []
        self._offered: set[bytes] = set()
        self._written: list[str] = []
        self._sent: list[bytes] = []
        """One key of each pack that was written."""
        self._requests = {
            manifest.id for manifest in backend.catalogue(self._namespace).manifests()
        }

    def pack(self, pack: bytes) -> None:
        """Read a pack for the next commit, if the target lacks any of its blocks; skip it if it is
        damaged or gone. Packs that wait already are committed first if they would be too large
        together with it.
        """
        table = self._source.packs.tables[pack]
        if pack in self._offered or self._packs.hold(table.keys.unpack()):
            return
        self._offered.add(pack)
        payload = self._source.read(table, self._took)
        if payload is None:
            return
        if (
            sum(waiting.raw_length for waiting in self._waiting) + table.raw_length
            > MAX_PACK_BYTES
        ):
            self.flush()
        self._waiting.append(PackCopy(table, payload))
        self._packs.add(table)

    def request(self, manifest: RequestManifest) -> None:
        """Commit a request with those of its packs that the target lacks, and with other waiting
        packs. If it is held already, or incomplete, it is only counted.
        """
        if manifest.id in self._requests:
            self._received.requests_held += 1
            return
        keys = self._source.keys(manifest.id)
        for pack in () if keys is None else self._source.packs.in_order(keys):
            self.pack(pack)
        if keys is None or not self._packs.hold(all_keys(keys)):
            self._received.incomplete.append(manifest.id)
            return
        self._commit([ManifestWrite(manifest, keys, self._packs.in_order(keys))])
        self._written.append(manifest.id)
        self._received.requests += 1

    def flush(self) -> None:
        if self._waiting:
            self._commit([])

    def check(self) -> None:
        """Record in ``received`` which of the written requests and packs the target no longer
        holds."""
        self._packs.refresh()
        there = {
            manifest.id
            for manifest in self._backend.catalogue(self._namespace).manifests()
        }
        self._received.lost += [name for name in self._written if name not in there]
        self._received.lost_packs += sum(
            not self._packs.hold([key]) for key in self._sent
        )

    def _commit(self, manifests: Sequence[ManifestWrite]) -> None:
        packs, self._waiting = self._waiting, []
        result = self._backend.commit(self._namespace, CommitBatch(packs, manifests))
        self._sent += [pack.keys.unpack()[0] for pack in packs]
        self._received.packs += len(packs)
        self._received.stored_bytes += sum(pack.table.payload_length for pack in packs)
        self._received.evicted_packs += len(result.evicted)
        for pack in packs:
            self._packs.remove(pack.pack_id)
        self._packs.refresh()


def print_received(
    received: Received,
    url: str,
    place: str,
    capacity: int | None,
    seconds: float | None = None,
) -> None:
    """Print the outcome of a transfer.

    :param place: URL that the target was opened with, see ``Transfer.place``.
    :param seconds: duration of the transfer; None: ``received`` is a plan.
    """
    size = render.format_size(received.stored_bytes)
    pace = (
        ""
        if seconds is None
        else f" {render.format_pace(received.stored_bytes, seconds)}"
    )
    what = f"{_counts(received.requests, received.packs)}, {size}{pace}"
    render.say(f"{'to copy' if seconds is None else 'copied'} to {url}: {what}")
    if received.requests_held or received.packs_held:
        render.say(
            f"not copied, because the store has them: "
            f"{_counts(received.requests_held, received.packs_held)}"
        )
    if received.evicted_packs:
        render.say(
            f"meanwhile, the store evicted {render.count(received.evicted_packs, 'pack')}"
        )
    print_incomplete(received.incomplete)
    if received.missing or received.missing_packs:
        packs = render.count(received.missing_packs, "pack")
        orphans = f" and {packs} without a request" if received.missing_packs else ""
        _print_names(
            f"no room for {render.count(len(received.missing), 'request')}{orphans}:",
            received.missing,
        )
    if received.lost or received.lost_packs:
        lost = _counts(len(received.lost), received.lost_packs)
        _print_names(f"copied, but evicted again: {lost}:", received.lost)
    if place != url and capacity is not None:
        created = "would be" if seconds is None else "was"
        render.say(
            f"{url} {created} created with a capacity of {render.format_size(capacity)}"
        )


def _counts(requests: int, packs: int) -> str:
    return f"{render.count(requests, 'request')} and {render.count(packs, 'pack')}"


def _print_names(title: str, names: list[str]) -> None:
    render.say(title)
    for name in names[:_SHOWN]:
        render.say(f"  {name}")
    if len(names) > _SHOWN:
        render.say(f"  and {len(names) - _SHOWN:,} more; --json lists all")
