"""Engines on a damaged store: the host process may die of it, the engine survives and stores its
blocks again."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.connection import discard
from persistkv.storage.host.protocol import JobDone, LoadJob, Mapped, Opened
from persistkv.storage.host.supervisor import State
from persistkv.storage.records import StoreReport
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import Served

COUNT = 32
KEYS = [number.to_bytes(32, "little") + bytes(4) for number in range(COUNT)]
PATIENCE_S = 60.0


def cut(data: bytearray) -> None:
    del data[len(data) // 3 // 4096 * 4096 :]


def fill_with_ones(data: bytearray) -> None:
    data[2 * 4096 :] = b"\xff" * (len(data) - 2 * 4096)


def store_all(hosted: Hosted, client: StoreClient) -> None:
    client.submit_store(
        1, "r", KEYS, list(range(COUNT)), None, hosted.array[:COUNT].nbytes
    )
    assert hosted.finish(client, 1).failed == []
    assert client.flush(PATIENCE_S)


@pytest.mark.parametrize("placement", ["inline", "extents"])
@pytest.mark.parametrize("damage", [cut, fill_with_ones])
def test_engine_damaged_store_survives_and_stores_again(
    hosted: Hosted,
    tmp_path: Path,
    damage: Callable[[bytearray], None],
    placement: str,
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
        # this load may kill the host process
        client.submit_load(2, KEYS, list(range(COUNT, 2 * COUNT)))
        hosted.finish(client, 2, PATIENCE_S)
    store_all(hosted, client)
    assert all(map(client.contains, KEYS))
    client.submit_load(3, KEYS, list(range(COUNT, 2 * COUNT)))
    assert hosted.finish(client, 3).failed == []
    assert (hosted.array[COUNT : 2 * COUNT] == hosted.array[:COUNT]).all()
    assert len(list((tmp_path / "kv").glob("damaged-*"))) == 1


def test_load_corrupt_pack_reports_removal_before_job_ends(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    """Otherwise the engine assumes that recomputed blocks are still stored, and loses them with the
    pack."""
    url = f"lmdb://{tmp_path}/kv?capacity=64MiB"
    client = hosted.connect(url)
    client.open()
    store_all(hosted, client)
    client.close()
    segment = tmp_path / "kv" / "segments" / "00000000.seg"
    data = bytearray(segment.read_bytes())
    data[data.index(hosted.array[5].tobytes())] ^= 1
    segment.write_bytes(data)

    served = Served(memoryview(hosted.memory))
    served.connection.send(hosted.connect(url).supervisor.hello)
    for message in served.receive_until(Opened):
        discard(message)
    served.connection.send(Mapped())
    rows = array("I", range(COUNT, 2 * COUNT)).tobytes()
    served.connection.send(LoadJob(1, PackedKeys.of(KEYS), rows))
    report, done = served.receive_until(JobDone)[:2]
    assert isinstance(report, StoreReport)
    assert sorted(report.removed) == sorted(KEYS)
    assert isinstance(done, JobDone)
    assert done.failed is not None
    assert KEYS[5] in done.failed.unpack()
    served.close()
