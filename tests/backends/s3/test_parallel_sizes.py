"""Blocks of head-sharded caches are shared by engines with different numbers of tensor-parallel
workers."""

from __future__ import annotations

import pytest

from tests.parallel_engine import check_sharing


@pytest.mark.parametrize("factor", [1, 2])
def test_head_sharded_blocks_in_s3_are_shared_by_1_2_and_1_workers(
    endpoint: str,
    bucket: str,
    factor: int,
) -> None:
    check_sharing(
        f"s3://{bucket}/store?endpoint_url={endpoint}",
        factor=factor,
        tokens_first=False,
    )
