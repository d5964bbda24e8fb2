from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from persistkv.base import (
    GPULoadStoreSpec,
    RequestDescription,
    check_labels,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from persistkv.cpu.manager import CPULoadStoreSpec
from persistkv.errors import ConfigurationError


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


def test_labels_of_most_characters_are_accepted_and_longer_ones_raise() -> None:
    check_labels({"note": "x" * 4092})
    too_long = {"note": "x" * 100_000}
    for check in (check_labels, lambda labels: RequestDescription(1, labels)):
        with pytest.raises(ConfigurationError, match="labels: 'note…'") as caught:
            check(too_long)
        assert str(caught.value).endswith(
            "4,096 characters for name and value, not 100,004"
        )
        assert len(str(caught.value)) < 200
