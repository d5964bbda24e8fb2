"""Configuration that vLLM passes to a secondary tier, without an engine; for tests and
benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


def offloading_config(chunk_bytes: int, chunk_tokens: int = 16) -> OffloadingConfig:
    """Return vLLM's ``OffloadingConfig`` of one worker and one KV cache group, with one block per
    chunk."""
    from vllm.v1.kv_offload import config as offload

    return offload.OffloadingConfig(
        groups=(
            offload.OffloadingGroupConfig(
                tokens_per_block=chunk_tokens, layer_names=("layer",), group_id=0
            ),
        ),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=True,
        extra_config={},
        engine_id="alone",
        model=offload.OffloadingModelConfig(name="tiny", dtype="bfloat16"),
        cache=offload.OffloadingCacheConfig(
            tokens_per_hash=chunk_tokens, blocks_per_chunk=1
        ),
        parallel=offload.OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
