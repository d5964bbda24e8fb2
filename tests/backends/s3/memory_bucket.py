"""A bucket in memory with a clock of its own, and engines on it whose background work the test does."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import md5
from pathlib import Path
from typing import Any, NamedTuple

from persistkv_s3 import S3Backend
from persistkv_s3.client.transport import (
    ABSENT,
    Body,
    Clock,
    ConditionFailedError,
    Deadline,
    ListPage,
    ObjectInfo,
    ObjectMissingError,
    Sink,
    Transport,
    UnchangedError,
)
from persistkv_s3.options import Place, S3Options

_PAGE = 1000


class StoredObject(NamedTuple):
    """An object with its ETag and the time of its upload."""

    data: bytes
    etag: str
    modified: float


class MemoryBucket:
    """The server."""

    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.now = 1e9
        self.lock = threading.Lock()
        self.honours_conditions = {"If-None-Match", "If-Match"}
        self.unquoted = False
        """``If-Match`` needs an ETag without quotes, as in Ceph."""

    def keys(self, part: str) -> list[str]:
        """Return the keys that contain ``part``, sorted."""
        return sorted(key for key in self.objects if part in key)

    def replace(self, key: str, data: bytes) -> None:
        """Write an object without a client."""
        self.objects[key] = StoredObject(data, f'"{md5(data, usedforsecurity=False).hexdigest()}"', self.now)


class BucketClock(Clock):
    """Time of the bucket; ``sleep`` advances it."""

    def __init__(self, bucket: MemoryBucket, seed: int) -> None:
        self._bucket = bucket
        self.random = random.Random(seed)

    def monotonic(self) -> float:
        return self._bucket.now

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
            held, honoured = self.bucket.objects.get(key), self.bucket.honours_conditions
            if condition == ABSENT:
                if held and "If-None-Match" in honoured:
                    raise ConditionFailedError(key)
            elif condition is not None and "If-Match" in honoured:
                if held is None:
                    raise ObjectMissingError(key)
                if condition != (held.etag.strip('"') if self.bucket.unquoted else held.etag):
                    raise ConditionFailedError(key)
            self.bucket.replace(key, data)
            etag = self.bucket.objects[key].etag
        self.after("PUT", key)
        return etag

    def get(
        self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline, *, known: str | None = None
    ) -> str:
        self._begin("GET", key)
        held = self.bucket.objects.get(key)
        if held is None:
            raise ObjectMissingError(key)
        if held.etag == known:
            raise UnchangedError(key)
        data = held.data
        if stop is not None and start is not None and len(data) < stop:
            raise ObjectMissingError(key)
        if stop is not None:
            data = data[start:stop]
        sink.expect(len(data))
        while len(room := sink.room()):
            count = min(len(room), len(data))
            room[:count], data = data[:count], data[count:]
            sink.advance(count)
        return held.etag

    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        self._begin("HEAD", key)
        held = self.bucket.objects.get(key)
        if held is None:
            raise ObjectMissingError(key)
        return ObjectInfo(key, len(held.data), held.modified)

    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        self._begin("LIST", prefix)
        with self.bucket.lock:
            found = sorted((key, held) for key, held in self.bucket.objects.items() if key.startswith(prefix))
        found = [pair for pair in found if page is None or pair[0] > page]
        objects = [ObjectInfo(key, len(held.data), held.modified) for key, held in found[:_PAGE]]
        return ListPage(objects, objects[-1].key if len(found) > _PAGE else None)

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._begin("DELETE", keys[0])
        for key in keys:
            self.bucket.objects.pop(key, None)

    def close(self) -> None:
        pass


class Engines:
    """Opens engines on one bucket, each with a directory of its own unless it is given one.

    :param directory: of the local catalogues.
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
        engine = S3Backend.connect(place, settings, client, read_only=read_only, clock=clock, background=False)
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
