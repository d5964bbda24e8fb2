"""The identity of a model's KV bytes, computed from the model and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from persistkv.errors import UnsupportedModelError
from persistkv.integrations.model_config import plain_config
from persistkv.integrations.transformers.hashing import HASH_NAME
from persistkv.integrations.transformers.kv_cache import KVGeometry, KVGroupGeometry
from persistkv.storage.format.codec import Buffer
from persistkv.storage.identity import fingerprint_checkpoint, fingerprint_tensors

IDENTITY_VERSION = 1
KV_LAYOUT = "per group: block, layer, key or value, head, token, head size"


def model_identity(model: Any, checkpoint: Path | None, geometry: KVGeometry, block_size: int) -> dict[str, Any]:
    """Return everything that must match for this model's KV bytes to be valid, as JSON values.

    :param checkpoint: the directory that the model was loaded from; None hashes the state dict instead.
    :raises ConfigurationError: if the checkpoint cannot be read.
    :raises UnsupportedModelError: if a weight's bytes are not available.
    """
    weights = fingerprint_checkpoint(checkpoint) if checkpoint else fingerprint_tensors(_state(model))
    return {
        "version": IDENTITY_VERSION,
        "weights": weights,
        "config": plain_config(model.config.to_dict()),
        "architecture": type(model).__name__,
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "dtype": {"model": _dtype_name(model.dtype), "kv": _dtype_name(geometry[0].dtype)},
        "kv_layout": KV_LAYOUT,
        "groups": [_group(group) for group in geometry],
        "block_size": block_size,
        "world": {"tensor_parallel": 1, "pipeline_parallel": 1},
        "hash": HASH_NAME,
    }


def _group(group: KVGroupGeometry) -> dict[str, Any]:
    return {
        "kind": "full_attention" if group.sliding_window is None else "sliding_attention",
        "sliding_window": group.sliding_window,
        "layers": list(group.layers),
        "heads": group.num_heads,
        "head_size": group.head_dim,
    }


def _state(model: Any) -> Iterator[tuple[str, str, tuple[int, ...], Buffer]]:
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            raise UnsupportedModelError(f"the bytes of {name!r} cannot be had, so the weights cannot be identified")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield name, _dtype_name(tensor.dtype), tuple(tensor.shape), data


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
