"""Blocks of head-sharded caches are shared by engines with different numbers of tensor-parallel
workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel_engine import ParallelEngine, block_keys, check_sharing


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_head_sharded_blocks_in_lmdb_are_shared_by_1_2_and_1_workers(
    tmp_path: Path,
    factor: int,
    tokens_first: bool,
) -> None:
    check_sharing(f"lmdb://{tmp_path}/store", factor=factor, tokens_first=tokens_first)


def test_head_sharded_engine_loads_blocks_of_engine_with_one_worker_and_direct_rows(
    tmp_path: Path,
) -> None:
    """With one GPU block per row, both layouts have the same bytes."""
    url, keys = f"lmdb://{tmp_path}/store", block_keys(2)
    first = ParallelEngine(url, 1, head_sharded=False)
    first.store(keys, "store")
    first.close()
    second = ParallelEngine(url, 2)
    assert second.load(keys, "load")
    second.close()


@pytest.mark.parametrize(("stored", "loaded"), [(1, 2), (2, 1)])
def test_blocks_that_are_not_head_sharded_miss_with_other_number_of_workers(
    tmp_path: Path,
    stored: int,
    loaded: int,
) -> None:
    url, keys = f"lmdb://{tmp_path}/store", block_keys(2)
    first = ParallelEngine(url, stored, head_sharded=False)
    first.store(keys, "store")
    first.close()
    second = ParallelEngine(url, loaded, head_sharded=False)
    assert not second.load(keys, "load")
    second.close()
