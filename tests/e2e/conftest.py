from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.backends.s3.conftest import bucket, credentials, endpoint, raw_client  # noqa: F401


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with one token per byte."""
    directory = tmp_path_factory.mktemp("model") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def hybrid_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with five sliding-window layers of 64 tokens, and one full-attention layer."""
    directory = tmp_path_factory.mktemp("model") / "gemma3"
    torch.manual_seed(0)
    layer_types = ["sliding_attention"] * 6
    layer_types[3] = "full_attention"
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=layer_types,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.1,
    )
    Gemma3ForCausalLM(config).save_pretrained(directory)
    return directory
