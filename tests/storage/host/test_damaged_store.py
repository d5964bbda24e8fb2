"""An engine whose store is damaged: the store's process may die of it, the engine goes on, and stores anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.side import State

COUNT = 32
KEYS = [number.to_bytes(32, "little") + bytes(4) for number in range(COUNT)]
PATIENCE_S = 60.0


def cut(data: bytearray) -> None:
    del data[len(data) // 3 // 4096 * 4096 :]


def fill_with_ones(data: bytearray) -> None:
    data[2 * 4096 :] = b"\xff" * (len(data) - 2 * 4096)


def store_all(hosted: Any, client: StoreClient) -> None:
    client.submit_store(1, "r", KEYS, list(range(COUNT)), None, hosted.array[:COUNT].nbytes)
    assert hosted.finish(client, 1).failed == []
    assert client.flush(PATIENCE_S)


@pytest.mark.parametrize("placement", ["inline", "extents"])
@pytest.mark.parametrize("damage", [cut, fill_with_ones])
def test_engine_outlives_a_damaged_store(
    hosted: Any, tmp_path: Path, damage: Callable[[bytearray], None], placement: str
) -> None:
    url = f"lmdb://{tmp_path}/kv?capacity=64MiB&placement={placement}"
    client = hosted.connect(url)
    client.open()
    store_all(hosted, client)
    client.close()

    file = tmp_path / "kv" / "data.mdb"
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)

    client = hosted.connect(url)
    client.open()
    deadline = time.monotonic() + PATIENCE_S
    while client.state is not State.OPEN or client.contains(KEYS[0]):
        assert time.monotonic() < deadline, "the store does not come back"
        client.submit_load(2, KEYS, list(range(COUNT, 2 * COUNT)))  # it may die of this one
        hosted.finish(client, 2, PATIENCE_S)
    store_all(hosted, client)
    assert all(map(client.contains, KEYS))
    client.submit_load(3, KEYS, list(range(COUNT, 2 * COUNT)))
    assert hosted.finish(client, 3).failed == []
    assert (hosted.array[COUNT : 2 * COUNT] == hosted.array[:COUNT]).all()
    assert len(list((tmp_path / "kv").glob("damaged-*"))) == 1
