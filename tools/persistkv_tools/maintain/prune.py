"""``persistkv prune``: deletes requests and the packs that only they use, while others write.

1. A pack is deleted only if no request that stays names a block in it. ``--shared-packs`` relaxes
   this.
2. A store deletes packs, not requests. A request disappears as soon as one of its packs is deleted.
   It stays if other requests use all its packs, or if the store holds none of them: then ttl and
   capacity delete it.
3. Before each commit, the command looks for requests that were added since the plan was made, and
   keeps their packs.
4. Pack tables are read only in namespaces where something is to be deleted. A run that finds
   nothing to delete costs as much as listing the requests.
5. Commits are short. After each one, the command pauses for as long as the commit took (0.2 s at
   most).
6. At the end, the store's free space is returned to the file system.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import msgspec

from persistkv.config import parse_size
from persistkv.errors import MissingOptionError, StoreError, StoreFullError
from persistkv.storage.backend import Backend, CommitBatch, Namespace
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.inspection.handle import StoreHandle, open_store
from persistkv.storage.inspection.pack_tables import NamespacePacks, all_keys, keys_of
from persistkv.storage.inspection.requests import (
    FoundRequest,
    RequestView,
    chosen_namespaces,
    copy_group,
    find_request,
    short_ids,
    with_uses,
)
from persistkv.storage.inspection.selection import Selection
from persistkv.storage.stats import BackendStats, FreeSpace, RequestUse
from persistkv_tools import render
from persistkv_tools.command import (
    URL,
    Command,
    add_flag,
    add_labels,
    add_larger_than,
    add_namespace,
    add_never_hit,
    add_older_than,
    add_yes,
    confirm,
    ensure_consent,
)

_SHOWN = 20
_COLUMNS = render.columns(
    "request=short_id age=created tokens size=raw_bytes pinned labels namespace"
)
_ONE_OF = (
    "at least one of --request, --older-than, --label, --larger-than, --never-hit, "
    "--namespace, --keep-size,"
    " --orphans and --quarantined"
)
_NO_PACKS = "the store holds none of {whose} packs"
_PACKS_AT_ONCE = 64
_MOST_PAUSE_S = 0.2


class Quarantine(msgspec.Struct):
    """Directories of damaged stores that ``--quarantined`` deletes."""

    directories: tuple[str, ...] = ()
    num_bytes: int = 0
    """Bytes that these directories take on disk before the deletion."""
    deleted_bytes: int = 0
    """Bytes on disk of the directories that were deleted; 0 before the deletion."""


class PrunedTotals(msgspec.Struct):
    """Totals of a set of packs: their number, their blocks, and the bytes of their payloads."""

    packs: int = 0
    blocks: int = 0
    stored_bytes: int = 0

    def add(self, table: PackTable) -> None:
        self.packs += 1
        self.blocks += len(table.keys)
        self.stored_bytes += table.payload_length


class PrunePlan(msgspec.Struct):
    """Requests and packs that a prune will delete."""

    requests: list[RequestView]
    """Requests to delete because they lose a pack, oldest first: chosen ones and, with
    --shared-packs, others that use the same packs."""
    staying: list[RequestView]
    """Chosen requests that cannot be deleted: other requests use all their packs, or the store
    holds none of them."""
    without_packs: list[str]
    """Ids of those of ``staying`` of which the store holds no pack, or whose keys cannot be
    read."""
    goes: PrunedTotals
    """Totals of the packs to delete."""
    private_blocks_left: int
    """Blocks that only chosen requests name, and that stay because other requests use their
    packs."""


class Done(msgspec.Struct):
    """Totals of a prune's deletions. Requests are counted after the last commit of their namespace
    or an error."""

    goes: PrunedTotals = msgspec.field(default_factory=PrunedTotals)
    requests: int = 0
    staying: list[str] = []
    """Ids of chosen requests that the store still holds."""
    freed_bytes: int = 0
    """Bytes of free space that the store returned to its file system."""


def prune(
    url: str,
    *,
    request: list[str] | None,
    older_than: str | None,
    label: list[str] | None,
    larger_than: str | None,
    never_hit: bool,
    namespace: str | None,
    keep_size: str | None,
    orphans: bool,
    shared_packs: bool,
    quarantined: bool,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    """Delete requests, and the packs that only they use.

    Packs that other requests use stay, and so do requests without other packs. Exit code 1: for
    this reason, requests that were chosen by --request, or by --label alone, could not be deleted
    completely. Exit code 3: a commit failed; earlier commits stay in effect and are shown.

    Example: persistkv prune lmdb:///var/cache/kv --older-than 30d --dry-run
    """
    selection = Selection.parse(
        label, older_than, larger_than=larger_than, never_hit=never_hit
    )
    keep_bytes = _keep_bytes(keep_size)
    is_chosen = selection != Selection() or namespace is not None
    names_requests = any([request, is_chosen, keep_bytes is not None])
    if not any([names_requests, orphans, quarantined]):
        raise MissingOptionError("prune", _ONE_OF)
    ensure_consent("prune", "--yes or --dry-run", yes=yes or dry_run, json=json)

    with open_store(url, read_only=dry_run) as store:
        pruning = plan_prune(
            store,
            selection if names_requests else None,
            requests=request or [],
            namespace=namespace,
            keep_size=keep_bytes,
            orphans=orphans,
            shared_packs=shared_packs,
            quarantined=quarantined,
        )
        if not json:
            _print_plan(pruning.plan, pruning.quarantined)
        outcome = _Outcome()
        if not dry_run:
            outcome = _run_if_consented(store, pruning, yes=yes)

    if json:
        report = {"url": url, "dry_run": dry_run, **_json_report(pruning, outcome)}
        render.print_json(report)
    else:
        _print_outcome(pruning, outcome, keep_bytes)
    if outcome.failure is not None:
        raise outcome.failure
    must_all_go = bool(request) or _is_by_labels(selection, keep_bytes)
    if must_all_go and not _all_gone(pruning.plan, outcome):
        raise SystemExit(1)


def _keep_bytes(keep_size: str | None) -> int | None:
    return None if keep_size is None else parse_size(keep_size, name="--keep-size")


def _is_by_labels(selection: Selection, keep_bytes: int | None) -> bool:
    """Return whether labels are the only condition: any other one is housekeeping."""
    only_labels = selection == Selection(labels=selection.labels)
    return bool(selection.labels) and only_labels and keep_bytes is None


class _Outcome(NamedTuple):
    """What the command deleted, and the store afterwards."""

    done: Done | None = None
    """None: nothing was deleted, because it was only a plan or the user did not consent."""
    failure: StoreError | None = None
    stats: BackendStats | None = None
    free: FreeSpace | None = None


def _run_if_consented(store: StoreHandle, pruning: Prune, *, yes: bool) -> _Outcome:
    asks = pruning.deletes and not yes
    if asks and not confirm("Delete them?"):
        return _Outcome()
    try:
        pruning.run()
    except StoreError as error:
        return _Outcome(pruning.done, error)
    backend = store.backend
    return _Outcome(pruning.done, None, backend.stats(), backend.free_space())


def _all_gone(plan: PrunePlan, outcome: _Outcome) -> bool:
    """Return whether all chosen requests were or will be deleted, with all their blocks."""
    staying: Sequence[object] = plan.staying
    if outcome.done is not None:
        staying = outcome.done.staying
    return not (staying or plan.private_blocks_left)


def _json_report(pruning: Prune, outcome: _Outcome) -> dict[str, object]:
    disk_bytes = free_bytes = None
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
    add_older_than(parser)
    add_labels(parser)
    add_larger_than(parser)
    add_never_hit(parser)
    add_namespace(parser)
    parser.add_argument(
        "--keep-size",
        metavar="SIZE",
        help="Delete the oldest until all packs take at most this, e.g. 50GiB.",
    )
    add_flag(parser, "--orphans", "Also delete packs that no request uses.")
    shared_help = "Also delete shared packs with blocks that only these requests use."
    add_flag(parser, "--shared-packs", shared_help)
    add_flag(
        parser, "--quarantined", "Also delete the renamed files of damaged stores."
    )
    add_flag(parser, "--dry-run", "Only show what would be deleted.")
    add_yes(parser)


COMMAND = Command(prune, (URL,), _add_options)


def _free_bytes(free: FreeSpace | None) -> int:
    return 0 if free is None else free.payload_bytes + free.catalogue_bytes


def _print_sizes(
    stats: BackendStats, free: FreeSpace | None, keep_bytes: int | None
) -> None:
    if keep_bytes is not None and stats.stored_bytes > keep_bytes:
        left = f"packs still take {render.format_size(stats.stored_bytes)}, more than --keep-size"
        render.say(
            f"{left}: requests that were not chosen use them, or none does (see --orphans)"
        )
    line = f"on disk: {render.format_size(stats.disk_bytes)}"
    if _free_bytes(free):
        line += f", of which {render.format_size(_free_bytes(free))} is free for new content"
    render.say(line)


def _print_plan(plan: PrunePlan, damaged: Quarantine) -> None:
    without_packs = [view for view in plan.staying if view.id in plan.without_packs]
    shared = [view for view in plan.staying if view.id not in plan.without_packs]
    reason = _NO_PACKS.format(whose="their")
    _print_requests("requests to delete", plan.requests)
    _print_requests("requests that stay, because others use all their packs", shared)
    _print_requests(
        f"requests that stay, because {reason}; ttl and capacity delete them",
        without_packs,
    )
    requests = render.count(len(plan.requests), "request")
    render.say(f"to delete: {requests}, {_amount(plan.goes)}")
    pins = sum(bool(view.pinned) for view in plan.requests)
    if pins:
        verb = "is" if pins == 1 else "are"
        render.say(f"of these, {render.count(pins, 'request')} {verb} pinned")
    if plan.private_blocks_left:
        blocks = render.count(plan.private_blocks_left, "block")
        kept = f"{blocks} that only these requests use, in shared packs"
        render.say(f"to keep: {kept}; --shared-packs deletes those, too")
    if damaged.directories:
        size = render.format_size(damaged.num_bytes)
        render.say(f"to delete: {size} in files of damaged stores:")
    for directory in damaged.directories:
        render.say(f"  {directory}")


def _print_requests(title: str, views: Sequence[RequestView]) -> None:
    if views:
        left = "pinned,labels,namespace"
        render.show_table(
            _COLUMNS, views, title=title, left=left, optional="pinned", most=_SHOWN
        )


def _print_outcome(pruning: Prune, outcome: _Outcome, keep_bytes: int | None) -> None:
    done, plan, damaged = outcome.done, pruning.plan, pruning.quarantined
    if done is None:
        return
    requests = render.count(done.requests, "request")
    render.say(f"deleted: {requests}, {_amount(done.goes)}")
    if done.freed_bytes:
        freed = render.format_size(done.freed_bytes)
        render.say(f"returned to the file system: {freed}")
    shared = [name for name in done.staying if name not in plan.without_packs]
    without_packs = [name for name in done.staying if name in plan.without_packs]
    _print_staying(shared, "others use all {whose} packs")
    _print_staying(without_packs, _NO_PACKS)
    if damaged.directories:
        size = render.format_size(damaged.deleted_bytes)
        render.say(f"deleted files of damaged stores: {size}")
    if outcome.stats is not None:
        _print_sizes(outcome.stats, outcome.free, keep_bytes)


def _print_staying(names: Sequence[str], reason: str) -> None:
    """Say how many requests stay.

    :param reason: with ``{whose}`` for a pronoun.
    """
    if names:
        because = reason.format(whose="its" if len(names) == 1 else "their")
        requests = render.count(len(names), "request")
        render.say(f"not deleted: {requests}, because {because}")


def _amount(amount: PrunedTotals) -> str:
    return f"{render.count(amount.packs, 'pack')}, {render.format_size(amount.stored_bytes)}"


class _Usage:
    """Requests and packs of one namespace, their relations, and the part that a plan deletes."""

    def __init__(self, backend: Backend, namespace: Namespace) -> None:
        self.namespace = namespace
        self.manifests = {
            manifest.id: manifest
            for manifest in backend.catalogue(namespace.id).manifests()
        }
        self.doomed: set[str] = set()
        """Ids of the requests that were chosen for deletion."""
        self.going: set[str] = set()
        """Ids of the requests that lose a pack by the plan: chosen ones, and others that use the
        same packs."""
        self.deleted: set[bytes] = set()
        """Ids of the packs that the plan deletes."""
        self._backend = backend

    @cached_property
    def held(self) -> NamespacePacks:
        return NamespacePacks(self._backend, self.namespace.id)

    @cached_property
    def packs(self) -> dict[str, set[bytes]]:
        """By request id, the ids of the packs that hold a block of the request; no ids if its keys
        cannot be read."""
        keys = keys_of(self._backend, self.namespace.id, self.manifests)
        return {name: self.held.holding(all_keys(found or ())) for name, found in keys}

    def uses(
        self, names: Iterable[str]
    ) -> Iterator[tuple[RequestManifest, RequestUse | None]]:
        return with_uses(
            self._backend, self.namespace.id, (self.manifests[name] for name in names)
        )

    def payload_lengths(self) -> dict[bytes, int]:
        """Return the bytes of each pack's payload, by pack id."""
        tables = self.held.tables.items()
        return {pack: table.payload_length for pack, table in tables}

    def users(self) -> Counter[bytes]:
        """Return the number of requests that use each pack, by pack id."""
        users: Counter[bytes] = Counter()
        for packs in self.packs.values():
            users.update(packs)
        return users

    def used(self, requests: Iterable[str]) -> set[bytes]:
        return set().union(*(self.packs[name] for name in requests))

    def choose(
        self, selection: Selection, named: Collection[tuple[bytes, str]]
    ) -> None:
        """Choose the requests that fulfil ``selection`` for deletion.

        :param named: (namespace id, request id): choose only among these and their copies, which
            use the same packs, so none of them can be deleted alone. Empty: choose among all.
        """
        names = list(self.manifests)
        if named:
            names = self._with_copies(named)
        if not selection.never_hit:  # the use of requests is not needed
            for name in names:
                if selection.takes(self.manifests[name]):
                    self.doomed.add(name)
            return
        for manifest, use in self.uses(names):
            if selection.takes(manifest, use):
                self.doomed.add(manifest.id)

    def _with_copies(self, named: Collection[tuple[bytes, str]]) -> list[str]:
        """Return the ids of these requests of the namespace, and of their copies."""
        groups = set()
        for space, name in named:
            if space == self.namespace.id and name in self.manifests:
                groups.add(copy_group(self.manifests[name]))
        names = []
        for name, manifest in self.manifests.items():
            if copy_group(manifest) in groups:
                names.append(name)
        return names

    def private_blocks(self, shared: set[bytes]) -> dict[bytes, int]:
        """Return, by pack id, how many blocks of a shared pack only chosen requests name, if there
        are any."""
        where = {
            key: pack for pack in shared for key in self.held.tables[pack].keys.unpack()
        }
        users = [
            name for name, packs in self.packs.items() if not packs.isdisjoint(shared)
        ]
        chosen, others = set[bytes](), set[bytes]()
        for name, keys in keys_of(self._backend, self.namespace.id, users):
            (chosen if name in self.doomed else others).update(
                where.keys() & all_keys(keys or ())
            )
        return dict(Counter(where[key] for key in chosen - others))

    def used_since(self) -> set[bytes]:
        """Return the ids of packs that are used by requests added after the plan was made."""
        fresh = [
            found.id
            for found in self._backend.catalogue(self.namespace.id).manifests()
            if found.id not in self.manifests
        ]
        keys = keys_of(self._backend, self.namespace.id, fresh)
        return set().union(
            *(self.held.holding(all_keys(found or ())) for _, found in keys)
        )


def plan_prune(
    store: StoreHandle,
    selection: Selection | None = None,
    *,
    requests: Iterable[str] = (),
    namespace: str | None = None,
    keep_size: int | str | None = None,
    orphans: bool = False,
    shared_packs: bool = False,
    quarantined: bool = False,
) -> Prune:
    """Plan the deletion of requests and of the packs that only they use; ``run`` of the result
    deletes them.

    :param selection: requests to delete; ``Selection()``: all; None: none, or those named in
        ``requests``.
    :param requests: ids; delete only these requests and their copies, if they fulfil ``selection``.
    :param keep_size: delete only as many requests as needed, oldest first, until packs take at most
        this size.
    :param orphans: also delete packs that no request names.
    :param shared_packs: also delete packs that other requests use, if only deleted requests name
        some of their blocks. The other requests that use these packs are deleted, too.
    :param quarantined: also delete the files of damaged stores that were renamed.
    :raises ConfigurationError: the size is invalid.
    """
    keep_bytes = None if keep_size is None else parse_size(keep_size, name="keep_size")
    found = [find_request(store.backend, name, namespace) for name in requests]
    return Prune(
        store.backend,
        store.writable,
        selection,
        chosen_namespaces(store.backend, namespace),
        found,
        keep_bytes,
        orphans=orphans,
        shared_packs=shared_packs,
        quarantined=quarantined,
    )


class Prune:
    """A planned prune of some namespaces of a store, made by ``plan_prune``.

    :ivar plan: requests and packs to delete.
    :ivar quarantined: directories of damaged stores to delete; ``run`` records the bytes that it
        deleted.
    :ivar done: totals of what ``run`` has deleted, also if it raised an error.
    """

    def __init__(
        self,
        backend: Backend,
        writable: Callable[[], Backend],
        selection: Selection | None,
        namespaces: Iterable[Namespace],
        requests: Iterable[FoundRequest] = (),
        keep_bytes: int | None = None,
        *,
        orphans: bool = False,
        shared_packs: bool = False,
        quarantined: bool = False,
    ) -> None:
        """Make the plan; see ``plan_prune``. ``writable`` returns the same store, open for
        writing."""
        self._backend = backend
        self._writable = writable
        named = {(found.namespace.id, found.manifest.id) for found in requests}
        self._usages = _usages(backend, namespaces, named)
        if selection is not None or named:
            for usage in self._usages:
                usage.choose(selection or Selection(), named)
        if keep_bytes is not None:
            self._shrink_to(keep_bytes)

        self.plan = PrunePlan([], [], [], PrunedTotals(), 0)
        for usage in self._usages:
            if usage.doomed or orphans:
                self._plan(usage, orphans, shared_packs)
        self._sort_and_shorten()
        self.quarantined = Quarantine()
        if quarantined:
            stats = backend.stats()
            self.quarantined = Quarantine(stats.quarantined, stats.quarantined_bytes)
        self.done = Done()

    @property
    def deletes(self) -> bool:
        """Whether the plan deletes packs or files of damaged stores."""
        return bool(self.plan.goes.packs or self.quarantined.directories)

    def run(self) -> Done:
        """Delete the planned packs, requests and files of damaged stores; keep packs that requests
        added meanwhile use. Then return the store's free space to the file system.

        :raises StoreError: the store is open read-only, or a commit failed; ``done`` counts the
            commits before it.
        """
        backend = self._writable() if self.deletes else self._backend
        for usage in self._usages:
            packs = sorted(usage.deleted)
            try:
                for start in range(0, len(packs), _PACKS_AT_ONCE):
                    self._delete(backend, usage, packs[start : start + _PACKS_AT_ONCE])
            except StoreError:
                with suppress(StoreError):  # the first error tells more
                    self._count_requests(backend, usage)
                raise
            self._count_requests(backend, usage)
        if self.quarantined.directories:
            self.quarantined.deleted_bytes = backend.delete_quarantined()
        if self.done.goes.packs:
            self.done.freed_bytes = backend.release_free()
        return self.done

    def _sort_and_shorten(self) -> None:
        """Sort the requests of the plan by age, and set their short ids."""
        names: list[str] = []
        for usage in self._usages:
            names.extend(usage.manifests)
        shorts = short_ids(names)
        for views in (self.plan.requests, self.plan.staying):
            views.sort(key=_age_order)
            for place, view in enumerate(views):
                views[place] = msgspec.structs.replace(view, short_id=shorts[view.id])

    def _shrink_to(self, stored_bytes: int) -> None:
        """Reduce the choice to the oldest chosen requests: as many as must be deleted to reach this
        size of packs."""
        if self._backend.stats().stored_bytes <= stored_bytes:  # of all namespaces
            for usage in self._usages:
                usage.doomed.clear()
            return
        held = 0
        candidates = []
        users: dict[bytes, Counter[bytes]] = {}
        for usage in self._usages:
            held += sum(usage.payload_lengths().values())
            users[usage.namespace.id] = usage.users()
            for name in usage.doomed:
                candidates.append((usage.manifests[name].created, name, usage))
        candidates.sort(key=lambda candidate: candidate[:2])

        for _, name, usage in candidates:
            if held <= stored_bytes:
                usage.doomed.remove(name)
                continue
            left = users[usage.namespace.id]
            left.subtract(usage.packs[name])
            for pack in usage.packs[name]:
                if not left[pack]:
                    held -= usage.held.tables[pack].payload_length

    def _plan(self, usage: _Usage, orphans: bool, shared_packs: bool) -> None:
        doomed, kept = (
            usage.used(usage.doomed),
            usage.used(usage.manifests.keys() - usage.doomed),
        )
        private = usage.private_blocks(doomed & kept)
        usage.deleted = doomed - kept
        if shared_packs:
            usage.deleted |= private.keys()
        else:
            self.plan.private_blocks_left += sum(private.values())
        if orphans:
            usage.deleted |= usage.held.tables.keys() - kept - doomed
        for pack in usage.deleted:
            self.plan.goes.add(usage.held.tables[pack])
        usage.going = {
            name
            for name, packs in usage.packs.items()
            if not packs.isdisjoint(usage.deleted)
        }
        for manifest, use in usage.uses(usage.going | usage.doomed):
            view = RequestView.of(usage.namespace.id, manifest, use)
            if manifest.id in usage.going:
                self.plan.requests.append(view)
                continue
            self.plan.staying.append(view)
            if not usage.packs[manifest.id]:
                self.plan.without_packs.append(manifest.id)

    def _delete(self, backend: Backend, usage: _Usage, packs: list[bytes]) -> None:
        used = usage.used_since()
        wanted = [pack for pack in packs if pack not in used]
        begin = time.monotonic()
        try:
            gone = backend.commit(
                usage.namespace.id, CommitBatch(deletions=wanted)
            ).evicted
        except StoreFullError:  # deleting takes room too; fewer at once take less
            if len(wanted) < 2:
                raise
            half = len(wanted) // 2
            self._delete(backend, usage, wanted[:half])
            self._delete(backend, usage, wanted[half:])
            return
        for table in gone:
            self.done.goes.add(table)
        time.sleep(min(time.monotonic() - begin, _MOST_PAUSE_S))

    def _count_requests(self, backend: Backend, usage: _Usage) -> None:
        if usage.doomed or usage.deleted:
            there = {
                manifest.id
                for manifest in backend.catalogue(usage.namespace.id).manifests()
            }
            self.done.requests += len(usage.going - there)
            self.done.staying += sorted(usage.doomed & there)


def _age_order(view: RequestView) -> tuple[float, str]:
    return view.created, view.id


def _usages(
    backend: Backend, namespaces: Iterable[Namespace], named: set[tuple[bytes, str]]
) -> list[_Usage]:
    """Return the usages of the namespaces; only those of the named requests, if there are any."""
    named_spaces = {space for space, _ in named}
    usages = []
    for space in namespaces:
        if not named or space.id in named_spaces:
            usages.append(_Usage(backend, space))
    return usages
