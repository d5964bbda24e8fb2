"""Speed and size of a full store over time: fill it, then replace its content again and again.

Packs have 64 KiB to 32 MiB, with sizes drawn uniformly on a logarithmic scale, so that freed space
rarely fits the next pack exactly. Each commit holds one pack, is synced, and evicts the oldest
content.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time

import numpy as np

from benchmarks.rig import show
from persistkv.config import parse_size
from persistkv.memory.rows import StagedBlocks
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.identity import Identity

TARGET = 0.8
BLOCK_BYTES = 64 << 10  # 64 KiB
MAX_BLOCKS = 512  # 32 MiB


class Churn:
    """Writer of packs of random sizes to a store."""

    def __init__(self, backend: Backend, seed: int) -> None:
        self._backend = backend
        self._draw = random.Random(seed)
        self._namespace = backend.open_namespace(Identity.of({"benchmark": "churn"})).id
        blocks = np.random.default_rng(seed).integers(
            0, 256, (MAX_BLOCKS, BLOCK_BYTES), dtype=np.uint8
        )
        self._source = StagedBlocks([blocks])
        self.evicted = 0
        self.most_bytes = 0

    def write(self, num_bytes: int) -> float:
        """Write packs of at least ``num_bytes`` in total; return the seconds of the commits."""
        written, seconds = 0, 0.0
        while written < num_bytes:
            count = round(math.exp(self._draw.uniform(0.0, math.log(MAX_BLOCKS))))
            keys = [self._draw.randbytes(32) + bytes(4) for _ in range(count)]
            pack = PackWriter(
                self._namespace,
                RawCodec(),
                [Section(0, BLOCK_BYTES, keys, self._source, 0)],
            )
            begin = time.perf_counter()
            result = self._backend.commit(self._namespace, CommitBatch([pack]))
            seconds += time.perf_counter() - begin
            written += pack.raw_length
            self.evicted += len(result.evicted)
            self.most_bytes = max(self.most_bytes, self._backend.stats().disk_bytes)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", default="1GiB")
    parser.add_argument(
        "--rounds", type=int, default=10, help="how often the whole content is replaced"
    )
    parser.add_argument(
        "--directory", help="where the store is made; a temporary directory by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--placement",
        choices=["inline", "extents"],
        action="append",
        help="both by default",
    )
    arguments = parser.parse_args()
    for placement in arguments.placement or ["extents", "inline"]:
        run(placement, arguments)


def run(placement: str, arguments: argparse.Namespace) -> None:
    """Fill a store and replace its content; print the table and the verdict."""
    capacity = parse_size(arguments.capacity, name="--capacity")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        backend = open_backend(
            f"lmdb://{directory}/store?capacity={capacity}&placement={placement}"
        )
        churn = Churn(backend, arguments.seed)
        speeds, rows = [], []
        for number in range(arguments.rounds + 1):
            speeds.append(capacity / churn.write(capacity) / 1e9)
            stats = backend.stats()
            rows.append(
                [
                    "fill" if number == 0 else str(number),
                    f"{speeds[-1]:.2f}",
                    f"{speeds[-1] / speeds[min(number, 1)]:.2f}",
                    f"{stats.stored_bytes / capacity:.3f}",
                    f"{churn.most_bytes / capacity:.4f}",
                    f"{churn.evicted:,}",
                ]
            )
            print(*rows[-1], flush=True)
        backend.close()
    columns = [
        "round",
        "GB/s",
        "÷ round 1",
        "payload ÷ capacity",
        "most on disk ÷ capacity",
        "packs evicted",
    ]
    show(
        f"Replacing the content of a full store of {arguments.capacity}, placement {placement}",
        columns,
        rows,
    )
    verdict = speeds[-1] / speeds[1] >= TARGET and churn.most_bytes <= capacity
    print(
        f"last round ÷ first ≥ {TARGET} and never over capacity: {'yes' if verdict else 'NO'}"
    )


if __name__ == "__main__":
    main()
