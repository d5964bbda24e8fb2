"""Checks of ``persistkv verify``: all packs, rows and requests of a store, while others write to it.

1. A first pass reads packs as fast as the medium delivers them, in their order on the medium, and checks every stored
   byte. Neighbours are read with one call and checked in the same thread, while they are in the processor's cache.
2. Suspects of the first pass are checked again by ``check_pack`` after the catalogue was read again: a pack may have
   been deleted or replaced meanwhile. A finding is wrong twice, and still there.
3. A store does not return unreadable rows. They are found by its totals if no other process writes meanwhile.
4. Requests are compared with 64-bit fingerprints of the held keys: 8 bytes a key, where a set of keys takes 100. With a
   million keys that are hashes, the probability that a missing key has the fingerprint of a held one is below 10^-12.
"""

from __future__ import annotations

import enum
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, FileError
from persistkv.memory.budget import no_collections
from persistkv.memory.pages import huge_memory
from persistkv.storage.backend import ReadSpan
from persistkv.storage.executor import ThreadPool
from persistkv.storage.extensions import InspectableBackend, scan, scan_order
from persistkv.storage.format.manifest import ManifestKeys
from persistkv.storage.format.pack import MAX_KEY_BYTES, PackedKeys, PackTable
from persistkv_tools.packs import (
    BATCH_BYTES,
    Finding,
    NamespacePacks,
    OtherReleaseError,
    Piece,
    Problem,
    Took,
    check_pack,
    check_piece,
    keys_of,
    pieces,
)

_AHEAD = 1024  # batches that are begun and not taken, at most: they have been read, and only their outcome is kept
_STATE_VERSION = 2
_ATTEMPTS = 5
_MANIFESTS_AT_ONCE = 512
_FACTORS = np.random.default_rng(0).integers(0, 1 << 64, -(-MAX_KEY_BYTES // 4), dtype=np.uint64)
_Fingerprints = npt.NDArray[np.uint64]
_Batch = list[Piece]
"""Pieces of one namespace that are read together."""


class _Outcome(enum.IntEnum):
    """Of the first pass. Of the parts of one pack, the largest counts."""

    RIGHT = 0
    OTHER_RELEASE = 1
    WRONG = 2


class Tally(msgspec.Struct, kw_only=True):
    """Packs that were read, and findings."""

    packs: int = 0
    frames: int = 0
    stored_bytes: int = 0
    went_meanwhile: int = 0
    """Packs that were deleted or replaced by others while they were read."""
    other_release_packs: int = 0
    """Packs of a codec that this release does not know: nothing was said of them."""
    findings: list[Finding] = []


class VerifyState(Tally, kw_only=True):
    """Progress of a run, and its findings so far. Packs are taken in the order of their ids."""

    version: int = _STATE_VERSION
    store: str
    """Scheme and location."""
    sample: float
    """Share of the packs to read."""
    salt: int
    """Draws the packs of the share: another one draws others."""
    after: str = ""
    """Namespace and pack that were done last, hexadecimal."""

    @classmethod
    def begin(cls, url: str, sample: float) -> VerifyState:
        """Return the state of a new run."""
        parsed = StoreUrl.parse(url)
        return cls(store=f"{parsed.scheme}://{parsed.location}", sample=sample, salt=secrets.randbits(32))

    @classmethod
    def load(cls, path: Path, url: str, sample: float) -> VerifyState:
        """Read the state of a file; a new state if the file is absent.

        :raises ConfigurationError: it is unreadable, or of another run.
        """
        fresh = cls.begin(url, sample)
        try:
            state = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return fresh
        except OSError as error:
            raise FileError("read", path, error) from None
        except msgspec.DecodeError as error:
            raise FileError("read", path, ValueError(f"verify did not write it ({error})")) from None
        if (state.version, state.store, state.sample) != (_STATE_VERSION, fresh.store, sample):
            expected = f"the state of {fresh.store} with --sample {sample:g}; it is of {state.store}, {state.sample:g}"
            raise ConfigurationError("--resume", str(path), expected)
        return state

    def take(self, tally: Tally, after: str) -> None:
        """Add a tally that is complete up to a pack."""
        self.after = after
        for name in Tally.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(tally, name))

    def save(self, path: Path) -> None:
        """Replace the file atomically.

        :raises ConfigurationError: it cannot be written.
        """
        part = path.with_name(path.name + ".new")
        try:
            part.write_bytes(msgspec.json.encode(self))
            os.replace(part, path)
        except OSError as error:
            raise FileError("write", path, error) from None

    def draws(self, pack_id: bytes) -> bool:
        """Whether the pack belongs to the share."""
        return xxhash.xxh3_64_intdigest(pack_id, seed=self.salt) < self.sample * 2**64


class _Portion(NamedTuple):
    space: NamespacePacks
    packs: list[bytes]
    """In the order of their names."""


def read_catalogues(backend: InspectableBackend) -> list[NamespacePacks]:
    """Readable namespaces of a store, by id."""
    with no_collections():  # of many objects that are made to stay
        return [NamespacePacks(backend, name) for name in sorted(space.id for space in backend.namespaces())]


def count_rows(backend: InspectableBackend, spaces: list[NamespacePacks]) -> list[Finding] | None:
    """Count heads and tables against the store's totals; None if others wrote all the time."""
    for _ in range(_ATTEMPTS):
        before = backend.stats()
        heads = sum(1 for space in spaces for _ in backend.manifests(space.namespace))
        moved = any(space.refresh() for space in spaces) or len(list(backend.namespaces())) != len(spaces)
        after = backend.stats()
        if not moved and all(
            getattr(before, name) == getattr(after, name) for name in ("packs", "requests", "stored_bytes")
        ):
            packs = before.packs - sum(len(space.tables) for space in spaces)
            heads = before.requests - heads
            found = (_unread(Problem.PACK_ROWS, "packs", packs), _unread(Problem.MANIFEST_ROWS, "requests", heads))
            return [finding for finding in found if finding.count]
    return None


def _unread(problem: Problem, what: str, missing: int) -> Finding:
    detail = f"the totals count {abs(missing)} {'more' if missing > 0 else 'fewer'} than the {what} that read"
    return Finding(problem=problem, detail=detail, count=abs(missing))


def packs_left(spaces: list[NamespacePacks], state: VerifyState) -> list[tuple[NamespacePacks, bytes]]:
    """The packs that are still to be read, in order."""
    return [
        (space, pack_id)
        for space in spaces
        for pack_id in sorted(space.tables)
        if (space.namespace + pack_id).hex() > state.after and state.draws(pack_id)
    ]


def _portions(spaces: list[NamespacePacks], state: VerifyState, most_bytes: int | None) -> Iterator[_Portion]:
    for space, left in groupby(packs_left(spaces, state), key=lambda pair: pair[0]):
        portion, size = _Portion(space, []), 0
        for _, found in left:
            portion.packs.append(found)
            size += space.tables[found].payload_length if found in space.tables else 0
            if most_bytes is not None and size >= most_bytes:
                yield portion
                portion, size = _Portion(space, []), 0
        if portion.packs:
            yield portion


class Verifier:
    """One run over the packs of a store.

    :param state: of the run; is updated.
    :param threads: that read and check ahead; 0: the caller's thread, when it asks.
    :param portion_bytes: payload between two states that can be resumed; None: all of it. Within a portion packs are
        read in their order on the medium, and not in the order of their names.
    :param batch_bytes: of one read.
    """

    def __init__(
        self,
        backend: InspectableBackend,
        spaces: list[NamespacePacks],
        state: VerifyState,
        took: Took,
        threads: int = 0,
        portion_bytes: int | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._backend = backend
        self._state = state
        self._took = took
        self._batch_bytes = batch_bytes
        self._portions = _portions(spaces, state, portion_bytes)
        self._portion: _Portion | None = None
        self._waiting: Iterator[_Batch] = iter(())
        self._begun: deque[tuple[_Batch, Future[list[_Outcome]]]] = deque()
        self._pool = ThreadPool(threads, "persistkv-verify") if threads else None
        self._local = threading.local()

    def begin(self) -> None:
        """Start to read in the background; ``packs`` returns the results."""
        if self._portion is None and (portion := next(self._portions, None)) is not None:
            space = portion.space
            order = scan_order(self._backend, space.namespace, portion.packs)
            self._waiting = self._batches(table for name in order if (table := space.tables.get(name)) is not None)
            self._portion = portion
            self._submit()

    def packs(self) -> Iterator[VerifyState]:
        """Check one portion of the packs after the other; the state behind each.

        :raises StoreError: the medium failed.
        """
        self.begin()
        while self._portion is not None:
            space, names = self._portion
            tally = Tally()
            self._scan(space, tally)
            self._state.take(tally, (space.namespace + names[-1]).hex())
            self._portion = None
            yield self._state
            self.begin()

    def close(self) -> None:
        """Begin no read any more, and wait for those that run. Reads of a remote store may take until its deadline;
        they write into memory of their own, and are not waited for.
        """
        self._waiting = iter(())
        if self._pool is not None:
            self._pool.shutdown(wait=not self._backend.capabilities.remote, cancel_futures=True)

    def _batches(self, tables: Iterable[PackTable]) -> Iterator[_Batch]:
        """The packs in their order, cut and put together."""
        batch: _Batch = []
        size = 0
        for piece in chain.from_iterable(pieces(table, self._batch_bytes) for table in tables):
            if batch and size + piece.length > self._batch_bytes:
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += piece.length
        if batch:
            yield batch

    def _submit(self) -> None:
        while self._pool is not None and len(self._begun) < _AHEAD:
            batch = next(self._waiting, None)
            if batch is None:
                return
            self._begun.append((batch, self._pool.submit(self._look, batch)))

    def _looks(self) -> Iterator[tuple[_Batch, list[_Outcome]]]:
        if self._pool is None:
            for batch in self._waiting:
                yield batch, self._look(batch)
        while self._begun:
            batch, looks = self._begun[0]
            yield batch, looks.result()
            self._begun.popleft()
            self._submit()

    def _look(self, batch: _Batch) -> list[_Outcome]:
        memory = self._memory(sum(piece.length for piece in batch))
        spans, found, end = [], [], 0
        for piece in batch:
            begin, end = end, end + piece.length
            found.append(memory[begin:end])
            spans.append(ReadSpan(piece.table.pack_id, piece.start, [found[-1]]))
        filled = scan(self._backend, batch[0].table.namespace, spans)
        return [
            _look_at(piece, bytes_) if there else _Outcome.WRONG
            for piece, bytes_, there in zip(batch, found, filled, strict=True)
        ]

    def _memory(self, size: int) -> memoryview:
        """This thread's, aligned; to be used until it asks again."""
        held: memoryview | None = getattr(self._local, "memory", None)
        if held is None or len(held) < size:
            held = self._local.memory = memoryview(huge_memory(max(size, BATCH_BYTES)))
        return held

    def _scan(self, space: NamespacePacks, tally: Tally) -> None:
        worst: dict[bytes, _Outcome] = {}
        for batch, looks in self._looks():
            for piece, look in zip(batch, looks, strict=True):
                name = piece.table.pack_id
                worst[name] = max(look, worst.get(name, look))
                if piece.is_last:
                    self._count(space, piece.table, worst.pop(name), tally)
                self._took(piece.length)

    def _count(self, space: NamespacePacks, table: PackTable, look: _Outcome, tally: Tally) -> None:
        try:
            findings = self._confirmed(space, table, tally) if look is _Outcome.WRONG else []
        except OtherReleaseError:
            look = _Outcome.OTHER_RELEASE
        if look is _Outcome.OTHER_RELEASE:
            tally.other_release_packs += 1
            return
        tally.packs += 1
        tally.frames += table.frame_count
        tally.stored_bytes += table.payload_length
        tally.findings += findings

    def _confirmed(self, space: NamespacePacks, table: PackTable, tally: Tally) -> list[Finding]:
        """Findings of a suspect that was not replaced while it was read again."""
        findings: list[Finding] = []
        for _ in range(_ATTEMPTS):
            space.refresh()
            current = space.tables.get(table.pack_id)
            findings = [] if current is None else check_pack(self._backend, current, self._took)
            if not findings:
                tally.went_meanwhile += 1
                return []
            space.refresh()
            if space.tables.get(table.pack_id) is current:
                break
        return findings


def _look_at(piece: Piece, found: memoryview) -> _Outcome:
    try:
        return _Outcome.RIGHT if next(check_piece(piece, found), None) is None else _Outcome.WRONG
    except OtherReleaseError:
        return _Outcome.OTHER_RELEASE


def check_manifests(backend: InspectableBackend, spaces: list[NamespacePacks], took: Took) -> tuple[int, list[Finding]]:
    """How many requests there are, and those whose keys are unreadable or that name blocks that no pack holds.

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


def _suspects(backend: InspectableBackend, space: NamespacePacks, names: list[str], took: Took) -> dict[str, Finding]:
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


class HeldKeys:
    """Fingerprints of keys, sorted."""

    def __init__(self, held: Iterable[PackedKeys]) -> None:
        self._held = np.sort(_fingerprints(held))

    def missing(self, requests: Sequence[ManifestKeys]) -> list[int]:
        """For each request, how many of its keys are not held."""
        prints = _fingerprints(chain.from_iterable(requests))
        if not self._absent(np.sort(prints)).any():  # sorted they are found five times as fast
            return [0] * len(requests)
        ends = np.cumsum([sum(map(len, keys)) for keys in requests])
        return [int(part.sum()) for part in np.split(self._absent(prints), ends)[: len(requests)]]

    def _absent(self, prints: _Fingerprints) -> npt.NDArray[np.bool_]:
        if not len(self._held):
            return np.ones(len(prints), dtype=bool)
        nearest = np.minimum(np.searchsorted(self._held, prints), len(self._held) - 1)
        absent: npt.NDArray[np.bool_] = self._held[nearest] != prints
        return absent


def _fingerprints(packed: Iterable[PackedKeys]) -> _Fingerprints:
    """Of each key, the sum of its 32-bit words, each multiplied by a random number."""
    prints: list[_Fingerprints] = [np.empty(0, dtype=np.uint64)]
    for keys in packed:
        for length, data in [(keys.key_length, keys.data)] if keys.key_length else [(len(k), k) for k in keys.unpack()]:
            rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, length)
            words = (np.pad(rows, ((0, 0), (0, -length % 4))) if length % 4 else rows).view("<u4")
            prints.append(words @ _FACTORS[: words.shape[1]] + np.uint64(length))
    return np.concatenate(prints)
