"""``persistkv prune``: delete requests and the packs that only they use, while others write."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable
from typing import NamedTuple

from persistkv.config import parse_size
from persistkv.errors import MissingOptionError, StoreError
from persistkv.storage.inspection.handle import StoreHandle, open_store
from persistkv.storage.inspection.requests import RequestView
from persistkv.storage.inspection.selection import Selection
from persistkv.storage.stats import BackendStats, FreeSpace
from persistkv_tools import render
from persistkv_tools.command import (
    SELECTION,
    URL,
    Command,
    add_flag,
    add_shared,
    confirm,
    ensure_consent,
    number,
)
from persistkv_tools.maintain.deletion import (
    Done,
    Prune,
    PrunedTotals,
    PrunePlan,
    Quarantine,
    plan_prune,
)

_SHOWN = 20  # requests in the table of the plan
_COLUMNS = render.columns(
    "request=short_id age=created expires tokens size=raw_bytes pinned labels namespace"
)
_ONE_OF = (
    "at least one of --request, --older-than, --label, --larger-than, --never-hit, --expired, "
    "--namespace, --keep-size, --keep-last, --keep-daily, --orphans and --quarantined"
)


def prune(
    url: str,
    *,
    request: list[str] | None,
    older_than: str | None,
    label: list[str] | None,
    larger_than: str | None,
    never_hit: bool,
    expired: bool,
    namespace: str | None,
    keep_size: str | None,
    keep_last: int | None,
    keep_daily: int | None,
    orphans: bool,
    shared_packs: bool,
    quarantined: bool,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    """Delete requests, and the packs that only they use.

    Packs that other requests use stay. Exit code 1: for this reason, requests that were chosen by
    --request, or by --label alone, could not be deleted completely. Exit code 3: a commit failed;
    earlier commits stay in effect and are shown.

    Example: persistkv prune lmdb:///var/cache/kv --older-than 30d --dry-run
    """
    selection = Selection.parse(
        label,
        older_than,
        larger_than=larger_than,
        never_hit=never_hit,
        expired=expired,
    )
    keep_bytes = _keep_bytes(keep_size)
    has_keep_options = (keep_size, keep_last, keep_daily) != (None, None, None)
    has_conditions = selection != Selection()
    deletes_requests = any([request, has_conditions, namespace, has_keep_options])
    if not any([deletes_requests, orphans, quarantined]):
        raise MissingOptionError("prune", _ONE_OF)
    ensure_consent("prune", "--yes or --dry-run", yes=yes or dry_run, json=json)

    with open_store(url, read_only=dry_run) as store:
        pruning = plan_prune(
            store,
            selection if deletes_requests else None,
            requests=request or [],
            namespace=namespace,
            keep_size=keep_bytes,
            keep_last=keep_last,
            keep_daily=keep_daily,
            orphans=orphans,
            shared_packs=shared_packs,
            quarantined=quarantined,
        )
        # print the plan before the question, because the user consents to it
        if not json:
            _print_plan(pruning.plan, pruning.quarantined)
        outcome = _run_if_consented(store, pruning, dry_run=dry_run, yes=yes)

    if json:
        report = {
            "url": url,
            "dry_run": dry_run,
            **_json_report(pruning, outcome),
        }
        render.print_json(report)
    else:
        _print_outcome(pruning, outcome, keep_bytes)
    if outcome.failure is not None:
        raise outcome.failure
    expects_all_deleted = _expects_all_deleted(
        request,
        selection,
        has_keep_options=has_keep_options,
    )
    if expects_all_deleted and pruning.plan.private_blocks_left:
        raise SystemExit(1)


def _keep_bytes(keep_size: str | None) -> int | None:
    return None if keep_size is None else parse_size(keep_size, name="--keep-size")


def _expects_all_deleted(
    requests: list[str] | None,
    selection: Selection,
    *,
    has_keep_options: bool,
) -> bool:
    """Return whether the user expects all content of the chosen requests to be deleted: requests
    are named, or are chosen by labels alone.

    :param has_keep_options: whether --keep-size, --keep-last or --keep-daily limits the deletion of
        the chosen requests.
    """
    if requests:
        return True
    # If a schedule deletes by age or size, blocks that stay because other requests use their packs
    # are no reason for an error.
    only_labels = selection == Selection(labels=selection.labels)
    return bool(selection.labels) and only_labels and not has_keep_options


class _Outcome(NamedTuple):
    """Deletions of the command, and the store afterwards."""

    done: Done | None = None
    """None: nothing was deleted, because it was only a plan or the user did not consent."""
    failure: StoreError | None = None
    """Error that ended the deletion; ``done`` counts the commits before it. None: it succeeded."""
    stats: BackendStats | None = None
    """Totals of the store afterwards; None: nothing was deleted, or the deletion failed."""
    free: FreeSpace | None = None
    """Free space of the store afterwards; None: unknown, or as for ``stats``."""


def _run_if_consented(
    store: StoreHandle,
    pruning: Prune,
    *,
    dry_run: bool,
    yes: bool,
) -> _Outcome:
    """Carry out the plan, after a question unless ``yes``; return the outcome, empty if the answer
    is no or for ``dry_run``."""
    if dry_run:
        return _Outcome()
    # without anything to delete, a question would only delay a script on a terminal
    asks = pruning.deletes and not yes
    if asks and not confirm("Delete them?"):
        return _Outcome()
    try:
        pruning.run()
    # the caller raises this error after it has shown the deletions
    except StoreError as error:
        return _Outcome(pruning.done, failure=error)
    backend = store.backend
    return _Outcome(
        done=pruning.done,
        stats=backend.stats(),
        free=backend.free_space(),
    )


def _json_report(pruning: Prune, outcome: _Outcome) -> dict[str, object]:
    """Return the plan and the outcome as fields of the JSON output; sizes of the store are null
    unless the deletion succeeded."""
    disk_bytes = None
    free_bytes = None
    if outcome.stats is not None:
        disk_bytes = outcome.stats.disk_bytes
        free_bytes = _free_bytes(outcome.free)
    return {
        "plan": pruning.plan,
        "done": outcome.done,
        "quarantined": pruning.quarantined,
        "disk_bytes": disk_bytes,
        "free_bytes": free_bytes,
    }


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--request",
        metavar="ID",
        action="append",
        help="This request and its copies (same context and labels); can be repeated.",
    )
    add_shared(parser, *SELECTION)
    parser.add_argument(
        "--keep-size",
        metavar="SIZE",
        help="Delete the oldest until all packs take at most this, e.g. 50GiB.",
    )
    parser.add_argument(
        "--keep-last",
        metavar="N",
        type=number(least=0),
        help="Keep the N newest of these requests.",
    )
    parser.add_argument(
        "--keep-daily",
        metavar="N",
        type=number(least=0),
        help="Keep the newest of these requests of each of the N newest days with any.",
    )
    add_flag(parser, "--orphans", "Also delete packs that no request uses.")
    shared_help = "Also delete shared packs with blocks that only these requests use."
    add_flag(parser, "--shared-packs", shared_help)
    add_flag(
        parser, "--quarantined", "Also delete the renamed files of damaged stores."
    )
    add_flag(parser, "--dry-run", "Only show what would be deleted.")
    add_shared(parser, "--yes")


COMMAND = Command(prune, (URL,), _add_options)


def _free_bytes(free: FreeSpace | None) -> int:
    return 0 if free is None else free.payload_bytes + free.catalogue_bytes


def _print_sizes(
    stats: BackendStats,
    free: FreeSpace | None,
    keep_bytes: int | None,
) -> None:
    """Print the size of the store after the deletion, and why it may be above ``--keep-size``."""
    # all chosen requests were deleted, and the remaining packs still take more than ``keep_bytes``
    if keep_bytes is not None and stats.stored_bytes > keep_bytes:
        size = render.format_size(stats.stored_bytes)
        render.say(
            f"packs still take {size}, more than --keep-size: requests that were not chosen "
            "use them, or none does (see --orphans)"
        )
    line = f"on disk: {render.format_size(stats.disk_bytes)}"
    free_bytes = _free_bytes(free)
    if free_bytes:
        line += f", of which {render.format_size(free_bytes)} is free for new content"
    render.say(line)


def _print_plan(plan: PrunePlan, damaged: Quarantine) -> None:
    """Print the content to delete."""
    if plan.requests:
        render.show_table(
            _COLUMNS,
            plan.requests,
            title="requests to delete",
            left="pinned,labels,namespace",
            optional="expires,pinned",
            most=_SHOWN,
        )
    requests = render.count(len(plan.requests), "request")
    render.say(f"to delete: {requests}, {_amount(plan.goes)}")
    _print_pins(plan.requests)
    if plan.private_blocks_left:
        blocks = render.count(plan.private_blocks_left, "block")
        kept = f"{blocks} that only these requests use, in shared packs"
        render.say(f"to keep: {kept}; --shared-packs deletes those, too")
    if damaged.directories:
        size = render.format_size(damaged.num_bytes)
        render.say(f"to delete: {size} in files of damaged stores:")
    for directory in damaged.directories:
        render.say(f"  {directory}")


def _print_pins(views: Iterable[RequestView]) -> None:
    """Print how many of the requests to delete are pinned."""
    pins = sum(bool(view.pinned) for view in views)
    if pins:
        verb = "is" if pins == 1 else "are"
        render.say(f"of these, {render.count(pins, 'request')} {verb} pinned")


def _print_outcome(
    pruning: Prune,
    outcome: _Outcome,
    keep_bytes: int | None,
) -> None:
    """Print the deleted content."""
    done = outcome.done
    # None: nothing was deleted, because of --dry-run, or because the user did not consent
    if done is None:
        return
    damaged = pruning.quarantined
    requests = render.count(done.requests, "request")
    render.say(f"deleted: {requests}, {_amount(done.goes)}")
    if done.freed_bytes:
        freed = render.format_size(done.freed_bytes)
        render.say(f"returned to the file system: {freed}")
    if damaged.directories:
        size = render.format_size(damaged.deleted_bytes)
        render.say(f"deleted files of damaged stores: {size}")
    if outcome.stats is not None:
        _print_sizes(outcome.stats, outcome.free, keep_bytes)


def _amount(amount: PrunedTotals) -> str:
    packs = render.count(amount.packs, "pack")
    return f"{packs}, {render.format_size(amount.stored_bytes)}"
