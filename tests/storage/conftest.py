"""Fixtures: stores on each driver, rows, and keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Unpack

import numpy as np
import pytest

from persistkv.base import make_offload_key
from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.memory import MemoryBackend
from tests.storage.stores import StoreSettings

IDENTITY = Identity.of({"weights": "w", "dtype": "float32"})


@pytest.fixture
def make_rows() -> Callable[..., Rows]:
    """Return a function that makes rows of random bytes; ``ranges`` are the valid ranges of each
    group."""

    def make(
        num_rows: int = 64,
        stride: int = 64 << 10,
        ranges: tuple[tuple[tuple[int, int], ...], ...] = (),
    ) -> Rows:
        layout = RowLayout(stride, tuple(map(GroupLayout, ranges or (((0, stride),),))))
        filled = np.random.default_rng(7).integers(
            0, 256, num_rows * stride, dtype=np.uint8
        )
        return Rows(memoryview(bytearray(filled.tobytes())), layout)

    return make


@pytest.fixture
def keys() -> Callable[..., list[bytes]]:
    """Return a function that makes keys, all of them different."""
    numbers = itertools.count()

    def make(count: int, group: int = 0) -> list[bytes]:
        return [
            bytes(make_offload_key(next(numbers).to_bytes(32, "little"), group))
            for _ in range(count)
        ]

    return make


@pytest.fixture(params=["memory", "lmdb"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a store that does not exist yet, for each driver."""
    return (
        "memory://test"
        if request.param == "memory"
        else f"lmdb://{tmp_path}/store?capacity=256MiB"
    )


@pytest.fixture
def open_store(
    make_rows: Callable[..., Rows],
) -> Iterator[Callable[..., BlockingStore]]:
    """Return a function that opens stores; close them after the test."""
    opened: list[BlockingStore] = []

    def open_one(
        url: str,
        rows: Rows | None = None,
        identity: Identity = IDENTITY,
        **options: Unpack[StoreSettings],
    ) -> BlockingStore:
        parsed = StoreUrl.parse(url)
        backend = (
            MemoryBackend.open(parsed)
            if parsed.scheme == "memory"
            else open_backend(url)
        )
        try:
            options.setdefault("events", True)
            settings = StoreOptions(**options)
            store = BlockingStore(
                backend, identity, rows or make_rows(), settings, url=url
            )
        except BaseException:
            backend.close()
            raise
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()
