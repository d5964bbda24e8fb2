"""Block hashes: a chain, so that a block's hash identifies all tokens up to its end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from persistkv.base import OffloadKey, make_offload_key

HASH_NAME = "sha256 over parent and tokens as little-endian u32, salt at the root"
_ROOT = b"persistkv block chain 1\n"


class BlockHashChain:
    """The hashes of one context's full blocks; it grows with the context.

    :param salt: separates contexts that must not share blocks, such as those of two tenants; None and "" differ.
    """

    def __init__(self, block_size: int, salt: str | None = None) -> None:
        self.hashes: list[bytes] = []
        self._block_bytes = 4 * block_size
        self._tail = b""
        salted = b"" if salt is None else b"salt " + salt.encode()
        self._parent = hashlib.sha256(_ROOT + salted).digest()

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Append tokens; return the hashes of the blocks that they made full."""
        data = self._tail + np.asarray(token_ids, dtype="<u4").tobytes()
        full = len(data) - len(data) % self._block_bytes
        new = []
        for start in range(0, full, self._block_bytes):
            self._parent = hashlib.sha256(self._parent + data[start : start + self._block_bytes]).digest()
            new.append(self._parent)
        self._tail = data[full:]
        self.hashes += new
        return new


def offload_keys(hashes: Sequence[bytes], group_idx: int = 0) -> list[OffloadKey]:
    """Return the offload keys of one group's blocks."""
    return [make_offload_key(block_hash, group_idx) for block_hash in hashes]
