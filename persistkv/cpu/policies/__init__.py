"""Eviction policies of the primary tier: one interface, LRU and ARC, and a registry for others."""

from __future__ import annotations

from persistkv.config import Registry
from persistkv.cpu.policies.arc import ARCCachePolicy
from persistkv.cpu.policies.base import CachePolicy
from persistkv.cpu.policies.lru import LRUCachePolicy

CACHE_POLICIES = Registry[CachePolicy](
    "persistkv.cache_policies", "eviction_policy", CachePolicy, {"lru": LRUCachePolicy, "arc": ARCCachePolicy}
)
