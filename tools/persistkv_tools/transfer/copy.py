"""``persistkv copy``: copy checked requests from one store to another."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple

from rich.progress import Progress

from persistkv.config import StoreUrl, parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.inspection.handle import open_store
from persistkv.storage.inspection.requests import (
    FoundRequest,
    chosen_namespaces,
    chosen_requests,
)
from persistkv.storage.inspection.selection import Selection
from persistkv.storage.key_options import KEY_OPTIONS
from persistkv_tools import render
from persistkv_tools.command import (
    REQUESTS,
    Command,
    Positional,
    add_flag,
    add_shared,
    number,
)
from persistkv_tools.options import open_if_exists
from persistkv_tools.progress import Throttle, byte_progress, counted
from persistkv_tools.transfer.plan import Copied, CopyPlan, CopyTarget, Source, counts
from persistkv_tools.transfer.writer import run_plan

_SHOWN = 20  # ids of requests in a list
_ALL = Selection()


_SOURCE = Positional("source", "SRC", "Store to copy from.", is_store=True)
_TARGET = Positional(
    "target", "DST", "Store to copy to; created if absent.", is_store=True
)


def copy(
    source: str,
    target: str,
    requests: list[str],
    *,
    namespace: str | None,
    label: list[str] | None,
    older_than: str | None,
    newer_than: str | None,
    newest: int | None,
    rate: str | None,
    dry_run: bool,
    json: bool,
) -> None:
    """Copy content that another store lacks. If a run is interrupted, the next one copies the rest.

    Exit code 1: something was not copied, because it is damaged or was evicted again. Exit code 2:
    the content does not fit the other store's capacity; nothing was written.

    Example: persistkv copy lmdb:///var/cache/kv file:///mnt/backup/kv --label user=anna
    """
    selection = Selection.parse(label, older_than, newer_than)
    begin = time.monotonic()
    with open_store(source) as store, byte_progress() as progress:
        outcome = copy_content(
            store.backend,
            source,
            target,
            selection,
            requests=requests,
            namespace=namespace,
            newest=newest,
            rate=rate,
            dry_run=dry_run,
            progress=progress,
        )
    if json:
        render.print_json(
            {
                "source": source,
                "target": target,
                "dry_run": dry_run,
                "copied": outcome.copied,
                "capacity": outcome.place.capacity,
            }
        )
    else:
        seconds = None if dry_run else time.monotonic() - begin
        _print(outcome, target, seconds)
    if not outcome.copied.complete:
        raise SystemExit(1)


def _add_options(parser: ArgumentParser) -> None:
    add_shared(parser, "--namespace", "--label", "--older-than", "--newer-than")
    parser.add_argument(
        "--newest",
        metavar="N",
        type=number(least=1),
        help="Only the N newest of these requests.",
    )
    add_shared(parser, "--rate")
    add_flag(parser, "--dry-run", "Only show what would be copied.")


COMMAND = Command(copy, (_SOURCE, _TARGET, REQUESTS), _add_options)


class CopyOutcome(NamedTuple):
    """Copied content, and its target."""

    copied: Copied
    place: CopyTarget
    """Where the content was written, or would be written by a plan."""


def copy_content(
    backend: Backend,
    url: str,
    target: str,
    selection: Selection = _ALL,
    *,
    requests: Iterable[str] = (),
    namespace: str | None = None,
    newest: int | None = None,
    rate: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CopyOutcome:
    """Copy requests that another store lacks. If no requests are chosen, copy all, and packs that
    no request names.

    :param backend: store to copy from.
    :param url: its URL.
    :param target: URL of the other store, which is created if absent.
    :param selection: requests to copy; none if ``never_hit`` is set.
    :param requests: ids; copy only these requests, whatever ``selection`` says.
    :param newest: copy only so many of these requests, the newest ones; None: all.
    :param rate: bytes to copy in a second at most, e.g. ``200MiB``.
    :param dry_run: write nothing; return what would be copied.
    :raises ConfigurationError: the target is this store, or an argument is invalid.
    :raises StoreTooSmallError: the content does not fit; nothing was written.
    """
    _refuse_same_store(url, target)
    throttle = Throttle(None if rate is None else parse_size(rate, name="--rate"))
    names = list(requests)
    chosen = chosen_requests(backend, names, selection, namespace)
    if newest is not None:
        chosen.sort(key=lambda found: found.manifest.created)
        chosen = chosen[-newest:]
    # Packs that no request names are copied only if no request is chosen, because they match no
    # choice.
    everything = not names and newest is None and selection == _ALL

    whole_namespaces = chosen_namespaces(backend, namespace) if everything else []
    sources = _sources(backend, chosen, whole_namespaces)
    # compare sizes before the target is created or opened for writing
    with open_if_exists(target) as existing:
        plan = CopyPlan(sources, existing, everything=everything)
        place = plan.place(existing, target, backend.stats().capacity)
    if dry_run:
        return CopyOutcome(plan.expected(), place)
    with closing(open_backend(place.url)) as writable:
        on_bytes = counted(progress, "copy", plan.payload_bytes, throttle)
        copied = run_plan(plan, writable, target, on_bytes)
        # read the capacity again, because another process may have created the store meanwhile
        capacity = writable.stats().capacity
    return CopyOutcome(copied, place._replace(capacity=capacity))


def _refuse_same_store(url: str, target: str) -> None:
    """Raise ConfigurationError if both URLs name one store at one place, under the same key. Under
    another key, a place holds another store."""
    source_url = StoreUrl.parse(url)
    target_url = StoreUrl.parse(target)
    source_place = (source_url.scheme, source_url.location)
    target_place = (target_url.scheme, target_url.location)
    if source_place != target_place:
        return
    # URLs that name different keys name different stores
    for name in KEY_OPTIONS:
        if source_url.options.get(name) != target_url.options.get(name):
            return
    raise ConfigurationError("target", target, "another store than the source")


def _sources(
    backend: Backend,
    chosen: Iterable[FoundRequest],
    whole_namespaces: Iterable[Namespace],
) -> list[Source]:
    """Return the sources of the chosen requests and of these namespaces."""
    namespaces = {namespace.id: namespace for namespace in whole_namespaces}
    requests: defaultdict[bytes, list[RequestManifest]] = defaultdict(list)
    for found in chosen:
        namespace = found.namespace
        namespaces.setdefault(namespace.id, namespace)
        requests[namespace.id].append(found.manifest)
    sources = []
    for namespace_id, namespace in namespaces.items():
        source = Source(backend, namespace, requests[namespace_id])
        sources.append(source)
    return sources


def _print(
    outcome: CopyOutcome,
    target: str,
    seconds: float | None,
) -> None:
    """Print the outcome of a copy.

    :param seconds: duration of the copy; None: the outcome is a plan.
    """
    copied = outcome.copied
    place = outcome.place
    content = counts(copied.requests, copied.packs)
    size = render.format_size(copied.stored_bytes)
    if seconds is None:
        render.say(f"to copy to {target}: {content}, {size}")
    else:
        pace = render.format_pace(copied.stored_bytes, seconds)
        render.say(f"copied to {target}: {content}, {size} {pace}")
    _print_left_out(copied)
    # the plan has added a capacity to the URL of a new store
    has_new_capacity = place.url != target
    if has_new_capacity and place.capacity is not None:
        created = "would be" if seconds is None else "was"
        capacity = render.format_size(place.capacity)
        render.say(f"{target} {created} created with a capacity of {capacity}")


def _print_left_out(copied: Copied) -> None:
    """Print the content that was not copied, with the reasons."""
    if copied.requests_held or copied.packs_held:
        held = counts(copied.requests_held, copied.packs_held)
        render.say(f"not copied, because the store has them: {held}")
    _print_losses(copied)


def _print_losses(copied: Copied) -> None:
    """Print the content that should have been copied and was not, and evictions by the copy."""
    if copied.evicted_packs:
        evicted = render.count(copied.evicted_packs, "pack")
        render.say(f"meanwhile, the store evicted {evicted}")
    if copied.damaged_packs:
        damaged = render.count(copied.damaged_packs, "pack")
        render.say(f"damaged or missing, and not copied: {damaged}")
    if copied.incomplete:
        _print_names(
            "left out, because some of their blocks are damaged or missing:",
            copied.incomplete,
        )
    if copied.lost or copied.lost_packs:
        lost = counts(len(copied.lost), copied.lost_packs)
        _print_names(f"copied, but evicted again: {lost}:", copied.lost)


def _print_names(title: str, names: list[str]) -> None:
    """Print a title and the first of these ids below it."""
    render.say(title)
    for name in names[:_SHOWN]:
        render.say(f"  {name}")
    if len(names) > _SHOWN:
        render.say(f"  and {len(names) - _SHOWN:,} more; --json lists all")
