"""A Llama of two layers, the same each time. Its weights are large, so that greedy answers are never close."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 512
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint.

    :param changes: to the configuration.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_key_value_heads"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {"model.embed_tokens.weight": random(VOCABULARY, hidden), "lm_head.weight": random(VOCABULARY, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": random(hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": random(heads * CONFIG["head_dim"], hidden),
            f"{prefix}self_attn.v_proj.weight": random(heads * CONFIG["head_dim"], hidden),
            f"{prefix}self_attn.o_proj.weight": random(hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": random(inner, hidden),
            f"{prefix}mlp.up_proj.weight": random(inner, hidden),
            f"{prefix}mlp.down_proj.weight": random(hidden, inner),
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(tensors, directory / "model.safetensors")
    return directory
