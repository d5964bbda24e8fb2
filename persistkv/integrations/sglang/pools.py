"""SGLang's host pools: memory of pages, and the identity of their bytes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from persistkv.errors import ConfigurationError, MissingOptionError
from persistkv.integrations.model_config import dtype_name
from persistkv.integrations.sglang.options import WHERE, SGLangOptions
from persistkv.memory.libc import memory_at
from persistkv.storage.blocks import BlockIdentity

MAIN_POOL = "kv"
_SHARDED_POOLS = ("mamba",)
"""Pools whose content differs between tensor-parallel ranks also in models with MLA."""
_GEOMETRY = ("layer_num", "head_num", "head_dim", "v_head_dim")
"""Attributes of SGLang's pools that are part of the identity; a pool may lack some."""
_OPAQUE = "uint8"
"""Dtype of a pool that shows bytes only, and not the type of the numbers in them."""


class PageMemory(NamedTuple):
    """Memory of pages of a pool."""

    pool: Any
    """SGLang's host pool."""
    page_size: int
    """Tokens of a page, one entry of the pool for each."""

    @classmethod
    def of(cls, pool: Any) -> PageMemory:
        """Return the memory of one of SGLang's host pools, whose attributes differ by kind: pages
        of a pool that names no size are of one token."""
        page_size = getattr(pool, "logical_page_size", None)
        if not page_size:
            page_size = getattr(pool, "page_size", None)
        return cls(pool, int(page_size or 1))

    def regions(self, host_indices: Any) -> list[list[memoryview]]:
        """Return the regions of each page, which SGLang may move between calls.

        :param host_indices: tensor of ``page_size`` indices for each page.
        :raises ValueError: there are not as many indices, or SGLang returns another number of
            regions.
        """
        num_pages, spare_indices = divmod(len(host_indices), self.page_size)
        if spare_indices:
            raise ValueError(
                f"{len(host_indices)} indices for pages of {self.page_size} tokens"
            )
        if not num_pages:
            return []
        # SGLang returns the regions of all pages in one list, page by page
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        regions_per_page, spare_regions = divmod(len(addresses), num_pages)
        if spare_regions:
            raise ValueError(f"{len(addresses)} regions for {num_pages} pages")
        regions: list[memoryview] = []
        for address, size in zip(addresses, sizes, strict=True):
            region = memory_at(int(address), int(size))
            regions.append(region)
        starts = range(0, len(regions), regions_per_page)
        return [regions[start : start + regions_per_page] for start in starts]

    def region_sizes(self) -> list[int]:
        """Return the bytes of each region of a page.

        :raises Exception: whatever SGLang raises for a pool or layout without regions.
        """
        import torch

        # take the first page of the pool, because all pages are alike
        first_page = torch.arange(self.page_size)
        _, sizes = self.pool.get_page_buffer_meta(first_page)
        return [int(size) for size in sizes]

    def flat_pages(self, host_indices: Any) -> list[Any]:
        """Return a copy of each page, as SGLang's tensors."""
        first_indices = host_indices[:: self.page_size].tolist()
        copy_page = self.pool.get_data_page
        return [copy_page(index, flat=True) for index in first_indices]

    def set_flat_page(
        self,
        host_indices: Any,
        page: int,
        tensor: Any,
    ) -> None:
        """Copy a tensor into a page.

        :param page: position of the page in ``host_indices``.
        """
        first_index = int(host_indices[page * self.page_size])
        self.pool.set_from_flat_data_page(first_index, tensor)

    def new_flat_page(self) -> Any:
        """Return a tensor for a page."""
        return self.pool.get_dummy_flat_data_page()

    def flat_bytes(self) -> int:
        """Return the bytes of a page that SGLang copies into one tensor."""
        page = self.pool.get_dummy_flat_data_page()
        return _num_bytes(page)


def tensor_memory(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. The caller keeps the tensor.

    :raises ValueError: the tensor is not contiguous, or on a device.
    """
    is_on_cpu = tensor.device.type == "cpu"
    if not (is_on_cpu and tensor.is_contiguous()):
        raise ValueError("a page is no contiguous CPU tensor")
    address = tensor.data_ptr()
    return memory_at(address, _num_bytes(tensor))


def _num_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def pool_identity(
    config: Any,
    options: SGLangOptions,
    name: str,
    memory: PageMemory,
    sizes: Sequence[int],
    *,
    weights: str,
    release: str,
) -> BlockIdentity:
    """Return the identity of the pages of a pool.

    :param config: SGLang's ``HiCacheStorageConfig``.
    :param sizes: bytes of each region of a page; one number if SGLang copies it as a whole.
    """
    pool = memory.pool
    geometry = _geometry_of(pool)
    layout = getattr(pool, "layout", None)
    if not isinstance(layout, str):
        raise ConfigurationError("layout", layout, f"a layout of SGLang's pool {name}")
    start_layer = plain_number(getattr(pool, "start_layer", None))
    end_layer = plain_number(getattr(pool, "end_layer", None))
    # a pool may lack some fields, so ``more`` also contains the numbers with their names
    shape = (memory.page_size, *geometry.values())
    return BlockIdentity(
        model_name=config.model_name or "",
        weights=weights,
        engine="sglang",
        release=release,
        dtype=_dtype(pool, options, name),
        shapes=(shape,),  # one KV cache group
        layout=f"{layout}, {len(sizes)} regions",
        rank=_rank(config, name),
        more={
            "pool": name,
            "attention_backend": options.attention_backend,
            "geometry": geometry,
            "region_bytes": list(sizes),
            "layers": [start_layer, end_layer],
            "split_heads": bool(config.should_split_heads),
        },
    )


def _geometry_of(pool: Any) -> dict[str, int]:
    """Return the numbers of ``_GEOMETRY`` that a pool has, by name."""
    geometry = {}
    for field in _GEOMETRY:
        number = plain_number(getattr(pool, field, None))
        if number is not None:
            geometry[field] = number
    return geometry


def plain_number(value: Any) -> int | None:
    """Convert an attribute of a pool, such as an integer of NumPy; None if it is no integer."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def _dtype(
    pool: Any,
    options: SGLangOptions,
    name: str,
) -> str:
    """Return the dtype of a pool's pages, for their identity.

    :raises MissingOptionError: the pool does not show it, and the option does not name it.
    """
    pool_dtype = dtype_name(getattr(pool, "dtype", ""))
    named_dtype = options.kv_cache_dtype
    if named_dtype:
        # use both names, because the pools of a model may differ, and the user names one type for
        # all of them
        return f"{pool_dtype} {named_dtype}" if pool_dtype else named_dtype
    if pool_dtype in ("", _OPAQUE):
        raise MissingOptionError(
            WHERE,
            f"option kv_cache_dtype, because pool {name} shows only "
            f"{pool_dtype or 'no type'}",
        )
    return pool_dtype


def _rank(config: Any, name: str) -> str:
    """Return the part of the model that a pool's pages hold: SGLang's ranks in pipeline (pp),
    context (cp, dcp) and tensor parallelism (tp)."""
    parts = [
        f"pp {config.pp_rank} of {config.pp_size}",
        f"cp {config.attn_cp_rank} of {config.attn_cp_size}",
        f"dcp {config.dcp_rank} of {config.dcp_size}",
    ]
    # with MLA, all tensor-parallel ranks have the same pages, and one rank stores them for all
    if config.is_mla_model and name not in _SHARDED_POOLS:
        parts.append("tp replicated")
    else:
        parts.append(f"tp {config.tp_rank} of {config.tp_size}")
    return ", ".join(parts)
