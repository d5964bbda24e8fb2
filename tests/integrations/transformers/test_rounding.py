"""In bf16, a warm answer may differ from a cold one, because its prompt is computed in two parts,
with other rounding.

Plain transformers shows the same difference between the same two splits; restored KV adds none.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from persistkv import Engine
from persistkv.integrations.transformers.interface import ModelForward
from tests.integrations.transformers.conftest import (
    EngineOptions,
    tiny_cohere2,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_mistral,
)

PREFIX = 48
NEW_TOKENS = 12
PROMPTS = torch.randint(
    0, 256, (2, 170), generator=torch.Generator().manual_seed(1)
).tolist()


def answer(model: PreTrainedModel, *parts: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Return the logits after a prompt that plain transformers computes in parts, and the most
    likely tokens."""
    argument = ModelForward(model).cache_argument
    cache, tokens, first = DynamicCache(config=model.config), list[int](), None
    with torch.no_grad():
        while len(tokens) < NEW_TOKENS:
            for part in parts:
                logits = model(
                    input_ids=torch.tensor([part]), **{argument: cache}
                ).logits[0, -1]
            first = logits if first is None else first
            tokens.append(int(logits.argmax()))
            parts = (tokens[-1:],)
    assert first is not None
    return first, tokens


def test_engine_bfloat16_answers_equal_plain_transformers_at_same_split(
    tmp_path: Path,
) -> None:
    differing_logits = 0
    for make in (tiny_cohere2, tiny_gemma3, tiny_gpt_oss, tiny_mistral):
        model, url = make().to(torch.bfloat16), f"lmdb://{tmp_path}/{make.__name__}"
        options: EngineOptions = {
            "device_blocks": 64,
            "cpu_bytes": "16MiB",
            "host": "thread",
        }
        with Engine.open(model, url, **options) as engine:
            for prompt in PROMPTS:
                engine.generate(prompt[:PREFIX], 1)
        with Engine.open(model, url, **options) as engine:
            for prompt in PROMPTS:
                warm = engine.generate(prompt, NEW_TOKENS, store=False)
                cold = engine.generate(prompt, NEW_TOKENS, store=False, load=False)
                assert (warm.stats.persistent_tokens, cold.stats.restored_tokens) == (
                    PREFIX,
                    0,
                )
                split_logits, split_tokens = answer(
                    model, prompt[:PREFIX], prompt[PREFIX:]
                )
                whole_logits, whole_tokens = answer(model, prompt)
                assert torch.equal(warm.logits, split_logits)
                assert torch.equal(cold.logits, whole_logits)
                assert (warm.tokens, cold.tokens) == (split_tokens, whole_tokens)
                differing_logits += not torch.equal(split_logits, whole_logits)
    assert differing_logits, (
        "the split shows in no logits: the comparison proves nothing"
    )
