"""``persistkv prune``: what deleting requests would take with it, and doing so while others write.

1. A pack goes only where no request that stays names a block in it.
2. A request goes with the first of its packs. One whose packs all stay, stays too: a store deletes packs, not requests.
3. Requests that came after the plan was made are looked for before each commit; their packs are spared.
4. What lies where is read only of namespaces where something is to go: beside an engine, a run that finds nothing costs
   what a list of requests costs.
5. Commits are short, and whoever else wants to write gets as much time between them as they took.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property

import msgspec

from persistkv.errors import StoreFullError
from persistkv.storage.backend import Backend, CommitBatch, Namespace, RequestUse
from persistkv.storage.manifest import RequestManifest
from persistkv.storage.pack import PackTable
from persistkv_tools.catalogue import Catalogue, all_keys, keys_of
from persistkv_tools.selection import RequestView, Selection, used

_PACKS_AT_ONCE = 64
_MOST_PAUSE_S = 0.2


class Amount(msgspec.Struct):
    """Some packs."""

    packs: int = 0
    blocks: int = 0
    stored_bytes: int = 0

    def add(self, table: PackTable) -> None:
        """Count one more."""
        self.packs += 1
        self.blocks += len(table.keys)
        self.stored_bytes += table.payload_length


class Plan(msgspec.Struct):
    """What would go."""

    requests: list[RequestView]
    """Those that would go, oldest first."""
    staying: list[RequestView]
    """Chosen requests that stay: other requests use all their packs."""
    goes: Amount
    """The packs that would go."""
    private_blocks_left: int
    """Blocks that only these requests name, in packs that others use: they stay, unless shared packs go too."""


class Done(msgspec.Struct):
    """What went."""

    goes: Amount
    requests: int
    staying: list[str]
    """Ids of requests that were chosen and are still there."""


class Usage:
    """The requests and packs of one namespace, and who uses what."""

    def __init__(self, backend: Backend, namespace: Namespace) -> None:
        self.namespace = namespace
        self.manifests = {manifest.id: manifest for manifest in backend.manifests(namespace.id)}
        self.doomed: set[str] = set()
        """Ids of the requests that are to go."""
        self.going: set[str] = set()
        """Of those that the plan takes: the doomed ones that can go, and what goes with them."""
        self._backend = backend

    @cached_property
    def _catalogue(self) -> Catalogue:
        return Catalogue.of(self._backend, self.namespace.id)

    @property
    def tables(self) -> dict[bytes, PackTable]:
        """The packs."""
        return self._catalogue.tables

    @cached_property
    def packs(self) -> dict[str, set[bytes]]:
        """For each request, the packs that hold one of its blocks."""
        keys = keys_of(self._backend, self.namespace.id, self.manifests)
        holding = self._catalogue.packs_holding
        return {name: set() if found is None else holding(all_keys(found)) for name, found in keys}

    def uses(self, names: Iterable[str]) -> Iterator[tuple[RequestManifest, RequestUse | None]]:
        """These requests, with what the store knows of their use."""
        return used(self._backend, self.namespace.id, (self.manifests[name] for name in names))

    def used(self, requests: Iterable[str]) -> set[bytes]:
        """The packs that these requests use."""
        return set().union(*(self.packs[name] for name in requests))

    @property
    def kept(self) -> list[str]:
        """Ids of the requests that stay."""
        return [name for name in self.manifests if name not in self.doomed]


class Pruning:
    """A plan over some namespaces of a store."""

    def __init__(self, backend: Backend, namespaces: Iterable[Namespace]) -> None:
        self._backend = backend
        self._usages = [Usage(backend, namespace) for namespace in namespaces]
        self._packs: dict[bytes, set[bytes]] = {}

    def choose(self, selection: Selection, requests: Collection[tuple[bytes, str]] | None = None) -> None:
        """Requests that are to go: all that are selected.

        :param requests: (namespace, id): only these.
        """
        for usage in self._usages:
            names = [name for name in usage.manifests if requests is None or (usage.namespace.id, name) in requests]
            asked = usage.uses(names) if selection.never_hit else ((usage.manifests[name], None) for name in names)
            usage.doomed.update(manifest.id for manifest, use in asked if selection.takes(manifest, use))

    def shrink_to(self, stored_bytes: int) -> None:
        """Of what was chosen, only as much goes as is needed, oldest first, until so many bytes are left."""
        if self._backend.stats().stored_bytes <= stored_bytes:  # of all namespaces
            for usage in self._usages:
                usage.doomed.clear()
            return
        held = sum(table.payload_length for usage in self._usages for table in usage.tables.values())
        candidates = [(usage.manifests[name].created, name, usage) for usage in self._usages for name in usage.doomed]
        uses = {id(usage): Counter(pack for used in usage.packs.values() for pack in used) for usage in self._usages}
        for usage in self._usages:
            usage.doomed = set()
        for _, name, usage in sorted(candidates, key=lambda candidate: candidate[:2]):
            if held <= stored_bytes:
                return
            usage.doomed.add(name)
            counts = uses[id(usage)]
            counts.subtract(usage.packs[name])
            held -= sum(usage.tables[pack].payload_length for pack in usage.packs[name] if not counts[pack])

    def plan(self, *, orphans: bool = False, shared: bool = False) -> Plan:
        """What would go.

        :param orphans: also packs that no request names.
        :param shared: also packs that hold a block only these requests name, although others use the pack.
        """
        plan = Plan([], [], Amount(), 0)
        for usage in self._usages:
            if not (usage.doomed or orphans):
                continue
            kept = usage.used(usage.kept)
            packs = usage.used(usage.doomed) - kept
            private = _private_blocks(self._backend, usage, usage.used(usage.doomed) & kept)
            if shared:
                packs |= private.keys()
            else:
                plan.private_blocks_left += sum(private.values())
            if orphans:
                packs |= usage.tables.keys() - kept - usage.used(usage.doomed)
            self._packs[usage.namespace.id] = packs
            for pack in packs:
                plan.goes.add(usage.tables[pack])
            self._sort_requests(plan, usage, packs)
        for views in (plan.requests, plan.staying):
            views.sort(key=lambda view: (view.created, view.id))
        return plan

    def _sort_requests(self, plan: Plan, usage: Usage, packs: set[bytes]) -> None:
        usage.going = {name for name, used_packs in usage.packs.items() if not used_packs.isdisjoint(packs)}
        for manifest, use in usage.uses(usage.going | usage.doomed):
            view = RequestView.of(usage.namespace.id, manifest, use)
            (plan.requests if manifest.id in usage.going else plan.staying).append(view)

    def run(self, backend: Backend) -> Done:
        """Delete what the plan names.

        :param backend: the same store, open for writing where there is something to delete.
        :raises StoreError: a commit failed; those before it were done.
        """
        done = Done(Amount(), 0, [])
        for usage in self._usages:
            packs = sorted(self._packs.get(usage.namespace.id, ()))
            for start in range(0, len(packs), _PACKS_AT_ONCE):
                for table in self._delete(backend, usage, packs[start : start + _PACKS_AT_ONCE]):
                    done.goes.add(table)
            if not (usage.doomed or packs):
                continue
            there = {manifest.id for manifest in backend.manifests(usage.namespace.id)}
            done.requests += len(usage.going - there)
            done.staying += sorted(usage.doomed & there)
        return done

    def _delete(self, backend: Backend, usage: Usage, packs: list[bytes]) -> Iterator[PackTable]:
        wanted = [pack for pack in packs if pack not in self._used_since(usage, packs)]
        begin = time.monotonic()
        try:
            gone = backend.commit(usage.namespace.id, CommitBatch(deletions=wanted)).evicted
            time.sleep(min(time.monotonic() - begin, _MOST_PAUSE_S))
            yield from gone
        except StoreFullError:  # deleting takes room too; fewer at once take less
            if len(wanted) < 2:
                raise
            half = len(wanted) // 2
            yield from self._delete(backend, usage, wanted[:half])
            yield from self._delete(backend, usage, wanted[half:])

    def _used_since(self, usage: Usage, packs: list[bytes]) -> set[bytes]:
        """Those of the packs that requests use which came after the plan was made."""
        namespace = usage.namespace.id
        fresh = [found.id for found in self._backend.manifests(namespace) if found.id not in usage.manifests]
        if not fresh:
            return set()
        catalogue = Catalogue(usage.tables[pack] for pack in packs)
        keys = (self._backend.manifest_keys(namespace, name) for name in fresh)
        return set().union(*(catalogue.packs_holding(all_keys(found)) for found in keys if found is not None))


def _private_blocks(backend: Backend, usage: Usage, shared: set[bytes]) -> dict[bytes, int]:
    """For each of these packs that has some, how many blocks in it only doomed requests name."""
    where = {key: pack for pack in shared for key in usage.tables[pack].keys.unpack()}
    doomed: set[bytes] = set()
    for name, packs in usage.packs.items():
        if name in usage.doomed and not packs.isdisjoint(shared):
            doomed.update(_keys_in(backend, usage, name, where))
    for name, packs in usage.packs.items():
        if name not in usage.doomed and not packs.isdisjoint(shared):
            doomed.difference_update(_keys_in(backend, usage, name, where))
    return dict(Counter(where[key] for key in doomed))


def _keys_in(backend: Backend, usage: Usage, name: str, where: dict[bytes, bytes]) -> set[bytes]:
    keys = backend.manifest_keys(usage.namespace.id, name)
    return set() if keys is None else where.keys() & all_keys(keys)
