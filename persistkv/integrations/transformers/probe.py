"""Check of models: the engine supports those whose whole state is the KV of full or sliding-window attention.

The configuration is checked first. Then one token is run with a cache that records the KV of each layer.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from persistkv.errors import UnsupportedModelError
from persistkv.integrations.transformers.kv_cache import KVGeometry, KVGroupGeometry

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def probe_model(model: Any) -> KVGeometry:
    """Return a model's KV cache groups, in the order of their first layers.

    :param model: a Hugging Face decoder-only model on its device.
    :raises UnsupportedModelError: if the engine does not support the model; names the unsupported part.
    """
    config = model.config.get_text_config(decoder=True)
    _check_config(model, config)
    return _grouped(_sliding_windows(model, config), _record_one_token(model, config))


def _check_config(model: Any, config: Any) -> None:
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder: its cross-attention cache belongs to no token")
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{name} takes no past_key_values: its state is no KV cache")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{name} shares KV between layers ({config.num_kv_shared_layers} of them)")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all") or not getattr(config, "is_causal", True):
        raise UnsupportedModelError(f"{name} attends to later tokens: its KV is not that of a prefix")
    for rope_type in sorted(_rope_types(config)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{name}: {rope_type!r} rotary embedding makes KV depend on later tokens: no prefix can be shared"
            )


def _sliding_windows(model: Any, config: Any) -> list[int | None]:
    """Return the window of each layer as transformers would cache it; None for full attention."""
    name = type(model).__name__
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "attention_chunk_size", None
    ):
        raise UnsupportedModelError(
            f"{name} has chunked attention; only full and sliding-window attention is supported"
        )
    windows: list[int | None] = []
    for layer_idx, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(int(layer.sliding_window))
        elif type(layer) is DynamicLayer:
            windows.append(None)
        else:
            raise UnsupportedModelError(
                f"{name}: layer {layer_idx} keeps a {type(layer).__name__}; "
                "only full and sliding-window attention is supported"
            )
    return windows


def _rope_types(config: Any) -> set[str]:
    """Return all RoPE types of a configuration of transformers 4 or 5, including those per layer type."""
    found: set[str] = set()
    todo = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            found |= {str(item[field]) for field in ("rope_type", "type") if field in item}
            todo += item.values()
    return found


class _RecordingLayer(DynamicLayer):  # type: ignore[misc]
    """Records the keys and values that a layer receives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append((key_states, value_states))
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values


def _record_one_token(model: Any, config: Any) -> list[_RecordingLayer]:
    layers = [_RecordingLayer() for _ in range(config.num_hidden_layers)]
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    name = type(model).__name__
    try:
        with torch.inference_mode():
            model(input_ids=token, past_key_values=Cache(layers=layers), use_cache=True)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"{name} does not run on a plain KV cache: {error}") from error
    return layers


def _grouped(windows: list[int | None], layers: list[_RecordingLayer]) -> KVGeometry:
    kinds: dict[tuple[int, int, int | None, torch.dtype, torch.device], list[int]] = {}
    for layer_idx, (window, layer) in enumerate(zip(windows, layers, strict=True)):
        if len(layer.seen) != 1:
            raise UnsupportedModelError(
                f"layer {layer_idx} wrote its KV {len(layer.seen)} times for one token, not once"
            )
        keys, values = layer.seen[0]
        if keys.shape != values.shape or keys.dtype != values.dtype or keys.shape[:1] + keys.shape[2:3] != (1, 1):
            raise UnsupportedModelError(
                f"layer {layer_idx} has keys of {tuple(keys.shape)} and values of {tuple(values.shape)}; "
                "(1, heads, 1, head size) is needed for both"
            )
        kinds.setdefault((keys.shape[1], keys.shape[3], window, keys.dtype, keys.device), []).append(layer_idx)
    groups = tuple(KVGroupGeometry(tuple(members), *kind) for kind, members in kinds.items())
    places = sorted({f"{group.dtype} on {group.device}" for group in groups})
    if len(places) != 1:
        raise UnsupportedModelError(f"layers differ in the type or device of their KV: {', '.join(places)}")
    return groups
