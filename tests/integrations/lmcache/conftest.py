"""Fixtures: adapters of LMCache, on LMCache itself or on stand-ins for it."""

from __future__ import annotations

import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.integrations.lmcache import stand_ins

if TYPE_CHECKING:
    from persistkv.integrations.lmcache.adapter import PersistKVL2Adapter
    from tests.integrations.lmcache.stand_ins import (
        Bitmap,
        L1MemoryDesc,
        L2StoreResult,
        MemoryLayoutDesc,
        ObjectKey,
    )

HAS_LMCACHE = find_spec("lmcache") is not None
if not HAS_LMCACHE:
    stand_ins.install(Path(tempfile.mkdtemp(prefix="persistkv-lmcache-")))

MODEL = "org/model"
OTHER_MODEL = "org/other"
SHAPE = (2, 4, 16, 64)  # KV, layers, tokens, numbers of a token: 16 KiB in 16 bits
_WAIT_S = 60.0


class Metadata(NamedTuple):
    shapes: list[torch.Size] | None
    dtypes: list[torch.dtype] | None


class Memory:
    """An object in L1: the methods of LMCache's ``MemoryObj`` that adapters may use."""

    def __init__(
        self,
        shape: tuple[int, ...] = SHAPE,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype)
        self.metadata = Metadata(None, None)

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The object's bytes: a view."""
        flat: npt.NDArray[np.uint8] = self.tensor.view(torch.uint8).numpy().reshape(-1)
        return flat

    @property
    def byte_array(self) -> memoryview:
        return self.bytes.data

    def get_size(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def get_shape(self) -> torch.Size:
        return self.tensor.shape

    def get_dtype(self) -> torch.dtype:
        return self.tensor.dtype


def memories(
    count: int,
    seed: int | None = None,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Memory]:
    """Return objects with random bytes, or zeros without a seed."""
    made = [Memory(shape, dtype) for _ in range(count)]
    if seed is not None:
        rng = np.random.default_rng(seed)
        for memory in made:
            memory.bytes[:] = rng.integers(0, 256, memory.get_size(), np.uint8)
    return made


def object_keys(
    numbers: Sequence[int],
    model: str = MODEL,
    rank: int = 0x01000100,
    salt: str = "",
    group: int = 0,
) -> list[ObjectKey]:
    """Return LMCache's keys of chunks with these numbers."""
    from lmcache.v1.distributed.api import ObjectKey

    keys: list[ObjectKey] = []
    for number in numbers:
        keys.append(ObjectKey(number.to_bytes(32, "big"), model, rank, group, salt))
    return keys


def descriptions(
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[int, MemoryLayoutDesc]:
    """Return the layouts of a lookup."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return {0: MemoryLayoutDesc([torch.Size(shape)], [dtype])}


class Driver:
    """Calls an adapter as LMCache's controllers do: submit, wait for the descriptor, query."""

    def __init__(self, adapter: PersistKVL2Adapter) -> None:
        self.adapter = adapter

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[Memory]) -> bool:
        adapter = self.adapter
        task = adapter.submit_store_task(list(keys), list(objects))
        done: dict[int, L2StoreResult] = {}

        def has_ended() -> bool:
            done.update(adapter.pop_completed_store_tasks())
            return task in done

        self._wait(adapter.get_store_event_fd(), has_ended)
        result = done[task]
        if result.is_successful():
            expected = sum(memory.get_size() for memory in objects)
            assert result.bytes_transferred() == expected
        return bool(result.is_successful())

    def lookup(
        self,
        keys: Sequence[ObjectKey],
        layouts: dict[int, MemoryLayoutDesc] | None = None,
    ) -> list[bool]:
        adapter = self.adapter
        layouts = descriptions() if layouts is None else layouts
        task = adapter.submit_lookup_and_lock_task(list(keys), layouts)
        query = adapter.query_lookup_and_lock_result
        return self._bits(adapter.get_lookup_and_lock_event_fd(), query, task)

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[Memory]) -> list[bool]:
        adapter = self.adapter
        task = adapter.submit_load_task(list(keys), list(objects))
        query = adapter.query_load_result
        return self._bits(adapter.get_load_event_fd(), query, task)

    def _bits(
        self, fd: int, query: Callable[[int], Bitmap | None], task: int
    ) -> list[bool]:
        results: list[Bitmap] = []

        def has_ended() -> bool:
            result = query(task)
            results.extend([] if result is None else [result])
            return bool(results)

        self._wait(fd, has_ended)
        assert query(task) is None, "a result is given once"
        bitmap = results[0]
        return [bitmap.test(place) for place in range(bitmap.size())]

    @staticmethod
    def _wait(fd: int, has_ended: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            assert select.select([fd], [], [], _WAIT_S)[0], "no task has ended"
            with open(fd, "rb", buffering=0, closefd=False) as opened:
                opened.read(8)
            if has_ended():
                return
        raise AssertionError("the task does not end")


class Listener:
    """Records what an adapter announces."""

    def __init__(self) -> None:
        self.stored: dict[ObjectKey, int] = {}
        self.deleted: list[ObjectKey] = []
        self.accessed: list[ObjectKey] = []

    def on_l2_keys_stored(
        self, keys: Sequence[ObjectKey], sizes: Sequence[int]
    ) -> None:
        self.stored.update(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: Sequence[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: Sequence[ObjectKey]) -> None:
        self.deleted += keys


Open = Callable[..., Driver]


@pytest.fixture
def params(tmp_path: Path) -> dict[str, Any]:
    """``adapter_params`` for a store of this test."""
    return {
        "url": f"lmdb://{tmp_path}/store?capacity=64MiB",
        "models": {MODEL: "name:weights-1", OTHER_MODEL: "name:weights-2"},
        "engine": "vllm 0.32 FLASH_ATTN",
    }


@pytest.fixture
def open_adapter(params: dict[str, Any]) -> Iterator[Open]:
    """Return a function that opens adapters, with other options; close them after the test."""
    from persistkv.integrations.lmcache.adapter import PersistKVL2Adapter

    opened: list[PersistKVL2Adapter] = []

    def open_one(
        l1_memory_desc: L1MemoryDesc | None = None, **options: object
    ) -> Driver:
        adapter = PersistKVL2Adapter({**params, **options}, l1_memory_desc)
        opened.append(adapter)
        return Driver(adapter)

    yield open_one
    for adapter in opened:
        adapter.close()
