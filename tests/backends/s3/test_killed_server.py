"""A server that is killed with -9 during writes and restarted. This needs a dedicated server: make
test-ceph."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from urllib.parse import urlsplit

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import (
    check_totals,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from tests.backends.s3.conftest import Opener
from tests.backends.s3.faults import SERVERS, wait_for_port

NAMESPACE = sample_identity().digest
CEPH = os.environ.get("PERSISTKV_S3_CEPH")

pytestmark = pytest.mark.skipif(
    CEPH is None, reason="PERSISTKV_S3_CEPH names no server that may be killed"
)


def ceph(action: str) -> None:
    # a pipe would never reach its end, because the daemons inherit it
    log = subprocess.DEVNULL
    subprocess.run(
        ["bash", str(SERVERS / "ceph.sh"), action],
        stdout=log,
        stderr=log,
        check=True,
        timeout=120,
    )


def batch(number: int) -> CommitBatch:
    packs = [
        sample_pack(NAMESPACE, 10 * number + part, blocks=8, block_bytes=1 << 18)
        for part in range(2)
    ]
    return CommitBatch(packs, [sample_manifest(f"r{number}", number)])


def test_acknowledged_commits_survive_killed_server(
    open_store: Opener,
    endpoint: str,
) -> None:
    backend, _ = open_store("refresh=0s&deadline=5s&slow=1h")
    backend.open_namespace(sample_identity())
    durable: list[int] = []
    enough, stop = threading.Event(), threading.Event()

    def write() -> None:
        for number in range(1_000_000):
            if stop.is_set():
                return
            try:
                backend.commit(NAMESPACE, batch(number))
            except StoreError:
                time.sleep(0.05)
                continue
            durable.append(number)
            if len(durable) >= 3:
                enough.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert enough.wait(60)
        ceph("kill9")
        before = len(durable)
        ceph("start")
        wait_for_port(urlsplit(endpoint).port or 80)
        until = time.monotonic() + 100
        while len(durable) < before + 3 and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        stop.set()
        writer.join()
    assert len(durable) >= before + 3, "it went on after the server came back"

    (other, _) = open_store()
    held = tables(other, NAMESPACE)
    listed = {manifest.id for manifest in other.catalogue(NAMESPACE).manifests()}
    for number in durable:
        for pack in batch(number).packs:
            payload = payload_of(pack)
            assert held[pack.pack_id] == pack.table
            assert read_pack(other, NAMESPACE, pack.table) == payload
        assert f"r{number}" in listed
    assert len(held) == 2 * len(listed), "a commit is there as a whole, or not at all"
    check_totals(other)
