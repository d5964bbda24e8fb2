"""Context of three packs, of which the middle one is damaged; all access uses a real client of the
store."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np

from benchmarks.store_rig import Job, finish, fresh_keys
from persistkv.storage import open_backend
from persistkv.storage.host.client import StoreClient
from persistkv.storage.records import RequestEnd
from tests.tools.conftest import Run

BLOCKS = 2
"""Number of blocks in each pack."""
BLOCK_BYTES = 8192


class MiddlePack:
    """Store with a context and three requests.

    ``whole`` uses all packs, ``begin`` the first pack, ``lost`` only the middle one.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._job = Job(BLOCKS, BLOCKS * BLOCK_BYTES)
        self._parts = [fresh_keys(BLOCKS) for _ in range(3)]
        with closing(self._opened()) as client:
            for number, keys in enumerate(self._parts):
                self._draw(number)
                self._job.store(client, number, keys)
            for name, parts in (
                ("whole", self._parts),
                ("begin", self._parts[:1]),
                ("lost", self._parts[1:2]),
            ):
                keys = [key for part in parts for key in part]
                client.end_request(RequestEnd(name, name, (keys,), 16 * len(keys), 16))
        with closing(open_backend(url, read_only=True)) as backend:
            (space,) = backend.namespaces()
            self.namespace = space.id
            tables = backend.changes(self.namespace, None).added
            (self.pack,) = (
                table.pack_id
                for table in tables
                if table.keys.unpack() == self._parts[1]
            )

    def _opened(self) -> StoreClient:
        client = self._job.rig.client(self._url, "thread")
        client.open()
        return client

    def _draw(self, number: int) -> None:
        self._job.rig.rows[:BLOCKS] = np.random.default_rng(number).integers(
            0, 256, (BLOCKS, BLOCK_BYTES)
        )

    def check_repair(self, run: Run) -> None:
        """Repair the store, whose middle pack is bad; check the remaining requests and blocks."""
        assert json.loads(run("verify", self._url, "--json").stdout)["by_problem"] == {
            "payload": 1
        }
        done = run("verify", self._url, "--repair", "--yes", "--json")
        summary = json.loads(done.stdout)
        assert done.returncode == 1
        assert (
            summary["deleted_packs"],
            summary["shortened_requests"],
            summary["deleted_requests"],
        ) == (1, 1, 1)
        assert run("verify", self._url).returncode == 0
        left = {
            request["id"]: request
            for request in json.loads(run("ls", self._url, "--json").stdout)["requests"]
        }
        assert left.keys() == {"whole", "begin"}
        for request in left.values():
            assert (request["blocks"], request["tokens"]) == (BLOCKS, 16 * BLOCKS)
            assert request["raw_bytes"] == BLOCKS * BLOCK_BYTES
        with closing(self._opened()) as client:
            held = [[client.contains(key) for key in keys] for keys in self._parts]
            assert held == [[True] * BLOCKS, [False] * BLOCKS, [True] * BLOCKS]
            for number in (0, 2):
                self._draw(number)
                self._job.load(client, 10 + number, self._parts[number])
            client.submit_load(20, self._parts[1], self._job.target)
            assert len(finish(client, 20).failed) == BLOCKS
