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
    offloading = spec.config
    if kv_cache is None or not _has_fixed_numbers(engine, offloading, device):
        return None
    replicated = getattr(offloading, "replicated_layout", False)
    workers = 1 if replicated else offloading.parallel.world_size
    worker_stride = getattr(spec, "cpu_page_size_per_worker", 0)
    if workers > 1 and not worker_stride:
        return None

    groups: dict[int, VectorLayout] = {}
    dtypes = set()
    for group in offloading.groups:
        attention = kv_cache.kv_cache_groups[group.group_id].kv_cache_spec
        name = _dtype_name(engine.cache_config, attention)
        if name not in _DTYPES:
            return None
        dtype, item = _DTYPES[name]
        dtypes.add(dtype)
        vectors = _vectors(
            offloading,
            group,
            attention,
            item,
            (workers, worker_stride),
            device=device,
        )
        if vectors is None:
            return None
        groups[group.group_id] = vectors
    if len(dtypes) != 1:
        return None
    return NumberLayout(dtypes.pop(), by_group_index(groups))


def _dtype_name(cache: Any, attention: Any) -> str:
    """Return vLLM's name of the dtype of a group's KV."""
    if cache.cache_dtype != "auto":
        return str(cache.cache_dtype)
    return str(getattr(attention, "dtype", "")).removeprefix("torch.")


def _has_fixed_numbers(engine: Any, offloading: Any, device: str) -> bool:
    """Return whether equal contexts have equal numbers, in one order of bytes that is known."""
    layouts = ("LBHNC",) if device == "cpu" else _LAYOUTS
    if getattr(offloading, "kv_cache_layout", None) not in layouts:
        return False
    for kind in ("pp", "pcp", "dcp"):
        if getattr(offloading.parallel, f"{kind}_size", 1) != 1:
            return False
    if getattr(engine.cache_config, "calculate_kv_scales", False):
        return False
    # the drafts of a speculative model may differ between two runs
    if engine.speculative_config is not None:
        return False
    return not getattr(offloading, "canonical_layout", False)


def _vectors(
    offloading: Any,
    group: Any,
    attention: Any,
    item: int,
    workers: tuple[int, int],
    *,
    device: str,
) -> VectorLayout | None:
    """Return the vectors of one group in a row; None if a worker's part contains anything else,
    such as padding.

    :param item: bytes of a number.
    :param workers: number of workers, and bytes from one worker's part to the next.
    """
    layout = offloading.kv_cache_layout  # such as LBHNC, see ``_LAYOUTS``
    blocks = offloading.cache.blocks_per_chunk
    tokens = group.tokens_per_block
    if not _is_plain(attention, tokens, device):
        return None
    keys = attention.head_size
    values = attention.head_size_v
    heads = attention.num_kv_heads
    if getattr(attention, "num_head_slots", None):
        heads = attention.num_heads
    counts = {
        "L": max(len(other.layer_names) for other in offloading.groups),
        "B": blocks,
        "H": heads,
        "N": tokens,
    }
    # in bytes, from the innermost dimension, the numbers of a token, outwards
    strides: dict[str, int] = {}
    stride = (keys + values) * item
    for letter in reversed(layout[:-1]):
        strides[letter] = stride
        stride *= counts[letter]
    if stride != offloading.worker_kv_bytes_per_block * blocks:
        return None  # padding, or tensors of several sizes

    # the parts of a cell: their number, and the bytes from one to the next
    if device == "cpu":  # all keys of a head, then all its values
        length = keys
        parts = (2, tokens * keys * item)
        token_stride = keys * item
    else:  # keys and values of a token are neighbours; each is a multiple of a vector
        length = gcd(keys, values or _LATENT_PART)
        parts = ((keys + values) // length, length * item)
        token_stride = strides["N"]
    layers = (len(group.layer_names), strides["L"])
    cells = (workers, layers, (heads, strides["H"]), parts)
    places = ((blocks, strides["B"]), (tokens, token_stride))
    return VectorLayout(0, cells, places, length)


def by_group_index(groups: Mapping[int, T]) -> tuple[T, ...]:
    """Return the value for each group index that a key may have; for a group that is not offloaded,
    the first one."""
    first = next(iter(groups.values()))
    # keys name groups by index, and vLLM may leave some out
    indices = range(max(groups) + 1)
    return tuple(groups.get(index, first) for index in indices)


def _is_plain(spec: Any, tokens: int, device: str) -> bool:
    """Return whether a block of the group holds exactly one key and one value vector per token and
    head, unpadded."""
    for name in ("num_kv_heads", "head_size", "head_size_v", "block_size"):
        if not isinstance(getattr(spec, name, None), int):
            return False
    if spec.block_size != tokens:
        return False
    has_state = getattr(spec, "state_content_bytes", None) is not None
    if has_state or getattr(spec, "tokens_per_state", 1) != 1:
        return False
    if getattr(spec, "page_size_padded", None) is not None:
        return False
    if int(getattr(spec, "kv_quant_mode", 0)) not in _CONSTANT_SCALES:
        return False
    return device != "cpu" or spec.head_size == spec.head_size_v
