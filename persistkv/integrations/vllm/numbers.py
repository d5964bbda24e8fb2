"""Positions and dtype of the numbers in vLLM's rows, needed to compare the blocks of two
releases."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, TypeVar

from persistkv.config import NumberLayout, VectorLayout

T = TypeVar("T")

_DTYPES: dict[str, tuple[Any, int]] = {
    "float32": ("float32", 4),
    "float16": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "fp8": ("float8_e4m3fn", 1),
    "fp8_e4m3": ("float8_e4m3fn", 1),
    "fp8_e5m2": ("float8_e5m2", 1),
}
"""vLLM's name of a KV cache dtype → its name in ``NumberLayout``, bytes of a number."""
_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC")
"""Supported values of ``kv_cache_layout``: orders of layers (L), blocks (B), heads (H), tokens (N)
and numbers (C) in which one block is contiguous in each tensor."""
_CONSTANT_SCALES = (0, 1)
"""Values of ``kv_quant_mode`` without scales that depend on the content: not quantized, and one
constant scale per tensor."""
_LATENT_PART = 64
"""Largest count of numbers in one part of MLA's latent vector, which is compared in parts of equal
length, because RoPE rotates only its end."""


def number_layout(
    engine: Any, spec: Any, kv_cache: Any, *, device: str
) -> NumberLayout | None:
    """Return the layout of the numbers in a row. Return None if it is not known for certain, or if
    equal contexts may have different numbers because of scales that are calculated at run time, a
    state-space model or speculative drafts.

    :param engine: vLLM's ``VllmConfig``.
    :param kv_cache: vLLM's ``KVCacheConfig``; None: unknown.
    """
    offloading, cache = spec.config, engine.cache_config
    parallel, layout = offloading.parallel, getattr(offloading, "kv_cache_layout", None)
    is_split = any(
        getattr(parallel, f"{kind}_size", 1) != 1 for kind in ("pp", "pcp", "dcp")
    )
    is_variable = (
        bool(getattr(cache, "calculate_kv_scales", False))
        or engine.speculative_config is not None
    )
    if (
        kv_cache is None
        or is_split
        or is_variable
        or getattr(offloading, "canonical_layout", False)
    ):
        return None
    if layout not in _LAYOUTS or (device == "cpu" and layout != "LBHNC"):
        return None
    workers = (
        1 if getattr(offloading, "replicated_layout", False) else parallel.world_size
    )
    worker_stride = getattr(spec, "cpu_page_size_per_worker", 0)
    if workers > 1 and not worker_stride:
        return None
    blocks, layers = (
        offloading.cache.blocks_per_chunk,
        max(len(group.layer_names) for group in offloading.groups),
    )
    groups: dict[int, VectorLayout] = {}
    dtypes = set()
    for group in offloading.groups:
        attention, tokens = (
            kv_cache.kv_cache_groups[group.group_id].kv_cache_spec,
            group.tokens_per_block,
        )
        name = str(getattr(attention, "dtype", "")).removeprefix("torch.")
        name = name if cache.cache_dtype == "auto" else str(cache.cache_dtype)
        if name not in _DTYPES or not _is_plain(attention, tokens, device):
            return None
        dtype, item = _DTYPES[name]
        dtypes.add(dtype)
        keys, values = attention.head_size, attention.head_size_v
        heads = (
            attention.num_heads
            if getattr(attention, "num_head_slots", None)
            else attention.num_kv_heads
        )
        counts = {"L": layers, "B": blocks, "H": heads, "N": tokens}
        strides, stride = {}, (keys + values) * item
        for letter in reversed(layout[:-1]):
            strides[letter] = stride
            stride *= counts[letter]
        if stride != offloading.worker_kv_bytes_per_block * blocks:
            return None  # padding, or tensors of several sizes
        if device == "cpu":  # all keys of a head, then all its values
            length, parts, token_stride = keys, (2, tokens * keys * item), keys * item
        else:
            length = gcd(keys, values or _LATENT_PART)
            parts, token_stride = (
                ((keys + values) // length, length * item),
                strides["N"],
            )
        used_layers = (len(group.layer_names), strides["L"])
        cells = ((workers, worker_stride), used_layers, (heads, strides["H"]), parts)
        groups[group.group_id] = VectorLayout(
            0, cells, ((blocks, strides["B"]), (tokens, token_stride)), length
        )
    if len(dtypes) != 1:
        return None
    return NumberLayout(dtypes.pop(), by_group_index(groups))


def by_group_index(groups: Mapping[int, T]) -> tuple[T, ...]:
    """Return the value for each group index that a key may have; for a group that is not offloaded,
    the first one."""
    first = next(iter(groups.values()))
    return tuple(groups.get(index, first) for index in range(max(groups) + 1))


def _is_plain(spec: Any, tokens: int, device: str) -> bool:
    """Return whether a block of the group holds exactly one key and one value vector per token and
    head, unpadded."""
    names = ("num_kv_heads", "head_size", "head_size_v", "block_size")
    if (
        not all(isinstance(getattr(spec, name, None), int) for name in names)
        or spec.block_size != tokens
    ):
        return False
    is_packed = (
        getattr(spec, "state_content_bytes", None) is not None
        or getattr(spec, "tokens_per_state", 1) != 1
    )
    is_constant = int(getattr(spec, "kv_quant_mode", 0)) in _CONSTANT_SCALES
    is_padded = getattr(spec, "page_size_padded", None) is not None
    has_halves = device != "cpu" or spec.head_size == spec.head_size_v
    return is_constant and has_halves and not (is_packed or is_padded)
