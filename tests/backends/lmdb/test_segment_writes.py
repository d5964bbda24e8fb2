"""Segment writes in threads end before their transaction ends, whether it commits or fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalog import CatalogTransaction
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.commit import Amount, Room
from tests.backends.lmdb.consistency import find_faults

SECONDS = 30.0  # longest wait for an event


def test_commit_out_of_space_waits_for_segment_writes_before_evicting(
    backend: LmdbBackend, namespace: bytes, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lack of space is found during the writes. The transactions that evict begin after these writes have ended."""
    if placement == "inline":
        pytest.skip("LMDB writes inline payloads itself")
    may_write, writes = threading.Event(), threading.Event()
    running, summed_up, refused, begun = list[bool](), list[bool](), list[int](), list[int]()
    pwritev, sum_up, used, begin = os.pwritev, CatalogTransaction.finish, Room.used, Room.__init__

    def slow(*arguments: Any) -> Any:
        running.append(True)
        writes.set()
        assert may_write.wait(SECONDS)
        written = pwritev(*arguments)
        running.pop()
        return written

    def note_sum(self: CatalogTransaction) -> None:
        sum_up(self)
        summed_up.append(True)

    def report_too_much_once(self: Room) -> Amount:
        if not summed_up or refused:
            return used(self)
        assert writes.wait(SECONDS)
        refused.append(len(running))
        threading.Timer(0.1, may_write.set).start()
        return Amount(1 << 60, 1 << 60)

    def note_begin(self: Room, *arguments: Any, **options: Any) -> None:
        begun.append(len(running))
        begin(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", slow)
        patch.setattr(CatalogTransaction, "finish", note_sum)
        patch.setattr(Room, "used", report_too_much_once)
        patch.setattr(Room, "__init__", note_begin)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1, blocks=3, block_bytes=1 << 20)]))
    assert refused == [1], "no write was running when the lack of space was found"
    assert len(begun) > 1
    assert not any(begun), "a transaction began while writes of the previous one were running"
    assert find_faults(backend) == []


def test_commit_aborted_waits_for_its_segment_writes(
    backend: LmdbBackend, namespace: bytes, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next transaction may reuse the extents, and the engine reuses the rows as soon as the commit has failed."""
    if placement == "inline":
        pytest.skip("LMDB writes inline payloads itself")
    may_write, running, writes = threading.Event(), [], []
    pwritev = os.pwritev

    def slow(*arguments: Any) -> Any:
        running.append(True)
        assert may_write.wait(SECONDS)
        writes.append(pwritev(*arguments))
        running.pop()
        return writes[-1]

    def fail(self: CatalogTransaction) -> None:
        threading.Timer(0.1, may_write.set).start()
        raise StoreError("aborted")

    pack = sample_pack(namespace, 1, blocks=3, block_bytes=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", slow)
        patch.setattr(CatalogTransaction, "finish", fail)
        with pytest.raises(StoreError, match="aborted"):
            backend.commit(namespace, CommitBatch([pack]))
        assert writes
        assert not running
    backend.commit(namespace, CommitBatch([pack]))
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
    return pwritev(*arguments)

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


def test_commit_interrupted_twice_keeps_commit_of_other_process(path: Path, placement: str) -> None:
    if placement == "inline":
        pytest.skip("LMDB writes inline payloads itself")
    script = INTERRUPTED.replace('sys.argv[0], sys.argv[1], "other"', 'SCRIPT, sys.argv[1], "other"')
    script = f"SCRIPT = {script!r}\n{script}"
    command = [sys.executable, "-c", script, f"lmdb://{path}?capacity=64MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n"
