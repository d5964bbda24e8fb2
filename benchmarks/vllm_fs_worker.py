"""Driver of vLLM's own ``fs`` tier through vLLM's public interface of secondary tiers; part of
``vllm_fs``.

Runs from the repository's root in a virtual environment with vLLM, and needs nothing else. Reads
one JSON command per line, ``{"store": true, "busy": false}``, and answers with one JSON line. A
load reads the blocks of the latest store.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.scheduler_loop import Scheduler
from tests.integrations.vllm.offloading import offloading_config


class FsTier:
    """The ``fs`` tier, with rows for one job to store from and one to load to.

    :param threads: number of its I/O threads; half of them prefer loads, the others stores, and all
        of them do both.
    """

    def __init__(self, root: str, count: int, block_bytes: int, threads: int) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        fd = os.memfd_create("benchmark")
        os.ftruncate(fd, 2 * count * block_bytes)
        self._rows = np.frombuffer(mmap.mmap(fd, 0), dtype=np.int8).reshape(
            2 * count, block_bytes
        )
        self._rows[:count] = np.random.default_rng(0).integers(
            -128, 128, (count, block_bytes), dtype=np.int8
        )
        order = np.random.default_rng(0).permutation(count)
        self._source, self._target = order, order + count
        spec = SimpleNamespace(
            config=offloading_config(block_bytes), blocks_per_chunk=1
        )
        config = {
            "type": "fs",
            "root_dir": root,
            "n_read_threads": threads // 2,
            "n_write_threads": -(-threads // 2),
        }
        self._tier = SecondaryTierFactory.create_secondary_tier(
            config, self._rows.data, spec
        )
        self._root = os.open(root, os.O_RDONLY)
        self._request = ReqContext("benchmark")
        self._tier.on_new_request(self._request)
        self._keys: list[bytes] = []
        self._job = 0

    def store(self, busy: bool) -> dict[str, Any]:
        """Store new blocks.

        :returns: seconds until the tier reports the job as done (``seconds``) and until its files
            are also synced (``synced``), and CPU seconds of the tier's threads (``cpu``).
        """
        words = os.urandom(32 * len(self._source))
        self._keys = [
            words[start : start + 32] + bytes(4) for start in range(0, len(words), 32)
        ]
        begin = time.perf_counter()
        seconds, cpu = self._run(busy, is_promotion=False)
        ctypes.CDLL(None).syncfs(self._root)
        return {
            "seconds": seconds,
            "cpu": cpu,
            "synced": time.perf_counter() - begin,
            "right": True,
        }

    def load(self, busy: bool) -> dict[str, Any]:
        """Load the blocks of the latest store, and compare them."""
        half = len(self._source)
        self._rows[half:] = 0
        seconds, cpu = self._run(busy, is_promotion=True)
        right = bool(np.array_equal(self._rows[half:], self._rows[:half]))
        return {"seconds": seconds, "cpu": cpu, "right": right}

    def _run(self, busy: bool, *, is_promotion: bool) -> tuple[float, float]:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._job += 1
        rows = self._target if is_promotion else self._source
        job = TransferJob(self._job, self._keys, rows, is_promotion, self._request)
        begin, cpu = time.perf_counter(), _cpu_of_others()
        (self._tier.submit_load if is_promotion else self._tier.submit_store)(job)
        Scheduler(busy).run(self._ended)
        return time.perf_counter() - begin, _cpu_of_others() - cpu

    def _ended(self) -> bool:
        results = list(self._tier.get_finished_jobs())
        if any(not result.success for result in results):
            raise RuntimeError(f"the tier failed: {results}")
        return bool(results)

    def close(self) -> None:
        """Shut the tier down, which ends its threads."""
        self._tier.shutdown()


def _cpu_of_others() -> float:
    """Return the CPU seconds of all threads except this one, which submits and polls."""
    return time.process_time() - time.thread_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root")
    parser.add_argument("count", type=int)
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("threads", type=int)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout
    tier = FsTier(
        arguments.root, arguments.count, arguments.block_bytes, arguments.threads
    )
    print(json.dumps({"version": _version()}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        print(
            json.dumps(
                (tier.store if command["store"] else tier.load)(command["busy"])
            ),
            file=answers,
        )
    tier.close()


def _version() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    main()
