"""Tools for testing drivers and tiers, without torch.

Conformance suites, sample packs, a backend and a medium in memory, and wrappers that inject faults
into any backend or medium.

``BackendConformance`` and ``BlobsConformance`` need pytest, and are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persistkv.testing.blobs import FaultyBlobs, MemoryBlobs
from persistkv.testing.faulty import FaultyBackend
from persistkv.testing.memory import MemoryBackend

if TYPE_CHECKING:
    from persistkv.testing.conformance import BackendConformance
    from persistkv.testing.conformance.blobs import BlobsConformance

__all__ = [
    "BackendConformance",
    "BlobsConformance",
    "FaultyBackend",
    "FaultyBlobs",
    "MemoryBackend",
    "MemoryBlobs",
]


def __getattr__(name: str) -> object:
    """Import a suite at its first use: without pytest, the other names can still be used."""
    if name == "BackendConformance":
        from persistkv.testing.conformance import BackendConformance

        return BackendConformance
    if name == "BlobsConformance":
        from persistkv.testing.conformance.blobs import BlobsConformance

        return BlobsConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
