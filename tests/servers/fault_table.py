"""What an engine and its store go through when the object store fails: python -m tests.servers.fault_table

An engine ticks each millisecond and hands over small stores and loads, over a connection that a proxy breaks; the
store is in its own process. Each fault lasts ``--seconds``; the time before it, with the same load, is what its ticks
are compared with. After it, what was lost is handed over once more, and a fresh handle that goes past the proxy looks
at everything.

Without ``--endpoint`` moto serves, which cannot be killed: it keeps nothing. ``make test-faults`` runs it against Ceph.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmarks.rig import Rig, fresh_keys, percentile, show
from benchmarks.s3_rig import make_bucket, plain_client, server
from persistkv.config import StoreUrl
from persistkv.storage.backend import ReadSpan
from persistkv.storage.host.client import StoreClient
from persistkv_s3 import S3Backend
from tests.backends.s3.faults import SERVERS, FaultProxy, wait_for_port

TICK_S = 0.001
JOB_TICKS = 20  # between two jobs
BLOCK = 64 << 10
JOB_BLOCKS = 8
SLOTS = 32  # jobs in flight, at most, of either kind
CONTENTS = 251
MAX_LATE_S = 0.002
OPTIONS = "deadline=3s&slow=2s&refresh=1s&cache=no"
PATIENCE_S = 90.0


class World(NamedTuple):
    """What a fault can be done to."""

    endpoint: str
    proxy: FaultProxy
    bucket: str
    client: Any
    ceph: str | None
    """Directory of a Ceph that may be killed."""


class Fault(NamedTuple):
    """Something that goes wrong, and its end."""

    name: str
    begin: Callable[[World], None]
    end: Callable[[World], None]
    trips: bool = True
    """Whether the breaker has to open."""
    keeps: bool = True
    """Whether what was durable before is there afterwards."""
    needs_ceph: bool = False


def through_proxy(name: str, mode: str, *, trips: bool = True) -> Fault:
    return Fault(name, lambda world: world.proxy.set(mode), lambda world: world.proxy.set("ok"), trips)


def ceph(world: World, action: str) -> None:
    log = subprocess.DEVNULL  # the daemons would keep a pipe open
    subprocess.run(["bash", str(SERVERS / "ceph.sh"), action], stdout=log, stderr=log, check=True, timeout=120)


def start_server(world: World) -> None:
    ceph(world, "start")
    wait_for_port(urlsplit(world.endpoint).port or 80)


def revoke(world: World) -> None:
    _user(world, "suspend") if world.ceph else world.proxy.set("deny")


def allow(world: World) -> None:
    _user(world, "enable") if world.ceph else world.proxy.set("ok")


def _user(world: World, action: str) -> None:
    environment = {**os.environ, "CEPH_CONF": f"{world.ceph}/ceph.conf"}
    command = ["radosgw-admin", "user", action, "--uid=test"]
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=60
    )


def delete_bucket(world: World) -> None:
    """The engine goes on writing to it meanwhile."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        pages = world.client.get_paginator("list_objects_v2").paginate(Bucket=world.bucket)
        for page in pages:
            if objects := [{"Key": entry["Key"]} for entry in page.get("Contents", ())]:
                world.client.delete_objects(Bucket=world.bucket, Delete={"Objects": objects, "Quiet": True})
        try:
            world.client.delete_bucket(Bucket=world.bucket)
            return
        except world.client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "BucketNotEmpty":
                raise
    raise TimeoutError(f"{world.bucket} is never empty")


def create_bucket(world: World) -> None:
    world.client.create_bucket(Bucket=world.bucket)


FAULTS = [
    through_proxy("hang", "hang"),
    through_proxy("hang after the commit", "hang_reply"),
    through_proxy("reset", "rst"),
    through_proxy("reset in the middle of a body", "rst_after 100000", trips=False),
    through_proxy("lost reply", "lose_reply"),
    through_proxy("503 storm", "s503 1000000"),
    through_proxy("slow body", "rate 20000"),
    Fault("server killed with -9 during uploads", lambda world: ceph(world, "kill9"), start_server, needs_ceph=True),
    Fault("credentials revoked", revoke, allow),
    Fault("bucket deleted", delete_bucket, create_bucket, keeps=False),
]


class Breakers(logging.Handler):
    """What the store's process told of its breaker."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = self.closed = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.opened += "requests are held back" in text
        self.closed += text.endswith("/store answers again")


class Load:
    """A steady load of small jobs, whose bytes are looked at."""

    def __init__(self, client: StoreClient, rig: Rig) -> None:
        self.client = client
        self.rig = rig
        self.durable: set[bytes] = set()
        self.offered: list[list[bytes]] = []
        self.wrong = self.missed = self.loaded = 0
        self._contents = np.random.default_rng(1).integers(0, 256, (CONTENTS, BLOCK), dtype=np.uint8)
        self._numbers = itertools.count()
        self._flying: dict[int, tuple[int, list[bytes], bool]] = {}
        self._free = {True: list(range(SLOTS)), False: list(range(SLOTS, 2 * SLOTS))}
        self._draw = random.Random(1)

    def content(self, key: bytes) -> Any:
        """The bytes of a block: they follow from its key."""
        return self._contents[int.from_bytes(key[:8], "little") % CONTENTS]

    def run(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> list[float]:
        """Tick for a while; how late each tick began."""
        late = []
        due = time.perf_counter() + TICK_S
        end = due + seconds
        for number in itertools.count():
            time.sleep(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            late.append(now - due)
            self.poll()
            if number % JOB_TICKS == 0:
                self.store(fresh_keys(JOB_BLOCKS))
                self.load()
            if now >= end or (number % JOB_TICKS == 0 and until()):
                return late
            due = now + TICK_S
        raise AssertionError("a count has no end")

    def poll(self) -> None:
        """Take what has ended, and look at what was loaded."""
        for outcome in self.client.poll():
            slot, keys, is_store = self._flying.pop(outcome.job_id)
            self._free[is_store].append(slot)
            if not is_store:
                self._look_at(slot, keys, set(outcome.failed) if not outcome.refused else set(keys))
        self.durable.update(self.client.take_stored())
        self.durable.difference_update(self.client.take_removed())
        self.client.take_persisted()

    def _look_at(self, slot: int, keys: list[bytes], failed: set[bytes]) -> None:
        for row, key in enumerate(keys, start=slot * JOB_BLOCKS):
            if key in failed:
                self.missed += 1
            else:
                self.loaded += 1
                self.wrong += not np.array_equal(self.rig.rows[row], self.content(key))

    def store(self, keys: list[bytes], *, again: bool = False) -> bool:
        """Hand a job over, where there is a slot."""
        if not self._free[True]:
            return False
        slot, number = self._free[True].pop(), next(self._numbers)
        rows = range(slot * JOB_BLOCKS, (slot + 1) * JOB_BLOCKS)
        for row, key in zip(rows, keys, strict=True):
            self.rig.rows[row] = self.content(key)
        if not again:
            self.offered.append(keys)
        self._flying[number] = (slot, keys, True)
        self.client.submit_store(number, f"r{number}", keys, rows, range(JOB_BLOCKS), JOB_BLOCKS * BLOCK)
        return True

    def load(self) -> None:
        """Ask for a job's blocks that are durable."""
        if not self._free[False] or not self.offered:
            return
        keys = self.offered[self._draw.randrange(len(self.offered))]
        if self.durable.issuperset(keys):
            slot, number = self._free[False].pop(), next(self._numbers)
            self._flying[number] = (slot, keys, False)
            self.client.submit_load(number, keys, range(slot * JOB_BLOCKS, (slot + 1) * JOB_BLOCKS))

    def hand_over_again(self) -> None:
        """Until all that was ever offered is durable, or for so long."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            lacking = [keys for keys in self.offered if not self.durable.issuperset(keys)]
            if not lacking:
                return
            for keys in lacking[:SLOTS]:
                self.store(keys, again=True)
            self.settle()

    def settle(self) -> None:
        """Wait for what is in flight, and for news."""
        self.client.flush(PATIENCE_S)
        until = time.monotonic() + 3.0
        while self._flying or time.monotonic() < until:
            self.poll()
            time.sleep(TICK_S)


def open_client(world: World, rig: Rig) -> StoreClient:
    url = f"s3://{world.bucket}/store?endpoint_url=http://127.0.0.1:{world.proxy.port}&{OPTIONS}"
    client = rig.client(url, max_age_s=0.2)
    client.open()
    return client


def check(world: World, load: Load) -> tuple[int, int, int]:
    """By a fresh handle that goes past the proxy: durable blocks that are missing, wrong, or stored twice."""
    backend = S3Backend.open(StoreUrl.parse(f"s3://{world.bucket}/store?endpoint_url={world.endpoint}&cache=no"))
    (namespace,) = [found.id for found in backend.namespaces()]
    holders: Counter[bytes] = Counter()
    wrong = 0
    for table in backend.changes(namespace, None).added:
        keys = table.keys.unpack()
        holders.update(keys)
        payload = np.zeros((len(keys), BLOCK), np.uint8)
        if backend.read(namespace, [ReadSpan(table.pack_id, 0, [payload.data.cast("B")])]) != [True]:
            holders.subtract(keys)
            continue
        wrong += sum(not np.array_equal(block, load.content(key)) for block, key in zip(payload, keys, strict=True))
    backend.close()
    missing = sum(holders[key] < 1 for keys in load.offered for key in keys)
    return missing, wrong, sum(count > 1 for count in holders.values())


def try_fault(world: World, fault: Fault, seconds: float) -> tuple[list[str], bool]:
    """A row of the table, and whether all in it is as it should be."""
    breakers = Breakers()
    log = logging.getLogger("persistkv")
    log.addHandler(breakers)
    rig = Rig(2 * SLOTS * JOB_BLOCKS, BLOCK)
    load = Load(open_client(world, rig), rig)
    load.run(1.0)
    before = load.run(seconds)
    fault.begin(world)
    beside = load.run(seconds)
    missed = load.missed
    fault.end(world)
    if not fault.keeps:
        load.client.close(5.0)
        wrong = load.wrong
        load = Load(open_client(world, rig), rig)
        load.wrong = wrong
    durable = len(load.durable)
    load.run(PATIENCE_S, until=lambda: len(load.durable) > durable)
    load.settle()
    load.hand_over_again()
    load.client.close()
    log.removeHandler(breakers)
    missing, wrong, twice = check(world, load)
    wrong += load.wrong
    p99 = [percentile(late, 0.99) for late in (before, beside)]
    breaker = breakers.opened == breakers.closed > 0 if fault.keeps else breakers.opened > 0
    good = not (missing or wrong or twice) and (breaker or not fault.trips) and p99[1] - p99[0] <= MAX_LATE_S
    told = f"{breakers.opened} / {breakers.closed}"
    row = [fault.name, str(missed), str(wrong), str(missing), str(twice), told]
    return [*row, *(f"{value * 1e3:.2f} ms" for value in p99), "yes" if good else "NO"], good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a fault, and of the time before it")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    arguments = parser.parse_args()
    logging.getLogger("persistkv").propagate = False
    found = os.environ.get("PERSISTKV_S3_CEPH")
    rows, good = [], True
    with server(arguments.endpoint) as endpoint:
        for fault in FAULTS:
            if arguments.only not in fault.name or (fault.needs_ceph and not found):
                continue
            proxy = FaultProxy(urlsplit(endpoint).port or 80)
            client = plain_client(endpoint)
            world = World(endpoint, proxy, make_bucket(endpoint), client, found if arguments.endpoint else None)
            try:
                row, well = try_fault(world, fault, arguments.seconds)
            finally:
                proxy.close()
                client.close()
            rows.append(row)
            sys.stderr.write(" · ".join(row) + "\n")
            good &= well
    columns = ["fault", "misses meanwhile", "wrong", "missing after", "twice", "breaker opened / closed"]
    columns += ["p99 before", "p99 beside", f"as it should be, + {MAX_LATE_S * 1e3:.0f} ms at most"]
    where = "moto" if arguments.endpoint is None else "Ceph" if found else arguments.endpoint
    show(f"Faults of the object store ({where}), and how late a ticker of 1 ms is beside them", columns, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
