"""Stores that are opened for reading: the option ``read_only``, and read-only file systems, as in
an image."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import Opener
from tests.storage.host.conftest import hosted  # noqa: F401
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import BLOCK, make_keys


def files_of(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return size, time of the last write and content of each file, by path."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            status = file.stat()
            found[str(file.relative_to(path))] = (
                status.st_size,
                status.st_mtime_ns,
                file.read_bytes(),
            )
    return found


def fill(hosted: Hosted, url: str, count: int) -> list[bytes]:  # noqa: F811
    """Store blocks with a writing client; return their keys."""
    keys = make_keys(count)
    client = hosted.connect(url)
    client.open()
    client.submit_store(1, "a", keys, range(count), None, count * BLOCK)
    assert client.flush(90)
    assert client.close()
    return keys


@pytest.mark.parametrize("placement", ["inline", "extents"])
def test_read_only_option_loads_and_drops_without_writing(
    hosted: Hosted,  # noqa: F811
    path: Path,
    placement: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = fill(hosted, f"lmdb://{path}?placement={placement}", 8)
    before = files_of(path)
    expected = hosted.array[:8].copy()
    client = hosted.connect(f"lmdb://{path}?read_only=yes")
    client.open()
    assert client.table.prefix(keys) == 8
    client.submit_load(1, keys, range(8, 16))
    assert hosted.finish(client, 1).failed == []
    assert (hosted.array[8:16] == expected).all()

    for job_id, first in ((2, 100), (3, 200)):
        client.submit_store(job_id, "b", make_keys(4, first), range(4), None, 4 * BLOCK)
        hosted.finish(client, job_id)
    stats = client.stats(90).host
    assert stats is not None
    assert (stats.counters.dropped_blocks, stats.counters.dropped_bytes) == (
        8,
        8 * BLOCK,
    )
    assert caplog.text.count("open for reading only") == 1
    assert client.close()
    after = files_of(path)
    before.pop("lock.mdb")  # LMDB's table of readers
    after.pop("lock.mdb")
    assert after == before


def test_read_only_option_other_identity_misses_and_drops(
    hosted: Hosted,  # noqa: F811
    path: Path,
) -> None:
    keys = fill(hosted, f"lmdb://{path}", 8)
    client = hosted.connect(
        f"lmdb://{path}?read_only=yes", identity={"weights": "other"}
    )
    client.open()
    assert client.table.prefix(keys) == 0
    client.submit_load(1, keys, range(8, 16))
    assert hosted.finish(client, 1).failed == keys
    client.submit_store(2, "b", keys[:4], range(4), None, 4 * BLOCK)
    hosted.finish(client, 2)
    stats = client.stats(90).host
    assert stats is not None
    assert stats.counters.dropped_blocks == 4
    assert client.close()


def test_read_only_option_rejects_writes(
    open_store: Opener,
    identity: Identity,
) -> None:
    writer = open_store()
    namespace = writer.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    writer.commit(namespace, CommitBatch([pack]))
    reader = open_store("?read_only=yes")
    assert not reader.capabilities.writable
    assert reader.status_interval_s is None
    with pytest.raises(StoreError, match="read-only"):
        reader.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
    assert reader.tables(namespace, [pack.pack_id]) == [pack.table]


MOUNT = (
    'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$2" -c "$3" "$1"'
)
ENGINE = """
import logging, os, sys
from persistkv.config import GroupLayout, RowLayout
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.protocol import Hello
from persistkv.storage.host.hosts import ProcessHost
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from tests.storage.host.conftest import NUM_ROWS, STRIDE
from tests.storage.host.jobs import BLOCK, make_keys
logging.basicConfig(level=logging.WARNING)
fd = os.memfd_create("rows")
os.ftruncate(fd, STRIDE * NUM_ROWS)
layout = RowLayout(STRIDE, (GroupLayout(((0, STRIDE),)),))
hello = Hello("lmdb://" + sys.argv[1], Identity.of({"weights": "w"}).encode(), layout, StoreOptions())
client = StoreClient(ProcessHost((fd,), STRIDE * NUM_ROWS), hello, max_queue_bytes=1 << 30)
client.open()
keys = make_keys(8)
assert client.table.prefix(keys) == 8
client.submit_load(1, keys, range(8))
client.submit_store(2, "b", make_keys(4, 100), range(100, 104), None, 4 * BLOCK)
outcomes = {}
while len(outcomes) < 2:
    outcomes.update((outcome.job_id, outcome) for outcome in client.poll())
assert outcomes[1].failed == [], outcomes
assert client.stats(90).host.counters.dropped_blocks == 4
os.pwrite(1, os.pread(fd, 8 * STRIDE, 0), 0)
assert client.close()
"""
CAN_MOUNT = (
    subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, check=False
    ).returncode
    == 0
)


@pytest.mark.skipif(not CAN_MOUNT, reason="mounts need privileges")
@pytest.mark.parametrize("placement", ["inline", "extents"])
def test_open_on_read_only_file_system_loads_and_drops_with_one_line_each(
    hosted: Hosted,  # noqa: F811
    path: Path,
    tmp_path: Path,
    placement: str,
) -> None:
    fill(hosted, f"lmdb://{path}?placement={placement}", 8)
    before = files_of(path)
    loaded = tmp_path / "loaded"
    command: list[str | Path] = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        MOUNT,
        "sh",
        path,
        sys.executable,
        ENGINE,
    ]
    with loaded.open("wb") as output:
        engine = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    assert engine.returncode == 0, engine.stderr
    assert loaded.read_bytes() == hosted.array[:8].tobytes()
    assert engine.stderr.count("read-only file system") == 1
    assert engine.stderr.count("open for reading only") == 1
    assert files_of(path) == before


def test_open_on_writable_file_system_writes(
    open_store: Opener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        backend: LmdbBackend = open_store()
    assert backend.capabilities.writable
    assert caplog.text == ""
