"""Fixtures: block stores on each medium."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from persistkv import BlockIdentity, BlockStore
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.blocks.store import TenantOf
from persistkv.storage.records import StoreOptions
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.blobs import MemoryBlobs
from tests.backends.s3.conftest import ACCESS, endpoint, raw_client  # noqa: F401

BLOCK_BYTES = 64 << 10  # 64 KiB
BlockArray = npt.NDArray[np.uint8]


def identity(**other: object) -> BlockIdentity:
    """Return an identity of one KV cache group, with other values for some fields."""
    common = BlockIdentity(
        model_name="test",
        weights="name:test",
        engine="test",
        release="1.0",
        dtype="bfloat16",
        shapes=((2, 4, 16, 8, 64),),
        layout="page_first",
        rank="tp 0 of 1",
    )
    return msgspec.structs.replace(common, **other)


class OpenBlocks(Protocol):
    """Opens a store of the test's medium."""

    def __call__(
        self,
        *,
        block_bytes: Sequence[int] = (BLOCK_BYTES,),
        faulty: bool = False,
        options: StoreOptions | None = None,
        identity: BlockIdentity = ...,
        tenant_of: TenantOf | None = None,
    ) -> BlockStore: ...


# slow on a simulated server: the store is the same on each shared medium
@pytest.fixture(
    params=["lmdb", "file", "memory", pytest.param("s3", marks=pytest.mark.slow)]
)
def open_backend_of(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], Backend]:
    """Return a function that opens the medium of the test, each time with its content."""
    for name, value in ACCESS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "memory":
        blobs = MemoryBlobs()
        return lambda: MemoryBackend(blobs.handle())
    urls = {
        "lmdb": f"lmdb://{tmp_path}/store?capacity=256MiB",
        "file": f"file://{tmp_path}/shared?capacity=256MiB",
    }
    url = urls.get(request.param, "")
    if request.param == "s3":
        client = request.getfixturevalue("raw_client")
        bucket = f"blocks-{tmp_path.name.replace('_', '-').lower()}"[:60].rstrip("-")
        client.create_bucket(Bucket=bucket)
        where = request.getfixturevalue("endpoint")
        url = f"s3://{bucket}/store?endpoint_url={where}"
    return lambda: open_backend(url)


@pytest.fixture
def open_blocks(open_backend_of: Callable[[], Backend]) -> Iterator[OpenBlocks]:
    """Return a function that opens a block store on the test's medium; close it after the test."""
    opened: list[BlockStore] = []

    def open_one(
        *,
        block_bytes: Sequence[int] = (BLOCK_BYTES,),
        faulty: bool = False,
        options: StoreOptions | None = None,
        identity: BlockIdentity = identity(),  # noqa: B008 - immutable
        tenant_of: TenantOf | None = None,
    ) -> BlockStore:
        backend = open_backend_of()
        if faulty:
            backend = FaultyBackend.of(backend)
        chosen = options or StoreOptions(adopt="never", events=True)
        store = BlockStore(
            backend, identity, block_bytes, chosen, url="test", tenant_of=tenant_of
        )
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        assert store.close()


_numbers = itertools.count()


def new_keys(count: int) -> list[bytes]:
    """Return keys that no other call returns."""
    return [next(_numbers).to_bytes(32, "big") for _ in range(count)]


def random_blocks(
    count: int,
    block_bytes: int = BLOCK_BYTES,
    seed: int = 0,
) -> BlockArray:
    """Return random bytes, shape (count, block_bytes)."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, block_bytes), np.uint8)
