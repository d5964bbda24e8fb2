"""``persistkv bench``: what a medium gives persistkv, beside what it gives without.

A disk is held against plain system calls, a bucket against the vendor's plain client with one object for all of a job.

1. All takes turns within a round, so that what a disk does at times hits both sides.
2. A store counts until its blocks are visible, hence durable; a load until its rows are filled and verified.
3. It works in stores and files of its own beside the one that was named, which it does not touch, and removes them.
"""

from __future__ import annotations

import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from persistkv.config import StoreUrl
from persistkv.storage.backend import Backend, CommitBatch, PlainMedium
from persistkv.storage.host.client import StoreClient
from persistkv.storage.registry import BACKENDS, open_backend
from persistkv_tools.raw_disk import RawDisk, drop_page_cache
from persistkv_tools.rig import Job, fresh_keys

_BLOCK_BYTES = 64 << 10  # 64 KiB
_PACKS_AT_ONCE = 256
_PAUSE_S = 0.2  # before a cold read
_GOOD = {"store": 0.75, "load, warm": 0.8, "load, cold": 0.9}
"""Shares of the disk's speed that are as much as can be expected: a checksum, a message and a transaction go along."""
_POOR = 0.5
"""Half of that is worth a look at the machine."""


class Figure(msgspec.Struct, frozen=True):
    """One operation, in medians over the rounds."""

    name: str
    seconds: float
    bytes_per_s: float
    limit_seconds: float | None
    """What the disk or the bucket takes for the same bytes without persistkv; None where nobody can tell."""
    ratio: float | None
    """Of that speed. Above 1 where persistkv is faster, or by chance."""
    verdict: str


class Report(msgspec.Struct, frozen=True):
    """One run."""

    url: str
    scratch_url: str
    """Where it worked; it is gone."""
    job_bytes: int
    rounds: int
    figures: list[Figure]
    notes: list[str]


class _Times:
    """Seconds by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)

    def median(self, *names: str) -> float | None:
        """The least of these medians; None where there is none."""
        found = [statistics.median(self._seconds[name]) for name in names if name in self._seconds]
        return min(found, default=None)


def bench(url: str, job_bytes: int, rounds: int, took: Callable[[int], None]) -> Report:
    """Measure. One round is made before and not counted.

    :param took: called with the bytes of each round.
    :raises StoreError: the store failed, or did not give back what it was given.
    """
    job, times = Job(job_bytes // _BLOCK_BYTES, job_bytes), _Times()
    notes: list[str] = []
    with _scratch(url, notes) as (scratch, directory):
        raw = _yardstick(scratch, job, directory, notes)
        try:
            keys = [fresh_keys(len(job.source)) for _ in range(rounds + 1)]
            _warm(scratch, job, raw, keys, times, took)
            if directory is not None:
                disk = raw if isinstance(raw, RawDisk) else None
                _cold(scratch, directory, job, disk, keys[1:], times, took, notes)
        finally:
            if raw is not None:
                raw.close()
    return Report(url, scratch, job_bytes, rounds, _figures(times, job_bytes), notes)


@contextmanager
def _scratch(url: str, notes: list[str]) -> Iterator[tuple[str, Path | None]]:
    """A new store beside the one of the URL, and its directory where it is one of this machine."""
    parsed = StoreUrl.parse(url)
    location = f"{parsed.location.rstrip('/')}.bench-{secrets.token_hex(4)}"
    query = urlencode(parsed.options)
    scratch = f"{parsed.scheme}://{location}" + f"?{query}" * bool(query)
    open_backend(scratch).close()
    directory = Path(location) if Path(location).is_dir() else None
    try:
        yield scratch, directory
    finally:
        if directory is not None:
            shutil.rmtree(directory)
        else:
            with closing(open_backend(scratch)) as backend:
                _empty(backend)
            notes.append(f"{scratch} is empty; a few small objects of it stay, to be removed by the bucket's own tools")


def _empty(backend: Backend) -> None:
    for namespace in list(backend.namespaces()):
        packs = [table.pack_id for table in backend.changes(namespace.id, None).added]
        for start in range(0, len(packs), _PACKS_AT_ONCE):
            backend.commit(namespace.id, CommitBatch(deletions=packs[start : start + _PACKS_AT_ONCE]))


class _Plain:
    """A medium without its driver, timed call by call."""

    def __init__(self, medium: PlainMedium, job: Job) -> None:
        self._medium = medium
        self._source, self._target = job.buffers(job.source), job.buffers(job.target)

    def write_new(self) -> float:
        """Seconds."""
        begin = time.perf_counter()
        self._medium.write(self._source)
        return time.perf_counter() - begin

    def read_warm(self, _threads: int) -> float:
        """Seconds."""
        begin = time.perf_counter()
        self._medium.read(self._target)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Remove what was written."""
        self._medium.close()


def _yardstick(scratch: str, job: Job, directory: Path | None, notes: list[str]) -> RawDisk | _Plain | None:
    if directory is None:
        parsed = StoreUrl.parse(scratch)
        plain = BACKENDS.get(parsed.scheme).plain_medium(parsed)
        if plain is None:
            notes.append("what the medium could give at most is not known here: there are figures, and no ratios")
        return None if plain is None else _Plain(plain, job)
    place = directory / "raw"
    place.mkdir()
    try:
        return RawDisk(place, job.buffers(job.source), job.buffers(job.target))
    except OSError as error:
        notes.append(f"the disk cannot be measured past the page cache ({error.strerror}): there are no ratios")
        return None


def _warm(
    scratch: str,
    job: Job,
    raw: RawDisk | _Plain | None,
    keys: list[list[bytes]],
    times: _Times,
    took: Callable[[int], None],
) -> None:
    with _client(scratch, job) as client:
        for number, names in enumerate(keys):
            found = {"store": job.store(client, 2 * number, names)}
            if raw is not None:
                found["raw write"] = raw.write_new()
            job.load(client, 2 * number + 1, names)  # into the page cache
            found["load, warm"] = job.load(client, 2 * number + 1, names)
            if raw is not None:
                found["raw warm"] = raw.read_warm(1)
            took(job.num_bytes)
            if number:
                for name, seconds in found.items():
                    times.add(name, seconds)


def _cold(
    scratch: str,
    directory: Path,
    job: Job,
    raw: RawDisk | None,
    keys: list[list[bytes]],
    times: _Times,
    took: Callable[[int], None],
    notes: list[str],
) -> None:
    """By clients that were just opened, with nothing of the store in the page cache but what opening read.

    All wait before they read: a disk that was just read from answers sooner.
    """
    for number, names in enumerate(keys):
        try:
            for name, direct in (("raw cold, past the cache", True), ("raw cold, through it", False)):
                if raw is not None:
                    time.sleep(_PAUSE_S)
                    times.add(name, raw.read_cold(number, direct=direct))
                    job.clear()  # as a load does: memory that was just read into is read into faster
            drop_page_cache([directory])
        except OSError as error:
            notes.append(f"what is not in the page cache cannot be measured: {error.strerror}")
            return
        with _client(scratch, job) as client:
            time.sleep(_PAUSE_S)
            times.add("load, cold", job.load(client, 0, names))
        took(job.num_bytes)


@contextmanager
def _client(url: str, job: Job) -> Iterator[StoreClient]:
    client = job.rig.client(url)
    client.open()
    try:
        yield client
    finally:
        client.close()


def _figures(times: _Times, job_bytes: int) -> list[Figure]:
    limits = {
        "store": ("raw write",),
        "load, warm": ("raw warm",),
        "load, cold": ("raw cold, past the cache", "raw cold, through it"),
    }
    found = []
    for name, yardsticks in limits.items():
        seconds = times.median(name)
        if seconds is not None:
            limit = times.median(*yardsticks)
            ratio = None if limit is None else limit / seconds
            found.append(
                Figure(
                    name,
                    round(seconds, 6),
                    round(job_bytes / seconds),
                    None if limit is None else round(limit, 6),
                    None if ratio is None else round(ratio, 3),
                    verdict(name, ratio),
                )
            )
    return found


def verdict(name: str, ratio: float | None) -> str:
    """What a ratio means."""
    if ratio is None:
        return "no limit to hold it against"
    good = _GOOD[name]
    if ratio >= good:
        return "as fast as this disk or bucket allows"
    if ratio >= good * _POOR:
        return "usable; a part of the speed is lost"
    return "slow: look at persistkv doctor, and at what else runs here"
