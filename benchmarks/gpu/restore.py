"""Restores of contexts from LMDB to the device, compared with the throughput of the disk and of the
link.

The tiers are those of an engine: lookup, promotion from disk into rows of the primary tier, load
onto the device, with blocks of 2 MiB (16 tokens of a Llama with 8 billion parameters). In
alternation with each restore, the same number of other bytes is read from the same disk by plain
calls past the page cache, and copied to the device from pinned memory. The ratio is the throughput
of the restore to that of the slower of the two. Each byte is read from the disk only once. The
bytes of each restored context are compared with the stored ones.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.results import Results, parse
from benchmarks.gpu.rig import PinnedCopies
from benchmarks.store_rig import fresh_keys
from persistkv.base import OffloadKey
from persistkv.errors import ConfigurationError
from persistkv.integrations.transformers.kv_cache import KVGroupGeometry, PagedKVCache
from persistkv.integrations.transformers.tiers import Tiers
from persistkv.memory.pages import huge_memory

TARGET = 0.85

_BLOCK_TOKENS = 16
_CALL_BYTES = 4 << 20  # 4 MiB
_READERS = 4  # threads: enough calls in flight for a virtual disk
_TIMEOUT_S = 120.0


class Restored(NamedTuple):
    """Times of one restore."""

    promotion_s: float
    """Seconds of the lookup and of reads from disk."""
    load_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole restore."""
        return self.promotion_s + self.load_s


class Restorer:
    """Tiers and device pages of an engine without a model. Call ``close`` after use."""

    def __init__(
        self,
        device: torch.device,
        url: str,
        max_blocks: int,
        smoke: bool,
    ) -> None:
        layers, heads = (2, 2) if smoke else (32, 8)
        geometry = KVGroupGeometry(
            tuple(range(layers)), heads, 128, None, torch.bfloat16, device
        )
        self.cache = PagedKVCache((geometry,), max_blocks, _BLOCK_TOKENS)
        self.block_bytes = self.cache.block_bytes
        rows = max_blocks + 64
        self._tiers = Tiers(
            self.cache,
            {"benchmark": "restore", "block": self.block_bytes},
            (url,),
            cpu_bytes=rows * self.block_bytes,
            lookup_deadline_s=_TIMEOUT_S,
        )
        self._pages = self.cache.groups[0].pages.view(torch.int8).view(max_blocks, -1)

    def store(self, number: int, keys: Sequence[OffloadKey]) -> None:
        """Store a context of random bytes, and drop it from everywhere except the disk.

        :raises RuntimeError: it did not become durable.
        """
        self._fill(number, len(keys))
        req_id, scheduler = f"store {number}", self._tiers.scheduler
        num_tokens = len(keys) * _BLOCK_TOKENS
        scheduler.on_new_request(req_id)
        scheduler.update_keys(req_id, 0, keys, num_tokens)
        scheduler.update_computed_tokens(req_id, num_tokens, [list(range(len(keys)))])
        self._tiers.begin(req_id, lambda: None, len(keys))
        self._tiers.end(req_id)
        deadline = time.monotonic() + _TIMEOUT_S
        (tier,) = self._tiers.persistent
        drained = self._tiers.drain(deadline)
        if not drained or not tier.wait_persisted(req_id, _TIMEOUT_S):
            raise RuntimeError(f"{len(keys)} blocks did not become durable")
        self._tiers.step()
        scheduler.manager.reset_cache(weights_changed=False)
        self._pages.zero_()

    def restore(self, number: int, keys: Sequence[OffloadKey]) -> Restored:
        """Load a stored context.

        :raises RuntimeError: it is incomplete, or its bytes differ from the stored ones.
        """
        req_id, scheduler = f"restore {number}", self._tiers.scheduler
        num_tokens = len(keys) * _BLOCK_TOKENS
        begin = time.perf_counter()
        scheduler.on_new_request(req_id, store=False)
        scheduler.update_keys(req_id, 0, keys, num_tokens + 1)
        self._tiers.begin(req_id, lambda: None, len(keys))
        matched = self._tiers.match(req_id, 0)
        promoted = time.perf_counter()
        loaded = self._tiers.load(req_id, [list(range(len(keys)))], matched)
        end = time.perf_counter()
        num_promoted = scheduler.num_promoted_tokens(req_id)
        self._tiers.end(req_id)
        self._tiers.step()
        scheduler.manager.reset_cache(weights_changed=False)
        if (
            not loaded.success
            or loaded.num_tokens != num_tokens
            or num_promoted != num_tokens
        ):
            raise RuntimeError(f"restored {loaded} of {num_tokens} tokens")
        restored = self._pages[: len(keys)].clone()
        self._fill(number, len(keys))
        if not torch.equal(restored, self._pages[: len(keys)]):
            raise RuntimeError("the restored bytes are not those that were stored")
        return Restored(promoted - begin, end - promoted)

    def close(self) -> None:
        """Close the tiers."""
        self._tiers.close()

    def _fill(self, number: int, count: int) -> None:
        generator = torch.Generator(self._pages.device).manual_seed(number)
        self._pages[:count].random_(-128, 128, generator=generator)


class RawFile:
    """A file that is read past the page cache, every byte once.

    :raises OSError: the file system does not support O_DIRECT.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._offset = 0
        buffer = huge_memory(_CALL_BYTES)
        buffer[:] = os.urandom(_CALL_BYTES)
        for offset in range(0, num_bytes, _CALL_BYTES):
            os.pwrite(self._fd, buffer, offset)
        os.fsync(self._fd)
        self._buffers = [huge_memory(_CALL_BYTES) for _ in range(_READERS)]
        self._pool = ThreadPoolExecutor(_READERS)

    def read(self, num_bytes: int) -> float:
        """Read the next bytes with a few threads; return the seconds."""
        offsets = range(self._offset, self._offset + num_bytes, _CALL_BYTES)
        self._offset = offsets.stop

        def read_share(reader: int, buffer: mmap.mmap) -> int:
            return sum(
                os.preadv(self._fd, [buffer], offset)
                for offset in offsets[reader::_READERS]
            )

        begin = time.perf_counter()
        done = sum(self._pool.map(read_share, range(_READERS), self._buffers))
        seconds = time.perf_counter() - begin
        if done < num_bytes:
            raise OSError(f"{done} of {num_bytes} bytes")
        return seconds

    def close(self) -> None:
        """Close the file."""
        self._pool.shutdown()
        os.close(self._fd)


def main(argv: Sequence[str] | None = None) -> None:
    sizes = [32, 128, 512, 1024, 4096]
    arguments = parse(
        __doc__.splitlines()[0],
        argv,
        lambda parser: parser.add_argument(
            "--mib", type=int, nargs="+", default=sizes, help="sizes of contexts"
        ),
    )
    results = Results("restore", arguments)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for mib in [4] if arguments.smoke else arguments.mib:
            try:
                measure(
                    Path(directory),
                    mib << 20,
                    arguments.device,
                    arguments.smoke,
                    results,
                )
            except ConfigurationError as error:  # too little shared memory for the rows
                results.add(f"{mib} MiB", skipped=str(error))


def measure(
    directory: Path,
    size: int,
    device: torch.device,
    smoke: bool,
    results: Results,
) -> None:
    """Measure contexts of one size, each stored once and restored once."""
    rounds = 1 if smoke else 3 if size <= 512 << 20 else 2
    tiers = Restorer(
        device,
        f"lmdb://{directory}/store?capacity=40GiB",
        _num_blocks(size, smoke),
        smoke,
    )
    try:
        count = size // tiers.block_bytes
        contexts = [
            [OffloadKey(key) for key in fresh_keys(count)] for _ in range(rounds)
        ]
        for number, keys in enumerate(contexts):
            tiers.store(number, keys)
        raw = RawFile(directory / "raw", rounds * size)
        link_bytes = min(size, 1 << 30)
        link = PinnedCopies(device, link_bytes)
        link.load()
        disk_s, link_s, restored = [], [], []
        try:
            for number, keys in enumerate(contexts):
                disk_s.append(raw.read(size))
                begin = time.perf_counter()
                link.load()
                link_s.append((time.perf_counter() - begin) * size / link_bytes)
                restored.append(tiers.restore(number, keys))
        finally:
            raw.close()
            (directory / "raw").unlink()
    finally:
        tiers.close()
    seconds = statistics.median(part.seconds for part in restored)
    slower = max(statistics.median(disk_s), statistics.median(link_s))
    results.add(
        f"{size >> 20} MiB",
        slower / seconds,
        at_least=TARGET,
        gb_s=size / seconds / 1e9,
        disk_gb_s=size / statistics.median(disk_s) / 1e9,
        link_gb_s=size / statistics.median(link_s) / 1e9,
        promotion_ms=statistics.median(part.promotion_s for part in restored) * 1e3,
        load_ms=statistics.median(part.load_s for part in restored) * 1e3,
        rounds=rounds,
    )


def _num_blocks(size: int, smoke: bool) -> int:
    block = _BLOCK_TOKENS * (2 * 2 * 2 if smoke else 2 * 32 * 8) * 128 * 2
    return size // block


if __name__ == "__main__":
    main()
