"""Checks of ``persistkv verify``: all packs, rows and requests of a store, while others write to
it.

1. A first pass reads packs as fast as the medium delivers them, and checks every stored byte.
   Several packs are read with one call and checked in the same thread, while they are in the CPU
   cache.
2. Packs that fail the first pass are suspects: another process may have deleted or replaced them
   meanwhile. So the catalogue is read again, and ``check_pack`` checks them again. Only packs that
   fail both checks are findings.
3. A store skips catalogue rows that it cannot read. Their number is the difference between the
   store's totals and the rows that were read. It is known only if no other process writes
   meanwhile.
4. Requests are compared with 64-bit fingerprints of the held keys: 8 bytes a key, where a set of
   keys takes 100. With a million keys that are hashes, the probability that a missing key has the
   fingerprint of a held one is below 10^-12.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from persistkv.batches import batched
from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, FileError
from persistkv.memory.budget import no_collections
from persistkv.memory.pages import huge_memory
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.format.manifest import ManifestKeys
from persistkv.storage.format.pack import PackedKeys, PackTable
from persistkv.storage.format.seal import Seal
from persistkv.storage.inspection.pack_tables import NamespacePacks, keys_of
from persistkv.storage.inspection.requests import request_ids
from persistkv.storage.threads import ThreadPool
from persistkv.tenants import DEFAULT_TENANT
from persistkv_tools import options
from persistkv_tools.packs import (
    BATCH_BYTES,
    Defect,
    OnBytes,
    Piece,
    Problem,
    UnknownCodecError,
    check_pack,
    check_piece,
    pieces,
    split_by_bytes,
)

_STATE_VERSION = 2
"""Version of the progress file's format."""
_ATTEMPTS = 5
"""Most times that something is read again, because another process wrote during the reading."""
_RECHECKS = 2
"""How often requests that look wrong are checked again before they are findings."""
_MANIFESTS_AT_ONCE = 512  # requests whose keys are in memory together
_Fingerprints = npt.NDArray[np.uint64]
_Batch = list[Piece]
"""Pieces of packs of one namespace that are read together."""


class _Read(NamedTuple):
    """A read of a batch: in progress, or made by the call of ``result``."""

    batch: _Batch
    result: Callable[[], list[bool]]
    """Returns which pieces of the batch are good."""


class Tally(msgspec.Struct, kw_only=True):
    """Totals of the packs that ``persistkv verify`` read, and its findings."""

    packs: int = 0
    frames: int = 0
    stored_bytes: int = 0
    went_meanwhile: int = 0
    """Part of ``packs``: those that failed the first check, because other processes deleted or
    replaced them meanwhile, and that were absent or good at the second."""
    other_release_packs: int = 0
    """Packs of a codec that this release does not know: they could not be checked, and are not part
    of ``packs``."""
    findings: list[Defect] = []


class VerifyState(Tally, kw_only=True):
    """Saved progress of a run: totals, findings, and the last pack in the order of namespace and
    pack ids."""

    version: int = _STATE_VERSION
    store: str
    """URL of the verified store without options: scheme and location."""
    sample: float
    """Random share of the packs to read, above 0 and up to 1."""
    salt: int
    """Seed of the random sample: the same seed selects the same packs."""
    after: str = ""
    """Ids of the last checked pack, hexadecimal: namespace id followed by pack id. Empty at
    first."""

    @classmethod
    def begin(cls, url: str, sample: float) -> VerifyState:
        """Return the state of a new run, with a new random sample."""
        parsed = StoreUrl.parse(url)
        return cls(
            store=f"{parsed.scheme}://{parsed.location}",
            sample=sample,
            salt=secrets.randbits(32),
        )

    @classmethod
    def load(
        cls,
        path: Path,
        url: str,
        sample: float,
    ) -> VerifyState:
        """Return the state that a file holds; a new state if the file is absent.

        :raises ConfigurationError: the file is unreadable, or of another store or sample.
        """
        fresh = cls.begin(url, sample)
        try:
            state = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return fresh
        except OSError as error:
            raise FileError("read", path, error) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = ValueError(f"it is not a progress file of verify ({error})")
            raise FileError("read", path, reason) from None
        found = (state.version, state.store, state.sample)
        if found != (_STATE_VERSION, fresh.store, sample):
            expected = (
                f"progress of {fresh.store} with --sample {sample:g}; it is of "
                f"{state.store}, {state.sample:g}"
            )
            raise ConfigurationError("--resume", str(path), expected)
        return state

    def take(self, tally: Tally, after: str) -> None:
        """Add the totals and findings of a finished portion.

        :param after: ids of its last pack, as in the attribute ``after``.
        """
        self.after = after
        for name in Tally.__struct_fields__:
            total = getattr(self, name) + getattr(tally, name)
            setattr(self, name, total)

    def save(self, path: Path) -> None:
        """Write the state to a file, atomically; raise ConfigurationError if that fails."""
        options.write_file(path, msgspec.json.encode(self))

    def draws(self, pack_id: bytes) -> bool:
        """Return whether the random sample includes the pack."""
        number = xxhash.xxh3_64_intdigest(pack_id, seed=self.salt)
        return number < self.sample * 2**64


def read_catalogues(backend: Backend) -> list[NamespacePacks]:
    """Return the packs of each readable namespace, in the order of the namespace ids."""
    # without garbage collections, which would scan the many long-lived tables again and again
    with no_collections():
        names = sorted(namespace.id for namespace in backend.namespaces())
        return [NamespacePacks(backend, name) for name in names]


def count_rows(
    backend: Backend,
    namespaces: list[NamespacePacks],
) -> list[Defect] | None:
    """Return a finding for each total of the store that differs from its readable rows; None if
    others kept writing."""
    for _ in range(_ATTEMPTS):
        findings = _count_rows_once(backend, namespaces)
        if findings is not None:
            return findings
    return None


def _count_rows_once(
    backend: Backend,
    namespaces: list[NamespacePacks],
) -> list[Defect] | None:
    """Return the findings of ``count_rows``; None if others wrote meanwhile. Refreshes the packs of
    all namespaces."""
    # Totals and rows are read one after the other. They can be compared only if nothing was written
    # in between: no rows changed, and the totals are the same when they are read again at the end.
    stats = backend.stats()
    tenants = backend.tenants()
    num_requests = 0
    num_packs = 0
    num_namespaces = len(list(backend.namespaces()))
    rows_changed = num_namespaces != len(namespaces)
    for held_packs in namespaces:
        num_requests += len(request_ids(backend, held_packs.namespace))
        if held_packs.refresh():
            rows_changed = True
        num_packs += len(held_packs.tables)
    compared_totals = attrgetter("packs", "requests", "stored_bytes")
    totals_now = compared_totals(backend.stats())
    if rows_changed or totals_now != compared_totals(stats):
        return None
    if tenants != backend.tenants():
        return None
    excess_packs = stats.packs - num_packs
    excess_requests = stats.requests - num_requests
    return [
        *_wrong_total(Problem.PACK_ROWS, "packs", excess_packs),
        *_wrong_total(Problem.MANIFEST_ROWS, "requests", excess_requests),
        *_wrong_tenant_totals(namespaces, tenants),
    ]


def _wrong_tenant_totals(
    namespaces: list[NamespacePacks],
    recorded: list[TenantTotals],
) -> Iterator[Defect]:
    """Yield a finding for each tenant whose totals count other packs or bytes than can be read. The
    default tenant has no totals of its own."""
    recorded_of = {totals.tenant: totals for totals in recorded}
    # compute the totals of the readable packs
    readable_of: dict[str, TenantTotals] = {}
    for held_packs in namespaces:
        for table in held_packs.tables.values():
            readable = readable_of.setdefault(table.tenant, TenantTotals(table.tenant))
            readable.count(table, sign=1)
    tenants = recorded_of.keys() | readable_of.keys()
    for tenant in sorted(tenants - {DEFAULT_TENANT}):
        nothing = TenantTotals(tenant)
        counted = recorded_of.get(tenant, nothing)
        found = readable_of.get(tenant, nothing)
        excess_packs = counted.packs - found.packs
        if not excess_packs and counted.stored_bytes == found.stored_bytes:
            continue
        detail = (
            f"the totals of the tenant {tenant} count {counted.packs} packs of "
            f"{counted.stored_bytes} bytes, and {found.packs} of {found.stored_bytes} can be "
            f"read"
        )
        # count at least one defect, because only the bytes may differ
        num_defects = max(1, abs(excess_packs))
        yield Defect(
            problem=Problem.TENANT_TOTALS,
            detail=detail,
            count=num_defects,
        )


def _wrong_total(
    problem: Problem,
    noun: str,
    excess: int,
) -> Iterator[Defect]:
    """Yield a finding if a total of the store counts other rows than can be read.

    :param noun: what the rows are, in the plural.
    :param excess: number that the totals count, less the number that can be read.
    """
    if excess:
        relation = "more" if excess > 0 else "fewer"
        num_rows = abs(excess)
        detail = f"the totals count {num_rows} {relation} {noun} than can be read"
        yield Defect(problem=problem, detail=detail, count=num_rows)


class PackToRead(NamedTuple):
    """A pack that a run has to read."""

    held_packs: NamespacePacks
    """The packs of its namespace, which are refreshed during the run."""
    table: PackTable
    """Table of the pack at the start of the run. The pack may be deleted or replaced meanwhile."""


def packs_left(
    namespaces: list[NamespacePacks],
    state: VerifyState,
) -> list[PackToRead]:
    """Return the packs that a run still has to read, in the order of namespace and pack ids."""
    left = []
    for held_packs in namespaces:
        for pack_id in sorted(held_packs.tables):
            # in this order, an interrupted run has read the packs up to ``state.after``
            is_left = (held_packs.namespace + pack_id).hex() > state.after
            if is_left and state.draws(pack_id):
                left.append(PackToRead(held_packs, held_packs.tables[pack_id]))
    return left


def _portions(
    packs: Iterable[PackToRead],
    most_bytes: float,
) -> Iterator[list[PackToRead]]:
    """Divide packs, sorted by namespace, into portions of one namespace each and of at most
    ``most_bytes``; a larger pack is a portion of its own."""
    payload_bytes = attrgetter("table.payload_length")
    for _, of_namespace in groupby(packs, key=attrgetter("held_packs")):
        yield from split_by_bytes(of_namespace, payload_bytes, most_bytes)


class Verifier:
    """Reads and checks the packs of a store, in portions. A run can be resumed after each portion.

    :param packs: packs to read, in the order of namespace and pack ids (``packs_left``).
    :param state: progress of the run, updated after each portion.
    :param on_bytes: called with the number of bytes of each piece after its check; may sleep to
        limit the pace.
    :param threads: threads that read and check ahead; 0: the thread that iterates ``packs`` reads
        and checks.
    :param portion_bytes: most payload bytes of a portion. Infinite: all packs of a namespace are
        one portion.
    :param batch_bytes: most bytes of one read, except for a frame that is larger.
    """

    def __init__(
        self,
        backend: Backend,
        packs: Iterable[PackToRead],
        state: VerifyState,
        on_bytes: OnBytes,
        threads: int = 0,
        portion_bytes: float = math.inf,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._backend = backend
        self._state = state
        self._on_bytes = on_bytes
        self._batch_bytes = batch_bytes
        self._portions = _portions(packs, portion_bytes)
        """Portions that have not begun."""
        self._portion: list[PackToRead] | None = None
        """Packs of the portion in progress; None: no portion is in progress."""
        self._reads: Iterable[_Read] = ()
        """Reads of the portion in progress, in the order of its packs."""
        self._pool = ThreadPool(threads, "persistkv-verify") if threads else None
        """Threads that read and check; None: the thread that iterates ``packs`` does it."""
        self._local = threading.local()
        """Memory of each reading thread; see ``_memory``."""

    def begin(self) -> None:
        """Prepare the next portion, unless one is in progress. With threads, they start to read it
        now, before ``packs`` is iterated."""
        if self._portion is None:
            self._portion = next(self._portions, None)
            if self._portion is not None:
                self._reads = self._start_reads(self._portion)

    def _start_reads(self, portion: list[PackToRead]) -> list[_Read]:
        """Cut the packs of a portion into batches, and return a read for each. With threads, they
        start now; without, each is made when its result is asked for."""
        parts: list[Piece] = []
        for pack in portion:
            table = pack.held_packs.tables.get(pack.table.pack_id)
            # the pack may have been evicted since the start of the run
            if table is not None:
                parts.extend(pieces(table, self._batch_bytes))
        reads: list[_Read] = []
        for batch in split_by_bytes(parts, attrgetter("length"), self._batch_bytes):
            result: Callable[[], list[bool]] = partial(self._check_batch, batch)
            if self._pool is not None:
                result = self._pool.submit(self._check_batch, batch).result
            reads.append(_Read(batch, result))
        return reads

    def packs(self) -> Iterator[VerifyState]:
        """Check one portion after the other, and yield the run's state after each."""
        self.begin()
        while self._portion is not None:
            last_pack = self._portion[-1]
            # all packs of a portion are in one namespace
            held_packs = last_pack.held_packs
            tally = self._check_portion(held_packs)
            # an interrupted run resumes after this pack
            last_position = held_packs.namespace + last_pack.table.pack_id
            self._state.take(tally, last_position.hex())
            self._portion = None
            yield self._state
            self.begin()

    def _check_portion(self, held_packs: NamespacePacks) -> Tally:
        """Finish the reads of the portion in progress, and return its totals and findings.

        :param held_packs: packs of the portion's namespace.
        """
        tally = Tally()
        # ids of the packs with a piece that is not good
        suspects: set[bytes] = set()
        for read in self._reads:
            for piece, is_good in zip(read.batch, read.result(), strict=True):
                table = piece.table
                if not is_good:
                    suspects.add(table.pack_id)
                if piece.is_last:
                    is_suspect = table.pack_id in suspects
                    self._count(held_packs, table, tally, is_suspect=is_suspect)
                self._on_bytes(piece.length)
        return tally

    def close(self) -> None:
        """Cancel reads that have not started, and wait for running reads of a local store. Reads of
        a remote store continue until their deadline at the latest; they write only to own memory.
        """
        if self._pool is not None:
            is_local = not self._backend.capabilities.remote
            self._pool.shutdown(wait=is_local, cancel_futures=True)

    def _check_batch(self, batch: _Batch) -> list[bool]:
        """Read a batch; return for each piece whether it is good. Pieces of an unknown codec count
        as not good."""
        num_bytes = sum(piece.length for piece in batch)
        # place the pieces one after the other, so that one read fills them all
        memory = self._memory(num_bytes)
        buffers: list[memoryview] = []
        spans: list[ReadSpan] = []
        begin = 0
        for piece in batch:
            end = begin + piece.length
            buffer = memory[begin:end]
            buffers.append(buffer)
            spans.append(ReadSpan(piece.table.pack_id, piece.start, [buffer]))
            begin = end
        # all pieces of a batch are in one namespace
        namespace = batch[0].table.namespace
        filled = self._backend.read(namespace, spans)
        are_good: list[bool] = []
        for piece, buffer, is_filled in zip(batch, buffers, filled, strict=True):
            is_good = is_filled and _is_good(piece, buffer, self._backend.seal)
            are_good.append(is_good)
        return are_good

    def _memory(self, size: int) -> memoryview:
        """Return aligned memory of at least ``size`` bytes. The next call in the same thread may
        return it again."""
        held: memoryview | None = getattr(self._local, "memory", None)
        if held is None or len(held) < size:
            held = memoryview(huge_memory(max(size, BATCH_BYTES)))
            self._local.memory = held
        return held

    def _count(
        self,
        held_packs: NamespacePacks,
        table: PackTable,
        tally: Tally,
        *,
        is_suspect: bool,
    ) -> None:
        """Count a pack whose pieces were read.

        :param is_suspect: whether a piece was not good. If so, check the pack again, and add the
            findings of this check to the tally.
        """
        try:
            if is_suspect:
                tally.findings += self._check_again(held_packs, table, tally)
        except UnknownCodecError:
            tally.other_release_packs += 1
            return
        tally.packs += 1
        tally.frames += table.frame_count
        tally.stored_bytes += table.payload_length

    def _check_again(
        self,
        held_packs: NamespacePacks,
        table: PackTable,
        tally: Tally,
    ) -> list[Defect]:
        """Check a suspect pack again and return its findings; none if it was deleted or replaced by
        a good one, which is counted in ``tally.went_meanwhile``."""
        findings: list[Defect] = []
        for _ in range(_ATTEMPTS):
            held_packs.refresh()
            current = held_packs.tables.get(table.pack_id)
            findings = []
            if current is not None:
                findings = check_pack(self._backend, current, self._on_bytes)
            if not findings:
                tally.went_meanwhile += 1
                return []
            # repeat the check if the pack was replaced during it: the findings are about a mixture
            # of the old and the new pack
            held_packs.refresh()
            if held_packs.tables.get(table.pack_id) is current:
                break
        return findings


def _is_good(
    piece: Piece,
    payload: memoryview,
    seal: Seal,
) -> bool:
    """Return whether a piece has no defect. False for an unknown codec: the second check of its
    pack counts it.

    :param payload: stored bytes of the piece, which are decrypted in place.
    """
    try:
        return next(check_piece(piece, payload, seal), None) is None
    except UnknownCodecError:
        return False


def check_manifests(
    backend: Backend,
    namespaces: list[NamespacePacks],
    on_bytes: OnBytes,
) -> tuple[int, list[Defect]]:
    """Return the number of requests, and a finding for each with unreadable keys or with blocks
    that are not held."""
    num_checked = 0
    findings: list[Defect] = []
    for held_packs in namespaces:
        names = request_ids(backend, held_packs.namespace)
        num_checked += len(names)
        suspects = _suspect_requests(backend, held_packs, names, on_bytes)
        # Keys and packs were not read at the same time: other processes may have written, evicted
        # or replaced some in between. So only requests that fail all rechecks are findings.
        for _ in range(_RECHECKS):
            if not suspects:
                break
            held_packs.refresh()
            existing = set(request_ids(backend, held_packs.namespace))
            suspect_names = [name for name in suspects if name in existing]
            suspects = _suspect_requests(backend, held_packs, suspect_names, on_bytes)
        findings += suspects.values()
    return num_checked, findings


def _suspect_requests(
    backend: Backend,
    held_packs: NamespacePacks,
    names: list[str],
    on_bytes: OnBytes,
) -> dict[str, Defect]:
    """Return a finding for each of these requests with unreadable keys or with blocks that are not
    held, by its id."""
    found: dict[str, Defect] = {}
    if not names:
        return found
    held = HeldKeys(table.keys for table in held_packs.tables.values())
    requests = keys_of(backend, held_packs.namespace, names)
    for batch in batched(requests, _MANIFESTS_AT_ONCE):
        # a request with unreadable keys (None) counts as one without keys
        readable_keys = [keys or () for _, keys in batch]
        missing = held.missing(readable_keys)
        for (name, keys), num_missing in zip(batch, missing, strict=True):
            is_readable = keys is not None
            if num_missing or not is_readable:
                defect = _request_defect(
                    held_packs, name, num_missing, is_readable=is_readable
                )
                found[name] = defect
        # no payload was read, but the limits of the pace may require a sleep
        on_bytes(0)
    return found


def _request_defect(
    held_packs: NamespacePacks,
    request: str,
    num_missing: int,
    *,
    is_readable: bool,
) -> Defect:
    """Return the finding for a request with unreadable keys, or with ``num_missing`` blocks that
    are not held."""
    problem = Problem.MANIFEST_KEYS
    detail = "its keys cannot be read"
    if is_readable:
        problem = Problem.MISSING_BLOCKS
        detail = f"no pack holds {num_missing} of its blocks"
    return Defect(
        problem=problem,
        detail=detail,
        namespace=held_packs.namespace.hex(),
        request=request,
    )


class HeldKeys:
    """Sorted fingerprints of the keys that packs hold, to find keys of requests that no pack
    holds."""

    def __init__(self, held: Iterable[PackedKeys]) -> None:
        self._held = np.sort(_fingerprints(held))

    def missing(self, requests: Sequence[ManifestKeys]) -> list[int]:
        """Return, for each request, the number of its keys that no pack holds."""
        # Usually all keys of all requests are held, which one search shows. It is five times as
        # fast if the keys that it looks for are sorted.
        prints = np.sort(_fingerprints(chain.from_iterable(requests)))
        if not self._absent(prints).any():
            return [0] * len(requests)
        missing: list[int] = []
        for keys in requests:
            absent = self._absent(_fingerprints(keys))
            missing.append(int(absent.sum()))
        return missing

    def _absent(self, prints: _Fingerprints) -> npt.NDArray[np.bool_]:
        """Return which of the fingerprints no held key has."""
        num_held = len(self._held)
        if not num_held:
            return np.ones(len(prints), dtype=bool)
        # the first held fingerprint that is not smaller is the same one, or there is none
        places = np.searchsorted(self._held, prints)
        # compare a fingerprint that is larger than all held ones with the last one, which differs
        places = np.minimum(places, num_held - 1)
        absent: npt.NDArray[np.bool_] = self._held[places] != prints
        return absent


def _fingerprints(packed: Iterable[PackedKeys]) -> _Fingerprints:
    """Return the 64-bit fingerprints of all these keys, in their order."""
    joined = b"".join(keys.fingerprints for keys in packed)
    return np.frombuffer(joined, dtype="<u8")
