"""Several handles of one shared store in one thread, on a medium in memory, with a clock that the
test moves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from persistkv.storage.backend import CommitBatch
from persistkv.storage.blobs import UnavailableError
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.shared import Clock, SharedBackend, SharedOptions
from persistkv.storage.shared.format import Delta, Names, decode_delta, open_object
from persistkv.tenants import DEFAULT_TENANT
from persistkv.testing import FaultyBlobs, MemoryBlobs
from persistkv.testing.conformance.suite import sample_identity, tables
from persistkv.testing.samples import sample_pack

START = 1_800_000_000.0
NAMESPACE = sample_identity().digest


class TownClock(Clock):
    """Clock of one handle: all machines agree on the time, unless the test says otherwise."""

    def __init__(self, town: Town) -> None:
        self._town = town
        self.random = random.Random(town.random.random())
        self.ahead_s = 0.0
        """By how much the machine's wall clock is wrong."""

    def monotonic(self) -> float:
        return self._town.now

    def wall(self) -> float:
        return START + self._town.now + self.ahead_s

    def sleep(self, seconds: float) -> None:
        self._town.now += seconds

    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()


class Engine:
    """One handle, as an engine has it."""

    def __init__(
        self,
        town: Town,
        options: SharedOptions,
        *,
        read_only: bool = False,
    ) -> None:
        self.clock = TownClock(town)
        medium = town.server.handle()
        medium.connections = (
            1  # calls run in the test's thread, in the same order each time
        )
        self.blobs = FaultyBlobs(medium)
        self.backend = SharedBackend(
            self.blobs, options, read_only=read_only, clock=self.clock, background=False
        )
        self._put = self.blobs.inner.put
        self.due_at = town.now
        self.namespace = NAMESPACE

    def open(self, number: int = 0) -> bytes:
        """Open a namespace; return its id."""
        self.namespace = self.backend.open_namespace(sample_identity(number)).id
        return self.namespace

    def pack(
        self,
        seed: int,
        *,
        blocks: int = 4,
        block_bytes: int = 4096,
        tenant: str = DEFAULT_TENANT,
    ) -> PackWriter:
        """Return a pack for this handle; see ``sample_pack``."""
        return sample_pack(
            NAMESPACE,
            seed,
            blocks=blocks,
            block_bytes=block_bytes,
            seal=self.backend.seal,
            tenant=tenant,
        )

    def store(self, *packs: PackWriter) -> None:
        self.backend.commit(packs[0].namespace, CommitBatch(packs))
        self.due_at = self.clock.monotonic()  # a commit wakes the thread of the handle

    def held(self, namespace: bytes = NAMESPACE) -> set[bytes]:
        """Return the ids of the packs that the handle knows."""
        return set(tables(self.backend, namespace))

    def date_replies(self, ahead_s: float) -> None:
        """From now on, let replies to puts have a wrong date, as from a proxy with a wrong
        clock."""
        put = self._put
        self.blobs.inner.put = (  # type: ignore[method-assign]
            lambda name, pieces: put(name, pieces) + ahead_s
        )

    def calls(self, method: str, part: str = "") -> int:
        """Return the number of calls of a method that concerned a name with this part."""
        return sum(
            name == method and part in subject for name, subject in self.blobs.calls
        )


class Town:
    """The medium, its clock and all handles."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.server = MemoryBlobs(lambda: START + self.now + self.server_ahead_s)
        self.server_ahead_s = 0.0
        """By how much the medium's clock is wrong."""
        self.key_env: str | None = None
        """Variable with the key of all engines; None: they have none."""
        self.engines: list[Engine] = []
        self._dead: list[Engine] = []
        self._directory = directory

    def engine(
        self,
        *,
        opens: bool = True,
        cache: str | None = None,
        **options: object,
    ) -> Engine:
        """Start an engine. ``cache``: name of its machine, which keeps replicas."""
        directory: str | bool = False if cache is None else str(self._directory / cache)
        values = {"cache": directory, "key_env": self.key_env, **options}
        engine = Engine(self, SharedOptions(**values))  # type: ignore[arg-type]
        self.engines.append(engine)
        if opens:
            engine.open()
        return engine

    def stop(self, engine: Engine) -> None:
        """Close an engine as at a clean exit."""
        engine.backend.close()
        self.engines.remove(engine)

    def kill(self, engine: Engine) -> None:
        """Let an engine vanish."""
        self.engines.remove(engine)
        self._dead.append(engine)

    def close(self) -> None:
        """End all engines, and remove what killed ones left on this machine."""
        for engine in self._dead:
            engine.blobs.fail("put", UnavailableError("it is dead"))
        for engine in [*self._dead, *self.engines]:
            if engine not in self._dead:
                engine.blobs.clear_faults()
            engine.backend.close()

    def run(self, seconds: float) -> None:
        """Let time pass; handles do what is due."""
        end = self.now + seconds
        while True:
            due = min((engine.due_at for engine in self.engines), default=end)
            if due >= end:
                break
            self.now = max(self.now, due)
            for engine in [one for one in self.engines if one.due_at <= self.now]:
                engine.due_at = self.now + engine.backend.step()
        self.now = max(self.now, end)

    def names(self, part: str) -> list[str]:
        """Return the names of the blobs with this part, of the first namespace or the whole
        store."""
        return [info.name for info in self.server.list("") if part in info.name]

    def delta(self, name: str, namespace: bytes = NAMESPACE) -> Delta:
        """Return the content of an index object."""
        return decode_delta(open_object(name, self.data(name), PLAIN, namespace))

    def data(self, name: str) -> bytes:
        (size,) = [info.size for info in self.server.list("") if info.name == name]
        buffer = bytearray(size)
        with memoryview(buffer) as view:
            self.server.read(name, 0, size, [view])
        return bytes(buffer)

    def fresh(self, namespace: bytes = NAMESPACE, number: int = 0) -> set[bytes]:
        """Return what a handle finds that knows nothing."""
        options = SharedOptions(cache=False, read_only=True, key_env=self.key_env)
        engine = Engine(self, options, read_only=True)
        engine.open(number)
        try:
            return engine.held(namespace)
        finally:
            engine.backend.close()


NAMES = Names(NAMESPACE)


def pack(
    seed: int,
    *,
    blocks: int = 2,
    block_bytes: int = 512,
    namespace: bytes = NAMESPACE,
) -> PackWriter:
    return sample_pack(namespace, seed, blocks=blocks, block_bytes=block_bytes)


@contextmanager
def town_of(directory: Path, seed: int = 0) -> Iterator[Town]:
    town = Town(directory, seed)
    try:
        yield town
    finally:
        town.close()
