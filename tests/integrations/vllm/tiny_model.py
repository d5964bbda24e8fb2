"""Tiny models, deterministic. Their weights are large, so that greedy choices are never close."""

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


TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
"""Bytes of KV per token: keys and values, two layers, two heads, 32 numbers of four bytes."""
HYBRID: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}
"""Fields that a Gemma 3 adds to those of a Llama."""


STATES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "shared_intermediate_size": 256,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "block_auto_adjust_ff_dim": False,
        "block_dim": 128,
        "conv_dim": 128,
    },
}
"""Fields of two hybrid models that differ from those of the Llama. Half of their layers keep a
state instead of keys and values: of Mamba 2 in the first model, inputs of a convolution in the
second.
"""
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
}
"""Fields of a DeepSeek V2 that differ from those of the Llama. vLLM's CPU kernel needs this latent
vector of 576 numbers.
"""


def make_model(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint.

    :param changes: fields of the configuration to replace.
    """
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(seed)
    tensors = _tensors(config, generator)
    tensors["lm_head.weight"] = _random(generator, VOCABULARY, config["hidden_size"])
    return _write(directory, config, tensors)


def make_hybrid_model(directory: Path) -> Path:
    """Write a checkpoint of a Gemma 3 in which half of the layers have a sliding window of 64
    tokens."""
    config = CONFIG | HYBRID
    tensors = _tensors(config, torch.Generator().manual_seed(0))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(config["hidden_size"])
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{norm}.weight"] = torch.ones(config["head_dim"])
    return _write(directory, config, tensors)


def make_model_of(directory: Path, model_type: str, fields: dict[str, Any]) -> Path:
    """Write a checkpoint of a model that ``transformers`` builds.

    :param fields: fields of the configuration that differ from those of the Llama.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        name: value
        for name, value in CONFIG.items()
        if name not in ("architectures", "model_type")
    }
    config = AutoConfig.for_model(
        model_type, **(common | {"initializer_range": 0.2, "pad_token_id": 0} | fields)
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        directory
    )
    return directory


def _tensors(
    config: dict[str, Any],
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.embed_tokens.weight": _random(generator, VOCABULARY, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": _random(generator, hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": _random(generator, keys, hidden),
            f"{prefix}self_attn.v_proj.weight": _random(generator, keys, hidden),
            f"{prefix}self_attn.o_proj.weight": _random(generator, hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": _random(generator, inner, hidden),
            f"{prefix}mlp.up_proj.weight": _random(generator, inner, hidden),
            f"{prefix}mlp.down_proj.weight": _random(generator, hidden, inner),
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
        }
    return tensors


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * 0.3


def _write(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
