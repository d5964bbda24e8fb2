"""``persistkv bench``: the speed of a store, and of its disk or bucket without persistkv.

1. The store and the plain medium take turns within a round: a slow phase of the medium affects
   both.
2. A store job ends when its blocks are visible, hence durable; a load job ends when its rows are
   filled and verified.
3. All work happens in a new store next to the named one. At the end it is removed, or emptied if it
   is in a bucket.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count, product
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import msgspec
import numpy as np
import numpy.typing as npt
import typer
import xxhash

from persistkv.config import GroupLayout, RowLayout, StoreUrl, parse_size
from persistkv.errors import ConfigurationError, StoreError
from persistkv.memory.libc import address_of
from persistkv.memory.pages import use_huge_pages
from persistkv.storage import BACKENDS, open_backend
from persistkv.storage.backend import PlainMedium
from persistkv.storage.commit_pipeline import DIRECT_BYTES
from persistkv.storage.host.client import JobOutcome, StoreClient
from persistkv.storage.host.protocol import Hello, HostStats
from persistkv.storage.host.supervisor import Host, ProcessHost
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv_tools import options, render
from persistkv_tools.inspect.doctor import CODECS, LEAST_GAIN, sample_store
from persistkv_tools.packs import Took
from persistkv_tools.progress import byte_progress, counted

_BLOCK_BYTES = 64 << 10  # 64 KiB
_QUEUE_BYTES = 8 << 30  # 8 GiB
_MAX_BUFFERS = 1024  # of one system call
_PAUSE_S = 0.2  # before a cold read
_NAP_S = 0.0001
_TIMEOUT_S = 120.0
_GOOD = {"store": 0.75, "load, warm": 0.8, "load, cold": 0.9}
"""Ratios to the plain medium's speed that count as good: checksums, messages and a transaction take
the rest."""
_POOR = 0.5  # below this share of the good ratio, an operation is judged slow
_CODEC_ROUNDS = 3  # after a warm-up round


class Figure(msgspec.Struct, frozen=True):
    """Speed of one operation: medians over the rounds. Fields: docs/json.md."""

    name: str
    seconds: float
    bytes_per_s: float
    limit_seconds: float | None
    ratio: float | None
    verdict: str


class CodecFigure(msgspec.Struct, frozen=True):
    """Ratio and speed of one codec: medians over the rounds. Fields: docs/json.md."""

    codec: str
    ratio: float
    store_bytes_per_s: float
    load_bytes_per_s: float
    time: float


class Advice(msgspec.Struct, frozen=True):
    """The codec that a benchmark recommends for the store, and why."""

    codec: str
    reason: str


class BenchReport(msgspec.Struct, frozen=True):
    """Results of one benchmark run. Fields: docs/json.md."""

    url: str
    scratch_url: str
    job_bytes: int
    rounds: int
    figures: list[Figure]
    codecs: list[CodecFigure]
    advice: Advice | None
    notes: list[str]


_FIGURES = render.columns(
    "operation=name time=seconds speed=bytes_per_s plain=limit_seconds ratio verdict"
)
_CODEC_FIGURES = render.columns(
    "codec ratio store=store_bytes_per_s load=load_bytes_per_s time_vs_raw=time"
)


def bench(
    url: options.Url,
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of one job.")
    ] = "32MiB",
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of rounds.")
    ] = 7,
    json: options.Json = False,
) -> None:
    """Compare persistkv with plain reads and writes of the same bytes on this disk or bucket.

    Then measure each codec on samples of the store's content, and recommend one.

    The measurement uses a temporary store next to the named one, which may be absent and is not
    changed. With the default sizes it writes 1.5 GiB.

    Example: persistkv bench lmdb:///var/cache/kv
    """
    job_bytes = parse_size(size, name="--size")
    if job_bytes % _BLOCK_BYTES or job_bytes < DIRECT_BYTES:
        raise ConfigurationError(
            "--size",
            size,
            "a multiple of 64KiB, and 4MiB or more, because smaller jobs are staged",
        )
    with byte_progress() as progress:
        jobs = 2 * rounds + 1 + 2 * len(CODECS) * (_CODEC_ROUNDS + 1)
        took = counted(progress, "bench", jobs * job_bytes)
        try:
            report = _bench(url, job_bytes, rounds, took)
        except OSError as error:
            raise StoreError(
                f"the plain file or the temporary store failed: {error.strerror or error}"
            ) from error
    if json:
        render.print_json(report)
        return
    title = (
        f"jobs of {render.format_size(report.job_bytes)}, medians of "
        f"{render.count(report.rounds, 'round')}"
    )
    render.show_table(_FIGURES, report.figures, title=title, left="verdict")
    if report.advice is not None:
        render.show_table(
            _CODEC_FIGURES,
            report.codecs,
            title="codecs, measured on samples of the store's content",
        )
        render.say(f"recommended codec: {report.advice.codec} ({report.advice.reason})")
    for note in report.notes:
        render.say(note)


def _bench(url: str, job_bytes: int, rounds: int, took: Took) -> BenchReport:
    """Run the benchmark, after one warm-up round; ``took`` advances the progress bar."""
    notes: list[str] = []
    times: dict[str, list[float]] = defaultdict(list)
    codecs: list[CodecFigure] = []
    job = _Job(job_bytes)
    try:
        with closing(open_backend(url, read_only=True)) as backend:
            sample, problem = (
                sample_store(backend, job_bytes),
                "the store holds less than 1 MiB",
            )
    except StoreError as error:
        sample, problem = b"", str(error)
    with _scratch(url) as (scratch, directory), ExitStack() as stack:
        if (plain := _plain_medium(scratch, directory, notes)) is not None:
            stack.enter_context(closing(plain))
        keys = [job.fresh_keys() for _ in range(rounds + 1)]
        with job.client(scratch) as client:
            for names in keys:
                times["store"].append(job.store(client, names))
                if plain is not None:
                    times["plain store"].append(_seconds(plain.write, job.source))
                job.load(client, names)  # fills the page cache
                times["load, warm"].append(job.load(client, names))
                if plain is not None:
                    if directory is not None:
                        plain.read(job.target)  # fills the page cache
                    times["plain load, warm"].append(_seconds(plain.read, job.target))
                took(job_bytes)
        for warmed_up in times.values():
            del warmed_up[0]
        if directory is not None:
            try:
                for number, names in enumerate(keys[1:]):
                    if isinstance(plain, _PlainDisk):
                        # a disk answers sooner right after another read
                        time.sleep(_PAUSE_S)
                        times["plain load, cold"].append(
                            _seconds(plain.read_cold, number, job.target)
                        )
                        # as after a load: reads into memory that was just written are faster
                        job.clear()
                    drop_page_cache([directory])
                    with job.client(scratch) as client:
                        time.sleep(_PAUSE_S)
                        times["load, cold"].append(job.load(client, names))
                    took(job_bytes)
            except OSError as error:
                notes.append(
                    f"reads that bypass the page cache cannot be measured: {error.strerror}"
                )
        try:
            codecs += (
                _measure_codecs(scratch, directory, job, sample, took) if sample else ()
            )
        except StoreError as error:
            sample, problem = b"", str(error)
        if not sample:
            notes.append(f"the codecs were not compared: {problem}")
    median = {
        name: round(statistics.median(seconds), 6) for name, seconds in times.items()
    }
    figures = []
    for name in (name for name in _GOOD if name in median):
        seconds, limit = median[name], median.get(f"plain {name}")
        ratio = None if limit is None else round(limit / seconds, 3)
        figures.append(
            Figure(
                name,
                seconds,
                round(job_bytes / seconds),
                limit,
                ratio,
                verdict(name, ratio),
            )
        )
    return BenchReport(
        url,
        scratch,
        job_bytes,
        rounds,
        figures,
        codecs,
        recommend(codecs) if codecs else None,
        notes,
    )


def _measure_codecs(
    scratch: str, directory: Path | None, job: _Job, sample: bytes, took: Took
) -> Iterator[CodecFigure]:
    """Yield the figures of each codec, measured by storing and loading a job filled with the
    sample.

    :param directory: of a local store: loads then read from the disk, not from the page cache.
        None: remote.
    """
    job.fill(sample)
    turns = [
        (name, job.fresh_keys())
        for _, name in product(range(_CODEC_ROUNDS + 1), CODECS)
    ]
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    hosts: dict[str, HostStats | None] = {}
    for operation, measure in (("store", job.store), ("load", job.load)):
        with ExitStack() as stack:
            clients = {
                name: stack.enter_context(job.client(scratch, name)) for name in CODECS
            }
            for name, keys in turns:
                times[operation, name].append(measure(clients[name], keys))
                took(job.num_bytes)
            hosts = hosts or {
                name: client.stats().host for name, client in clients.items()
            }
        if directory is not None and operation == "store":
            with suppress(OSError):  # on a file system in memory
                drop_page_cache([directory])
    median = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    for name, host in hosts.items():
        if host is None or not host.counters.stored_bytes:
            raise StoreError("the host process did not report how much it stored")
        ratio = host.counters.stored_raw_bytes / host.counters.stored_bytes
        store, load = median["store", name], median["load", name]
        relative = (store + load) / (median["store", "raw"] + median["load", "raw"])
        speeds = round(job.num_bytes / store), round(job.num_bytes / load)
        yield CodecFigure(name, round(ratio, 3), *speeds, round(relative, 3))


def _seconds(call: Callable[..., None], *arguments: object) -> float:
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def verdict(name: str, ratio: float | None) -> str:
    """Return a text that judges the ratio of an operation (see ``Figure``) to the plain medium;
    None: unknown."""
    if ratio is None:
        return "no plain speed to compare with"
    if ratio >= _GOOD[name]:
        return "as fast as this disk or bucket allows"
    if ratio >= _GOOD[name] * _POOR:
        return "usable, but slower than this disk or bucket allows"
    return "slow: run persistkv doctor, and check the load of this machine"


def recommend(figures: Sequence[CodecFigure]) -> Advice:
    """Return the codec of the highest worth, and the reason; ``raw`` if no codec is worth clearly
    more.

    The worth of a codec is its ratio divided by the time of a store and a load, each relative to
    ``raw``: one that halves the bytes and takes twice as long is worth as much as ``raw``.
    """
    best = max(
        (figure for figure in figures if figure.codec != "raw"),
        key=lambda figure: figure.ratio / figure.time,
    )
    smaller, longer = (
        f"{best.codec} makes the data {best.ratio:.2f}x smaller",
        f"{best.time:.2f}x as long as with raw",
    )
    traits = f"{smaller}, and a store and a load take {longer}"
    if best.ratio / best.time >= LEAST_GAIN:
        return Advice(best.codec, traits)
    return Advice("raw", f"no codec is worth its time here: {traits}")


@contextmanager
def _scratch(url: str) -> Iterator[tuple[str, Path | None]]:
    """Create a temporary store next to that of the URL; yield its URL and directory (None: remote).
    At the end, remove the directory, or erase the remote store.
    """
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
            BACKENDS.get(parsed.scheme).erase(StoreUrl.parse(scratch))


class _Job:
    """Block buffers of a job in shared memory, in shuffled order: stores read the first half, loads
    fill the second."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._fd = os.memfd_create("persistkv-bench")
        try:
            os.ftruncate(self._fd, 2 * num_bytes)
            memory = mmap.mmap(self._fd, 2 * num_bytes)
        except (OSError, OverflowError):
            raise ConfigurationError(
                "--size", render.format_size(num_bytes), "half of the memory at most"
            ) from None
        rows: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8).reshape(
            2, -1, _BLOCK_BYTES
        )
        self._stored, self._loaded = rows
        random = np.random.default_rng(0)
        self._stored[:] = random.integers(0, 256, self._stored.shape, dtype=np.uint8)
        self.clear()
        use_huge_pages([self._fd], 2 * num_bytes)  # as the primary tier does
        self._order = [int(row) for row in random.permutation(len(self._stored))]
        self.source = [self._stored[row].data for row in self._order]
        self.target = [self._loaded[row].data for row in self._order]
        self._ids = count(1)

    def fill(self, sample: bytes) -> None:
        """Fill the blocks to store with the sample, repeated or cut off."""
        self._stored[self._order] = np.resize(
            np.frombuffer(sample, dtype=np.uint8), self._stored.shape
        )

    def fresh_keys(self) -> list[bytes]:
        """Return new random keys, one for each block."""
        return [os.urandom(32) + bytes(4) for _ in self._order]

    @contextmanager
    def client(self, url: str, codec: str = "raw") -> Iterator[StoreClient]:
        """Open a store client, whose host process can access the job's memory, until the ``with``
        statement ends."""
        with closing(
            store_client(
                url, ProcessHost((self._fd,), 2 * self.num_bytes), _BLOCK_BYTES, codec
            )
        ) as client:
            client.open()
            yield client

    def store(self, client: StoreClient, keys: list[bytes]) -> float:
        """Store all blocks; return the seconds until lookups find them."""
        job_id = next(self._ids)
        begin = time.perf_counter()
        client.submit_store(
            job_id,
            f"request {job_id}",
            keys,
            self._order,
            range(len(keys)),
            self.num_bytes,
        )
        if failed := finish(client, job_id).failed:
            raise StoreError(f"{len(failed)} blocks were not stored")
        while not all(map(client.contains, keys)):
            client.poll()
            if time.perf_counter() - begin > _TIMEOUT_S:
                raise StoreError(f"stored blocks were not visible in {_TIMEOUT_S:g} s")
            time.sleep(_NAP_S)
        return time.perf_counter() - begin

    def load(self, client: StoreClient, keys: list[bytes]) -> float:
        """Load all blocks; return the seconds it took. Then compare the bytes with the stored ones
        and clear them."""
        job_id = next(self._ids)
        begin = time.perf_counter()
        client.submit_load(job_id, keys, [row + len(keys) for row in self._order])
        failed = finish(client, job_id).failed
        seconds = time.perf_counter() - begin
        if failed:
            raise StoreError(f"{len(failed)} blocks were not loaded")
        if not np.array_equal(self._loaded, self._stored):
            raise StoreError("the loaded bytes differ from the stored ones")
        self.clear()
        return seconds

    def clear(self) -> None:
        self._loaded[:] = 0


def store_client(
    url: str, host: Host, block_bytes: int, codec: str = "raw"
) -> StoreClient:
    """Return a client, not yet open, for blocks of one KV cache group."""
    layout = RowLayout(block_bytes, (GroupLayout(((0, block_bytes),)),))
    hello = Hello(
        url,
        Identity.of({"benchmark": block_bytes}).encode(),
        layout,
        StoreOptions(codec=codec),
    )
    return StoreClient(host, hello, max_queue_bytes=_QUEUE_BYTES)


def finish(client: StoreClient, job_id: int) -> JobOutcome:
    """Poll the client until a job has ended, for two minutes at most; return the job's outcome."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        for outcome in client.poll():
            if outcome.job_id == job_id:
                return outcome
        time.sleep(_NAP_S)
    raise StoreError(f"job {job_id} did not end in {_TIMEOUT_S:g} s")


def _plain_medium(
    scratch: str, directory: Path | None, notes: list[str]
) -> PlainMedium | None:
    if directory is not None:
        try:
            return _PlainDisk(directory / "plain")
        except OSError as error:
            notes.append(
                f"writes that bypass the page cache do not work here ({error.strerror}): there "
                f"are no ratios"
            )
            return None
    parsed = StoreUrl.parse(scratch)
    plain = BACKENDS.get(parsed.scheme).plain_medium(parsed)
    if plain is None:
        notes.append(
            "the speed without persistkv cannot be measured here: there are no ratios"
        )
    return plain


class _PlainDisk(PlainMedium):
    """A file that is written and read with plain system calls; ``_scratch`` removes it.

    All calls raise OSError if the disk fails. The constructor raises it if the file system has no
    O_DIRECT.
    """

    def __init__(self, path: Path) -> None:
        self._direct = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600
        )
        self._buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._end = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append the buffers, bypassing the page cache. They are durable on return, as a store's
        are."""
        transfer(os.pwritev, self._direct, buffers, self._end)
        os.fdatasync(self._direct)
        self._end += sum(map(len, buffers))

    def read(self, buffers: Sequence[memoryview]) -> None:
        """Read through the page cache, and compute a checksum of each buffer, because a load does
        so."""
        transfer(os.preadv, self._buffered, buffers, self._end - sum(map(len, buffers)))
        for buffer in buffers:
            xxhash.xxh3_64_intdigest(buffer)

    def read_cold(self, number: int, buffers: Sequence[memoryview]) -> None:
        """Read the bytes of call ``number`` of ``write``, bypassing the page cache. All calls wrote
        equally many."""
        transfer(os.preadv, self._direct, buffers, number * sum(map(len, buffers)))

    def close(self) -> None:
        os.close(self._direct)
        os.close(self._buffered)


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> None:
    """Transfer buffers from or to byte ``offset`` of a file, in as few calls of preadv or pwritev
    as possible.

    :raises OSError: a call transferred fewer bytes.
    """
    for start in range(0, len(buffers), _MAX_BUFFERS):
        part = buffers[start : start + _MAX_BUFFERS]
        wanted = sum(map(len, part))
        if (done := call(fd, part, offset)) != wanted:
            raise OSError(errno.EIO, f"{done} of {wanted} bytes")
        offset += wanted


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Remove files, and all files below directories, from the page cache. No process may have them
    mapped.

    :raises OSError: more than 1 MiB of a file, and more than 1 % of it, stays in the page cache.
    """
    for file in (
        below for path in paths for below in (path, *path.rglob("*")) if below.is_file()
    ):
        with file.open("rb") as opened:
            for _ in range(2):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if _resident_bytes(opened.fileno()) <= max(
                    file.stat().st_size // 100, 1 << 20
                ):
                    break
                # dirty pages stay; only then, because each fsync flushes the disk
                os.fsync(opened.fileno())
            else:
                raise OSError(
                    errno.EBUSY,
                    f"{file} stays in the page cache: another process uses it",
                )


def _resident_bytes(fd: int) -> int:
    size = os.fstat(fd).st_size
    if not size:
        return 0
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        address, libc = (
            address_of(memoryview(memory)),
            ctypes.CDLL(None, use_errno=True),
        )
        if libc.mincore(
            ctypes.c_void_p(address),
            ctypes.c_size_t(size),
            ctypes.c_void_p(pages.ctypes.data),
        ):
            raise OSError(ctypes.get_errno(), "mincore")
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE
