"""Blocks of bytes for engines with memory of their own: ``BlockStore``."""

from persistkv.storage.blocks.completions import Completion, CompletionQueue
from persistkv.storage.blocks.identity import BlockIdentity
from persistkv.storage.blocks.service import StoreEvents
from persistkv.storage.blocks.store import BlockCounters, BlockStore
from persistkv.storage.blocks.usage import StoredBlock, Usage

__all__ = [
    "BlockCounters",
    "BlockIdentity",
    "BlockStore",
    "Completion",
    "CompletionQueue",
    "StoreEvents",
    "StoredBlock",
    "Usage",
]
