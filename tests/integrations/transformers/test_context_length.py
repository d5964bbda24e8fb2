"""Prompts and answers beyond the model's context length are refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from persistkv import Engine, PromptTooLongError
from tests.integrations.transformers.conftest import tiny_llama

LENGTH = 64


def tiny_gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def limited_llama(
    rope_parameters: Mapping[str, object] | None = None,
) -> PreTrainedModel:
    return tiny_llama(max_position_embeddings=LENGTH, rope_parameters=rope_parameters)


@pytest.mark.parametrize("make", [tiny_gpt2, limited_llama])
def test_generate_up_to_context_length_answers_and_beyond_raises(
    make: Callable[[], PreTrainedModel],
) -> None:
    engine = Engine.open(make(), cpu_bytes="8MiB")
    assert len(engine.generate(range(LENGTH - 8), 8).tokens) == 8
    for prompt_tokens, new_tokens in (
        (LENGTH - 8, 9),
        (LENGTH + 1, 1),
        (3 * LENGTH, 8),
    ):
        with pytest.raises(PromptTooLongError, match="context length") as error:
            engine.generate(range(prompt_tokens), new_tokens)
        assert (error.value.tokens, error.value.limit) == (
            prompt_tokens + new_tokens,
            LENGTH,
        )
        assert error.value.option is None
    assert engine.stats().requests == 1, "refused requests have run nothing"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": LENGTH,
        },
    ],
)
def test_generate_scaled_rotary_embedding_allows_factor(
    rope: dict[str, object],
) -> None:
    engine = Engine.open(
        limited_llama(rope_parameters={"rope_theta": 10_000.0, **rope}),
        cpu_bytes="8MiB",
    )
    assert len(engine.generate(range(2 * LENGTH), 8).tokens) == 8
    with pytest.raises(PromptTooLongError, match=f"at most {4 * LENGTH} tokens"):
        engine.generate([1] * 4 * LENGTH, 8)


def test_generate_model_without_limit_answers() -> None:
    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=256,
        hidden_size=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    engine = Engine.open(BloomForCausalLM(config).eval(), cpu_bytes="8MiB")
    assert len(engine.generate([5] * 300, 4).tokens) == 4
