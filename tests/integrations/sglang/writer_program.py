"""Program that stores pages until it is killed: prints the number of each acknowledged batch.

Arguments: the store's URL and the number of the first batch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tests.integrations.sglang.conftest import fill, make_pool, page_keys
from tests.integrations.sglang.host_pools import (
    create_storage,
    page_indices,
    storage_config,
)
from tests.integrations.sglang.stand_ins import HostPool

if TYPE_CHECKING:
    from persistkv.integrations.sglang.backend import PersistKVStorage

BATCH = 8  # pages


def batch_keys(batch: int) -> list[str]:
    """Return the page hashes of a batch."""
    return page_keys(range(batch * BATCH, (batch + 1) * BATCH))


def open_storage(url: str, pool: HostPool) -> PersistKVStorage:
    """Return a backend with the main pool registered."""
    options = {
        "url": url,
        "weights": "w",
        "attention_backend": "torch_native",
        "timeout_s": 120,
    }
    return create_storage(storage_config(options), pool)


def main(url: str, batch: int) -> None:
    pool = make_pool()
    backend = open_storage(url, pool)
    while True:
        fill(pool, batch)
        stored = backend.batch_set_v1(batch_keys(batch), page_indices(0, BATCH))
        if all(stored):
            os.write(1, f"{batch}\n".encode())
        batch += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
