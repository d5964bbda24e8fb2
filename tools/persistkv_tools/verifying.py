"""``persistkv verify``: everything in a store is read and checked, while others write to it.

1. Whatever looks wrong is looked at again, after another look at the catalogue: a pack may have been deleted or
   replaced meanwhile. Only what is wrong twice, and still there, is a finding.
2. Repair deletes a pack only if it is bad still when nothing happened between that look and the commit.
3. Rows that do not read are not handed out by a store; they are found by its totals, where nobody writes meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from persistkv.errors import StoreError
from persistkv.storage.backend import Backend, BackendStats, CommitBatch
from persistkv.storage.pack import PackTable
from persistkv_tools.catalogue import all_keys, keys_of
from persistkv_tools.live import LivePacks
from persistkv_tools.pack_check import Finding, OtherReleaseError, Problem, check_pack
from persistkv_tools.verify_state import VerifyState

_ATTEMPTS = 5
_REPAIR_ATTEMPTS = 100
_AHEAD = 2  # packs for each thread that are begun and not taken


class Catalogues(NamedTuple):
    """All namespaces of a store, as far as they read."""

    spaces: list[LivePacks]
    """By the namespace's id."""
    findings: list[Finding]
    """Rows that do not read."""
    certain: bool
    """False: others wrote all the time, so nothing can be said of rows that do not read."""


def read_catalogues(backend: Backend) -> Catalogues:
    """Read all tables, and count heads and tables against the store's totals."""
    for _ in range(_ATTEMPTS):
        before = backend.stats()
        spaces = [LivePacks(backend, name) for name in sorted(space.id for space in backend.namespaces())]
        heads = sum(1 for space in spaces for _ in backend.manifests(space.namespace))
        moved = any(space.refresh() for space in spaces)
        if not moved and _totals(before) == _totals(backend.stats()):
            packs = before.packs - sum(len(space.tables) for space in spaces)
            return Catalogues(spaces, list(_unread(packs, before.requests - heads)), True)
    return Catalogues(spaces, [], False)


def _ignore(num_bytes: int) -> None:
    """Bytes are counted where the pack is taken."""


def _totals(stats: BackendStats) -> tuple[int, ...]:
    return stats.packs, stats.requests, stats.stored_bytes


def _unread(packs: int, heads: int) -> Iterator[Finding]:
    for count, problem, what in ((packs, Problem.PACK_ROWS, "packs"), (heads, Problem.MANIFEST_ROWS, "requests")):
        if count:
            detail = f"the totals count {abs(count)} {'more' if count > 0 else 'fewer'} than the {what} that read"
            yield Finding(problem=problem, detail=detail, count=abs(count))


def packs_left(spaces: list[LivePacks], state: VerifyState) -> list[tuple[LivePacks, bytes]]:
    """The packs that are still to be read, in order."""
    return [
        (space, pack_id)
        for space in spaces
        for pack_id in sorted(space.tables)
        if (space.namespace + pack_id).hex() > state.after and state.draws(pack_id)
    ]


def payload_left(spaces: list[LivePacks], state: VerifyState) -> int:
    """Their bytes."""
    return sum(space.tables[pack_id].payload_length for space, pack_id in packs_left(spaces, state))


class Verifier:
    """One run over the packs of a store."""

    def __init__(
        self,
        backend: Backend,
        spaces: list[LivePacks],
        state: VerifyState,
        took: Callable[[int], None],
        threads: int = 1,
    ) -> None:
        """:param state: where to go on; is kept up to date.

        :param took: called with the bytes of each read; of each pack, where there are several threads.
        :param threads: packs that are read and checked side by side: packs do not lie in the order of their names, and
            a disk is faster where it is asked for several.
        """
        self._threads = threads
        self._backend = backend
        self._spaces = spaces
        self._state = state
        self._took = took

    def packs(self) -> Iterator[VerifyState]:
        """Check one pack after the other; the state behind each.

        :raises StoreError: the medium failed.
        """
        for space, pack_id, check in self._checks():
            if (table := space.tables.get(pack_id)) is not None:  # it may have gone since
                self._pack(space, table, check)
            self._state.after = (space.namespace + pack_id).hex()
            yield self._state

    def _checks(self) -> Iterator[tuple[LivePacks, bytes, Callable[[], list[Finding]]]]:
        """The packs that are left, in order, each with what gives the findings of a first look."""
        left = packs_left(self._spaces, self._state)
        if self._threads == 1:
            for space, pack_id in left:
                if (table := space.tables.get(pack_id)) is not None:
                    yield space, pack_id, partial(check_pack, self._backend, table, self._took)
            return
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="persistkv-verify")
        begun: deque[tuple[LivePacks, bytes, Callable[[], list[Finding]]]] = deque()
        try:
            for space, pack_id in left:
                if (table := space.tables.get(pack_id)) is not None:
                    begun.append((space, pack_id, self._begin(pool, table)))
                if len(begun) >= _AHEAD * self._threads:
                    yield begun.popleft()
            yield from begun
        finally:
            pool.shutdown(cancel_futures=True)

    def _begin(self, pool: ThreadPoolExecutor, table: PackTable) -> Callable[[], list[Finding]]:
        future = pool.submit(check_pack, self._backend, table, _ignore)

        def findings() -> list[Finding]:
            found = future.result()
            self._took(table.payload_length)
            return found

        return findings

    def _pack(self, space: LivePacks, table: PackTable, check: Callable[[], list[Finding]]) -> None:
        state = self._state
        try:
            findings = self._confirmed(space, table) if check() else []
        except OtherReleaseError:
            state.other_release += 1
            return
        state.packs += 1
        state.frames += len(table.frames)
        state.stored_bytes += table.payload_length
        state.findings += findings

    def _confirmed(self, space: LivePacks, table: PackTable) -> list[Finding]:
        """What is wrong with a pack that looked wrong, and that stayed where it was while it was read again."""
        findings: list[Finding] = []
        for _ in range(_ATTEMPTS):
            space.refresh()
            current = space.tables.get(table.pack_id)
            findings = [] if current is None else check_pack(self._backend, current, self._took)
            if not findings:
                self._state.went += 1
                return []
            space.refresh()
            if space.tables.get(table.pack_id) is current:
                break
        return findings

    def repair(self) -> list[PackTable]:
        """Delete the packs that were found bad, and still are.

        :returns: what went: these, and what could only be reached through them. Their requests went with them.
        :raises StoreError: a deletion failed, or others wrote all the time.
        """
        bad = {(finding.namespace, finding.pack) for finding in self._state.findings if finding.pack is not None}
        gone: list[PackTable] = []
        for space in self._spaces:
            for namespace, pack in sorted(bad, key=str):
                if namespace == space.namespace.hex() and pack is not None:
                    gone += self._delete(space, bytes.fromhex(pack))
        return gone

    def _delete(self, space: LivePacks, pack_id: bytes) -> list[PackTable]:
        for _ in range(_REPAIR_ATTEMPTS):
            space.refresh()
            table = space.tables.get(pack_id)
            if table is None or not check_pack(self._backend, table, self._took):
                return []
            done = self._backend.commit(space.namespace, CommitBatch(deletions=[pack_id], seen=space.cursor))
            if not done.stale:
                return list(done.evicted)
        raise StoreError(f"pack {pack_id.hex()} could not be deleted: others wrote between each look and the commit")


def check_manifests(backend: Backend, spaces: list[LivePacks]) -> tuple[int, list[Finding]]:
    """How many requests there are, and those whose keys do not read or that name blocks that no pack holds.

    :raises StoreError: the medium failed.
    """
    checked, findings = 0, []
    for space in spaces:
        names = [manifest.id for manifest in backend.manifests(space.namespace)]
        checked += len(names)
        suspects = _suspects(backend, space, names)
        for _ in range(2):  # others may have written, evicted or replaced what looks wrong
            if not suspects:
                break
            space.refresh()
            there = {manifest.id for manifest in backend.manifests(space.namespace)}
            suspects = _suspects(backend, space, [name for name in suspects if name in there])
        findings += list(suspects.values())
    return checked, findings


def _suspects(backend: Backend, space: LivePacks, names: list[str]) -> dict[str, Finding]:
    held = {key for table in space.tables.values() for key in table.keys.unpack()} if names else set()
    found: dict[str, Finding] = {}
    namespace = space.namespace.hex()
    for name, keys in keys_of(backend, space.namespace, names):
        if keys is None:
            detail = "its keys do not read"
            found[name] = Finding(problem=Problem.MANIFEST_KEYS, detail=detail, namespace=namespace, request=name)
        elif missing := sum(key not in held for key in all_keys(keys)):
            detail = f"{missing} of its blocks are in no pack"
            found[name] = Finding(problem=Problem.MISSING_BLOCKS, detail=detail, namespace=namespace, request=name)
    return found
