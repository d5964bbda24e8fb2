"""Program that stores pages until it is killed: prints the number of each acknowledged batch.

Arguments: the store's URL and the number of the first batch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.integrations.sglang.conftest import fill, indices, make_pool, page_keys

BATCH = 8  # pages


def batch_keys(batch: int) -> list[str]:
    """Return the page hashes of a batch."""
    return page_keys(range(batch * BATCH, (batch + 1) * BATCH))


def open_storage(url: str, pool: Any) -> Any:
    """Return a backend with the main pool registered."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from persistkv.integrations.sglang.backend import PersistKVStorage

    options = {"url": url, "weights": "w", "attention_backend": "torch_native"}
    options["timeout_s"] = "120"
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="org/model",
        extra_config={"interface_v1": 1, "persistkv": options},
    )
    backend = PersistKVStorage(config)
    backend.register_mem_pool_host(pool)
    return backend


def main(url: str, batch: int) -> None:
    pool = make_pool()
    backend = open_storage(url, pool)
    while True:
        fill(pool, batch)
        if all(backend.batch_set_v1(batch_keys(batch), indices(0, BATCH))):
            os.write(1, f"{batch}\n".encode())
        batch += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
