"""Tools for testing drivers and tiers, without torch.

Conformance suites, sample packs, a backend in memory, and a wrapper that injects faults into any backend.

``BackendConformance`` needs pytest, and is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persistkv.testing.faulty import FaultyBackend
from persistkv.testing.memory import MemoryBackend

if TYPE_CHECKING:
    from persistkv.testing.conformance import BackendConformance

__all__ = ["BackendConformance", "FaultyBackend", "MemoryBackend"]


def __getattr__(name: str) -> object:
    if name == "BackendConformance":
        from persistkv.testing.conformance import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
