"""What S3 costs: requests, as boto3 sends them, and the client's CPU, beside a plain boto3 loop over the same bytes.

    python -m benchmarks.s3_cost [--endpoint http://127.0.0.1:7480] [--packs 10000] [--cpu-mib 1024]

Without ``--endpoint`` moto serves, in a process of its own. Credentials come from the environment, or are ``test``.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import boto3
import numpy as np

from benchmarks.rig import show
from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.codec import RawCodec
from persistkv.storage.identity import Identity
from persistkv.storage.pack import ByteArray, PackWriter, Segment
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.rows import Rows
from persistkv.storage.store import Store
from persistkv.testing.samples import ArraySource, sample_manifest
from persistkv_s3 import S3Backend
from persistkv_s3.client import BotoClient
from persistkv_s3.options import parse_url
from persistkv_tools.rig import fresh_keys

TOKENS_PER_BLOCK = 16
PACK_BYTES = 16 << 20  # 16 MiB: the packs of the CPU figures
BLOCK_BYTES = 256 << 10  # 256 KiB: the objects of the loop that they stand beside
PUT_TARGET, GET_TARGET = 0.6, 0.8  # CPU seconds per GB


class Model(NamedTuple):
    """A block's size."""

    name: str
    block_bytes: int


MODELS = (Model("demo: 8 layers of 512", 256 << 10), Model("8B: 32 layers, 8 KV heads of 128", 2 << 20))


class CountingClient(BotoClient):
    """Counts requests as they are sent."""

    def __init__(self, url: str) -> None:
        super().__init__(*parse_url(StoreUrl.parse(url)))
        self._sent: Counter[str] = Counter()
        self._client.meta.events.register("before-send.s3", self._count)

    def _count(self, request: Any, **_: Any) -> None:
        self._sent[request.method] += 1

    def take(self) -> int:
        """How many there were since the last call."""
        total = sum(self._sent.values())
        self._sent.clear()
        return total


def connect(url: str) -> tuple[S3Backend, CountingClient]:
    """A handle whose requests are counted."""
    client = CountingClient(url)
    return S3Backend.connect(*parse_url(StoreUrl.parse(url)), client), client


@contextmanager
def server(given: str | None) -> Iterator[str]:
    """The endpoint; moto's own process where none was given."""
    if given is not None:
        yield given
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def count_request(url: str, model: Model, tokens: int) -> list[str]:
    """Store one request and promote it by another handle; a row of the table."""
    blocks = tokens // TOKENS_PER_BLOCK
    memory = memoryview(np.random.default_rng(0).integers(0, 256, blocks * model.block_bytes, dtype=np.uint8).data)
    rows = Rows(memory, RowLayout(model.block_bytes, (GroupLayout(((0, model.block_bytes),)),)))
    identity = Identity.of({"benchmark": model.name})
    backend, client = connect(url)
    store = Store(backend, identity, rows, StoreOptions(), url=url)
    keys = fresh_keys(blocks)
    client.take()
    store.put("r", keys, range(blocks), range(blocks))
    store.end_request(RequestEnd("r", "manifest", (keys,), tokens, TOKENS_PER_BLOCK))
    store.commit()
    stored = client.take()
    assert store.counters.stored_blocks == blocks
    assert not any(store.contains(key) for key in fresh_keys(1000))
    missing = client.take()
    store.close()

    backend, client = connect(url)
    store = Store(backend, identity, rows, StoreOptions(), url=url)
    client.take()
    assert store.read(keys, range(blocks)) == []
    promoted, num_packs = client.take(), len(backend.changes(store.namespace, None).added)
    store.close()
    per_1000 = 1000 / tokens
    each = 1000 / TOKENS_PER_BLOCK
    return [
        model.name,
        f"{num_packs} packs + {stored - num_packs}",
        f"{promoted}",
        f"{missing}",
        f"{stored * per_1000:.1f} / {each:.1f}",
        f"{promoted * per_1000:.1f} / {each:.1f}",
    ]


def count_open(url: str, packs: int, per_commit: int) -> list[list[str]]:
    """Fill a bucket, open it anew, and idle."""
    backend, client = connect(url)
    namespace = backend.open_namespace(Identity.of({"benchmark": "open"})).id
    blocks = np.zeros((1, 4096), dtype=np.uint8)
    for first in range(0, packs, per_commit):
        batch = [pack_of(namespace, blocks) for _ in range(min(per_commit, packs - first))]
        backend.commit(namespace, CommitBatch(batch, [sample_manifest(f"r{first}")]))
    filling = client.take()
    backend.close()
    backend, client = connect(f"{url}&refresh=100s")
    begin = time.perf_counter()
    namespace = backend.open_namespace(Identity.of({"benchmark": "open"})).id
    changes = backend.changes(namespace, None)
    seconds, opening = time.perf_counter() - begin, client.take()
    for _ in range(1000):
        changes = backend.changes(namespace, changes.cursor)
    between = client.take()
    backend._space(namespace).follower.refresh()
    idle = client.take()
    backend.close()
    commits = -(-packs // per_commit)
    return [
        [f"open {packs:,} packs", f"{opening}", f"{seconds:.2f} s"],
        ["1,000 looks between two refreshes", f"{between}", ""],
        ["a refresh where nothing happened", f"{idle}", ""],
        [
            f"a commit, beside its packs: mean of {commits:,}, snapshots included",
            f"{(filling - packs) / commits:.2f}",
            "",
        ],
    ]


def pack_of(namespace: bytes, blocks: ByteArray) -> PackWriter:
    """A pack of fresh keys."""
    segment = Segment(0, blocks.shape[1], fresh_keys(len(blocks)), ArraySource(blocks), 0)
    return PackWriter(namespace, RawCodec(), [segment])


def cpu_per_gb(work: Callable[[], object], num_bytes: int) -> float:
    """CPU seconds of this process, all threads, per GB."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / (num_bytes / 1e9)


def measure_cpu(url: str, bucket: str, endpoint: str, num_bytes: int) -> list[list[str]]:
    """Packs through the driver, and the same bytes through plain boto3."""
    backend, _ = connect(f"{url}&unsigned_payload=yes")
    namespace = backend.open_namespace(Identity.of({"benchmark": "cpu"})).id
    count = num_bytes // PACK_BYTES
    blocks = np.random.default_rng(1).integers(0, 256, (PACK_BYTES // BLOCK_BYTES, BLOCK_BYTES), dtype=np.uint8)
    packs = [pack_of(namespace, blocks) for _ in range(count)]
    put = cpu_per_gb(lambda: [backend.commit(namespace, CommitBatch([pack])) for pack in packs], num_bytes)
    into = memoryview(bytearray(PACK_BYTES))
    spans = [[ReadSpan(pack.pack_id, 0, [into])] for pack in packs]
    got = cpu_per_gb(lambda: [backend.read(namespace, span) for span in spans], num_bytes)
    backend.close()
    found = [("16 MiB packs, persistkv", put, got)]
    plain = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    for name, length in (("16 MiB objects, plain boto3", PACK_BYTES), ("256 KiB objects, plain boto3", BLOCK_BYTES)):
        total = num_bytes if length == PACK_BYTES else num_bytes // 4
        body = bytes(blocks.reshape(-1)[:length])
        keys = [f"plain/{length}/{number}" for number in range(total // length)]
        put = cpu_per_gb(lambda k=keys, b=body: [plain.put_object(Bucket=bucket, Key=key, Body=b) for key in k], total)  # type: ignore[misc]
        got = cpu_per_gb(lambda k=keys: [plain.get_object(Bucket=bucket, Key=key)["Body"].read() for key in k], total)  # type: ignore[misc]
        found.append((name, put, got))
    plain.close()
    targets = [f"{PUT_TARGET} / {GET_TARGET}", "", ""]
    return [[name, f"{put:.2f}", f"{got:.2f}", target] for (name, put, got), target in zip(found, targets, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint")
    parser.add_argument("--tokens", type=int, default=4096, help="of the request that is stored and promoted")
    parser.add_argument("--packs", type=int, default=10_000)
    parser.add_argument("--per-commit", type=int, default=5)
    parser.add_argument("--cpu-mib", type=int, default=1024)
    arguments = parser.parse_args()
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "testsecret")
    with server(arguments.endpoint) as endpoint:
        bucket = f"benchmark-{uuid.uuid4().hex}"
        plain = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        plain.create_bucket(Bucket=bucket)
        plain.close()

        def url(prefix: str) -> str:
            return f"s3://{bucket}/{prefix}?endpoint_url={endpoint}"

        columns = ["model", "store", "promote", "1,000 misses", "store, per 1,000 tokens / one object a block"]
        rows = [count_request(url("request"), model, arguments.tokens) for model in MODELS]
        show(f"Requests of one context of {arguments.tokens} tokens", [*columns, "promote, the same"], rows)
        show(
            "Requests of an engine",
            ["", "requests", ""],
            count_open(url("open"), arguments.packs, arguments.per_commit),
        )
        cpu = measure_cpu(url("cpu"), bucket, endpoint, arguments.cpu_mib << 20)
        show("Client CPU, seconds per GB", ["", "put", "get", "at most"], cpu)


if __name__ == "__main__":
    main()
