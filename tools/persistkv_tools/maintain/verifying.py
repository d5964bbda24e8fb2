"""``persistkv verify``: everything in a store is read and checked, while others write to it.

1. Whatever looks wrong is looked at again, after another look at the catalogue: a pack may have been deleted or
   replaced meanwhile. Only what is wrong twice, and still there, is a finding.
2. Rows that do not read are not handed out by a store; they are found by its totals, where nobody writes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import NamedTuple

from persistkv.storage.backend import Backend, BackendStats
from persistkv.storage.memory import no_collections
from persistkv.storage.pack import PackTable
from persistkv_tools.catalogue import LivePacks, keys_of
from persistkv_tools.maintain.held_keys import HeldKeys
from persistkv_tools.maintain.scanning import BATCH_BYTES, Look, Scanner, batches
from persistkv_tools.maintain.verify_state import VerifyState
from persistkv_tools.pack_check import Finding, OtherReleaseError, Problem, check_pack

_ATTEMPTS = 5
_MANIFESTS_AT_ONCE = 512


class Rows(NamedTuple):
    """What can be said of rows that do not read."""

    findings: list[Finding]
    certain: bool
    """False: others wrote all the time, so nothing can be said."""


def read_catalogues(backend: Backend) -> list[LivePacks]:
    """All namespaces of a store, as far as they read, by id."""
    with no_collections():  # of many objects that are made to stay
        return [LivePacks(backend, name) for name in sorted(space.id for space in backend.namespaces())]


def count_rows(backend: Backend, spaces: list[LivePacks]) -> Rows:
    """Count heads and tables against the store's totals."""
    for _ in range(_ATTEMPTS):
        before = backend.stats()
        heads = sum(1 for space in spaces for _ in backend.manifests(space.namespace))
        moved = any(space.refresh() for space in spaces) or len(list(backend.namespaces())) != len(spaces)
        if not moved and _totals(before) == _totals(backend.stats()):
            packs = before.packs - sum(len(space.tables) for space in spaces)
            return Rows(list(_unread(packs, before.requests - heads)), True)
    return Rows([], False)


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


class _Portion(NamedTuple):
    space: LivePacks
    packs: list[bytes]
    """In the order of their names."""


def _portions(spaces: list[LivePacks], state: VerifyState, most_bytes: int | None) -> Iterator[_Portion]:
    for space, left in groupby(packs_left(spaces, state), key=lambda pair: pair[0]):
        portion, size = _Portion(space, []), 0
        for _, pack_id in left:
            portion.packs.append(pack_id)
            size += space.tables[pack_id].payload_length if pack_id in space.tables else 0
            if most_bytes is not None and size >= most_bytes:
                yield portion
                portion, size = _Portion(space, []), 0
        if portion.packs:
            yield portion


class Verifier:
    """One run over the packs of a store."""

    def __init__(
        self,
        backend: Backend,
        spaces: list[LivePacks],
        state: VerifyState,
        took: Callable[[int], None],
        threads: int = 0,
        portion_bytes: int | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """:param state: where to go on; is kept up to date.

        :param took: called with the bytes of each read.
        :param threads: that read and check; 0: the caller's.
        :param portion_bytes: payload between two states that can be gone on from; None: as much as there is. Within a
            portion packs are read as they lie, and not in the order of their names.
        :param batch_bytes: of one read.
        """
        self._threads = threads
        self._backend = backend
        self._spaces = spaces
        self._state = state
        self._took = took
        self._batch_bytes = batch_bytes
        self._portions = _portions(spaces, state, portion_bytes)
        self._scanning: tuple[_Portion, Scanner] | None = None

    def begin(self) -> None:
        """Begin to read, beside what the caller does until it asks for ``packs``."""
        if self._scanning is None and (portion := next(self._portions, None)) is not None:
            order = self._backend.scan_order(portion.space.namespace, portion.packs)
            tables = (table for pack_id in order if (table := portion.space.tables.get(pack_id)) is not None)
            self._scanning = portion, Scanner(self._backend, batches(tables, self._batch_bytes), self._threads)

    def packs(self) -> Iterator[VerifyState]:
        """Check one portion of the packs after the other; the state behind each.

        :raises StoreError: the medium failed.
        """
        self.begin()
        while self._scanning is not None:
            portion, scanner = self._scanning
            tally = self._state.beside()
            try:
                self._scan(portion.space, scanner, tally)
            finally:
                scanner.close()
            self._state.take(tally, (portion.space.namespace + portion.packs[-1]).hex())
            self._scanning = None
            yield self._state
            self.begin()

    def close(self) -> None:
        """Read nothing any more."""
        if self._scanning is not None:
            self._scanning[1].close()
            self._scanning = None

    def _scan(self, space: LivePacks, scanner: Scanner, tally: VerifyState) -> None:
        worst: dict[bytes, Look] = {}
        for batch, looks in scanner:
            for piece, look in zip(batch, looks, strict=True):
                table = piece.table
                worst[table.pack_id] = look = max(look, worst.get(table.pack_id, look))
                if piece.is_last:
                    self._count(space, table, worst.pop(table.pack_id), tally)
                self._took(piece.length)

    def _count(self, space: LivePacks, table: PackTable, look: Look, tally: VerifyState) -> None:
        try:
            findings = self._confirmed(space, table, tally) if look is Look.WRONG else []
        except OtherReleaseError:
            look = Look.OTHER_RELEASE
        if look is Look.OTHER_RELEASE:
            tally.other_release += 1
            return
        tally.packs += 1
        tally.frames += table.frame_count
        tally.stored_bytes += table.payload_length
        tally.findings += findings

    def _confirmed(self, space: LivePacks, table: PackTable, tally: VerifyState) -> list[Finding]:
        """What is wrong with a pack that looked wrong, and that stayed where it was while it was read again."""
        findings: list[Finding] = []
        for _ in range(_ATTEMPTS):
            space.refresh()
            current = space.tables.get(table.pack_id)
            findings = [] if current is None else check_pack(self._backend, current, self._took)
            if not findings:
                tally.went += 1
                return []
            space.refresh()
            if space.tables.get(table.pack_id) is current:
                break
        return findings


def check_manifests(
    backend: Backend, spaces: list[LivePacks], took: Callable[[int], None]
) -> tuple[int, list[Finding]]:
    """How many requests there are, and those whose keys do not read or that name blocks that no pack holds.

    :param took: called between pieces of the work, with no bytes: it may wait.
    :raises StoreError: the medium failed.
    """
    checked, findings = 0, []
    for space in spaces:
        names = [manifest.id for manifest in backend.manifests(space.namespace)]
        checked += len(names)
        suspects = _suspects(backend, space, names, took)
        for _ in range(2):  # others may have written, evicted or replaced what looks wrong
            if not suspects:
                break
            space.refresh()
            there = {manifest.id for manifest in backend.manifests(space.namespace)}
            suspects = _suspects(backend, space, [name for name in suspects if name in there], took)
        findings += list(suspects.values())
    return checked, findings


def _suspects(backend: Backend, space: LivePacks, names: list[str], took: Callable[[int], None]) -> dict[str, Finding]:
    held = HeldKeys(table.keys for table in space.tables.values()) if names else HeldKeys(())
    found: dict[str, Finding] = {}

    def note(problem: Problem, name: str, detail: str) -> None:
        found[name] = Finding(problem=problem, detail=detail, namespace=space.namespace.hex(), request=name)

    waiting = keys_of(backend, space.namespace, names)
    while some := list(islice(waiting, _MANIFESTS_AT_ONCE)):
        counts = held.missing([keys or () for _, keys in some])
        for (name, keys), missing in zip(some, counts, strict=True):
            if keys is None:
                note(Problem.MANIFEST_KEYS, name, "its keys do not read")
            elif missing:
                note(Problem.MISSING_BLOCKS, name, f"{missing} of its blocks are in no pack")
        took(0)
    return found
