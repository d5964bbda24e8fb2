"""Clients of stores with shared rows, on both hosts: process and thread."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np
import numpy.typing as npt

from persistkv.config import GroupLayout, RowLayout
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import Host, ProcessHost, ThreadHost
from persistkv.storage.host.in_flight import JobOutcome
from persistkv.storage.host.protocol import Hello
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from tests.storage.stores import StoreSettings

STRIDE = 64 << 10
NUM_ROWS = 128
CONTENT = np.random.default_rng(3).integers(0, 256, (NUM_ROWS, STRIDE), dtype=np.uint8)
"""First content of the rows."""


@dataclass
class Hosted:
    """Clients, their hosts, and the rows they share."""

    memory: mmap.mmap
    fd: int
    array: npt.NDArray[np.uint8]
    clients: list[StoreClient] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)

    def connect(
        self,
        url: str,
        kind: str = "process",
        *,
        identity: dict[str, str] | None = None,
        max_queue_bytes: int = 1 << 30,
        watchdog_s: float = 60.0,
        **options: Unpack[StoreSettings],
    ) -> StoreClient:
        """Return a client that is not open yet."""
        hosts: dict[str, Callable[[], Host]] = {
            "process": lambda: ProcessHost((self.fd,), len(self.memory)),
            "thread": lambda: ThreadHost(memoryview(self.memory)),
        }
        host = hosts[kind]()
        layout = RowLayout(STRIDE, (GroupLayout(((0, STRIDE),)),))
        encoded = Identity.of(identity or {"weights": "w"}).encode()
        options.setdefault("events", True)
        hello = Hello(url, encoded, layout, StoreOptions(**options))
        client = StoreClient(
            host, hello, max_queue_bytes=max_queue_bytes, watchdog_s=watchdog_s
        )
        self.clients.append(client)
        self.hosts.append(host)
        return client

    def finish(
        self,
        client: StoreClient,
        job_id: int,
        timeout_s: float = 90.0,
    ) -> JobOutcome:
        """Poll until the job ends; return its outcome."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for outcome in client.poll():
                if outcome.job_id == job_id:
                    return outcome
            time.sleep(0.001)
        raise AssertionError(f"job {job_id} did not end")
