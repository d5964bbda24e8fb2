"""``persistkv doctor``: settings of this machine that prevent or slow persistkv, and their
remedies.

The checks leave nothing: O_DIRECT is tried on a file without a name. On the medium of a shared
store, a blob of 1 KiB under a random name is written, read, listed and deleted, unless the URL says
``read_only=yes``.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from rich.text import Text

from persistkv.config import PAGE_BYTES, StoreUrl
from persistkv.errors import CorruptPackError, PersistKVError
from persistkv.releases import TESTED
from persistkv.rounding import divide_up
from persistkv.storage import BACKENDS, open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.checks import Check, Level
from persistkv.storage.format.codec import parse_codec
from persistkv.storage.format.pack import FRAME_BYTES, PackTable, align
from persistkv.storage.inspection.requests import stored_requests
from persistkv.storage.stats import BackendStats
from persistkv_tools import render
from persistkv_tools.command import URL, Command
from persistkv_tools.packs import read_frame

CODECS = ("raw", "zstd:1", "planes:2", "planes:4")
LEAST_GAIN = 1.1
"""Factor by which the ratio of a codec must be better than the store's present one to be
recommended."""
_SAMPLE_PACKS = 64  # most packs from which bytes are taken to compare codecs
SHARED_MEMORY = Path("/dev/shm")
REGIONS = "persistkv_offload_*.mmap"
"""Pattern of the file names of primary tiers under /dev/shm; see ``persistkv.cpu.region_file``."""
_PACKAGES = (
    "persistkv",
    "lmdb",
    "msgspec",
    "numpy",
    "rich",
    "xxhash",
    "zstandard",
)
_OPTIONAL_PACKAGES = {
    "boto3": "'persistkv[s3]'",
    "cryptography": "'persistkv[encryption]'",
    "prometheus-client": "'persistkv[metrics]'",
    "torch": "'persistkv[transformers]'",
    "transformers": "'persistkv[transformers]'",
    "safetensors": "'persistkv[transformers]'",
    "vllm": "vllm",
}
"""Requirement that pip installs, for each package that is optional."""
_MIN_SHARED = 1 << 30  # 1 GiB: a smaller primary tier is of little use
_MIN_FILES = 1024
_RELEASED = 1_760_000_000
"""Seconds since the epoch, before this release: a clock that shows less is wrong."""
_SKEW_S = 300.0  # seconds by which the clocks of machines may differ
_SAMPLE_BYTES = 8 << 20  # 8 MiB, which each codec encodes in a tenth of a second
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # inode in /proc/*/ns/pid: include/linux/proc_ns.h

T = TypeVar("T")


_STYLES = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.WARNING: "yellow",
    Level.PROBLEM: "bold red",
}


_URL = URL._replace(help="Also check this store: URL or path.", is_needed=False)


def doctor(url: str | None, *, json: bool) -> None:
    """Check this machine and, if given, a store. Exit code 1: a warning or a problem was found.

    Example: persistkv doctor lmdb:///var/cache/kv
    """
    findings = list(examine(url, os.environ))
    if json:
        render.print_json({"url": url, "findings": findings})
    else:
        _print(findings)
    levels = {finding.level for finding in findings}
    if levels & {Level.WARNING, Level.PROBLEM}:
        raise SystemExit(1)


def _print(findings: Sequence[Check]) -> None:
    """Print a table of the findings, each with its remedy below it."""
    table = render.table(("check", "level", "found"), [], left="level,found")
    # Allow line breaks in the last column. ``render.table`` forbids them in columns of short
    # texts, and it has seen no row.
    table.columns[-1].no_wrap = False
    for finding in findings:
        level = render.plain(finding.level.value, _STYLES[finding.level])
        found = render.plain(finding.found)
        if finding.todo:
            todo = render.plain(f"→ {finding.todo}")
            found = Text("\n").join([found, todo])
        table.add_row(render.plain(finding.check), level, found)
    render.console().print(table)


COMMAND = Command(doctor, (_URL,))


def examine(
    url: str | None,
    environment: Mapping[str, str],
    shared_memory: Path = SHARED_MEMORY,
) -> Iterator[Check]:
    """Run all checks of the machine and, unless it is None, of the store; yield their outcomes."""
    yield from _packages()
    yield from _shared_memory(shared_memory)
    yield from _process(environment)
    if url is not None:
        yield from _store(url)


def _passed(
    check: str,
    passed: bool,
    found: str,
    todo: str,
    level: Level = Level.WARNING,
) -> Check:
    """Return the outcome of a check: OK if it passed, otherwise ``level`` with the remedy.

    :param found: what the check has found.
    :param todo: remedy.
    """
    if passed:
        return Check(check, Level.OK, found)
    return Check(check, level, found, todo)


def _packages() -> Iterator[Check]:
    """Check which packages are installed, and in which releases."""
    for name in (*_PACKAGES, *_OPTIONAL_PACKAGES):
        try:
            yield _check_release(name, version(name))
        except PackageNotFoundError:
            level = Level.PROBLEM
            todo = f"pip install {name}"
            if name in _OPTIONAL_PACKAGES:
                level = Level.NOTE
                todo = f"optional: pip install {_OPTIONAL_PACKAGES[name]}"
            yield Check(f"package {name}", level, "not installed", todo)


def _check_release(name: str, installed: str) -> Check:
    """Check that the installed release of a package is among those that persistkv is tested with. A
    package without such a list passes."""
    tested = TESTED.get(name)
    passed = tested is None or tested.covers(installed)
    found = installed if passed else f"{installed}, which is not tested"
    return _passed(
        f"package {name}", passed, found, f"persistkv is tested with {name} {tested}"
    )


def _shared_memory(directory: Path) -> Iterator[Check]:
    """Check the room in the directory of the primary tiers, and look for files that killed engines
    left there."""
    try:
        disk = shutil.disk_usage(directory)
    except OSError as error:
        yield Check(
            "shared memory",
            Level.PROBLEM,
            f"{directory}: {error.strerror}",
            "mount a tmpfs there",
        )
        return
    free = render.format_size(disk.free)
    total = render.format_size(disk.total)
    found = f"{free} of {total} free in {directory}"
    todo = (
        "it holds an engine's primary tier: enlarge it (docker run --shm-size, or remount "
        "with size=)"
    )
    yield _passed("shared memory", disk.free >= _MIN_SHARED, found, todo)
    yield _leftovers(directory)


def _leftovers(directory: Path) -> Check:
    """Check that no killed engine has left the file of its primary tier."""
    regions = sorted(directory.glob(REGIONS))
    leftovers = [path for path in regions if _is_leftover(path)]
    found = "none"
    if leftovers:
        count = render.count(len(leftovers), "region")
        num_bytes = sum(path.stat().st_size for path in leftovers)
        names = " ".join(map(str, leftovers))
        size = render.format_size(num_bytes)
        found = f"{count} of killed engines, {size}: {names}"
    todo = "the next engine removes them, or delete them by hand"
    return _passed("leftover regions", not leftovers, found, todo)


def _is_leftover(path: Path) -> bool:
    """Return whether a killed engine left this primary tier's file: no process locks it. False if
    it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # the lock lasts until the file is closed below; an engine that meets it retries
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else f"{number:,}"


def _process(environment: Mapping[str, str]) -> Iterator[Check]:
    """Check limits, settings and the clock of this process; those of an engine may differ."""
    yield _open_files()
    yield _locked_memory()
    yield _hash_seed(environment)
    yield _machine_clock()


def _open_files() -> Check:
    """Check the number of files that the process may open."""
    # the soft limit applies, and a process may raise it up to the hard one
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= _MIN_FILES
    found = f"{_limit(soft)} (at most {_limit(hard)})"
    todo = f"ulimit -n {_MIN_FILES}, or LimitNOFILE= of the service"
    return _passed("open files", enough, found, todo)


def _locked_memory() -> Check:
    """Check the limit of locked memory: registering memory with CUDA locks it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    found = "no limit" if unlimited else render.format_size(soft)
    todo = (
        "only if pinning the primary tier for a GPU fails: ulimit -l unlimited, or "
        "LimitMEMLOCK=infinity"
    )
    return _passed("locked memory", unlimited, found, todo, Level.NOTE)


def _hash_seed(environment: Mapping[str, str]) -> Check:
    """Check that Python's hashes are the same after a restart."""
    seed = environment.get("PYTHONHASHSEED", "")
    found = seed or "not set"
    todo = (
        "set it to 0 for engines that name blocks with Python's hash(): otherwise they find "
        "nothing after a restart"
    )
    return _passed("PYTHONHASHSEED", seed.isdecimal(), found, todo, Level.NOTE)


def _machine_clock() -> Check:
    """Check that the clock shows no time before this release."""
    now = time.time()
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    todo = "the clock is behind: set it, because ages and ttl depend on it"
    return _passed("clock", now >= _RELEASED, found, todo)


def _store(url: str) -> Iterator[Check]:
    """Check whether a store can be opened, and what limits or threatens it."""
    try:
        parsed = StoreUrl.parse(url)
        # check the medium before opening it, because this check names the defect that prevents it
        yield from BACKENDS.get(parsed.scheme).check_medium(parsed)
        with closing(open_backend(url, read_only=True)) as backend:
            is_remote = backend.capabilities.remote
            stats = backend.stats()
            newest = _newest_request(backend)
            sample = sample_store(backend, _SAMPLE_BYTES)
    except PersistKVError as error:
        message = " ".join(str(error).split())
        todo = "see the message; an absent store is created by an engine"
        yield Check("store", Level.PROBLEM, message, todo)
        return
    requests = render.count(stats.requests, "request")
    packs = render.count(stats.packs, "pack")
    size = render.format_size(stats.disk_bytes)
    found = f"can be opened: {requests}, {packs}, {size} on disk"
    yield Check("store", Level.OK, found)
    yield _codec(stats, sample)
    if stats.quarantined:
        yield _damaged_files(url, stats)
    yield _store_clock(newest)
    location = Path(parsed.location)
    # False for a bucket, which is no place on this machine
    if location.is_dir():
        yield _disk_space(location, stats.disk_bytes, stats.capacity)
        # these checks are about LMDB and segment files, which a shared directory does not have
        if not is_remote:
            yield _pid_namespace()
            yield _direct(location)


def _damaged_files(url: str, stats: BackendStats) -> Check:
    """Return a warning about files of damaged stores that were renamed."""
    size = render.format_size(stats.quarantined_bytes)
    names = " ".join(stats.quarantined)
    found = f"{size}, not counted in the capacity: {names}"
    todo = f"persistkv prune {shlex.quote(url)} --quarantined deletes them"
    return Check("damaged files", Level.WARNING, found, todo)


def _newest_request(backend: Backend) -> float:
    """Return when the newest request was created: seconds since the epoch; 0: there is none."""
    times = [found.manifest.created for found in stored_requests(backend)]
    return max(times, default=0.0)


def _codec(stats: BackendStats, sample: bytes) -> Check:
    """Check whether another codec would make the store's content clearly smaller.

    :param sample: raw bytes of the store's packs; empty if the sampled frames have less than
        1 MiB.
    """
    if not sample:
        found = "the samples of the store have less than 1 MiB, too little to recommend a codec"
        return Check("codec", Level.OK, found)
    ratio = stats.raw_bytes / stats.stored_bytes if stats.stored_bytes else 1.0
    codec, possible = smallest(sample)
    is_good_enough = possible < LEAST_GAIN * ratio
    found = f"codec ratio {ratio:.2f}; with {codec}: {possible:.2f}"
    todo = f"try codec {codec}: new content takes less space, and more processor time"
    return _passed("codec", is_good_enough, found, todo, Level.NOTE)


def _store_clock(newest: float) -> Check:
    """Check that the newest request, created at ``newest`` (seconds since the epoch), is not from
    the future."""
    # allow some minutes, a common and harmless difference between the clocks of machines
    is_right = newest <= time.time() + _SKEW_S
    found = "no request is from the future"
    if not is_right:
        found = f"the newest request has age {render.format_age(newest)}"
    todo = "this machine's clock, or that of an engine, is wrong"
    return _passed("store's clock", is_right, found, todo)


def sample_store(backend: Backend, most_bytes: int) -> bytes:
    """Return raw bytes of readable frames, spread evenly over a store's packs, with at most
    ``most_bytes``.

    Empty if there is less than one full frame, which is too little to compare codecs.
    """
    tables: list[PackTable] = []
    for namespace in backend.namespaces():
        tables.extend(backend.changes(namespace.id, None).added)
    if not tables:
        return b""
    # spread the sample over all packs, because contexts of different models compress differently
    packs = _spread(tables, _SAMPLE_PACKS)
    most_frames = most_bytes // FRAME_BYTES
    frames_per_pack = max(1, most_frames // len(packs))
    sample = bytearray()
    for table in packs:
        numbers = range(table.frame_count)
        for number in _spread(numbers, frames_per_pack):
            # leave out damaged frames, and evicted ones, which are None
            with suppress(CorruptPackError):
                frame = read_frame(backend, table, number)
                if frame is not None:
                    sample += frame
    if len(sample) < FRAME_BYTES:
        return b""
    return bytes(sample[:most_bytes])


def _spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` of the items, evenly spaced."""
    step = divide_up(len(items), most)
    return items[:: max(1, step)]


def smallest(sample: bytes) -> tuple[str, float]:
    """Return the codec that makes these bytes smallest, and its ratio of raw to stored bytes."""
    sizes = dict.fromkeys(CODECS, 0)
    for start in range(0, len(sample), FRAME_BYTES):
        frame = sample[start : start + FRAME_BYTES]
        for name in CODECS:
            encoded = parse_codec(name).encode(frame)
            # a store writes a frame raw if the codec makes it no smaller
            stored_bytes = min(len(encoded), len(frame))
            sizes[name] += align(stored_bytes)
    best = min(sizes, key=sizes.__getitem__)
    return best, len(sample) / sizes[best]


def _pid_namespace() -> Check:
    """Check that this is the machine's PID namespace: LMDB identifies processes by PID, and
    namespaces repeat PIDs."""
    try:
        is_initial = os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        # pass the check if the namespace is unknown, because advice would be a guess
        is_initial = True
    found = "that of the machine" if is_initial else "this container's own"
    todo = (
        "containers that share a store need different PIDs: give them one PID namespace "
        "(docker run --pid)"
    )
    return _passed("PID namespace", is_initial, found, todo, Level.NOTE)


def _disk_space(
    location: Path,
    store_bytes: int,
    capacity: int | None,
) -> Check:
    """Check whether the disk has room for a store that grows up to its capacity.

    :param store_bytes: bytes that the store takes on disk now.
    :param capacity: in bytes; None: unlimited.
    """
    disk = shutil.disk_usage(location)
    # negative: the store is above its capacity, and will shrink
    growth_bytes = 0 if capacity is None else capacity - store_bytes
    fits = growth_bytes <= disk.free
    found = f"{render.format_size(disk.free)} free"
    if not fits:
        found += f", and the store may grow by {render.format_size(growth_bytes)}"
    todo = "a full disk evicts content early: make room, or lower the capacity (persistkv set)"
    return _passed("free disk", fits, found, todo)


def _direct(location: Path) -> Check:
    """Check that files in the store's directory can be written past the page cache."""
    try:
        works = _writes_direct(location)
    except OSError as error:
        found = f"could not be tried: {error.strerror}"
        return Check("O_DIRECT", Level.NOTE, found)
    found = "works" if works else f"does not work in {location}"
    todo = "writes use the page cache and are slower; a local ext4 or xfs file system is faster"
    return _passed("O_DIRECT", works, found, todo)


def _writes_direct(location: Path) -> bool:
    """Write one page with O_DIRECT to a file without a name in the directory; return whether that
    works.

    :raises OSError: no file can be created, for another reason, such as no permission.
    """
    flags = os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC
    try:
        descriptor = os.open(location, flags, 0o600)
    except OSError as error:
        # a file system refuses O_DIRECT with this error
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        # O_DIRECT needs a buffer that is aligned to pages, as an mmap is
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwritev(descriptor, [page], 0)
    # some file systems accept O_DIRECT when a file is opened, and refuse the write
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
