"""A driver with none of the optional protocols that commands use."""

from __future__ import annotations

from persistkv.config import StoreUrl
from persistkv.testing import MemoryBackend


class PlainBackend(MemoryBackend):
    """An empty store in memory, which can be opened for reading, too."""

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> PlainBackend:
        return cls()
