"""What authors of drivers and tiers test with: conformance suites, sample packs, a store in memory. Needs no torch.

``BackendConformance`` needs pytest, and is imported where it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persistkv.testing.memory import MemoryBackend

if TYPE_CHECKING:
    from persistkv.testing.conformance import BackendConformance

__all__ = ["BackendConformance", "MemoryBackend"]


def __getattr__(name: str) -> object:
    if name == "BackendConformance":
        from persistkv.testing.conformance import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
