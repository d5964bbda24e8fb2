"""The demo's model: a Llama with a fixed seed, created once and kept as a checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

_SEED = 20_240_229


def make_checkpoint(directory: Path) -> None:
    """Create the checkpoint atomically: another run sees all of it or nothing."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        _make_model().save_pretrained(made, safe_serialization=True)
        os.replace(made, directory)
    except BaseException:
        shutil.rmtree(made)
        raise


def _make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1 << 16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(config).float()
