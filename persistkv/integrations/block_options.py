"""Options that the adapters of engines with memory of their own have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from persistkv.storage.blocks import BlockIdentity, BlockStore


class BlockStoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the block stores that an adapter opens: one for each kind of block."""

    url: str
    """The store, e.g. ``lmdb:///var/cache/kv?capacity=100GiB``."""
    codec: str = "raw"
    """Codec of new packs."""
    io_threads: int | None = None
    """Threads of each open block store that read and decode; a remote store has always 8. None: 4
    on a machine with 8 cores or more, otherwise 2."""
    staging_bytes: int | str = "256MiB"
    """Bound on the memory of each open block store beyond its index."""
    max_queue_bytes: int | str = "1GiB"
    """Bound on the bytes that wait to be stored in each open block store; further ones are not
    stored."""
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    """Tokens per second that the engine computes: blocks are hits only if loading them is expected
    to be faster. Neither LMCache nor SGLang reports the speed. None: all held blocks are hits."""

    def open(
        self,
        identity: BlockIdentity,
        block_bytes: int,
        tenant_of: Callable[[bytes], str],
        *,
        tokens_per_block: int = 1,
        events: bool = False,
    ) -> BlockStore:
        """Open a block store of one KV cache group.

        :param block_bytes: bytes of one block.
        :param tenant_of: returns the tenant of a key.
        :param tokens_per_block: tokens of one block, for the lists of stored contexts.
        :param events: whether ``BlockStore.take_events`` reports keys.
        :raises ConfigurationError: the URL or an option is invalid, or the size does not fit the
            identity.
        :raises StoreError: the store cannot be opened.
        """
        return BlockStore.open(
            self.url,
            identity,
            [block_bytes],
            codec=self.codec,
            io_threads=self.io_threads,
            staging_bytes=self.staging_bytes,
            max_queue_bytes=self.max_queue_bytes,
            tokens_per_block=tokens_per_block,
            events=events,
            tenant_of=tenant_of,
        )
