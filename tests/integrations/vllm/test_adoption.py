"""Adoption of another release's chunks through vLLM's tiering manager, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from persistkv.base import OffloadKey, make_offload_key
from tests.integrations.vllm.conftest import tier as tier_entry
from tests.integrations.vllm.offloading import offloading_config
from tests.integrations.vllm.test_manager import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    CHUNKS,
    Engine,
)

pytestmark = pytest.mark.vllm

# keys and values of two bytes
HEADS, SIZE = 2, CHUNK_BYTES // (2 * 2 * 2 * CHUNK_TOKENS)
LENGTH = 6  # chunks of a context


def keys_of(context: int) -> list[OffloadKey]:
    return [
        make_offload_key(bytes([10 * context + index]) * 32, 0)
        for index in range(LENGTH)
    ]


def pages_of(context: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(context)
    numbers = torch.randn(2 * CHUNKS, CHUNK_BYTES // 2, generator=generator).to(
        torch.bfloat16
    )
    return numbers.view(torch.int8)


StartRelease = Callable[..., Engine]


@pytest.fixture
def start(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartRelease]:
    """Return a function that starts a manager and a worker of a release; end them after the
    test."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from persistkv.integrations.vllm import tier
    from tests.integrations.vllm import test_manager

    spec = FullAttentionSpec(
        block_size=CHUNK_TOKENS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=torch.bfloat16,
    )
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    monkeypatch.setattr(tier, "find_kv_cache_config", lambda: caches)
    monkeypatch.setattr(tier, "engine_facts", lambda: {"device": "cpu"})

    def config_with_layout(*arguments: int) -> Any:
        config = offloading_config(*arguments)
        object.__setattr__(config, "kv_cache_layout", "LBHNC")
        return config

    monkeypatch.setattr(test_manager, "offloading_config", config_with_layout)
    running: list[Engine] = []

    def start(release: str, *others: dict[str, Any], **options: Any) -> Engine:
        tiers = [tier_entry(url, **options), *others]
        transfer = SimpleNamespace(
            kv_connector="OffloadingConnector",
            kv_connector_extra_config={"secondary_tiers": tiers},
        )
        cache = SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto")
        engine = SimpleNamespace(
            cache_config=cache,
            model_config=SimpleNamespace(max_model_len=1),
            kv_transfer_config=transfer,
            speculative_config=None,
        )
        monkeypatch.setattr(tier, "find_vllm_config", lambda: engine)
        monkeypatch.setattr(
            tier, "engine_identity", lambda *_, **__: {"engine": {"release": release}}
        )
        running.append(Engine(*tiers))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


def compute_and_store(engine: Engine, context: int) -> None:
    engine.pages[:] = pages_of(context)
    engine.store(keys_of(context))


def can_load(engine: Engine, context: int, timeout_s: float) -> bool:
    """Return whether a context can be loaded within this time and equals the computed pages."""
    deadline = time.monotonic() + timeout_s
    while not engine.load(keys_of(context), CHUNKS):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return bool(
        (engine.pages[CHUNKS : CHUNKS + LENGTH] == pages_of(context)[:LENGTH]).all()
    )


def fill_store(start: StartRelease) -> None:
    older = start("0.31")
    for context in (1, 2, 3):
        compute_and_store(older, context)
    older.close()


def test_manager_newer_release_adopts_chunks_after_comparison(
    start: StartRelease,
) -> None:
    fill_store(start)
    newer = start("0.32")
    assert not can_load(newer, 3, 0)
    for context in (1, 2):
        compute_and_store(newer, context)
    assert can_load(newer, 3, 60)
    newer.close()
    assert can_load(start("0.32"), 3, 10)


def test_manager_newer_release_with_other_tier_type_adopts_nothing(
    start: StartRelease,
) -> None:
    """A tier of another type may supply chunks of any release."""
    fill_store(start)
    newer = start("0.32", {"type": "example"})
    for context in (1, 2):
        compute_and_store(newer, context)
    assert not can_load(newer, 3, 3)


def test_manager_adopt_never_misses_chunks_of_older_release(
    start: StartRelease,
) -> None:
    fill_store(start)
    newer = start("0.32", adopt="never")
    for context in (1, 2):
        compute_and_store(newer, context)
    assert not can_load(newer, 3, 3)
