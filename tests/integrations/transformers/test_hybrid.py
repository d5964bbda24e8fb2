"""The engine with models that have sliding-window layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Unpack

import pytest
import torch
from transformers import PreTrainedModel

from persistkv import Engine
from persistkv.errors import ConfigurationError
from tests.integrations.transformers.conftest import EngineOptions, OpenEngine

WINDOW = 32
BLOCK = 4


@pytest.fixture
def open_engine(gemma: PreTrainedModel) -> Iterator[OpenEngine]:
    opened = []

    def open_one(
        chosen: PreTrainedModel | None = None,
        url: str | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        defaults: EngineOptions = {
            "block_size": BLOCK,
            "device_blocks": 64,
            "cpu_bytes": "2MiB",
            "host": "thread",
        }
        opened.append(Engine.open(chosen or gemma, url, **(defaults | options)))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?capacity=256MiB"


@pytest.fixture
def long_prompt() -> list[int]:
    return [(5 * index * index + 11 * index) % 256 for index in range(170)]


def plain_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after the last token, from one forward pass over all tokens without a
    cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=torch.tensor([list(tokens)]), use_cache=False
        ).logits[0, -1]
    return logits


def assert_greedy(
    model: PreTrainedModel,
    prompt: list[int],
    tokens: Sequence[int],
) -> None:
    """Check that one forward pass over all tokens, without a cache, predicts each of ``tokens``."""
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False
        ).logits[0]
    assert list(tokens) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def pages_of(
    engine: Engine,
    block_hashes: Collection[bytes],
) -> dict[tuple[int, bytes], torch.Tensor]:
    """Copy the resident pages of these hashes, by group and hash."""
    return {
        (group, block_hash): page.clone()
        for group in range(len(engine.geometry))
        for block_hash, page in engine.resident_pages(group).items()
        if block_hash in block_hashes
    }


class TestGenerate:
    def test_cold_resident_or_restored_prefix_matches_plain_forward_pass(
        self,
        open_engine: OpenEngine,
        windowed: PreTrainedModel,
        long_prompt: list[int],
    ) -> None:
        engine = open_engine(windowed)
        expected = plain_logits(windowed, long_prompt)
        cold = engine.generate(long_prompt, 4)
        resident = engine.generate(long_prompt, 4)
        engine.forget_device()
        restored = engine.generate(long_prompt, 4)
        assert (resident.stats.device_tokens, restored.stats.cpu_tokens) == (168, 168)
        for result in (cold, resident, restored):
            assert_close(result.logits, expected)
        assert torch.equal(resident.logits, restored.logits)
        assert cold.tokens == resident.tokens == restored.tokens
        assert_greedy(windowed, long_prompt, cold.tokens)

    @pytest.mark.parametrize("length", [1, 5, 28, 31, 32, 33, 36, 63, 64, 65, 100])
    def test_any_restored_length_matches_plain_forward_pass(
        self,
        open_engine: OpenEngine,
        gemma: PreTrainedModel,
        long_prompt: list[int],
        length: int,
    ) -> None:
        """The restored prefix covers all, part or none of the window of the first computed
        token."""
        engine = open_engine()
        engine.generate(long_prompt[:length], 1)
        engine.forget_device()
        result = engine.generate(long_prompt, 1)
        assert result.stats.cpu_tokens == length - length % BLOCK
        assert_close(result.logits, plain_logits(gemma, long_prompt))

    @pytest.mark.parametrize("length", [20, 30, 31, 32, 33])
    def test_decoding_past_window_end_matches_plain_forward_pass(
        self,
        open_engine: OpenEngine,
        windowed: PreTrainedModel,
        long_prompt: list[int],
        length: int,
    ) -> None:
        engine = open_engine(windowed)
        prompt = long_prompt[:length]
        assert_greedy(windowed, prompt, engine.generate(prompt, 40).tokens)
        engine.forget_device()
        assert_greedy(windowed, prompt, engine.generate(prompt, 40).tokens)

    def test_prompt_with_restored_generated_tokens_matches_forward_pass(
        self,
        open_engine: OpenEngine,
        windowed: PreTrainedModel,
        long_prompt: list[int],
    ) -> None:
        engine = open_engine(windowed)
        begun = engine.generate(long_prompt, 41)
        longer = [*long_prompt, *begun.tokens, 7, 8, 9]
        engine.forget_device()
        result = engine.generate(longer, 1)
        assert result.stats.cpu_tokens == 208
        assert_close(result.logits, plain_logits(windowed, longer))


class TestLoadedBlocks:
    def test_sliding_window_group_loads_only_blocks_inside_window(
        self,
        open_engine: OpenEngine,
        gemma: PreTrainedModel,
        long_prompt: list[int],
    ) -> None:
        engine = open_engine()
        engine.generate(long_prompt, 1)
        engine.forget_device()
        result = engine.generate(long_prompt, 1)
        sliding, full = (group.token_bytes for group in engine.geometry)
        assert result.stats.bytes_loaded == 168 * full + WINDOW * sliding
        resident = [len(engine.resident_pages(group)) for group in range(2)]
        assert resident == [WINDOW // BLOCK, 42]

    def test_shorter_prompt_loads_window_before_its_own_end(
        self,
        open_engine: OpenEngine,
        gemma: PreTrainedModel,
        long_prompt: list[int],
    ) -> None:
        engine = open_engine()
        engine.generate(long_prompt, 1)
        engine.forget_device()
        engine.generate(long_prompt, 1)
        shorter = engine.generate(long_prompt[:101], 1)
        assert shorter.stats.device_tokens == 0
        assert shorter.stats.cpu_tokens == 100
        assert_close(shorter.logits, plain_logits(gemma, long_prompt[:101]))

    def test_prefix_partly_on_device_loads_rest_from_cpu_tier(
        self,
        open_engine: OpenEngine,
        gemma: PreTrainedModel,
        long_prompt: list[int],
    ) -> None:
        engine = open_engine()
        engine.generate(long_prompt, 1)
        engine.forget_device()
        engine.generate(long_prompt[:101], 1)
        result = engine.generate(long_prompt, 1)
        assert (result.stats.device_tokens, result.stats.cpu_tokens) == (100, 68)
        assert_close(result.logits, plain_logits(gemma, long_prompt))


class TestRestart:
    @pytest.mark.parametrize("codec", ["raw", "zstd:3"])
    def test_new_engine_restores_identical_pages_and_answer(
        self,
        open_engine: OpenEngine,
        windowed: PreTrainedModel,
        url: str,
        long_prompt: list[int],
        codec: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        first = open_engine(windowed, url, codec=codec)
        cold = first.generate(long_prompt, 8)
        resident = first.generate(long_prompt, 8, store=False)
        assert first.wait_persisted(cold)
        pages = pages_of(first, cold.block_hashes[:42])
        first.close()
        second = open_engine(windowed, url)
        warm = second.generate(long_prompt, 8)
        assert (warm.stats.persistent_tokens, warm.stats.computed_tokens) == (168, 2)
        assert torch.equal(warm.logits, resident.logits)
        assert warm.tokens == resident.tokens == cold.tokens
        restored = pages_of(second, warm.block_hashes[:42])
        assert {group for group, _ in restored} == set(range(len(second.geometry)))
        assert all(torch.equal(page, pages[key]) for key, page in restored.items())
        assert second.wait_persisted(warm)

    def test_cpu_tier_smaller_than_context_restores_leading_blocks(
        self,
        open_engine: OpenEngine,
        gemma: PreTrainedModel,
        url: str,
        long_prompt: list[int],
    ) -> None:
        first = open_engine(url=url)
        assert first.wait_persisted(first.generate(long_prompt, 4))
        row_bytes = first.stats().block_bytes
        first.close()
        second = open_engine(url=url, cpu_bytes=30 * row_bytes)
        result = second.generate(long_prompt, 4)
        assert result.stats.persistent_tokens == (30 - WINDOW // BLOCK) * BLOCK
        assert_close(result.logits, plain_logits(gemma, long_prompt))

    def test_changed_sliding_window_misses_and_adds_notice(
        self,
        open_engine: OpenEngine,
        gemma: PreTrainedModel,
        url: str,
        long_prompt: list[int],
    ) -> None:
        first = open_engine(url=url)
        assert first.wait_persisted(first.generate(long_prompt, 1))
        first.close()
        gemma.config.sliding_window = 24
        try:
            second = open_engine(url=url)
            assert second.generate(long_prompt, 1).stats.restored_tokens == 0
            assert "sliding_window" in second.notices[0]
        finally:
            gemma.config.sliding_window = WINDOW


class TestDeviceLimit:
    def test_generate_small_device_pool_matches_plain_forward_pass(
        self,
        open_engine: OpenEngine,
        gemma: PreTrainedModel,
    ) -> None:
        engine = open_engine(device_blocks=14, cpu_bytes="96KiB")
        for number in range(20):
            prompt = [(number % 3 * 50 + index * 5) % 256 for index in range(48)]
            assert_greedy(gemma, prompt, engine.generate(prompt, 6).tokens)
        assert engine.flush()
        last = engine.generate(range(200, 252), 5)
        assert len(last.block_hashes) == 14, (
            "all device blocks of both groups are available"
        )

    def test_generate_context_larger_than_device_raises(
        self,
        open_engine: OpenEngine,
        long_prompt: list[int],
    ) -> None:
        with pytest.raises(ConfigurationError, match="device_blocks=44"):
            open_engine(device_blocks=43).generate(long_prompt, 8)
