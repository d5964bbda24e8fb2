from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from persistkv.base import (
    GPULoadStoreSpec,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from persistkv.cpu.manager import CPULoadStoreSpec


@pytest.mark.parametrize("block_ids", [[3, 1, 2], (), range(2), np.array([7, 5])])
def test_load_store_spec_any_sequence_becomes_int64_array(
    block_ids: Sequence[int],
) -> None:
    for spec in (
        CPULoadStoreSpec(block_ids),
        GPULoadStoreSpec(block_ids, [len(block_ids)], [0]),
    ):
        assert isinstance(spec.block_ids, np.ndarray)
        assert (spec.block_ids.dtype, spec.block_ids.shape) == (
            np.dtype(np.int64),
            (len(block_ids),),
        )
        assert spec.block_ids.tolist() == list(block_ids)
        assert repr(spec.block_ids.tolist()) in repr(spec)


def test_load_store_spec_copies_block_ids() -> None:
    rows = np.array([1, 2])
    spec = CPULoadStoreSpec(rows)
    rows[0] = 9
    assert spec.block_ids.tolist() == [1, 2]


@pytest.mark.parametrize("block_hash", [b"", b"\0\0\0\0", bytes(range(32))])
def test_offload_key_parts_are_block_hash_and_group(block_hash: bytes) -> None:
    key = make_offload_key(block_hash, 7)
    assert (get_offload_block_hash(key), get_offload_group_idx(key)) == (block_hash, 7)


def test_base_import_does_not_import_torch() -> None:
    program = "import sys, persistkv.base; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], timeout=60, check=False
        ).returncode
        == 0
    )
