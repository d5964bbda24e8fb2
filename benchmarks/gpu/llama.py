"""Model of the GPU benchmarks: a Llama with 8 billion random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from persistkv.integrations.transformers import engine as engine_module
from persistkv.integrations.transformers.model import model_identity

VOCABULARY = 128_256
# keys and values, layers, KV heads, head size, bf16
KV_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def make_llama(device: torch.device, smoke: bool) -> Any:
    """Return a model with the shape of Llama 3 8B in bf16, created on the device; a tiny one for
    smoke tests."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    if smoke:
        shape |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    config = LlamaConfig(
        **shape,
        max_position_embeddings=1 << 17,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.device(device),
    ):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@contextmanager
def weights_hashed_once() -> Iterator[None]:
    """Share the identity of a model among all engines on it: hashing 16 GB of weights takes many
    seconds."""
    known: dict[int, Mapping[str, Any]] = {}

    def identity(model: Any, *rest: Any) -> Mapping[str, Any]:
        if id(model) not in known:
            known[id(model)] = model_identity(model, *rest)
        return known[id(model)]

    with mock.patch.object(engine_module, "model_identity", identity):
        yield
