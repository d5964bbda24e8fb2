"""Positions and dtype of the numbers in vLLM's rows, needed to compare the blocks of two
releases."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

from persistkv.config import NumberLayout, VectorLayout
from persistkv.integrations.model_config import dtype_name

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
_CPU_LAYOUTS = ("LBHNC",)
"""The value of ``_LAYOUTS`` in which vLLM's CPU platform keeps its keys and values."""
_CONSTANT_SCALES = (0, 1)
"""Values of ``kv_quant_mode`` without scales that depend on the content: not quantized, and one
constant scale per tensor."""
_LATENT_PART = 64
"""Largest count of numbers in one part of MLA's latent vector, the common source of the key and the
value. It is compared in parts of equal length, because RoPE rotates only its end."""


def number_layout(
    engine: Any,
    spec: Any,
    kv_cache: Any,
    *,
    device: str,
) -> NumberLayout | None:
    """Return the layout of the numbers in a row. Return None if it is not known for certain, or if
    equal contexts may have different numbers because of scales that are calculated at run time, a
    state-space model or speculative drafts.

    :param engine: vLLM's ``VllmConfig``.
    :param spec: vLLM's ``OffloadingSpec``.
    :param kv_cache: vLLM's ``KVCacheConfig``; None: unknown.
    :param device: vLLM's device type, such as ``cpu``.
    """
    offloading = spec.config
    if kv_cache is None or not _has_fixed_numbers(engine, offloading, device):
        return None
    # in a replicated layout, all workers have the same bytes, and a row has them once
    is_replicated = getattr(offloading, "replicated_layout", False)
    num_workers = 1 if is_replicated else offloading.parallel.world_size
    worker_stride = getattr(spec, "cpu_page_size_per_worker", 0)
    if num_workers > 1 and not worker_stride:
        return None

    groups: dict[int, VectorLayout] = {}
    dtypes = set()
    for group in offloading.groups:
        attention = kv_cache.kv_cache_groups[group.group_id].kv_cache_spec
        vllm_dtype = _dtype_name(engine.cache_config, attention)
        if vllm_dtype not in _DTYPES:
            return None
        dtype, number_bytes = _DTYPES[vllm_dtype]
        dtypes.add(dtype)
        vectors = _vectors(
            offloading,
            group,
            attention,
            number_bytes,
            workers=(num_workers, worker_stride),
            device=device,
        )
        if vectors is None:
            return None
        groups[group.group_id] = vectors
    # a layout has one dtype for all groups
    if len(dtypes) != 1:
        return None
    return NumberLayout(dtypes.pop(), by_group_index(groups))


def _dtype_name(cache: Any, attention: Any) -> str:
    """Return vLLM's name of the dtype of a group's KV."""
    if cache.cache_dtype != "auto":
        return str(cache.cache_dtype)
    return dtype_name(getattr(attention, "dtype", ""))


def _has_fixed_numbers(
    engine: Any,
    offloading: Any,
    device: str,
) -> bool:
    """Return whether equal contexts have equal numbers, and the order of their bytes is known."""
    layouts = _CPU_LAYOUTS if device == "cpu" else _LAYOUTS
    if getattr(offloading, "kv_cache_layout", None) not in layouts:
        return False
    # the canonical layout has another order of bytes than ``kv_cache_layout``
    if getattr(offloading, "canonical_layout", False):
        return False
    # pipeline and context parallelism divide layers and tokens among workers, not heads alone
    for kind in ("pp", "pcp", "dcp"):
        if getattr(offloading.parallel, f"{kind}_size", 1) != 1:
            return False
    # the first request of each run determines the scales, and so the numbers
    if getattr(engine.cache_config, "calculate_kv_scales", False):
        return False
    # the drafts of a speculative model may differ between two runs
    has_drafts = engine.speculative_config is not None
    return not has_drafts


def _vectors(
    offloading: Any,
    group: Any,
    attention: Any,
    number_bytes: int,
    *,
    workers: tuple[int, int],
    device: str,
) -> VectorLayout | None:
    """Return where the vectors of one group are in a row; None if a worker's part of the row
    contains anything else, such as padding.

    A row has a part for each worker. A part is an array of numbers, whose dimensions
    ``kv_cache_layout`` names from the outermost to the innermost (``_LAYOUTS``). In
    ``VectorLayout``, each dimension is a pair: a count, and the bytes from one element to the next.

    :param number_bytes: bytes of one number.
    :param workers: the workers' parts as such a dimension: their count, and the bytes from one part
        to the next.
    :param device: vLLM's device type: on ``cpu``, values follow the keys of all tokens.
    """
    blocks = offloading.cache.blocks_per_chunk
    tokens = group.tokens_per_block
    if not _is_plain(attention, tokens, device):
        return None
    heads = _num_heads(attention)
    counts = {
        # groups share the tensors: one for each layer of the group with the most layers
        "L": max(len(other.layer_names) for other in offloading.groups),
        "B": blocks,
        "H": heads,
        "N": tokens,
    }
    # the innermost dimension (C): the key and the value of one head of a token
    pair_bytes = (attention.head_size + attention.head_size_v) * number_bytes
    # with another size, there is padding in the worker's part, or tensors differ in size
    part_bytes = prod(counts.values()) * pair_bytes
    if part_bytes != offloading.worker_kv_bytes_per_block * blocks:
        return None
    strides = _strides(offloading.kv_cache_layout, counts, pair_bytes)

    if device == "cpu":
        vectors = _cpu_vectors(attention, tokens, number_bytes)
    else:
        vectors = _device_vectors(attention, strides["N"], number_bytes)
    layers = (len(group.layer_names), strides["L"])
    heads_of_layer = (heads, strides["H"])
    blocks_of_chunk = (blocks, strides["B"])
    tokens_of_block = (tokens, vectors.token_bytes)
    return VectorLayout(
        offset=0,  # the first part begins with the row
        cells=(workers, layers, heads_of_layer, vectors.of_token),
        tokens=(blocks_of_chunk, tokens_of_block),
        length=vectors.length,
    )


def _num_heads(attention: Any) -> int:
    """Return the number of KV heads that a worker's part has of each token and layer."""
    # a spec with ``num_head_slots`` has the number of heads in another attribute
    if getattr(attention, "num_head_slots", None):
        return int(attention.num_heads)
    return int(attention.num_kv_heads)


class _TokenVectors(NamedTuple):
    """Vectors of a token in one head of one layer."""

    length: int
    """Numbers of a vector."""
    of_token: tuple[int, int]
    """Dimension of a token's vectors: their count, and the bytes from one to the next."""
    token_bytes: int
    """Bytes from the vectors of a token to those of the next one."""


def _cpu_vectors(
    attention: Any,
    tokens: int,
    number_bytes: int,
) -> _TokenVectors:
    """Return the vectors in a block of vLLM's CPU platform: the keys of all tokens, followed by the
    values of all tokens. Keys and values have the same length (``_is_plain``)."""
    length = attention.head_size
    vector_bytes = length * number_bytes
    # a token has two vectors, key and value; the second one follows after the keys of all tokens
    return _TokenVectors(
        length,
        of_token=(2, tokens * vector_bytes),
        token_bytes=vector_bytes,
    )


def _device_vectors(
    attention: Any,
    token_bytes: int,
    number_bytes: int,
) -> _TokenVectors:
    """Return the vectors in a block of any other platform: each token's key, followed by its value.

    Key and value may differ in length, so both are divided into vectors of their greatest common
    divisor. MLA has a latent vector instead of a key, and no value.
    """
    key_length = attention.head_size
    value_length = attention.head_size_v
    # without a value, divide the latent vector into parts of at most ``_LATENT_PART`` numbers
    length = gcd(key_length, value_length or _LATENT_PART)
    num_vectors = (key_length + value_length) // length
    return _TokenVectors(
        length,
        of_token=(num_vectors, length * number_bytes),
        token_bytes=token_bytes,
    )


def _strides(
    layout: str,
    counts: Mapping[str, int],
    innermost_bytes: int,
) -> dict[str, int]:
    """Return the bytes from one element to the next for each dimension but the innermost one.

    :param layout: ``kv_cache_layout``: names of the dimensions, the innermost one last.
    :param counts: elements of each dimension.
    """
    strides: dict[str, int] = {}
    stride = innermost_bytes
    for dimension in reversed(layout[:-1]):
        strides[dimension] = stride
        stride *= counts[dimension]
    return strides


def by_group_index(groups: Mapping[int, T]) -> tuple[T, ...]:
    """Return the value for each group index that a key may have; for a group that is not offloaded,
    the first one."""
    first = next(iter(groups.values()))
    # keys name groups by index, and vLLM may offload only some groups
    num_indices = max(groups) + 1
    return tuple(groups.get(index, first) for index in range(num_indices))


def _is_plain(
    spec: Any,
    tokens: int,
    device: str,
) -> bool:
    """Return whether a block of the group holds exactly one key and one value vector per token and
    head, unpadded."""
    # the spec of a state-space model, or of a later release of vLLM, may lack these numbers
    for name in ("num_kv_heads", "head_size", "head_size_v", "block_size"):
        if not isinstance(getattr(spec, name, None), int):
            return False
    # the sizes differ if the block that a key names is not one block of the KV cache
    if spec.block_size != tokens:
        return False
    # a block with this attribute has opaque bytes instead of a key and a value
    if getattr(spec, "state_content_bytes", None) is not None:
        return False
    # a block may have one state for several tokens, instead of a key and a value for each
    if getattr(spec, "tokens_per_state", 1) != 1:
        return False
    if getattr(spec, "page_size_padded", None) is not None:
        return False
    # in other modes than these, a block also contains scales
    if int(getattr(spec, "kv_quant_mode", 0)) not in _CONSTANT_SCALES:
        return False
    # on a CPU, the values begin after as many bytes as keys have, so both must be equally long
    if device == "cpu":
        return bool(spec.head_size == spec.head_size_v)
    return True
