"""The commands work on the stores of ``BlockStore``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from persistkv import BlockStore
from tests.storage.blocks.conftest import (
    BLOCK_BYTES,
    identity,
    new_keys,
    random_blocks,
)
from tests.tools.conftest import Run, run  # noqa: F401


def test_ls_stat_verify_and_copy_of_a_block_store(run: Run, tmp_path: Path) -> None:  # noqa: F811
    url = f"lmdb://{tmp_path}/store?capacity=64MiB"
    keys, blocks = new_keys(40), random_blocks(40)
    with BlockStore.open(url, identity(), [BLOCK_BYTES], tokens_per_block=16) as store:
        labels = {"engine": "test"}
        assert all(store.put(keys[:30], list(blocks[:30]), labels=labels))
        assert all(store.put(keys[30:], list(blocks[30:]), timeout_s=60))

    listed = json.loads(run("ls", f"{tmp_path}/store", "--json").stdout)
    tokens = sorted(request["tokens"] for request in listed["requests"])
    assert tokens == [10 * 16, 30 * 16]
    assert {"engine": "test"} in [request["labels"] for request in listed["requests"]]

    totals = json.loads(run("stat", f"{tmp_path}/store", "--json").stdout)
    assert totals["blocks"] == 40

    verified = run("verify", f"{tmp_path}/store", "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["stored_bytes"] == 40 * BLOCK_BYTES

    copied = run("copy", f"{tmp_path}/store", f"lmdb://{tmp_path}/copy?capacity=64MiB")
    assert copied.returncode == 0, copied.stderr
    copy = f"lmdb://{tmp_path}/copy"
    with BlockStore.open(copy, identity(), [BLOCK_BYTES]) as store:
        into = np.zeros_like(blocks)
        assert all(store.get(keys, list(into)))
        assert np.array_equal(into, blocks)
