"""Segment writes in threads end before their commit ends or tries again, whether it succeeds or
fails."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from persistkv.errors import StoreError
from persistkv.memory.rows import ByteArray
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue import TableRows
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv.testing.samples import payload_of, sample_keys
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.payloads.room import Room
from tests.backends.lmdb.consistency import find_faults

MIB = 1 << 20
SECONDS = 30.0  # longest wait for an event


class AlignedSource:
    """Blocks of 1 MiB in aligned memory, so that writes need no copies and overlap.

    :param on_last: called when the last third of the blocks is read.
    """

    def __init__(self, blocks: int, on_last: Callable[[], None] = lambda: None) -> None:
        self.memory = memoryview(mmap.mmap(-1, blocks * MIB))
        self.on_last, self.last = on_last, 2 * blocks // 3
        for block in range(blocks):
            self.memory[block * MIB : (block + 1) * MIB] = bytes([block + 1]) * MIB

    def gather(self, start: int, stop: int) -> ByteArray:
        return np.frombuffer(self.memory[start * MIB : stop * MIB], np.uint8).reshape(
            stop - start, MIB
        )

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        if start >= self.last:
            self.on_last()
        return [self.memory[start * MIB : stop * MIB]]


def aligned_pack(
    namespace: bytes,
    on_last: Callable[[], None] = lambda: None,
) -> PackWriter:
    return PackWriter(
        namespace,
        RawCodec(),
        [Section(0, MIB, sample_keys(1, 12), AlignedSource(12, on_last))],
    )


def test_commit_disk_full_waits_for_segment_writes_before_evicting(
    backend: LmdbBackend,
    namespace: bytes,
    placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of two writes finds the disk full. No transaction begins before the other write has
    ended."""
    if placement == "inline":
        pytest.skip("LMDB writes inline payloads itself")
    may_write, writes = threading.Event(), threading.Event()
    calls, running, refused, begun = (
        list[bool](),
        list[bool](),
        list[int](),
        list[int](),
    )
    pwritev, begin = os.pwritev, Room.__init__

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(True)
        if len(calls) == 2:
            assert writes.wait(SECONDS)
            refused.append(len(running))
            threading.Timer(0.1, may_write.set).start()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        running.append(True)
        writes.set()
        assert may_write.wait(SECONDS)
        written = pwritev(fd, buffers, offset)
        running.pop()
        return written

    def note_begin(
        self: Room,
        environment: Environment,
        transaction: TableRows,
        *,
        without_growth: bool = False,
    ) -> None:
        begun.append(len(running))
        begin(self, environment, transaction, without_growth=without_growth)

    pack = aligned_pack(namespace)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write)
        patch.setattr(Room, "__init__", note_begin)
        backend.commit(namespace, CommitBatch([pack]))
    assert refused == [1], "no write was running when the disk was found full"
    assert len(begun) > 2
    assert not any(begun), "a transaction began while a write was running"
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)
    assert find_faults(backend) == []


def test_commit_failed_waits_for_its_segment_writes(
    backend: LmdbBackend,
    namespace: bytes,
    placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next commit writes into the same extents, and the engine reuses the rows as soon as the
    commit has failed."""
    if placement == "inline":
        pytest.skip("LMDB writes inline payloads itself")
    may_write, running, writes = threading.Event(), list[bool](), list[int]()
    pwritev = os.pwritev

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        running.append(True)
        assert may_write.wait(SECONDS)
        writes.append(pwritev(fd, buffers, offset))
        running.pop()
        return writes[-1]

    def fail() -> None:
        threading.Timer(0.1, may_write.set).start()
        raise StoreError("unreadable")

    pack = aligned_pack(namespace, fail)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", slow)
        with pytest.raises(StoreError, match="unreadable"):
            backend.commit(namespace, CommitBatch([pack]))
        assert writes
        assert not running
    assert tables(backend, namespace) == {}
    pack = aligned_pack(namespace)
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)
    assert find_faults(backend) == []


INTERRUPTED = """
import os, signal, subprocess, sys, threading, time
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import read_pack
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend

def stored(number):
    return sample_pack(name, number, blocks=3, block_bytes=1 << 20)

signal.signal(signal.SIGINT, signal.default_int_handler)
backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
name = backend.open_namespace(Identity.of({})).id
if len(sys.argv) > 2:
    backend.commit(name, CommitBatch([stored(2)]))
    sys.exit()
may_write, begun, pwritev = threading.Event(), threading.Event(), os.pwritev

def slow(*arguments):
    begun.set()
    may_write.wait(5)
    return pwritev(fd, buffers, offset)

def press():
    begun.wait()
    for _ in range(2):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    may_write.set()

os.pwritev = slow
threading.Thread(target=press, daemon=True).start()
try:
    backend.commit(name, CommitBatch([stored(1)]))
except KeyboardInterrupt:
    subprocess.run([sys.executable, "-c", sys.argv[0], sys.argv[1], "other"], check=True)
may_write.set()
backend.close()
backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]), read_only=True)
found = {table.pack_id: read_pack(backend, name, table) for table in backend.changes(name, None).added}
print(found == {stored(2).pack_id: payload_of(stored(2))})
"""


def test_commit_interrupted_twice_keeps_commit_of_other_process(
    path: Path,
    placement: str,
) -> None:
    if placement == "inline":
        pytest.skip("LMDB writes inline payloads itself")
    script = INTERRUPTED.replace(
        'sys.argv[0], sys.argv[1], "other"', 'SCRIPT, sys.argv[1], "other"'
    )
    script = f"SCRIPT = {script!r}\n{script}"
    command = [sys.executable, "-c", script, f"lmdb://{path}?capacity=64MiB"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "True\n"
