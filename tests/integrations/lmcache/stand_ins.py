"""Stand-ins for LMCache 0.5.6, built from its public signatures, for environments without it.

`make test-lmcache` runs the same tests with LMCache itself.
"""

from __future__ import annotations

import threading
from abc import ABC
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from tests.integrations.stand_ins import install_package

RELEASE = "0.5.6"


@dataclass(frozen=True)
class EncodedObjectKey:
    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    def to_encoded_object_key(self) -> EncodedObjectKey:
        return EncodedObjectKey(
            self.chunk_hash.hex(),
            self.model_name,
            self.kv_rank,
            self.object_group_id,
            self.cache_salt,
        )


class KeyListener(Protocol):
    """What adapters call."""

    def on_l2_keys_stored(
        self,
        keys: Sequence[ObjectKey],
        sizes: Sequence[int],
    ) -> None: ...

    def on_l2_keys_accessed(self, keys: Sequence[ObjectKey]) -> None: ...

    def on_l2_keys_deleted(self, keys: Sequence[ObjectKey]) -> None: ...


@dataclass(frozen=True)
class KeyEntry:
    key: EncodedObjectKey
    size_bytes: int


@dataclass(frozen=True)
class KeyListPage:
    entries: tuple[KeyEntry, ...]
    next_page_token: str | None


@dataclass(frozen=True)
class MemoryLayoutDesc:
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]


@dataclass(frozen=True)
class L1MemoryDesc:
    ptr: int
    size: int
    align_bytes: int


class Bitmap:
    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, index: int) -> None:
        self._bits[index] = True

    def test(self, index: int) -> bool:
        return self._bits[index]

    def size(self) -> int:
        return len(self._bits)


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        return int(self) >= 0

    def bytes_transferred(self) -> int:
        return max(0, int(self))


@dataclass(frozen=True)
class AdapterUsage:
    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: Mapping[str, int] = field(default_factory=dict)


class L2AdapterInterface(ABC):  # noqa: B024
    """Calls its listeners, and counts bytes, as LMCache's class does."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._listeners: list[KeyListener] = []
        self._max_capacity_bytes = max_capacity_bytes
        self._usage_lock = threading.Lock()
        self._bytes_by_salt: Counter[str] = Counter()

    def register_listener(self, listener: KeyListener) -> None:
        self._listeners.append(listener)

    @property
    def supports_global_eviction(self) -> bool:
        return self._max_capacity_bytes > 0

    def get_usage(self) -> AdapterUsage:
        return AdapterUsage(
            self._bytes_by_salt.total(),
            self._max_capacity_bytes,
            dict(self._bytes_by_salt),
        )

    def _notify_keys_stored(
        self, keys: Sequence[ObjectKey], sizes: Sequence[int]
    ) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self._bytes_by_salt[key.cache_salt] += size
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys: Sequence[ObjectKey]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)

    def _notify_keys_deleted(
        self, keys: Sequence[ObjectKey], sizes: Sequence[int]
    ) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self._bytes_by_salt[key.cache_salt] -= size
        for listener in self._listeners:
            listener.on_l2_keys_deleted(keys)


_MODULES: dict[str, tuple[type, ...]] = {
    "lmcache": (),
    "lmcache.lmcache_native": (Bitmap,),
    "lmcache.v1": (),
    "lmcache.v1.distributed": (),
    "lmcache.v1.distributed.api": (ObjectKey, KeyEntry, KeyListPage, MemoryLayoutDesc),
    "lmcache.v1.distributed.internal_api": (L1MemoryDesc, L2StoreResult),
    "lmcache.v1.distributed.l2_adapters": (),
    "lmcache.v1.distributed.l2_adapters.base": (AdapterUsage, L2AdapterInterface),
}


def install(directory: Path) -> None:
    """Make the stand-ins importable, with the metadata of a release in ``directory``."""
    install_package("lmcache", RELEASE, _MODULES, directory)
