"""Let the disk fail at one call after another: ``python -m tests.crash.disk_faults --seed 1``.

An engine opens a new store, stores requests until some blocks are evicted, promotes the blocks that
it has, and closes. Its k-th call that changes the disk fails (``record.c``), for each k and each of
``FAULTS``. Some faults also hit the following calls, so that undo and recovery fail too. A lasting
fault hits all following calls, until the engine has tried to promote. The store runs in the
engine's process, or with ``--host process`` in a host process, which is killed when the disk works
again. Invariants:

1. No call of the engine raises, except opening, which succeeds on a retry. Each submitted block is
   held, was evicted, or is counted as dropped. Promoted blocks are correct. Later requests are
   stored.
2. In the store that the next process opens, every block that the engine knew to be held is present.
   All blocks are readable and correct. Each manifest names present blocks. The request that was
   persisted last has a manifest.
3. Totals equal a recount, and free and used extents match the files. Nothing was quarantined. The
   store is writable.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import json
import logging
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.errors import StoreError
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import ProcessHost, ThreadHost
from persistkv.storage.host.in_flight import JobOutcome
from persistkv.storage.host.protocol import Hello
from persistkv.storage.host.supervisor import State
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.conformance.suite import check_totals
from persistkv.testing.samples import sample_blocks, sample_keys
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.payloads.allocator import Allocator
from tests.backends.lmdb.consistency import find_faults
from tests.crash.disk import (
    ALLOCATE,
    CREATE,
    FAILED,
    MKDIR,
    PAGE_BYTES,
    PUNCH,
    REMOVE,
    RESIZE,
    SYNC,
    UNMODELLED,
    WRITE,
    read_log,
)
from tests.crash.forks import Outcome, run_in_fork
from tests.crash.loop import PLACEMENTS
from tests.crash.recorder import build_recorder

IDENTITY = Identity.of({"test": "disk faults"})
BLOCK_BYTES = 16 << 10  # 16 KiB
REQUESTS = (6, 24, 40, 12, 30, 9)
"""Blocks of each request; together more than the store can hold."""
LAST = len(REQUESTS)
"""One more request, with the length of the first."""
PREFIX = 4
"""Number of blocks at the start of every request."""
CAPACITY = 2 << 20  # 2 MiB
METADATA_BYTES = 64 << 10  # 64 KiB: of the file system, for one file
OPTIONS = StoreOptions(staging_bytes=16 << 20, events=True)
"""16 MiB: large enough to copy a request's blocks, which are committed with its manifest in one
transaction."""
PATIENCE_S = 120.0
THREAD, PROCESS = ThreadHost.name, ProcessHost.name
STORED, DROPPED = "stored all", "dropped some"
_LAYOUT = RowLayout(BLOCK_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),))
_UNDONE, _DONE, _HALF, _DONE_ONCE = 1, 2, 3, 4  # as in record.c
_MANY = 1 << 30
_CALLS = {
    WRITE: "write to",
    SYNC: "sync of",
    RESIZE: "resize of",
    ALLOCATE: "allocation in",
    CREATE: "creation of",
    MKDIR: "creation of",
    UNMODELLED: "renaming of",
    REMOVE: "removal of",
    PUNCH: "hole in",
}


class Fault(NamedTuple):
    """One way for calls to fail. "Call executed" means that the call takes effect, and then reports
    an error."""

    name: str
    errno: int
    how: int
    calls: int = 1
    """Number of consecutive calls that fail, from the k-th on."""

    @property
    def lasts(self) -> bool:
        """Whether the disk works again only after the engine has met the fault in each of its
        operations."""
        return self.calls == _MANY


FAULTS = (
    Fault("ENOSPC", errno.ENOSPC, _UNDONE),
    Fault("EIO", errno.EIO, _UNDONE),
    Fault("EIO, call executed", errno.EIO, _DONE),
    Fault("short write", 0, _HALF),
    Fault("2 x EIO", errno.EIO, _UNDONE, 2),
    Fault("4 x EIO", errno.EIO, _UNDONE, 4),
    Fault("4 x EIO, first call executed", errno.EIO, _DONE_ONCE, 4),
    Fault("4 x ENOSPC", errno.ENOSPC, _UNDONE, 4),
    Fault("ENOSPC until the end", errno.ENOSPC, _UNDONE, _MANY),
    Fault("EIO until the end", errno.EIO, _UNDONE, _MANY),
)
_NEVER = "0 0 0 0"


class Known(NamedTuple):
    """Knowledge of an engine at its end."""

    held: Sequence[str]
    """Keys of the held blocks, in hexadecimal."""
    persisted: int | None
    """Last request whose full context was durable."""


@lru_cache(maxsize=32)
def content(request: int) -> dict[bytes, bytes]:
    """Return the blocks of a request by key, in order."""
    return _sample(99, PREFIX) | _sample(request, REQUESTS[request % len(REQUESTS)])


def _sample(seed: int, count: int) -> dict[bytes, bytes]:
    return dict(
        zip(
            sample_keys(seed, count),
            map(bytes, sample_blocks(seed, count, BLOCK_BYTES)),
            strict=True,
        )
    )


def everything() -> dict[bytes, bytes]:
    """Return every block that is ever stored, by key."""
    return {
        key: block
        for request in range(LAST + 1)
        for key, block in content(request).items()
    }


class Engine:
    """An engine's client of the store."""

    def __init__(self, url: str, host: str) -> None:
        """:raises StoreError: the store cannot be opened."""
        self.offered: list[bytes] = []
        self.removed: set[bytes] = set()
        self.persisted: int | None = None
        """Last request whose full context is durable."""
        size = len(everything()) * BLOCK_BYTES
        region = os.memfd_create("rows")
        os.ftruncate(region, size)
        self._rows = mmap.mmap(region, size)
        hello = Hello(url, IDENTITY.encode(), _LAYOUT, OPTIONS)
        self._host = (
            ProcessHost((region,), size)
            if host == PROCESS
            else ThreadHost(memoryview(self._rows))
        )
        self._client = StoreClient(self._host, hello, max_queue_bytes=1 << 30)
        self._client.open()
        self._jobs = 0
        self._ended: list[JobOutcome] = []

    def held(self) -> list[bytes]:
        """Return the keys of the blocks that the engine knows to be held."""
        return list(filter(self._client.contains, everything()))

    def store(self, request: int) -> None:
        """Submit a request, and wait until it is durable or dropped."""
        blocks = content(request)
        keys, rows = list(blocks), range(len(blocks))
        self._rows[: len(blocks) * BLOCK_BYTES] = b"".join(blocks.values())
        self.offered += keys
        self._client.submit_store(
            self._next_job(), str(request), keys, rows, rows, len(blocks) * BLOCK_BYTES
        )
        chains = (keys,)
        self._client.end_request(
            RequestEnd(str(request), str(request), chains, 16 * len(keys), 16)
        )
        assert self._client.flush(PATIENCE_S), "submitted jobs do not end"
        self._end_job()
        for name, whole in self._client.take_persisted().items():
            self.persisted = int(name) if whole else self.persisted
        self.removed.update(self._client.take_events().removed)

    def promote(self) -> int:
        """Load all held blocks and compare them. Return the number of misses."""
        held, right = self.held(), everything()
        self._client.submit_load(self._next_job(), held, range(len(held)))
        failed = self._end_job()
        for row, key in enumerate(held):
            loaded = self._rows[row * BLOCK_BYTES : (row + 1) * BLOCK_BYTES]
            assert key in failed or loaded == right[key], "wrong bytes were promoted"
        self.removed.update(self._client.take_events().removed)
        return len(failed)

    def account(self) -> int:
        """Check that each block was stored, was held already, or was dropped. Return the number of
        dropped blocks."""
        stats = self._client.stats().host
        assert stats is not None
        counters = stats.counters
        counted = (
            counters.stored_blocks + counters.held_blocks + counters.dropped_blocks
        )
        assert counted == len(self.offered), (
            f"{len(self.offered)} blocks submitted, {counters}"
        )
        lost = {*self.offered} - {*self.held()} - self.removed
        assert len(lost) <= counters.dropped_blocks, (
            f"{len(lost)} blocks are missing but not counted as dropped, {counters}"
        )
        return counters.dropped_blocks

    def kill(self) -> None:
        """Kill the host process, and wait for its successor."""
        assert isinstance(self._host, ProcessHost)
        assert self._host.pid is not None
        os.kill(self._host.pid, signal.SIGKILL)
        self._await(
            lambda: self._client.state is not State.OPEN,
            "the client does not detect that the host process is dead",
        )
        self._await(
            lambda: self._client.state is State.OPEN,
            "the host process is not restarted",
        )

    @property
    def restarts(self) -> int:
        """Number of restarts of the host process."""
        return self._client.counters.restarts

    def close(self) -> None:
        """Close the client, which also ends the host process."""
        assert self._client.close(PATIENCE_S), "the client does not close"

    def _next_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def _end_job(self) -> list[bytes]:
        """Wait for the only job in flight. Return the keys that failed."""
        self._await(lambda: not self._client.num_jobs, "a job does not end")
        (outcome,) = self._ended
        self._ended.clear()
        assert outcome.job_id == self._jobs
        return outcome.failed

    def _await(self, reached: Callable[[], bool], complaint: str) -> None:
        """Poll until a condition holds, then poll one more time."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline, complaint
            self._ended += self._client.poll()
            time.sleep(0.001)
        self._ended += self._client.poll()


def live(url: str, root: Path, log: Path, fault: Fault, k: int, host: str) -> Outcome:
    """Run an engine from opening to closing.

    :param k: number of the call that fails; 0: none.
    :returns: ``count``: number of calls in this process that can fail in this way. ``detail``: the
        engine's knowledge at its end, as JSON.
    """
    disk = _Disk(root, log, host)
    disk.fail(f"{k} {fault.calls if k else 0} {fault.errno} {fault.how}")
    engine = _open(disk, url, fault, host)
    for request in range(LAST):
        engine.store(request)
    missed = engine.promote()
    assert fault.lasts or not missed, f"{missed} held blocks were not promoted"
    fault_ended = disk.failed(k, 1 if fault.lasts else fault.calls)
    dropped = engine.account()
    assert not engine.restarts, "a disk fault ended the host process"
    if k and fault.lasts:
        disk.fail(_NEVER)
        if host == PROCESS:
            engine.kill()
    engine.store(LAST)
    assert engine.persisted == LAST or not fault_ended, (
        "nothing is stored although the fault has ended"
    )
    assert engine.removed or fault.calls > 1, "nothing was evicted"
    if not engine.restarts:
        dropped = engine.account()
    known = Known([key.hex() for key in engine.held()], engine.persisted)
    engine.close()
    return Outcome(DROPPED if dropped else STORED, disk.calls, json.dumps(known))


class _Disk:
    """Disk of an engine or of its host process. A host process reads the fault settings when it
    starts."""

    def __init__(self, root: Path, log: Path, host: str) -> None:
        os.environ["PERSISTKV_RECORD_ROOT"], os.environ["PERSISTKV_RECORD_LOG"] = (
            str(root),
            str(log),
        )
        self._log = log
        self._recorder = None if host == PROCESS else ctypes.CDLL(None)

    def fail(self, how: str) -> None:
        """Set the fault of the following calls.

        :param how: as in ``record.c``.
        """
        os.environ["PERSISTKV_RECORD_FAIL"] = how
        if self._recorder is not None:
            self._recorder.persistkv_record_begin()

    @property
    def calls(self) -> int:
        """Number of calls of this process so far that can fail."""
        return (
            0
            if self._recorder is None
            else int(self._recorder.persistkv_record_calls())
        )

    def failed(self, k: int, count: int) -> bool:
        """Return whether all calls that have to fail, ``count`` from the k-th on, have been
        made."""
        if self._recorder is None:
            return sum(record.op == FAILED for record in read_log(self._log)) >= count
        return self.calls >= k + count


def _open(disk: _Disk, url: str, fault: Fault, host: str) -> Engine:
    """Open an engine. Retry while opening fails, and remove a lasting fault before the last
    attempt."""
    for _ in range(2 if fault.lasts else fault.calls + 1):
        with suppress(StoreError):
            return Engine(url, host)
        if host == PROCESS:
            disk.fail(_NEVER)  # otherwise the next process would count from the start
    assert fault.lasts, "the store does not open"
    disk.fail(_NEVER)
    return Engine(url, host)


def look(url: str, store: Path, known: Known) -> Outcome:
    """Open the store as the next process would, and check it."""
    right = everything()
    rows = Rows(memoryview(bytearray(len(right) * BLOCK_BYTES)), _LAYOUT)
    backend = LmdbBackend.open(StoreUrl.parse(url))
    opened = BlockingStore(backend, IDENTITY, rows, OPTIONS, url=url)
    assert not list(store.glob("damaged-*")), "the store was quarantined"
    held = [key for key in right if opened.contains(key)]
    missing = {*map(bytes.fromhex, known.held)} - {*held}
    assert not missing, f"{len(missing)} held blocks are missing"
    assert len(opened.index) == len(held), (
        "the index lists blocks that were never stored"
    )
    assert not opened.read(held, range(len(held))), "held blocks cannot be read"
    assert all(
        bytes(rows.places(0, row)[0]) == right[key] for row, key in enumerate(held)
    ), "wrong bytes"
    manifests = {
        manifest.id for manifest in backend.catalogue(opened.namespace).manifests()
    }
    assert known.persisted != LAST or str(LAST) in manifests, (
        "the request that was persisted last is missing"
    )
    for name in manifests:
        (chain,) = backend.manifest_keys(opened.namespace, [name])[0] or ()
        assert {*chain.unpack()} <= {*held}, f"request {name} names missing blocks"
    check_totals(backend)
    faults = find_faults(backend)
    assert not faults, faults
    _write_more(opened, backend)
    opened.close()
    return Outcome("right", len(held))


def _write_more(opened: BlockingStore, backend: LmdbBackend) -> None:
    """Check that the store accepts new content, and that its files then have the recorded
    lengths."""
    blocks = content(LAST)
    opened.rows.array[: len(blocks)] = [
        np.frombuffer(block, np.uint8) for block in blocks.values()
    ]
    opened.put("more", list(blocks), range(len(blocks)), range(len(blocks)))
    opened.flush()
    assert all(map(opened.contains, blocks)), "the store does not accept new blocks"
    backend.commit(opened.namespace, CommitBatch())
    faults = find_faults(backend)
    assert not faults, faults
    environment = backend.environment
    with environment.transaction() as transaction:
        allocator = Allocator(transaction)
        recorded = {
            segment: pages * PAGE_BYTES
            for segment, pages in allocator.segments().items()
        }
        for hole in allocator.holes():
            recorded[hole.segment] -= hole.pages * PAGE_BYTES
    lengths = environment.files.lengths()
    for segment in lengths.keys() | recorded.keys():
        excess = lengths.get(segment, 0) - recorded.get(segment, 0)
        # ext4 counts the blocks that list the parts of a file with holes
        assert 0 <= excess <= METADATA_BYTES, (
            f"files have {lengths} bytes, the extents in them {recorded}"
        )


def run_case(
    directory: Path,
    placement: str,
    fault: Fault,
    k: int,
    host: str = THREAD,
) -> Outcome:
    """Run an engine and check the store that it leaves.

    :raises AssertionError: an invariant is violated; the message names the call that failed.
    """
    root, log = directory / "root", directory / "log"
    shutil.rmtree(root, ignore_errors=True)
    log.unlink(missing_ok=True)
    root.mkdir()
    url = f"lmdb://{root}/store?capacity={CAPACITY}&placement={placement}"
    lived = run_in_fork(lambda: live(url, root, log, fault, k, host), 2 * PATIENCE_S)
    failed = [
        f"{_CALLS[record.offset]} {record.path}"
        for record in read_log(log)
        if record.op == FAILED
    ]
    where = f"{placement}, {fault.name}, call {k} ({failed[0] if failed else 'none'})"
    assert lived.kind in (STORED, DROPPED), f"{where}: {lived.kind}: {lived.detail}"
    known = Known(*json.loads(lived.detail))
    found = run_in_fork(lambda: look(url, root / "store", known), PATIENCE_S)
    assert found.kind == "right", (
        f"{where}: {lived.kind}; then {found.kind}: {found.detail}"
    )
    return lived


def run(
    cases: int,
    seed: int,
    directory: Path,
    seconds: float,
    placement: str,
    faults: Sequence[Fault],
    host: str,
) -> Counter[str]:
    """Run up to ``cases`` cases, in an order given by the seed, within the time limit. Count their
    outcomes.

    :raises AssertionError: as ``run_case``.
    """
    deadline = time.monotonic() + seconds
    gc.freeze()
    seen: Counter[str] = Counter()
    calls = {
        fault.how: run_case(directory, placement, fault, 0).total for fault in faults
    }
    every = [(fault, k) for fault in faults for k in range(1, calls[fault.how] + 1)]
    seen["possible"] = len(every)
    for fault, k in random.Random(seed).sample(every, min(cases, len(every))):
        if time.monotonic() > deadline:
            break
        seen[run_case(directory, placement, fault, k, host).kind] += 1
    return seen


def main() -> None:
    by_name = {fault.name: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", type=int, default=100_000, help="maximum for each placement"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="time limit for each placement"
    )
    parser.add_argument("--fault", choices=sorted(by_name), help="run this fault only")
    parser.add_argument(
        "--host", choices=(THREAD, PROCESS), default=THREAD, help="where the store runs"
    )
    arguments = parser.parse_args()
    faults = FAULTS if arguments.fault is None else (by_name[arguments.fault],)
    if not hasattr(ctypes.CDLL(None), "persistkv_record_begin"):
        with tempfile.TemporaryDirectory() as directory:
            environment = {
                **os.environ,
                "LD_PRELOAD": str(build_recorder(Path(directory))),
            }
            command = [sys.executable, "-m", "tests.crash.disk_faults", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    logging.disable(logging.CRITICAL)
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as directory:
            seen = run(
                arguments.cases,
                arguments.seed,
                Path(directory),
                arguments.seconds,
                placement,
                faults,
                arguments.host,
            )
        possible = seen.pop("possible")
        ends = ", ".join(f"{count} {kind}" for kind, count in sorted(seen.items()))
        print(
            f"{placement}: {seen.total()} of {possible} faults of the disk ({ends}): 0 lost, 0 "
            f"wrong"
        )


if __name__ == "__main__":
    main()
