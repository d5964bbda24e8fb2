"""Stop a writer (SIGSTOP) before each of its calls to the disk, and use the store meanwhile:
``python -m tests.crash.stops --stop-s 60``.

A stopped process keeps its locks, its reservation and its snapshots. Meanwhile another engine reads
and commits, and a tool opens the store.

Invariants:

1. Reads and tools do not wait. A commit waits for the writer lock at most 10 s, later ones at most
   0.2 s.
2. The files never exceed the capacity.
3. After SIGCONT the writer completes its commits, and those of both processes are there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from persistkv.config import StoreUrl
from persistkv.errors import StoreBusyError
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv_lmdb import LmdbBackend
from tests.crash.loop import (
    CAPACITY,
    NUMBERS_A_ROUND,
    PLACEMENTS,
    Expected,
    Writer,
    check,
    payload,
)
from tests.crash.recorder import build_recorder
from tests.crash.writer import IDENTITY, make_pack

COMMITS = 2  # the second one writes into extents that the first one has reserved
PATIENCE_S = 120.0
FIRST_WAIT_S, LATER_WAIT_S = 13.0, 3.0  # of a commit; 10 and 0.2 s on an idle machine
# of a read, or of a tool that opens the store; milliseconds on an idle machine
CALL_S = 5.0
_NAP_S = 0.01
_FILLING = 40
_T = TypeVar("_T")


class Neighbour:
    """An engine that uses the store beside the stopped writer."""

    def __init__(self, url: str, expected: Expected) -> None:
        self.url = url
        self.backend = LmdbBackend.open(StoreUrl.parse(url))
        self.namespace = self.backend.open_namespace(IDENTITY).id
        self.commits = self.refused = 0
        self.evicted: set[bytes] = set()
        """Packs that its commits have evicted, also packs of the stopped writer whose output is
        read later."""
        self._expected = expected
        self._number = 0

    def commit(self) -> bool:
        """Commit one pack; return whether the store was not busy."""
        self._number += 1
        pack = make_pack(self.namespace, self._number)
        try:
            result = self.backend.commit(self.namespace, CommitBatch([pack]))
        except StoreBusyError:
            self.refused += 1
            return False
        self.commits += 1
        self._expected.packs[pack.pack_id] = self._number
        self.evicted.update(table.pack_id for table in result.evicted)
        self._expected.forget(self.evicted & self._expected.packs.keys())
        return True

    def use(self, seconds: float) -> None:
        """Use the store for a time, and check that nothing takes long."""
        end = time.monotonic() + seconds
        patience_s = FIRST_WAIT_S
        while True:
            within(CALL_S, self._read)
            within(CALL_S, self._look)
            if not within(patience_s, self.commit):
                patience_s = LATER_WAIT_S
            assert self.backend.stats().disk_bytes <= CAPACITY, (
                "the files exceed the capacity"
            )
            if time.monotonic() > end:
                return

    def _read(self) -> None:
        pack_id, table = next(iter(tables(self.backend, self.namespace).items()))
        # otherwise the stopped writer has committed it
        if pack_id in self._expected.packs:
            stored = read_pack(self.backend, self.namespace, table)
            assert stored == payload(self.namespace, self._expected.packs[pack_id]), (
                "wrong bytes"
            )

    def _look(self) -> None:
        with closing(
            LmdbBackend.open(StoreUrl.parse(self.url), read_only=True)
        ) as tool:
            assert tool.stats().packs > 0


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return the result of a call that must not take longer."""
    begin = time.monotonic()
    result = call()
    took = time.monotonic() - begin
    assert took <= seconds, f"{call} took {took:.1f} s instead of {seconds:.1f} s"
    return result


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Wait until a process is stopped or has ended; return whether it is stopped."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        with open(f"/proc/{process.pid}/stat", "rb") as status:
            if status.read().rpartition(b")")[2].split()[0] == b"T":
                return True
        time.sleep(_NAP_S)
    raise AssertionError(
        f"the writer neither stopped nor ended within {PATIENCE_S:.0f} s"
    )


def stop_once(
    directory: Path,
    neighbour: Neighbour,
    expected: Expected,
    call: int,
    stop_s: float,
) -> bool:
    """Run a writer that is stopped before its ``call``-th call to the disk. Return False if it
    makes fewer calls."""
    log = directory / "log"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(directory / "record.so"),
        "PERSISTKV_RECORD_ROOT": str(directory / "root"),
        "PERSISTKV_RECORD_LOG": str(log),
        "PERSISTKV_RECORD_STOP_AT": str(call),
    }
    first = NUMBERS_A_ROUND * call
    command = [
        sys.executable,
        "-m",
        "tests.crash.writer",
        neighbour.url,
        *map(str, (first, call, COMMITS)),
    ]
    expected.writers = [Writer()]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            stopped = is_stopped(process)
            if stopped:
                neighbour.use(stop_s)
        finally:
            process.send_signal(signal.SIGCONT)
            output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors.decode()
    evicted: set[bytes] = set()
    for line in output.splitlines():
        evicted |= expected.apply(json.loads(line), expected.writers[0])
    expected.forget((evicted | neighbour.evicted) & expected.packs.keys())
    check(neighbour.backend, expected)
    log.unlink()
    return stopped


def run(
    directory: Path,
    stop_s: float,
    placement: str,
    step: int = 1,
) -> tuple[int, Neighbour]:
    """Stop writers before every ``step``-th of their calls; return the number of stops, and the
    neighbour."""
    build_recorder(directory)
    (directory / "root").mkdir()
    url = f"lmdb://{directory}/root/store?capacity={CAPACITY}&placement={placement}"
    expected = Expected(IDENTITY.digest)
    neighbour = Neighbour(url, expected)
    with closing(neighbour.backend):
        for _ in range(_FILLING):
            neighbour.commit()
        call = 1
        while stop_once(directory, neighbour, expected, call, stop_s):
            call += step
    return (call - 1) // step, neighbour


def main() -> None:
    """Run for both placements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stop-s",
        type=float,
        default=60.0,
        help="seconds for which a writer is stopped",
    )
    arguments = parser.parse_args()
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as directory:
            stops, neighbour = run(Path(directory), arguments.stop_s, placement)
            counts = (
                f"{neighbour.commits} commits beside them, {neighbour.refused} refused"
            )
            print(
                f"{placement}: {stops} stops of {arguments.stop_s:g} s, {counts}; nothing "
                f"lost, no call took long"
            )


if __name__ == "__main__":
    main()
