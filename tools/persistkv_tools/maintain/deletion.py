"""Deletion of requests and of the packs that only they use, while others write.

1. A pack is deleted only if no request that stays names a block in it. ``shared_packs`` relaxes
   this.
2. A chosen request is always deleted, also if all its packs stay because others use them.
3. Before each commit, requests that were added since the plan was made are looked for, and their
   packs are kept.
4. Pack tables are read only in namespaces where something is to be deleted. A run that finds
   nothing to delete costs as much as listing the requests.
5. Commits are short. After each one, the run pauses for as long as the commit took (0.2 s at most).
6. At the end, the store's free space is returned to the file system.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import msgspec

from persistkv.batches import batched
from persistkv.config import parse_size
from persistkv.errors import StoreError, StoreFullError
from persistkv.storage.backend import Backend, CommitBatch, Namespace
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.inspection.handle import StoreHandle
from persistkv.storage.inspection.pack_tables import NamespacePacks, all_keys, keys_of
from persistkv.storage.inspection.requests import (
    FoundRequest,
    RequestView,
    chosen_namespaces,
    copy_group,
    find_request,
    request_ids,
    short_ids,
    with_uses,
)
from persistkv.storage.inspection.selection import Selection
from persistkv.storage.stats import RequestUse

_AT_ONCE = 64  # packs or requests of one commit
_MOST_PAUSE_S = 0.2  # longest pause after a commit


class Quarantine(msgspec.Struct):
    """Directories of damaged stores that ``--quarantined`` deletes."""

    directories: tuple[str, ...] = ()
    """Paths of the directories. Each is a store that an engine renamed because it was damaged."""
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
    """Requests to delete, oldest first: chosen ones and, with --shared-packs, others that use the
    same packs."""
    goes: PrunedTotals
    """Totals of the packs to delete."""
    private_blocks_left: int
    """Blocks that only chosen requests name, and that stay because other requests use their
    packs."""


class Done(msgspec.Struct):
    """Totals of a prune's deletions. Requests are counted after the last commit of their namespace
    or an error."""

    goes: PrunedTotals = msgspec.field(default_factory=PrunedTotals)
    """Totals of the packs that were deleted."""
    requests: int = 0
    freed_bytes: int = 0
    """Bytes of free space that the store returned to its file system."""


class PruneRules(NamedTuple):
    """Rules for the content that a prune deletes; see ``plan_prune``."""

    selection: Selection | None = None
    requests: Sequence[FoundRequest] = ()
    keep_bytes: int | None = None
    """Size of all packs to reach; None: delete all chosen requests."""
    keep_last: int = 0
    """Number of requests to keep."""
    keep_daily: int = 0
    """Number of days of which a request is kept."""
    orphans: bool = False
    shared_packs: bool = False
    quarantined: bool = False


class _Usage:
    """Requests and packs of one namespace, their relations, and the part that a plan deletes."""

    def __init__(self, backend: Backend, namespace: Namespace) -> None:
        self.namespace = namespace
        self.manifests: dict[str, RequestManifest] = {}
        """By id, the requests of the namespace when the plan was made."""
        for manifest in backend.catalogue(namespace.id).manifests():
            self.manifests[manifest.id] = manifest
        self.chosen: set[str] = set()
        """Ids of the requests that were chosen for deletion."""
        self.requests_to_delete: set[str] = set()
        """Ids of the requests that the plan deletes: chosen ones, and others that lose a pack."""
        self.packs_to_delete: set[bytes] = set()
        """Ids of the packs that the plan deletes."""
        self.private_blocks_left = 0
        """Blocks that only chosen requests name, and that stay in packs of other requests."""
        self._backend = backend

    @cached_property
    def held_packs(self) -> NamespacePacks:
        """The packs of the namespace, read when they are first needed."""
        return NamespacePacks(self._backend, self.namespace.id)

    @cached_property
    def packs_of(self) -> dict[str, set[bytes]]:
        """By request id, the ids of the packs that hold a block of the request; no ids if its keys
        cannot be read."""
        # Packs are found by key. The packs that a manifest names may be outdated, because a block
        # that was deleted and stored again is in another pack.
        packs: dict[str, set[bytes]] = {}
        for name, keys in keys_of(self._backend, self.namespace.id, self.manifests):
            packs[name] = self.held_packs.holders_of(all_keys(keys))
        return packs

    def uses(
        self,
        names: Iterable[str],
        *,
        needed: bool = True,
    ) -> Iterator[tuple[RequestManifest, RequestUse | None]]:
        """Yield the manifests of these requests, each with its use.

        :param needed: whether the uses are needed; False: None instead of them.
        """
        manifests = (self.manifests[name] for name in names)
        return with_uses(self._backend, self.namespace.id, manifests, needed=needed)

    def payload_bytes(self) -> int:
        """Return the payload bytes of all packs of the namespace."""
        return sum(table.payload_length for table in self.held_packs.tables.values())

    def user_counts(self) -> Counter[bytes]:
        """Return the number of requests that use each pack, by pack id."""
        users: Counter[bytes] = Counter()
        for packs in self.packs_of.values():
            users.update(packs)
        return users

    def used_by(self, requests: Iterable[str]) -> set[bytes]:
        """Return the ids of the packs that hold a block of one of these requests."""
        used: set[bytes] = set()
        for name in requests:
            used |= self.packs_of[name]
        return used

    def choose(
        self,
        selection: Selection,
        named: Collection[tuple[bytes, str]],
    ) -> None:
        """Choose the requests that fulfil ``selection`` for deletion.

        :param named: (namespace id, request id): choose only among these and their copies, which
            have the same content. Empty: choose among all.
        """
        names = list(self.manifests)
        if named:
            names = self._with_copies(named)
        ttl_s = self._backend.policy().ttl_s
        for manifest, use in self.uses(names, needed=selection.needs_use):
            if selection.takes(manifest, use, ttl_s):
                self.chosen.add(manifest.id)

    def _with_copies(self, named: Collection[tuple[bytes, str]]) -> list[str]:
        """Return the ids of these requests of the namespace, and of their copies."""
        # two requests are copies of each other if they are in the same copy group
        copy_groups = set()
        for namespace_id, name in named:
            if namespace_id == self.namespace.id and name in self.manifests:
                copy_groups.add(copy_group(self.manifests[name]))
        names = []
        for name, manifest in self.manifests.items():
            if copy_group(manifest) in copy_groups:
                names.append(name)
        return names

    def plan(self, *, orphans: bool, shared_packs: bool) -> None:
        """Set the packs and requests to delete, and ``private_blocks_left``, according to the
        chosen requests."""
        others = self.manifests.keys() - self.chosen
        used_by_chosen = self.used_by(self.chosen)
        used_by_others = self.used_by(others)
        self.packs_to_delete = used_by_chosen - used_by_others
        # A pack that others use, too, may hold blocks that only chosen requests name. Such blocks
        # can be deleted only with the whole pack.
        shared = used_by_chosen & used_by_others
        private_blocks = self._private_blocks(shared)
        if shared_packs:
            self.packs_to_delete.update(private_blocks.keys())
        else:
            self.private_blocks_left = private_blocks.total()
        if orphans:
            all_packs = self.held_packs.tables.keys()
            self.packs_to_delete |= all_packs - used_by_others - used_by_chosen
        # requests that lose a shared pack are deleted, too, even if they were not chosen
        users = self._users_of(self.packs_to_delete)
        self.requests_to_delete = self.chosen.union(users)

    def _users_of(self, packs: set[bytes]) -> list[str]:
        """Return the ids of the requests that have a block in one of these packs."""
        users = []
        for name, used in self.packs_of.items():
            if not used.isdisjoint(packs):
                users.append(name)
        return users

    def _private_blocks(self, shared: set[bytes]) -> Counter[bytes]:
        """Return, by pack id, how many blocks of a shared pack only chosen requests name; packs
        without such blocks are left out.

        :param shared: ids of packs that chosen and other requests use.
        """
        # maps each key of the shared packs to its pack's id
        pack_of: dict[bytes, bytes] = {}
        for pack in shared:
            keys_in_pack = self.held_packs.tables[pack].keys.unpack()
            pack_of.update(dict.fromkeys(keys_in_pack, pack))
        named_by_chosen: set[bytes] = set()
        named_by_others: set[bytes] = set()
        users = self._users_of(shared)
        for name, keys in keys_of(self._backend, self.namespace.id, users):
            shared_keys = pack_of.keys() & all_keys(keys)
            if name in self.chosen:
                named_by_chosen |= shared_keys
            else:
                named_by_others |= shared_keys
        private_blocks: Counter[bytes] = Counter()
        for key in named_by_chosen - named_by_others:
            private_blocks[pack_of[key]] += 1
        return private_blocks

    def used_since(self, backend: Backend) -> set[bytes]:
        """Return the ids of packs that are used by requests added after the plan was made.

        :param backend: the backend that commits the plan (see ``present``).
        """
        added = self.present(backend) - self.manifests.keys()
        used: set[bytes] = set()
        for _, keys in keys_of(backend, self.namespace.id, added):
            used |= self.held_packs.holders_of(all_keys(keys))
        return used

    def present(self, backend: Backend) -> set[str]:
        """Return the ids of the requests that the store holds now.

        :param backend: if the plan is carried out, the backend that commits it: other backends may
            see the commits only later.
        """
        return set(request_ids(backend, self.namespace.id))


class _Chosen(NamedTuple):
    """A request that was chosen for deletion."""

    created: float
    request: str
    """Id of the request."""
    usage: _Usage
    """Usage of the request's namespace."""

    def keep(self) -> None:
        """Take the request out of the choice."""
        self.usage.chosen.remove(self.request)

    def simulate_deletion(self, users_left: Counter[bytes]) -> int:
        """Return the payload bytes of the packs that the deletion of this request frees.

        :param users_left: by pack id, the number of requests that use the pack; this request is
            subtracted from it.
        """
        packs = self.usage.packs_of[self.request]
        users_left.subtract(packs)
        num_bytes = 0
        # a pack is deleted with the last of its requests
        for pack in packs:
            if users_left[pack] == 0:
                num_bytes += self.usage.held_packs.tables[pack].payload_length
        return num_bytes


def plan_prune(
    store: StoreHandle,
    selection: Selection | None = None,
    *,
    requests: Iterable[str] = (),
    namespace: str | None = None,
    keep_size: int | str | None = None,
    keep_last: int | None = None,
    keep_daily: int | None = None,
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
    :param keep_last: keep so many of these requests, the newest ones.
    :param keep_daily: keep the newest of these requests of each day, for so many days on which
        requests were stored, the newest days. Days begin at midnight of this machine's time zone.
    :param orphans: also delete packs that no request names.
    :param shared_packs: also delete packs that other requests use, if only deleted requests name
        some of their blocks. The other requests that use these packs are deleted, too.
    :param quarantined: also delete the files of damaged stores that were renamed.
    :raises ConfigurationError: the size is invalid.
    """
    keep_bytes = None if keep_size is None else parse_size(keep_size, name="keep_size")
    found = [find_request(store.backend, name, namespace) for name in requests]
    rules = PruneRules(
        selection=selection,
        requests=found,
        keep_bytes=keep_bytes,
        keep_last=keep_last or 0,
        keep_daily=keep_daily or 0,
        orphans=orphans,
        shared_packs=shared_packs,
        quarantined=quarantined,
    )
    namespaces = chosen_namespaces(store.backend, namespace)
    return Prune(store.backend, store.writable, namespaces, rules)


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
        namespaces: Iterable[Namespace],
        rules: PruneRules,
    ) -> None:
        """Make the plan.

        :param writable: returns the same store, open for writing.
        :param namespaces: namespaces from which requests and packs are deleted.
        :param rules: what to delete and to keep; see ``plan_prune``.
        """
        self._backend = backend
        self._writable = writable
        named = {(found.namespace.id, found.manifest.id) for found in rules.requests}
        self._usages = _usages(backend, namespaces, named)
        self._choose(rules, named)
        self.plan = PrunePlan(
            requests=[],
            goes=PrunedTotals(),
            private_blocks_left=0,
        )
        for usage in self._usages:
            # the packs of a namespace without chosen requests are read only to find orphans
            if usage.chosen or rules.orphans:
                self._plan_namespace(usage, rules)
        self._finish_views()
        self.quarantined = Quarantine()
        if rules.quarantined:
            stats = backend.stats()
            self.quarantined = Quarantine(stats.quarantined, stats.quarantined_bytes)
        self.done = Done()

    @property
    def deletes(self) -> bool:
        """Whether the plan deletes requests, packs or files of damaged stores."""
        plan = self.plan
        return bool(plan.requests or plan.goes.packs or self.quarantined.directories)

    def run(self) -> Done:
        """Delete the planned packs, requests and files of damaged stores; keep packs that requests
        added meanwhile use. Then return the store's free space to the file system.

        :raises StoreError: the store is open read-only, or a commit failed; ``done`` counts the
            commits before it.
        """
        # open the store for writing only if there is something to delete
        backend = self._writable() if self.deletes else self._backend
        for usage in self._usages:
            if usage.requests_to_delete or usage.packs_to_delete:
                self._run_namespace(backend, usage)
        if self.quarantined.directories:
            self.quarantined.deleted_bytes = backend.delete_quarantined()
        if self.done.goes.packs:
            self.done.freed_bytes = backend.release_free()
        return self.done

    def _choose(
        self,
        rules: PruneRules,
        named: set[tuple[bytes, str]],
    ) -> None:
        """Choose the requests to delete: those that the selection takes or that are named, without
        those that the other rules keep.

        :param named: (namespace id, request id) of the requests that the user named.
        """
        if rules.selection is not None or named:
            # without a selection, all named requests are chosen
            selection = rules.selection or Selection()
            for usage in self._usages:
                usage.choose(selection, named)
        # apply the rules that keep requests after the choice, because they count chosen requests
        if rules.keep_last or rules.keep_daily:
            self._keep_newest(rules.keep_last, rules.keep_daily)
        if rules.keep_bytes is not None:
            self._limit_choice(rules.keep_bytes)

    def _oldest_first(self) -> list[_Chosen]:
        """Return the chosen requests of all namespaces, the oldest first."""
        chosen = []
        for usage in self._usages:
            for name in usage.chosen:
                created = usage.manifests[name].created
                chosen.append(_Chosen(created, name, usage))
        chosen.sort(key=attrgetter("created", "request"))
        return chosen

    def _keep_newest(self, last: int, days: int) -> None:
        """Take the newest chosen requests, and the newest one of each of the newest days, out of
        the choice.

        :param last: number of requests to keep.
        :param days: number of days of which a request is kept.
        """
        newest_first = reversed(self._oldest_first())
        days_seen: set[date] = set()
        for number, chosen in enumerate(newest_first):
            day = date.fromtimestamp(chosen.created)
            is_kept_for_its_day = day not in days_seen and len(days_seen) < days
            days_seen.add(day)
            if number < last or is_kept_for_its_day:
                chosen.keep()

    def _limit_choice(self, stored_bytes: int) -> None:
        """Reduce the choice to the oldest requests: as many as must be deleted until the packs take
        at most ``stored_bytes``."""
        # compare the store's totals first: if all packs fit, no catalogue need be read
        if self._backend.stats().stored_bytes <= stored_bytes:
            for usage in self._usages:
                usage.chosen.clear()
            return
        remaining_bytes = sum(usage.payload_bytes() for usage in self._usages)
        # by namespace id, the users of each pack that remain after the deletions so far
        users_left = {}
        for usage in self._usages:
            users_left[usage.namespace.id] = usage.user_counts()
        for chosen in self._oldest_first():
            # the deletion of the older requests suffices
            if remaining_bytes <= stored_bytes:
                chosen.keep()
                continue
            namespace_id = chosen.usage.namespace.id
            freed_bytes = chosen.simulate_deletion(users_left[namespace_id])
            remaining_bytes -= freed_bytes

    def _plan_namespace(self, usage: _Usage, rules: PruneRules) -> None:
        """Add the packs and requests to delete from one namespace to the plan."""
        usage.plan(orphans=rules.orphans, shared_packs=rules.shared_packs)
        self.plan.private_blocks_left += usage.private_blocks_left
        tables = usage.held_packs.tables
        for pack in usage.packs_to_delete:
            self.plan.goes.add(tables[pack])
        ttl_s = self._backend.policy().ttl_s
        for manifest, use in usage.uses(usage.requests_to_delete):
            view = RequestView.of(usage.namespace.id, manifest, use, ttl_s)
            self.plan.requests.append(view)

    def _finish_views(self) -> None:
        """Sort the requests of the plan by age, and set their short ids."""
        # make short ids unique among all requests, because other commands search all of them
        all_ids: list[str] = []
        for usage in self._usages:
            all_ids.extend(usage.manifests)
        shorts = short_ids(all_ids)
        finished = []
        for view in sorted(self.plan.requests, key=_age_order):
            short_id = shorts[view.id]
            finished.append(msgspec.structs.replace(view, short_id=short_id))
        self.plan.requests = finished

    def _run_namespace(self, backend: Backend, usage: _Usage) -> None:
        """Delete the chosen packs and requests of one namespace, in commits of a few each, and
        count the requests that are gone."""
        try:
            for packs in batched(sorted(usage.packs_to_delete), _AT_ONCE):
                # look for new requests before each commit, because engines store them all the time
                used = usage.used_since(backend)
                wanted = [pack for pack in packs if pack not in used]
                self._commit(backend, usage, CommitBatch(deletions=wanted))
            # The deletion of a pack has deleted the requests that name it. Chosen requests that
            # share all their packs with other requests are still there.
            still_present = usage.chosen & usage.present(backend)
            for names in batched(sorted(still_present), _AT_ONCE):
                self._commit(backend, usage, CommitBatch(manifest_deletions=names))
        except StoreError:
            with suppress(StoreError):  # raise the first error, which tells more
                self._count_requests(backend, usage)
            raise
        self._count_requests(backend, usage)

    def _commit(
        self,
        backend: Backend,
        usage: _Usage,
        batch: CommitBatch,
    ) -> None:
        """Commit deletions, in smaller parts if the store has no room for the commit, and pause."""
        begin = time.monotonic()
        try:
            result = backend.commit(usage.namespace.id, batch)
        # the commit of a deletion takes room, too, and that of half of it takes less
        except StoreFullError:
            halves = _halves(batch)
            if not halves:
                raise
            for half in halves:
                self._commit(backend, usage, half)
            return
        for table in result.evicted:
            self.done.goes.add(table)
        seconds = time.monotonic() - begin
        # engines wait while a commit runs: leave them as much time as it took, within bounds
        time.sleep(min(seconds, _MOST_PAUSE_S))

    def _count_requests(self, backend: Backend, usage: _Usage) -> None:
        """Count the planned requests of a namespace that the store no longer holds."""
        self.done.requests += len(usage.requests_to_delete - usage.present(backend))


def _halves(batch: CommitBatch) -> list[CommitBatch]:
    """Return two smaller batches that together delete what this one deletes; none if it deletes
    only one pack or request."""
    packs = batch.deletions
    names = batch.manifest_deletions
    if len(packs) + len(names) < 2:
        return []
    middle_pack = len(packs) // 2
    # Round requests up where packs are rounded down. Otherwise, a batch of one pack and one request
    # would be divided into an empty batch and itself.
    middle_name = (len(names) + 1) // 2
    first = CommitBatch(
        deletions=packs[:middle_pack],
        manifest_deletions=names[:middle_name],
    )
    second = CommitBatch(
        deletions=packs[middle_pack:],
        manifest_deletions=names[middle_name:],
    )
    return [first, second]


def _age_order(view: RequestView) -> tuple[float, str]:
    return view.created, view.id


def _usages(
    backend: Backend,
    namespaces: Iterable[Namespace],
    named: set[tuple[bytes, str]],
) -> list[_Usage]:
    """Return the usages of the namespaces.

    :param named: (namespace id, request id): only the namespaces of these requests are returned.
        Empty: all are.
    """
    named_ids = {namespace_id for namespace_id, _ in named}
    usages = []
    for namespace in namespaces:
        if not named or namespace.id in named_ids:
            usages.append(_Usage(backend, namespace))
    return usages
