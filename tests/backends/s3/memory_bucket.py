"""A bucket in memory with its own clock, and engines on it whose background work the test runs."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from persistkv_s3 import S3Backend
from persistkv_s3.client.transport import Body, Clock, Deadline, ListPage, ObjectInfo, Sink, Transport
from persistkv_s3.options import Place, S3Options
from tests.backends.s3.simulation import START, Server, deliver


class MemoryBucket:
    """The server, and its clock, which tests advance."""

    def __init__(self) -> None:
        self.now = START
        """Seconds since the epoch."""
        self.server = Server(lambda: self.now)
        self.lock = threading.Lock()
        """Held during each effect on the server."""

    def keys(self, part: str) -> list[str]:
        """Return the keys that contain ``part``, sorted."""
        return sorted(key for key in self.server.objects if part in key)

    def data(self, key: str) -> bytes:
        """Return the content of an object."""
        return self.server.get(key).data

    def replace(self, key: str, data: bytes) -> None:
        """Write an object without a client."""
        self.server.put(key, data, None)


class BucketClock(Clock):
    """Clock of an engine, which differs from that of the bucket by a constant; ``sleep`` advances both."""

    def __init__(self, bucket: MemoryBucket, seed: int) -> None:
        self._bucket = bucket
        self._behind_s = START - 1e6 * seed
        self.random = random.Random(seed)

    def monotonic(self) -> float:
        return self._bucket.now - self._behind_s

    def sleep(self, seconds: float) -> None:
        self._bucket.now += seconds


class MemoryClient(Transport):
    """A client of the bucket. ``before`` and ``after`` are called with verb and key, and may raise."""

    def __init__(self, bucket: MemoryBucket) -> None:
        self.bucket = bucket
        self.counts: Counter[str] = Counter()
        self.before: Callable[[str, str], None] = lambda verb, key: None
        self.after: Callable[[str, str], None] = lambda verb, key: None

    def take(self) -> dict[str, int]:
        """Return the number of requests by verb since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def _begin(self, verb: str, key: str) -> None:
        self.counts[verb] += 1
        self.before(verb, key)

    @property
    def requests(self) -> dict[str, int]:
        return dict(self.counts)

    def server_time(self) -> float:
        return self.bucket.now

    def put(self, key: str, body: Body, deadline: Deadline, *, condition: str | None = None) -> str:
        self._begin("PUT", key)
        data = b"".join(iter(body.read, b""))
        with self.bucket.lock:
            etag = self.bucket.server.put(key, data, condition)
        self.after("PUT", key)
        return etag

    def get(
        self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline, *, known: str | None = None
    ) -> str:
        self._begin("GET", key)
        with self.bucket.lock:
            found = self.bucket.server.get(key, start, stop, known)
        deliver(found.data, sink)
        return found.etag

    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        self._begin("HEAD", key)
        with self.bucket.lock:
            return self.bucket.server.head(key)

    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        self._begin("LIST", prefix)
        with self.bucket.lock:
            return self.bucket.server.list(prefix, page)

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._begin("DELETE", keys[0])
        with self.bucket.lock:
            self.bucket.server.delete(keys)

    def close(self) -> None:
        pass


class Engines:
    """Opens engines on one bucket, each with its own directory unless ``cache`` names one.

    :param directory: parent of the directories of local catalogues.
    """

    def __init__(self, bucket: MemoryBucket, directory: Path) -> None:
        self.bucket = bucket
        self._directory = directory
        self.all: list[S3Backend] = []
        self.clients: dict[S3Backend, MemoryClient] = {}

    def open(self, *, cache: str = "", read_only: bool = False, **options: Any) -> S3Backend:
        """Open an engine."""
        number = len(self.clients)
        directory = self._directory / (cache or str(number))
        settings = S3Options(**{"cache": str(directory), "connections": 1, **options})
        client, clock = MemoryClient(self.bucket), BucketClock(self.bucket, number)
        place = Place("bucket", "store/")
        engine = S3Backend(place, settings, client, read_only=read_only, clock=clock, background=False)
        self.all.append(engine)
        self.clients[engine] = client
        return engine

    def kill(self, engine: S3Backend) -> None:
        """Stop an engine without closing it."""
        self.all.remove(engine)

    def stop(self, engine: S3Backend) -> None:
        """Close an engine."""
        self.all.remove(engine)
        engine.close()

    def run(self, seconds: float) -> None:
        """Let time pass; all engines do their background work each second."""
        end = self.bucket.now + seconds
        while self.bucket.now < end:
            self.bucket.now += 1.0
            for engine in self.all:
                engine.step()

    def close(self) -> None:
        """Close all engines."""
        for engine in self.clients:
            engine.close()
