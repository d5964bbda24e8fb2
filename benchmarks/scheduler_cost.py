"""Cost of the tiers for the scheduler: lookups, and stores with eviction and a cascade, as the
primary tier grows.

The secondary tier accepts every block and keeps none, so that the figures are the manager's own.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Iterable

import numpy as np

from benchmarks.rig import show
from persistkv.base import (
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    make_offload_key,
)
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.cpu.manager import CPUPrimaryTierOffloadingManager
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.spec import TieringOffloadingOptions

ROW_BYTES = 4 << 10  # 4 KiB, the smallest
MAX_LOOKUP_US = 1.0
MAX_STORE_US = 8.0


class NullTier(SecondaryTierManager):
    """Tier that accepts every block and keeps none."""

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview) -> None:
        super().__init__(config, primary_kv_view)
        self._finished: list[JobResult] = []

    @staticmethod
    def get_tier_type() -> str:
        return "null"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return False

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._finished.append(JobResult(job_metadata.job_id, True))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._finished.append(JobResult(job_metadata.job_id, False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    def drain_jobs(self, timeout_s: float) -> bool:
        return True


def keys_from(start: int, count: int) -> list[OffloadKey]:
    """Return keys of the length of vLLM's, distributed like hashes."""
    words = np.random.default_rng(start).bytes(32 * count)
    return [
        make_offload_key(words[32 * number : 32 * number + 32], 0)
        for number in range(count)
    ]


def measure(
    resident: int,
    per_call: int,
    policy: str,
    runs: int,
) -> tuple[float, float]:
    """Return the median microseconds per lookup and per stored block, with a full primary tier."""
    region = SharedOffloadRegion(uuid.uuid4().hex, resident, 0, 1, ROW_BYTES)
    primary = CPUPrimaryTierOffloadingManager(region, policy)
    layout = RowLayout(ROW_BYTES, (GroupLayout(((0, ROW_BYTES),)),))
    tier = NullTier(
        OffloadingConfig({}, 16, layout, resident), primary.get_kv_memoryview()
    )
    options = TieringOffloadingOptions(cpu_bytes_to_use=resident * ROW_BYTES)
    manager = TieringOffloadingManager(primary, [tier], options)
    req = ReqContext("r")
    manager.on_new_request(req)
    held: list[OffloadKey] = []
    for start in range(0, resident, per_call):
        held = store(manager, keys_from(start, min(per_call, resident - start)), req)
    lookups, stores = [], []
    for run in range(runs):
        keys = keys_from(resident + run * per_call, per_call)
        begin = time.perf_counter()
        held = store(manager, keys, req)
        stores.append((time.perf_counter() - begin) / per_call * 1e6)
        begin = time.perf_counter()
        for key in held:
            manager.lookup(key, req)
        lookups.append((time.perf_counter() - begin) / len(held) * 1e6)
    manager.shutdown()
    return statistics.median(lookups), statistics.median(stores)


def store(
    manager: TieringOffloadingManager,
    keys: list[OffloadKey],
    req: ReqContext,
) -> list[OffloadKey]:
    """Run one store job from plan to end of step, without the copy."""
    output = manager.prepare_store(keys, req)
    if output is None:
        raise RuntimeError("the primary tier is full of protected blocks")
    manager.complete_store(output.keys_to_store, req)
    manager.take_events()
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--resident", type=int, nargs="+", default=[10_000, 100_000, 1_000_000]
    )
    parser.add_argument("--per-call", type=int, default=1000)
    parser.add_argument("--policy", nargs="+", default=["lru", "arc"])
    parser.add_argument("--runs", type=int, default=101)
    arguments = parser.parse_args()
    rows = []
    for policy in arguments.policy:
        for resident in arguments.resident:
            lookup, stored = measure(
                resident, arguments.per_call, policy, arguments.runs
            )
            good = lookup <= MAX_LOOKUP_US and stored <= MAX_STORE_US
            rows.append(
                [
                    f"{policy}, {resident:,} resident",
                    f"{lookup:.2f} µs",
                    f"{stored:.2f} µs",
                    "yes" if good else "NO",
                ]
            )
    columns = [
        "primary tier",
        "lookup, resident",
        f"store with eviction and cascade, of {arguments.per_call}",
    ]
    target = f"<= {MAX_LOOKUP_US:.0f} and {MAX_STORE_US:.0f} µs"
    show("Cost on the scheduler's thread, per block", [*columns, target], rows)


if __name__ == "__main__":
    main()
