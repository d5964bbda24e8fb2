"""Program that stores blocks until it is killed: prints the number of each acknowledged put.

Arguments: the store's URL, the first number, the bytes of a block, and the blocks of a put.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from persistkv import BlockStore
from tests.storage.blocks.conftest import BlockArray, identity


def keys_of(put: int, count: int) -> list[bytes]:
    """Return the keys of a put."""
    return [f"put {put} block {number}".encode() for number in range(count)]


def blocks_of(put: int, count: int, block_bytes: int) -> list[BlockArray]:
    """Return the blocks of a put."""
    rng = np.random.default_rng(put)
    return list(rng.integers(0, 256, (count, block_bytes), np.uint8))


def main(url: str, first: int, block_bytes: int, count: int) -> None:
    store = BlockStore.open(url, identity(), [block_bytes])
    put = first
    while True:
        stored = store.put(keys_of(put, count), blocks_of(put, count, block_bytes))
        if all(stored):
            os.write(1, f"{put}\n".encode())
        put += 1


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
