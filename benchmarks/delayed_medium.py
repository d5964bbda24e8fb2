"""A shared directory whose packs are read late and slowly: ``delayed:///path``.

The file ``<path>.delay`` has the seconds before the first byte, and the bytes per second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from persistkv.config import StoreUrl
from persistkv.storage.blobs import Blobs
from persistkv_dir import DirBackend
from persistkv_dir.blobs import DirBlobs


def delay_of(store: Path) -> tuple[float, float]:
    """Return the seconds before the first byte, and the bytes per second."""
    latency_s, bandwidth = store.with_suffix(".delay").read_text().split()
    return float(latency_s), float(bandwidth)


def set_delay(store: Path, latency_s: float, bandwidth: float) -> None:
    """Set both for all later reads, of all processes."""
    new = store.with_suffix(".new")
    new.write_text(f"{latency_s} {bandwidth}")
    new.rename(store.with_suffix(".delay"))


def install(site: Path) -> None:
    """Make the driver known to the processes that have ``site`` in ``PYTHONPATH``."""
    folder = site / "delayed_medium-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: delayed_medium\nVersion: 1\n"
    )
    (folder / "entry_points.txt").write_text(
        "[persistkv.backends]\ndelayed = benchmarks.delayed_medium:DelayedBackend\n"
    )


class DelayedBlobs(DirBlobs):
    """The blobs of such a directory."""

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        if "/packs/" not in name:
            return super().read(name, offset, length, buffers)
        latency_s, bandwidth = delay_of(self.root)
        time.sleep(latency_s)
        return super().read(name, offset, length, _paced(buffers, bandwidth))


def _paced(buffers: Iterable[memoryview], bandwidth: float) -> Iterator[memoryview]:
    due = time.monotonic()
    for buffer in buffers:
        due += len(buffer) / bandwidth
        yield buffer
        time.sleep(max(0.0, due - time.monotonic()))


class DelayedBackend(DirBackend):
    """The driver of ``delayed://`` URLs."""

    @classmethod
    def open_blobs(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
        *,
        read_only: bool,
    ) -> Blobs:
        cls.check_options(url, options)
        return DelayedBlobs(Path(url.location), read_only=read_only)
