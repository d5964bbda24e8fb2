"""Product code that one job passes through: number of files, functions, switches between files, and
call depth.

Three trips on an LMDB store, each from its call of the tier to its result: storing one job of 256
blocks (``submit_store`` until the blocks are durable and visible), promoting it (``submit_load``
until the rows are filled), and opening the store that holds it (the tier's constructor). The store
runs in a thread of this process (``host="thread"``), so the code of engine and host is counted
together. A round before the counted one imports modules and fills caches.

Counted are functions of ``persistkv`` and its backends in all threads, including generators and
coroutines:

- files, in the order of the first visit, and distinct functions;
- switches: number of entered functions whose file differs from that of the previous one in the same
  thread;
- frames at the device: the deepest stack of such functions at a call that reads, writes or syncs a
  file or ends an LMDB transaction, from the entry of its thread. Calls through ctypes are not seen.

The figures are counts, not times. They vary by a few with the interleaving of threads.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import CodeType, FrameType
from typing import Any

import numpy as np

from benchmarks.rig import show
from persistkv.base import OffloadKey, ReqContext, make_offload_key
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.persistent import PersistentTier

BLOCKS = 256
BLOCK_BYTES = 64 << 10  # 64 KiB
TARGET_FILES = {"store": 28, "promote": 20, "open": 30}
TARGET_FUNCTIONS = {"store": 150, "promote": 90, "open": 120}
TARGET_FRAMES = 14
# Bounds that a test enforces, so that a longer path is noticed. They are above the targets, which
# are missed.
MOST_FILES = {"store": 56, "promote": 42, "open": 62}
MOST_FUNCTIONS = {"store": 560, "promote": 220, "open": 420}
_TIMEOUT_S = 60.0
_NAP_S = 0.0005  # between polls
_DEVICE_CALLS = {
    *("pread", "preadv", "pwrite", "pwritev", "fdatasync", "fsync"),
    *("Transaction.commit", "Transaction.__exit__", "Environment.sync"),
}


@dataclass
class Trip:
    """Counts of one trip."""

    files: dict[str, int] = field(default_factory=dict)
    """Number of distinct functions in each file, in the order of the first visit."""
    switches: int = 0
    device: dict[str, list[str]] = field(default_factory=dict)
    """For each kind of device call, its deepest stack: ``file:function``, outermost first."""

    @property
    def functions(self) -> int:
        """Number of distinct functions in all files."""
        return sum(self.files.values())

    @property
    def frames(self) -> int:
        """Frames of the deepest stack at a device call; 0 if there was none."""
        return max(map(len, self.device.values()), default=0)


class Recorder:
    """Profiler of the current thread and of all threads that start later.

    :param projects: beginnings of the names of the modules whose functions count.
    """

    def __init__(self, projects: Sequence[str] = ("persistkv",)) -> None:
        self._projects = tuple(projects)
        self._trip: Trip | None = None
        self._functions: set[CodeType] = set()
        self._last_file: dict[int, str] = {}
        # thread whose first call begins the trip; None: the trip has begun
        self._awaited: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Profile the block, then restore the previous profilers."""
        before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])

    @contextmanager
    def trip(self) -> Iterator[Trip]:
        """Record the block as one trip. It begins with the first call in this thread: a thread of
        the host may be in the middle of other work."""
        self._functions.clear()
        self._last_file.clear()
        self._awaited = threading.get_ident()
        trip = self._trip = Trip()
        try:
            yield trip
        finally:
            self._trip = None

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        trip = self._trip
        if trip is None:
            return
        if event == "call":
            file = _file_of(frame, self._projects)
            if file and self._has_begun():
                self._enter(trip, file, frame.f_code)
        elif event == "c_call" and argument.__qualname__ in _DEVICE_CALLS:
            stack = _stack_of(frame, self._projects)
            if len(stack) > len(trip.device.get(argument.__qualname__, ())):
                trip.device[argument.__qualname__] = stack

    def _has_begun(self) -> bool:
        if self._awaited == threading.get_ident():
            self._awaited = None
        return self._awaited is None

    def _enter(self, trip: Trip, file: str, function: CodeType) -> None:
        if function not in self._functions:
            self._functions.add(function)
            trip.files[file] = trip.files.get(file, 0) + 1
        thread = threading.get_ident()
        trip.switches += self._last_file.get(thread, file) != file
        self._last_file[thread] = file


def _file_of(frame: FrameType, projects: tuple[str, ...]) -> str:
    """Return the frame's file, named after its module; empty for other projects' files and for
    generated code."""
    name = str(frame.f_globals.get("__name__", ""))
    path = frame.f_code.co_filename
    if not name.startswith(projects) or path != frame.f_globals.get("__file__"):
        return ""
    package = "/__init__" if os.path.basename(path) == "__init__.py" else ""
    return f"{name.replace('.', '/')}{package}.py"


def _stack_of(frame: FrameType, projects: tuple[str, ...]) -> list[str]:
    stack: list[str] = []
    inner: FrameType | None = frame
    while inner is not None:
        file = _file_of(inner, projects)
        if file:
            stack.append(f"{file}:{inner.f_code.co_name}")
        inner = inner.f_back
    return stack[::-1]


def measure(directory: str) -> dict[str, Trip]:
    """Make the three trips twice, each round on a new store below ``directory``; return the counts
    of the second round.

    :raises RuntimeError: a job failed, a block was not found, or the loaded bytes differ from the
        stored ones.
    """
    recorder = Recorder()
    with recorder.installed():
        for number in range(2):
            trips = _round(
                recorder, f"lmdb://{directory}/store-{number}?capacity=256MiB"
            )
    return trips


def _round(recorder: Recorder, url: str) -> dict[str, Trip]:
    memory = mmap.mmap(-1, 2 * BLOCKS * BLOCK_BYTES)
    rows = np.frombuffer(memory, dtype=np.uint8).reshape(2, BLOCKS * BLOCK_BYTES)
    rows[0] = np.random.default_rng(0).integers(0, 256, rows.shape[1], dtype=np.uint8)
    layout = RowLayout(BLOCK_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),))
    config = OffloadingConfig({"weights": "trips"}, 16, layout, 2 * BLOCKS)
    keys = [make_offload_key(os.urandom(32), 0) for _ in range(BLOCKS)]
    request = ReqContext("request")

    tier = PersistentTier(config, memoryview(memory), url=url, host="thread")
    with recorder.trip() as store:
        _run(
            tier,
            tier.submit_store,
            JobMetadata(1, keys, np.arange(BLOCKS), False, request),
        )
    _check_held(tier, keys, request)
    with recorder.trip() as promote:
        _run(
            tier,
            tier.submit_load,
            JobMetadata(2, keys, np.arange(BLOCKS, 2 * BLOCKS), True, request),
        )
    if not np.array_equal(rows[0], rows[1]):
        raise RuntimeError("the promoted blocks differ from the stored ones")
    tier.shutdown()
    with recorder.trip() as opening:
        tier = PersistentTier(config, memoryview(memory), url=url, host="thread")
    _check_held(tier, keys, request)
    tier.shutdown()
    return {"store": store, "promote": promote, "open": opening}


def _run(
    tier: PersistentTier,
    submit: Callable[[JobMetadata], None],
    job: JobMetadata,
) -> None:
    submit(job)
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        for result in tier.get_finished_jobs():
            if not result.success or result.failed_keys:
                raise RuntimeError(f"job {job.job_id} failed")
            return
        time.sleep(_NAP_S)
    raise RuntimeError(f"job {job.job_id} did not end within {_TIMEOUT_S:g} s")


def _check_held(
    tier: PersistentTier,
    keys: Sequence[OffloadKey],
    request: ReqContext,
) -> None:
    if not all(tier.lookup(key, request) for key in keys):
        raise RuntimeError("a stored block was not found")


def as_json(trips: dict[str, Trip]) -> str:
    """Return counts, routes and stacks of the trips as one JSON object."""
    return json.dumps(
        {
            name: {
                **asdict(trip),
                "functions": trip.functions,
                "frames": trip.frames,
                "num_files": len(trip.files),
            }
            for name, trip in trips.items()
        },
        indent=1,
    )


def _show(trips: dict[str, Trip]) -> None:
    columns = [
        "trip",
        "files",
        "target",
        "functions",
        "target",
        "switches",
        "frames at the device",
        "target",
    ]
    rows = [
        (
            name,
            len(trip.files),
            TARGET_FILES[name],
            trip.functions,
            TARGET_FUNCTIONS[name],
            trip.switches,
            trip.frames,
            TARGET_FRAMES,
        )
        for name, trip in trips.items()
    ]
    show(f"One job of {BLOCKS} blocks", columns, [list(map(str, row)) for row in rows])
    for name, trip in trips.items():
        print(f"\n{name}: functions of each file, in order of the first visit")
        for file, functions in trip.files.items():
            print(f"{functions:5} {file}")
        for call, stack in sorted(trip.device.items(), key=lambda item: -len(item[1])):
            print(f"{name}: {len(stack)} frames at {call}")
        for place in max(trip.device.values(), key=len, default=[]):
            print(f"      {place}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument(
        "--directory", help="directory of the stores; a temporary directory by default"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        trips = measure(directory)
    if arguments.json:
        print(as_json(trips))
    else:
        _show(trips)


if __name__ == "__main__":
    main()
