"""Steady load of small jobs on a store in a host process, with a check of every loaded byte and a
ticker."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.store_rig import Rig, fresh_keys
from persistkv.storage.host.client import StoreClient

BLOCK = 64 << 10
JOB_BLOCKS = 8
SLOTS = 32  # maximum jobs in flight, for stores and loads each
ROWS = 2 * SLOTS * JOB_BLOCKS
PATIENCE_S = 90.0

_TICK_S = 0.001
_JOB_TICKS = 20  # between two jobs
_CONTENTS = 251
_NEWS_S = 3.0  # longer than two refreshes of the index


class Contents:
    """Bytes of a block, derived from its key."""

    def __init__(self) -> None:
        self._blocks = np.random.default_rng(1).integers(
            0, 256, (_CONTENTS, BLOCK), dtype=np.uint8
        )

    def of(self, key: bytes) -> npt.NDArray[np.uint8]:
        """Return the bytes of one block."""
        number = int.from_bytes(key[:8], "little") % _CONTENTS
        block: npt.NDArray[np.uint8] = self._blocks[number]
        return block


class Load:
    """Client that submits stores and loads at a steady rate and checks the loaded blocks."""

    def __init__(self, client: StoreClient, rig: Rig) -> None:
        self.client = client
        self.rig = rig
        self.contents = Contents()
        self.durable: set[bytes] = set()
        self.offered: list[list[bytes]] = []
        self.planned: deque[list[bytes]] = deque()
        """Keys of the next jobs; if empty, jobs have fresh keys."""
        self.wrong = self.missed = self.loaded = 0
        self.waits: list[float] = []
        """Seconds from the submission of each load to its outcome, since this list was cleared."""
        self._numbers = itertools.count()
        self._in_flight: dict[int, tuple[int, list[bytes], bool]] = {}
        self._began: dict[int, float] = {}
        self._free = {True: list(range(SLOTS)), False: list(range(SLOTS, 2 * SLOTS))}
        self._draw = random.Random(1)

    def run(
        self,
        seconds: float,
        *,
        until: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """Tick for a number of seconds. Return the duration of the client's calls in each tick, in
        seconds, without the time in which the thread waited for a processor: other programs cause
        that.
        """
        durations: list[float] = []
        end = time.perf_counter() + seconds
        for number in itertools.count():
            time.sleep(_TICK_S)
            is_job = number % _JOB_TICKS == 0
            begin = time.perf_counter()
            waited = _waited_for_processor()
            self.poll()
            if is_job:
                self._store_next()
                self.load()
            now = time.perf_counter()
            durations.append(max(0.0, now - begin - (_waited_for_processor() - waited)))
            if now >= end or (is_job and until()):
                return durations
        raise AssertionError("a count has no end")

    def _store_next(self) -> None:
        keys = self.planned[0] if self.planned else fresh_keys(JOB_BLOCKS)
        if self.store(keys) and self.planned:
            self.planned.popleft()

    def poll(self) -> None:
        """Process finished jobs and check the loaded blocks."""
        for outcome in self.client.poll():
            slot, keys, is_store = self._in_flight.pop(outcome.job_id)
            self._free[is_store].append(slot)
            if not is_store:
                self.waits.append(time.perf_counter() - self._began.pop(outcome.job_id))
                self._check_rows(
                    slot,
                    keys,
                    set(outcome.failed) if not outcome.refused else set(keys),
                )
        events = self.client.take_events()
        # a key that was removed and then stored is in both; one that was stored and then removed,
        # only among the removed
        self.durable.difference_update(events.removed)
        self.durable.update(events.stored)
        # some may have become durable, too: a commit whose reply was lost
        if events.lost:
            offered = [key for keys in self.offered for key in keys]
            self.durable = set(filter(self.client.contains, offered))
        self.client.take_persisted()

    def _check_rows(self, slot: int, keys: list[bytes], failed: set[bytes]) -> None:
        for row, key in enumerate(keys, start=slot * JOB_BLOCKS):
            if key in failed:
                self.missed += 1
            else:
                self.loaded += 1
                self.wrong += not np.array_equal(
                    self.rig.rows[row], self.contents.of(key)
                )

    def store(self, keys: list[bytes], *, again: bool = False) -> bool:
        """Submit a store job, if a slot is free. Return whether it was submitted."""
        if not self._free[True]:
            return False
        slot, number = self._free[True].pop(), next(self._numbers)
        rows = range(slot * JOB_BLOCKS, (slot + 1) * JOB_BLOCKS)
        for row, key in zip(rows, keys, strict=True):
            self.rig.rows[row] = self.contents.of(key)
        if not again:
            self.offered.append(keys)
        self._in_flight[number] = (slot, keys, True)
        self.client.submit_store(
            number, f"r{number}", keys, rows, range(JOB_BLOCKS), JOB_BLOCKS * BLOCK
        )
        return True

    def load(self) -> None:
        """Submit a load of one earlier job, if all of its blocks are durable."""
        if not self._free[False] or not self.offered:
            return
        keys = self.offered[self._draw.randrange(len(self.offered))]
        if self.durable.issuperset(keys):
            slot, number = self._free[False].pop(), next(self._numbers)
            self._in_flight[number] = (slot, keys, False)
            self._began[number] = time.perf_counter()
            self.client.submit_load(
                number, keys, range(slot * JOB_BLOCKS, (slot + 1) * JOB_BLOCKS)
            )

    def idle(self, seconds: float) -> None:
        """Process finished jobs and events for a number of seconds, and submit nothing."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()
            time.sleep(_TICK_S)

    def recover(self) -> None:
        """Continue the load until a new block is durable. Then submit lost jobs again, until every
        block is durable."""
        before = set(self.durable)
        self.run(PATIENCE_S, until=lambda: not self.durable <= before)
        self.settle(lambda: False)
        until = time.monotonic() + PATIENCE_S
        while (lacking := self.not_durable()) and time.monotonic() < until:
            for keys in lacking:
                while not self.store(keys, again=True):
                    self.poll()
                    time.sleep(_TICK_S)
            self.settle(lambda: not self.not_durable())

    def not_durable(self) -> list[list[bytes]]:
        """Return the keys of the jobs with blocks that are not durable."""
        return [keys for keys in self.offered if not self.durable.issuperset(keys)]

    def settle(self, done: Callable[[], bool]) -> None:
        """Wait for the jobs in flight, and then for events until ``done`` returns True or
        ``_NEWS_S`` has passed.

        :raises TimeoutError: a job does not end.
        """
        self.client.flush(PATIENCE_S)
        begin = time.monotonic()
        while self._in_flight or (time.monotonic() < begin + _NEWS_S and not done()):
            if time.monotonic() > begin + PATIENCE_S:
                raise TimeoutError(f"{len(self._in_flight)} jobs do not end")
            self.poll()
            time.sleep(_TICK_S)


def _waited_for_processor() -> float:
    """Return the seconds that this thread could have run and did not; 0 if the kernel does not
    tell."""
    try:
        text = Path("/proc/thread-self/schedstat").read_text()
    except OSError:
        return 0.0
    return int(text.split()[1]) / 1e9
