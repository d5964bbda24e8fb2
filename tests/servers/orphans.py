"""Orphans in a bucket, and a process whose retention removes them while a commit reuses them.

An engine that is killed after the upload of its packs and before that of its index object leaves packs without a
reference. This module creates such packs. They are older than ``GRACE_S`` when an engine stores the same blocks, so the
engine finds them and reuses them. For each connection to ``port``, retention runs once before the connection is closed.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.store_rig import fresh_keys
from persistkv.config import StoreUrl
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import PackWriter, Segment
from persistkv.storage.identity import Identity
from persistkv.testing.samples import ArraySource
from persistkv_s3 import S3Backend
from tests.servers.fault_load import BLOCK, JOB_BLOCKS, PATIENCE_S, Contents

GRACE_S = 15.0  # longer than an engine takes from the PUT of a pack to the index object that references it


class Orphans:
    """Orphaned packs in a store, and a process that runs retention on request.

    :param url: of the store, without the proxy.
    :param identity: of the namespace that the engine uses.
    """

    def __init__(self, url: str, identity: Identity, count: int) -> None:
        self.jobs = [fresh_keys(JOB_BLOCKS) for _ in range(count)]
        """Keys of each pack, as one job stores them."""
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe(duplex=False)
        arguments = (f"{url}&grace={GRACE_S:g}s", identity, self.jobs, theirs)
        self._process = context.Process(target=_keep_pruning, args=arguments, daemon=True)
        self._process.start()
        if not self._line.poll(PATIENCE_S):
            raise TimeoutError("the orphans are not there")
        self.port: int = self._line.recv()
        """Port of the process that runs retention."""
        self._old = time.monotonic() + GRACE_S + 1.0

    def wait_until_old(self) -> None:
        """Wait until retention would remove the orphans."""
        time.sleep(max(0.0, self._old - time.monotonic()))

    def removed(self) -> int:
        """Return the number of objects that retention removed since the last call."""
        found = 0
        while self._line.poll(0):
            found += self._line.recv()
        return found

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


def _keep_pruning(url: str, identity: Identity, jobs: Sequence[list[bytes]], to_parent: Connection) -> None:
    backend = S3Backend.open(StoreUrl.parse(url))
    namespace = backend.open_namespace(identity).id
    session, contents = backend.session(namespace), Contents()
    for keys in jobs:
        blocks = np.stack([contents.of(key) for key in keys])
        pack = PackWriter(namespace, RawCodec(), [Segment(0, BLOCK, keys, ArraySource(blocks), 0)])
        session.packs.upload(pack, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        to_parent.send(listener.getsockname()[1])
        while True:
            asking, _ = listener.accept()
            with asking, suppress(ConnectionError):
                pruned = backend.retain(time.time())
                to_parent.send(0 if pruned is None else pruned.orphans)
