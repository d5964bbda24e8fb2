"""Writers with overlapping requests on one bucket, with readers: python -m tests.servers.writers
--seconds 120

All writers store the same shared prefixes at the same time, each followed by blocks of their own.
Afterwards a new handle reads and compares every block that was reported as durable. Every pack of
the index must have its object, and the index must name each block once: two writers that store the
same prefix at once upload two objects of one pack.

PERSISTKV_S3_ENDPOINT names the server (make test-writers starts one). Credentials are read from the
environment.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import uuid
from collections import Counter
from multiprocessing.connection import Connection
from typing import NamedTuple

import boto3
import numpy as np
import numpy.typing as npt

from persistkv.base import make_offload_key
from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.errors import StoreError
from persistkv.memory.rows import Rows
from persistkv.storage.format.pack import ID_BYTES
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.shared import SharedBackend
from persistkv.storage.shared.format import Names
from persistkv.storage.store.blocking import BlockingStore
from persistkv_s3 import S3Backend

BLOCK = 256 << 10
PREFIX, OWN = 64, 8  # blocks: a pack cut at a fixed depth, and a pack of staged blocks
IDENTITY = Identity.of({"trial": "writers"})
OPTIONS = StoreOptions(staging_bytes=64 << 20)  # four packs of a prefix
PATIENCE_S = 60.0


class Report(NamedTuple):
    """Result of one process."""

    keys: set[bytes]
    """Blocks that were reported as durable."""
    requests: int
    reads: int
    wrong: int
    """Blocks with other bytes than those of their key."""
    dropped: int


def prefix_keys(family: int) -> list[bytes]:
    return [_key(b"shared", family, depth) for depth in range(PREFIX)]


def own_keys(writer: int, number: int) -> list[bytes]:
    return [_key(b"own %d" % writer, number, depth) for depth in range(OWN)]


def _key(kind: bytes, first: int, second: int) -> bytes:
    return bytes(
        make_offload_key(
            kind.ljust(16, b"\0")
            + first.to_bytes(8, "big")
            + second.to_bytes(8, "big"),
            0,
        )
    )


def content(key: bytes) -> npt.NDArray[np.uint8]:
    """Return the bytes of a block, derived from its key."""
    return np.random.default_rng(list(key)).integers(0, 256, BLOCK, dtype=np.uint8)


def open_store(url: str) -> BlockingStore:
    return store_of(S3Backend.open(StoreUrl.parse(url)), url)


def store_of(backend: S3Backend, url: str) -> BlockingStore:
    rows = Rows(
        memoryview(bytearray((PREFIX + OWN) * BLOCK)),
        RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),)),
    )
    return BlockingStore(backend, IDENTITY, rows, OPTIONS, url=url)


def read_some(store: BlockingStore, keys: list[bytes]) -> tuple[int, int]:
    """Read blocks. Return the number of blocks that were read, and the number of wrong ones."""
    failed = set(store.read(keys, range(len(keys))))
    came = [(row, key) for row, key in enumerate(keys) if key not in failed]
    return len(came), sum(
        not np.array_equal(store.rows.array[row], content(key)) for row, key in came
    )


def write(url: str, writer: int, seconds: float, to_parent: Connection) -> None:
    """Store one request after another, each with a shared prefix and blocks of its own."""
    store, begin = open_store(url), time.monotonic()
    durable: set[bytes] = set()
    number = 0
    while time.monotonic() - begin < seconds:
        # all writers are at the same prefix at about the same time
        family = int((time.monotonic() - begin) / 3)
        keys = [*prefix_keys(family), *own_keys(writer, number)]
        for row, key in enumerate(keys):
            store.rows.array[row] = content(key)
        store.put(f"r{number}", keys, range(len(keys)), range(len(keys)))
        store.end_request(
            RequestEnd(f"r{number}", f"{writer}-{number}", (keys,), 16 * len(keys), 16)
        )
        store.flush()
        store.refresh()
        durable.update(key for key in keys if store.contains(key))
        number += 1
    store.close()
    to_parent.send(Report(durable, number, 0, 0, store.counters.dropped_blocks))


def follow(url: str, reader: int, seconds: float, to_parent: Connection) -> None:
    """Read random blocks from the current content."""
    store, begin = open_store(url), time.monotonic()
    draw = random.Random(reader)
    reads = wrong = 0
    while time.monotonic() - begin < seconds:
        try:
            store.refresh()
        except StoreError:
            continue
        tables = store.view.backend.tables(store.namespace, store.index.pack_ids())
        known = [key for table in tables for key in table.keys.unpack()]
        came, bad = read_some(store, draw.sample(known, min(OWN, len(known))))
        reads, wrong = reads + came, wrong + bad
    store.close()
    to_parent.send(Report(set(), 0, reads, wrong, 0))


def run(url: str, writers: int, readers: int, seconds: float) -> list[Report]:
    """Run all writers and readers at the same time, each in its own process."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for number in range(writers + readers):
        ours, theirs = context.Pipe(duplex=False)
        work = write if number < writers else follow
        processes.append(
            context.Process(
                target=work, args=(url, number, seconds, theirs), daemon=True
            )
        )
        lines.append(ours)
    for process in processes:
        process.start()
    reports = [line.recv() for line in lines]
    for process in processes:
        process.join()
    return reports


def wait_until_merged(backend: SharedBackend, client: object, bucket: str) -> None:
    """Wait until the inbox is empty, and read everything."""
    until = time.monotonic() + PATIENCE_S
    while left := waiting_commits(client, bucket):
        if time.monotonic() > until:
            raise TimeoutError(f"{len(left)} commits remain in the inbox: {left[:3]}")
        time.sleep(0.2)
    backend.refresh()


def waiting_commits(client: object, bucket: str) -> list[str]:
    """Return the objects of commits that are not merged."""
    return [key for key in stored_objects(client, bucket, "store/") if "/inbox/" in key]


def stored_objects(client: object, bucket: str, prefix: str) -> list[str]:
    pager = client.get_paginator("list_objects_v2")  # type: ignore[attr-defined]
    pages = pager.paginate(Bucket=bucket, Prefix=prefix)
    return [entry["Key"] for page in pages for entry in page.get("Contents", ())]


def problems_of(
    url: str,
    bucket: str,
    client: object,
    reports: list[Report],
) -> list[str]:
    """Return descriptions of all violations in the store."""
    backend = S3Backend.open(StoreUrl.parse(url))
    store = store_of(backend, url)
    last = _key(b"last", 0, 0)  # who commits merges what others left
    store.put("last", [last], [0], [0])
    store.end_request(RequestEnd("last", "last", ([last],), 16, 16))
    store.flush()
    wait_until_merged(backend, client, bucket)
    durable = sorted(set().union(*(report.keys for report in reports)))
    problems = [
        f"{report.wrong} wrong blocks were read" for report in reports if report.wrong
    ]
    came = wrong = 0
    for first in range(0, len(durable), PREFIX):
        found, bad = read_some(store, durable[first : first + PREFIX])
        came, wrong = came + found, wrong + bad
    if came < len(durable) or wrong:
        problems.append(
            f"of {len(durable)} durable blocks {came} came, {wrong} of them wrong"
        )
    tables = list(backend.changes(store.namespace, None).added)
    holders = Counter(key for table in tables for key in table.keys.unpack())
    twice = [key for key, count in holders.items() if count > 1]
    if twice:
        problems.append(f"{len(twice)} blocks are in more than one pack")
    names = Names(store.namespace)
    objects: set[bytes] = set()
    for key in stored_objects(client, bucket, f"store/{names.packs}"):
        name = names.pack_name(key.removeprefix("store/"))
        if name is not None:
            objects.add(name[:ID_BYTES])
    if lost := {table.pack_id for table in tables} - objects:
        problems.append(f"{len(lost)} packs of the index have no object")
    store.close()
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint", default=os.environ.get("PERSISTKV_S3_ENDPOINT"))
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "testsecret")
    client = boto3.client(
        "s3", endpoint_url=arguments.endpoint, region_name="us-east-1"
    )
    bucket = f"writers-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    url = f"s3://{bucket}/store?endpoint_url={arguments.endpoint}&refresh=1s&slow=1h&cache=no"
    reports = run(url, arguments.writers, arguments.readers, arguments.seconds)
    problems = problems_of(url, bucket, client, reports)
    sys.stdout.write(
        f"{arguments.writers} writers, {arguments.seconds:g} s: "
        f"{sum(report.requests for report in reports)} requests, "
        f"{len(set().union(*(report.keys for report in reports)))} blocks durable, "
        f"{sum(report.dropped for report in reports)} dropped, "
        f"{sum(report.reads for report in reports)} read beside\n"
    )
    for problem in problems:
        sys.stdout.write(f"WRONG: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
