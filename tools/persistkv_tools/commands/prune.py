"""``persistkv prune``."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from persistkv.config import parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage.backend import Backend
from persistkv_tools import render
from persistkv_tools.listing import RequestView
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
from persistkv_tools.pruning import Amount, Done, Plan, Pruning
from persistkv_tools.selection import Selection, chosen_namespaces, find_request

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


_ONE_OF = (
    "at least one of --request, --older-than, --label, --larger-than, --never-hit, --namespace, --keep-size,"
    " --orphans and --compact"
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
    compact: Annotated[
        bool, typer.Option("--compact", help="Then give free space within the store back to the disk.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete requests, and the packs that only they use. Exit code 1: something that was asked for could not go.

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
    if not (wanted.names_requests or orphans or compact):
        raise ConfigurationError("prune", url, _ONE_OF)
    ensure_consent("prune", url, "--yes or --dry-run", yes=yes or dry_run, json=json)
    with opened(url) as backend:
        pruning = _chosen(backend, wanted)
        plan = pruning.plan(orphans=orphans, shared=shared_packs)
        if not json:
            _print_plan(plan)
        done = None
        if not dry_run and plan.goes.packs == 0:
            done = pruning.run(backend)
        elif not dry_run and (yes or typer.confirm("Delete them?")):
            with opened(url, writable=True) as writer:
                done = pruning.run(writer)
    freed = _compact(url) if compact and done is not None else None
    if json:
        render.print_json({"url": url, "dry_run": dry_run, "plan": plan, "done": done, "freed_bytes": freed})
    elif done is not None:
        _print_done(done)
    if freed is not None and not json:
        render.say(f"given back to the disk: {render.format_size(freed)}")
    stay = plan.staying if done is None else done.staying
    if stay or (plan.private_blocks_left and wanted.requests):
        raise typer.Exit(1)


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
        ("these cannot go: others use all their packs", plan.staying),
    ):
        if views:
            rows = map(_cells, views[:_SHOWN])
            columns = ("request", "age", "tokens", "size", "labels", "namespace")
            render.console().print(render.table(columns, rows, title=title, left="labels namespace"))
            if len(views) > _SHOWN:
                render.say(f"and {len(views) - _SHOWN:,} more; --json lists all")
    render.say(f"to delete: {render.count(len(plan.requests), 'request')}, {_amount(plan.goes)}")
    if plan.private_blocks_left:
        blocks = render.count(plan.private_blocks_left, "block")
        render.say(f"{blocks} of these requests alone stay, in packs that others use; --shared-packs deletes those too")


def _print_done(done: Done) -> None:
    render.say(f"deleted: {render.count(done.requests, 'request')}, {_amount(done.goes)}")
    if done.staying:
        render.say(f"still there: {render.count(len(done.staying), 'request')} of those that were to go")


def _amount(amount: Amount) -> str:
    return f"{render.count(amount.packs, 'pack')}, {render.format_size(amount.stored_bytes)}"


def _cells(request: RequestView) -> list[str]:
    return [
        request.id,
        render.format_age(request.created),
        f"{request.tokens:,}",
        render.format_size(request.raw_bytes),
        render.format_labels(request.labels),
        request.namespace[:8],
    ]
