"""Fixtures: backends of SGLang's HiCache, on SGLang itself or on stand-ins for it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.integrations.sglang import stand_ins
from tests.integrations.sglang.host_pools import (
    PAGE,
    create_storage,
    make_host_pool,
    storage_config,
)
from tests.integrations.sglang.preparation import HAS_SGLANG, prepare
from tests.integrations.sglang.stand_ins import HostPool

if TYPE_CHECKING:
    from persistkv.integrations.sglang.backend import PersistKVStorage

if HAS_SGLANG:
    prepare()
else:
    stand_ins.install(Path(tempfile.mkdtemp(prefix="persistkv-sglang-")))

PAGES = 32
LAYERS = 2
HEADS = 2


def make_pool(
    layout: str = "page_first",
    dtype: torch.dtype = torch.bfloat16,
    heads: int = HEADS,
    layers: int = LAYERS,
) -> HostPool:
    """Return a host pool of 32 pages of 16 tokens."""
    return make_host_pool(PAGES, layers=layers, heads=heads, layout=layout, dtype=dtype)


def fill(pool: HostPool, seed: int) -> None:
    """Fill a pool with random numbers."""
    flat = pool.kv_buffer.view(torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    flat.random_(0, 256, generator=generator)


def page_keys(numbers: range, prefix: str = "") -> list[str]:
    """Return page hashes as SGLang's: 64 hexadecimal digits."""
    return [f"{prefix}{number:0{64 - len(prefix)}x}" for number in numbers]


def pages_of(pool: HostPool, first: int, count: int) -> torch.Tensor:
    """Return a copy of consecutive pages."""
    tokens = slice(first * PAGE, (first + count) * PAGE)
    if pool.layout == "page_first":
        return pool.kv_buffer[:, tokens].clone()
    return pool.kv_buffer[:, :, tokens].clone()


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors have the same bytes; random numbers include NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


Open = Callable[..., "PersistKVStorage"]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """The options of the backend, for a store of this test."""
    return {
        "url": f"lmdb://{tmp_path}/store?capacity=256MiB",
        "weights": "weights-1",
        "attention_backend": "torch_native",
        "timeout_s": 60.0,
    }


@pytest.fixture
def open_backend(options: dict[str, Any]) -> Iterator[Open]:
    """Return a function that creates backends through SGLang's factory, with the main pool
    registered; close them after the test."""
    opened: list[PersistKVStorage] = []

    def open_one(
        pool: HostPool | None = None,
        *,
        interface_v1: int = 1,
        config: Mapping[str, object] | None = None,
        **changed: object,
    ) -> PersistKVStorage:
        fields = config or {}
        made = storage_config(
            {**options, **changed}, interface_v1=interface_v1, **fields
        )
        backend = create_storage(made, pool)
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        with suppress(AttributeError):
            backend.close()
