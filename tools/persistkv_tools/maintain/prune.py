"""``persistkv prune``."""

from __future__ import annotations

import shlex
from typing import Annotated

import msgspec
import typer

from persistkv.config import parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage.backend import Backend, SupportsQuarantine
from persistkv_tools import render
from persistkv_tools.maintain.pruning import Amount, Done, Plan, Pruning
from persistkv_tools.options import (
    InNamespace,
    Json,
    Labels,
    LargerThan,
    NeverHit,
    OlderThan,
    Url,
    Yes,
    ensure_consent,
    opened,
)
from persistkv_tools.progress import byte_progress
from persistkv_tools.selection import RequestView, Selection, chosen_namespaces, find_request

_SHOWN = 20


class Wanted(msgspec.Struct, frozen=True):
    """What the command line asks for."""

    selection: Selection
    namespace: str | None
    requests: list[str]
    keep_size: int | None
    orphans: bool
    shared: bool

    @property
    def names_requests(self) -> bool:
        """Whether requests are to go at all; with ``--orphans`` alone, none are."""
        chosen = self.selection != Selection() or self.requests or self.namespace is not None
        return bool(chosen) or self.keep_size is not None

    @property
    def must_all_go(self) -> bool:
        """Whether it names certain requests, by id or by labels alone. Any condition besides is housekeeping, which is
        done where it has deleted all that can go.
        """
        by_labels = bool(self.selection.labels) and self.selection == Selection(labels=self.selection.labels)
        return bool(self.requests) or (by_labels and self.keep_size is None)


class Disk(msgspec.Struct, frozen=True):
    """Size of a store on its medium."""

    total_bytes: int
    free_bytes: int
    """Of these, free for new content."""
    compactable_bytes: int
    """Of these, the part that ``--compact`` can return to the disk."""

    @classmethod
    def of(cls, backend: Backend) -> Disk:
        """As it is now."""
        free = backend.free_space()
        disk_bytes = backend.stats().disk_bytes
        if free is None:
            return cls(disk_bytes, 0, 0)
        return cls(disk_bytes, free.payload_bytes + free.catalogue_bytes, free.payload_bytes)


class Quarantine(msgspec.Struct):
    """Directories of damaged stores that ``--quarantined`` deletes."""

    directories: tuple[str, ...] = ()
    num_bytes: int = 0
    """Bytes on disk."""
    deleted_bytes: int = 0
    """Bytes on disk that were deleted."""

    @classmethod
    def of(cls, backend: Backend) -> Quarantine:
        """As it is now."""
        stats = backend.stats()
        return cls(stats.quarantined, stats.quarantined_bytes)


_ONE_OF = (
    "at least one of --request, --older-than, --label, --larger-than, --never-hit, --namespace, --keep-size,"
    " --orphans, --quarantined and --compact"
)


def prune(
    url: Url,
    request: Annotated[
        list[str] | None, typer.Option("--request", metavar="ID", help="This request; may be given again.")
    ] = None,
    older_than: OlderThan = None,
    label: Labels = None,
    larger_than: LargerThan = None,
    never_hit: NeverHit = False,
    namespace: InNamespace = None,
    keep_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Only as many as needed, oldest first, until packs take this: 50GiB."),
    ] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="Also packs that no request names.")] = False,
    shared_packs: Annotated[
        bool,
        typer.Option(
            "--shared-packs", help="Also packs that others use, where a block in it is only of these requests."
        ),
    ] = False,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Also the files of damaged stores that were renamed.")
    ] = False,
    compact: Annotated[
        bool, typer.Option("--compact", help="Then give free space within the store back to the disk.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete requests, and the packs that only they use.

    A request whose packs are all used by others stays until one of these goes. Exit code 1: such a request was
    named, with --request or with --label and no other condition, or blocks of it stay. Exit code 3: a commit failed;
    those before it were done.

    Example: persistkv prune lmdb:///var/cache/kv --older-than 30d --dry-run
    """
    wanted = Wanted(
        Selection.parse(label, older_than, larger_than=larger_than, never_hit=never_hit),
        namespace,
        request or [],
        None if keep_size is None else parse_size(keep_size, name="--keep-size"),
        orphans,
        shared_packs,
    )
    if not (wanted.names_requests or orphans or quarantined or compact):
        raise ConfigurationError("prune", url, _ONE_OF)
    ensure_consent("prune", url, "--yes or --dry-run", yes=yes or dry_run, json=json)
    with opened(url) as backend:
        pruning = _chosen(backend, wanted)
        plan = pruning.plan(orphans=orphans, shared=shared_packs)
        damaged = Quarantine.of(backend) if quarantined else Quarantine()
        if not json:
            _print_plan(plan)
            _print_quarantine(damaged)
        done = None
        if not dry_run and plan.goes.packs == 0 and not damaged.directories:
            done = pruning.run(backend)
        elif not dry_run and (yes or typer.confirm("Delete them?")):
            with opened(url, writable=True) as writer:
                done = pruning.run(writer)
                if damaged.directories and isinstance(writer, SupportsQuarantine):
                    damaged.deleted_bytes = writer.delete_quarantined()
    freed, disk, packs_bytes = None, None, 0
    if done is not None:
        freed = _compact(url) if compact else None
        with opened(url) as backend:
            disk, packs_bytes = Disk.of(backend), backend.stats().stored_bytes
    if json:
        sizes = {"disk_bytes": disk and disk.total_bytes, "free_bytes": disk and disk.free_bytes}
        what = {"plan": plan, "done": done, "quarantined": damaged}
        render.print_json({"url": url, "dry_run": dry_run, **what, "freed_bytes": freed, **sizes})
    elif done is not None and disk is not None:
        _print_done(done, must_all_go=wanted.must_all_go)
        if damaged.directories:
            render.say(f"deleted files of damaged stores: {render.format_size(damaged.deleted_bytes)}")
        if wanted.keep_size is not None and packs_bytes > wanted.keep_size:
            left = f"{render.format_size(packs_bytes)} of packs are left, more than --keep-size"
            render.say(f"{left}: of requests that were not chosen, or of none (--orphans)")
        _print_disk(url, disk, freed)
    stay = plan.staying if done is None else done.staying
    if wanted.must_all_go and (stay or plan.private_blocks_left):
        raise typer.Exit(1)


def _print_disk(url: str, disk: Disk, freed: int | None) -> None:
    if freed is not None:
        render.say(f"given back to the disk: {render.format_size(freed)}")
    line = f"on disk: {render.format_size(disk.total_bytes)}"
    if disk.free_bytes:
        line += f", of which {render.format_size(disk.free_bytes)} are free for new content"
    if disk.compactable_bytes and freed is None:
        line += f"; to give {render.format_size(disk.compactable_bytes)} of it back: "
        line += f"persistkv prune {shlex.quote(url)} --compact"
    render.say(line)


def _compact(url: str) -> int:
    """Bytes on disk that it saved."""
    with opened(url, writable=True) as backend, byte_progress() as progress:
        before = backend.stats().disk_bytes
        task = progress.add_task("compact", total=None)
        for step in backend.compact():
            progress.update(task, completed=step.moved_bytes, total=step.total_bytes)
        return max(0, before - backend.stats().disk_bytes)


def _chosen(backend: Backend, wanted: Wanted) -> Pruning:
    namespaces = chosen_namespaces(backend, wanted.namespace)
    found = [find_request(backend, name, wanted.namespace) for name in wanted.requests]
    if found:
        ids = {request.namespace.id for request in found}
        namespaces = [namespace for namespace in namespaces if namespace.id in ids]
    pruning = Pruning(backend, namespaces)
    if wanted.names_requests:
        pruning.choose(wanted.selection, {(space.id, manifest.id) for space, manifest in found} or None)
    if wanted.keep_size is not None:
        pruning.shrink_to(wanted.keep_size)
    return pruning


def _print_plan(plan: Plan) -> None:
    for title, views in (
        ("these requests go", plan.requests),
        ("these stay: others use all their packs", plan.staying),
    ):
        if views:
            pinned = any(view.pinned for view in views)
            rows = (_cells(view, pinned=pinned) for view in views[:_SHOWN])
            columns = ("request", "age", "tokens", "size", *(["pinned"] if pinned else []), "labels", "namespace")
            render.console().print(render.table(columns, rows, title=title, left="pinned labels namespace"))
            if len(views) > _SHOWN:
                render.say(f"and {len(views) - _SHOWN:,} more; --json lists all")
    render.say(f"to delete: {render.count(len(plan.requests), 'request')}, {_amount(plan.goes)}")
    if pins := sum(bool(view.pinned) for view in plan.requests):
        render.say(f"{render.count(pins, 'request')} of these {'is' if pins == 1 else 'are'} pinned")
    if plan.private_blocks_left:
        blocks = render.count(plan.private_blocks_left, "block")
        render.say(f"{blocks} of these requests alone stay, in packs that others use; --shared-packs deletes those too")


def _print_quarantine(damaged: Quarantine) -> None:
    if damaged.directories:
        render.say(f"to delete: {render.format_size(damaged.num_bytes)} of damaged stores:")
        for directory in damaged.directories:
            render.say(f"  {directory}")


def _print_done(done: Done, *, must_all_go: bool) -> None:
    render.say(f"deleted: {render.count(done.requests, 'request')}, {_amount(done.goes)}")
    staying = render.count(len(done.staying), "request")
    if done.staying and must_all_go:
        render.say(f"still there: {staying} of those that were to go")
    elif done.staying:
        stays = "stays" if len(done.staying) == 1 else "stay"
        render.say(f"{staying} {stays} until one of their packs goes: others use all of these")


def _amount(amount: Amount) -> str:
    return f"{render.count(amount.packs, 'pack')}, {render.format_size(amount.stored_bytes)}"


def _cells(request: RequestView, *, pinned: bool) -> list[str]:
    return [
        request.id,
        render.format_age(request.created),
        f"{request.tokens:,}",
        render.format_size(request.raw_bytes),
        *(["yes" if request.pinned else ""] if pinned else []),
        render.format_labels(request.labels),
        request.namespace[:8],
    ]
