"""Store clients for benchmarks without an engine: rows in shared memory, and store and load jobs on
them."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import StoreError
from persistkv.memory.pages import use_huge_pages
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import Host, ProcessHost, ThreadHost
from persistkv.storage.host.in_flight import JobOutcome
from persistkv.storage.host.protocol import Hello
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions

_NAP_S = 0.0001
_TIMEOUT_S = 120.0


class Rig:
    """Rows in shared memory, and store clients that use them.

    :param block_bytes: bytes of a row, which is one block; a multiple of 4 KiB.
    :param huge_pages: back the rows with huge pages, as the primary tier does.
    """

    def __init__(
        self,
        num_rows: int,
        block_bytes: int,
        *,
        huge_pages: bool = True,
    ) -> None:
        self.block_bytes = block_bytes
        self._fd = os.memfd_create("persistkv-rig")
        os.ftruncate(self._fd, num_rows * block_bytes)
        self._memory = mmap.mmap(self._fd, num_rows * block_bytes)
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(
            self._memory, dtype=np.uint8
        ).reshape(num_rows, block_bytes)
        self.rows[:] = np.random.default_rng(0).integers(
            0, 256, self.rows.shape, dtype=np.uint8
        )
        if huge_pages:  # as the primary tier does
            use_huge_pages([self._fd], len(self._memory))

    def client(
        self,
        url: str,
        host: str = "process",
        *,
        max_queue_bytes: int = 8 << 30,
        **options: object,
    ) -> StoreClient:
        """Return a store client that is not open yet.

        :param host: where the store runs: ``process`` or ``thread``.
        :param options: fields of ``StoreOptions``.
        """
        hosts: dict[str, Callable[[], Host]] = {
            "process": lambda: ProcessHost((self._fd,), len(self._memory)),
            "thread": lambda: ThreadHost(memoryview(self._memory)),
        }
        layout = RowLayout(self.block_bytes, (GroupLayout(((0, self.block_bytes),)),))
        identity = Identity.of({"benchmark": self.block_bytes}).encode()
        hello = Hello(url, identity, layout, StoreOptions(**options))  # type: ignore[arg-type]
        return StoreClient(hosts[host](), hello, max_queue_bytes=max_queue_bytes)


class Job:
    """Rows of jobs: the first ones of a rig are the source of stores, the others are targets of
    loads.

    Source and targets are used in shuffled order.

    :param count: blocks of a job.
    :param num_bytes: bytes of all blocks of a job.
    :param in_line: jobs that can be loaded at once, each into its own rows.
    """

    def __init__(self, count: int, num_bytes: int, in_line: int = 1) -> None:
        self.num_bytes = num_bytes
        self.rig = Rig((1 + in_line) * count, num_bytes // count)
        order = np.random.default_rng(0).permutation(count)
        self.source = [int(row) for row in order]
        self.targets = [
            [int(row) + count * number for row in order]
            for number in range(1, 1 + in_line)
        ]
        self.target = self.targets[0]

    def buffers(self, rows: list[int]) -> list[memoryview]:
        """Return the memory of the given rows."""
        return [self.rig.rows[row].data for row in rows]

    def store(self, client: StoreClient, job_id: int, keys: list[bytes]) -> float:
        """Store one job; return the seconds until all its blocks are visible, hence durable.

        :raises StoreError: blocks failed, or were not visible within two minutes.
        """
        return self.store_in_line(client, job_id, [keys])

    def store_in_line(
        self,
        client: StoreClient,
        job_id: int,
        jobs: Sequence[list[bytes]],
    ) -> float:
        """Submit several store jobs at once; return the seconds until all their blocks are visible.

        :param job_id: id of the first job; the others count up from it.
        :raises StoreError: blocks failed, or were not visible within two minutes per job.
        """
        begin = time.perf_counter()
        for number, keys in enumerate(jobs, job_id):
            client.submit_store(
                number,
                f"request {number}",
                keys,
                self.source,
                range(len(keys)),
                self.num_bytes,
            )
        waiting = set(range(job_id, job_id + len(jobs)))
        end = begin + len(jobs) * _TIMEOUT_S
        while time.perf_counter() < end:
            for outcome in client.poll():
                self._check(outcome.failed)
                waiting.discard(outcome.job_id)
            if not waiting and all(
                client.contains(key) for keys in jobs for key in keys
            ):
                return time.perf_counter() - begin
            time.sleep(_NAP_S)
        raise StoreError(f"{len(jobs)} jobs were not visible in {end - begin:g} s")

    def load(self, client: StoreClient, job_id: int, keys: list[bytes]) -> float:
        """Load one job; return the seconds until its rows are filled. Then compare the rows and
        clear them.

        :raises StoreError: blocks failed, the job did not end within two minutes, or the loaded
            bytes differ from the stored ones.
        """
        return self.load_in_line(client, job_id, [keys])

    def load_in_line(
        self,
        client: StoreClient,
        job_id: int,
        jobs: Sequence[list[bytes]],
    ) -> float:
        """Submit several load jobs at once; return the seconds until all their rows are filled.
        Otherwise as ``load``.

        :param job_id: id of the first job; the others count up from it.
        """
        begin = time.perf_counter()
        for number, keys in enumerate(jobs):
            client.submit_load(job_id + number, keys, self.targets[number])
        failed = [
            key
            for outcome in finish_all(client, range(job_id, job_id + len(jobs)))
            for key in outcome.failed
        ]
        seconds = time.perf_counter() - begin
        self._check(failed)
        count = len(self.source)
        for first in range(count, count * (1 + len(jobs)), count):
            if not np.array_equal(
                self.rig.rows[first : first + count], self.rig.rows[:count]
            ):
                raise StoreError("what was loaded is not what was stored")
        self.clear()
        return seconds

    def clear(self) -> None:
        """Fill the target rows with zeros."""
        self.rig.rows[len(self.source) :] = 0

    def _check(self, failed: list[bytes]) -> None:
        if failed:
            raise StoreError(f"{len(failed)} blocks failed")


def fresh_keys(count: int) -> list[bytes]:
    """Return new random keys."""
    words = os.urandom(32 * count)
    return [words[start : start + 32] + bytes(4) for start in range(0, len(words), 32)]


def finish(
    client: StoreClient,
    job_id: int,
    timeout_s: float = _TIMEOUT_S,
) -> JobOutcome:
    """Poll, with short sleeps, until the job has ended; return its outcome.

    :raises StoreError: the job did not end within the timeout.
    """
    return finish_all(client, [job_id], timeout_s)[0]


def finish_all(
    client: StoreClient,
    job_ids: Collection[int],
    timeout_s: float = _TIMEOUT_S,
) -> list[JobOutcome]:
    """Poll, with short sleeps, until all jobs have ended; return their outcomes in the order in
    which they ended.

    :raises StoreError: some jobs did not end within the timeout.
    """
    deadline = time.monotonic() + timeout_s
    ended: list[JobOutcome] = []
    while time.monotonic() < deadline:
        ended += [outcome for outcome in client.poll() if outcome.job_id in job_ids]
        if len(ended) == len(job_ids):
            return ended
        time.sleep(_NAP_S)
    raise StoreError(
        f"of jobs {list(job_ids)}, {len(job_ids) - len(ended)} did not end in {timeout_s} s"
    )
