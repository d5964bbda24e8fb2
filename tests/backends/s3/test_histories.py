"""Random histories of engines on one simulated bucket that loses, delays and repeats requests.

Promises after each history:

1. An acknowledged pack that no engine deleted and whose ttl has not passed is held, with its bytes. An operator who
   deletes objects ends only the packs in them, and, by an object of the index, those stored before. A pack ended in
   this way may be missed until a read has noticed it: an upload by an engine that did not know the first object is
   ignored.
   Deleted objects of the index and a damaged head together are more than the repair handles; no history has both.
2. No read returned bytes that no engine stored under these keys.
3. A reader with an empty cache opens the store.

Each engine has two namespaces, and a second thread that polls and leads. A pause meets one thread of one engine. In
some histories, a thread hangs in an upload of the leader or in a repair for longer than every timeout.

A check of the histories: the functions ``plant_…`` put a mended bug back, and some history must fail. Seed 30 finds
``plant_newest_etag``, the first that finds ``plant_repair_of_any_version`` is 72.

A failure prints its seed and its steps. For the long test, ``PERSISTKV_HISTORIES`` is the number of histories, and
``PERSISTKV_FIRST_HISTORY`` the seed of the first one.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.extensions import Policy
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.testing.conformance.suite import read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend, backend, session
from persistkv_s3.catalogue import Catalogue, LocalRows
from persistkv_s3.client.bucket import Bucket
from persistkv_s3.client.transport import ABSENT
from persistkv_s3.feed import head, leader
from persistkv_s3.feed.format import Head
from persistkv_s3.feed.head import HeadVersion, StoreHead
from persistkv_s3.options import Place, S3Options
from tests.backends.s3.simulation import CALM, Faults, Hang, Process, SimulatedLock, SimulatedTransport, World

PLACE = Place("bucket", "store/")
IDENTITIES = (sample_identity(0), sample_identity(1))
NAMESPACES = tuple(identity.digest for identity in IDENTITIES)
HOUR_S = 3600.0
YEAR_S = 365 * 24 * HOUR_S
SETTLE_S = 90.0  # enough for a takeover and a merge

MIXES = (
    Faults(),
    Faults(lost=0.05, failed=0.02, throttled=0.02, slow=0.1),
    Faults(late=0.04, repeated=0.08, doubled=0.05, slow=0.2),
    Faults(pause=0.02, death=0.004, slow=0.1),
    Faults(lost=0.03, failed=0.02, late=0.03, throttled=0.03, repeated=0.04, doubled=0.03, pause=0.01, death=0.005),
)
EVENTS = (
    "LOST",
    "FAILED",
    "late",
    "503",
    "REPEATED",
    "DOUBLED",
    "SUSPENDED",
    "DIES",
    "CUT OFF",
    "STORED",
    "DELETED",
    "OPERATOR",
    "HANGS",
)
"""Each of them occurs in 30 histories."""


def namespace_of(seed: int) -> bytes:
    """Return the namespace of the packs with a seed, so that no two namespaces have equal packs."""
    return NAMESPACES[seed % 2]


@cache
def pack_of(seed: int, content: int) -> PackWriter:
    return sample_pack(namespace_of(seed), seed, blocks=1 + seed % 3, block_bytes=512, content=content)


class Span(NamedTuple):
    """Time of a call that changed a pack, in simulated seconds."""

    begin: float
    end: float
    uploads: bool = True
    """Whether it uploaded the pack, or found it in its catalogue."""


class Held(NamedTuple):
    """An acknowledged request."""

    packs: list[bytes]
    at: Span


class Model:
    """Acknowledged packs and requests, and deletions."""

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = ttl_s
        self.payloads: defaultdict[bytes, set[bytes]] = defaultdict(set)
        """For each pack, the payloads that any engine tried to store."""
        self.stored: defaultdict[bytes, list[Span]] = defaultdict(list)
        """Acknowledged commits."""
        self.deleted: defaultdict[bytes, list[Span]] = defaultdict(list)
        """Deletions; one without an acknowledgement never ends."""
        self.requests: dict[str, Held] = {}

    def must_hold(self, now: float) -> set[bytes]:
        """Return the packs that the store must hold.

        A pack that was deleted or may have expired must be held if a later commit uploaded it. A commit that finds the
        pack in its catalogue uploads nothing, and its use is written minutes later.
        """
        return {name for name, stored in self.stored.items() if self._must_hold(name, stored, now)}

    def must_hold_requests(self, now: float) -> set[str]:
        """Return the requests that the store must hold: neither they nor their packs were deleted or have expired."""
        packs = self.must_hold(now)
        return {
            name
            for name, (named, at) in self.requests.items()
            if packs.issuperset(named)
            and not any(self.deleted[pack] for pack in named)
            and (self._ttl_s is None or at.begin + self._ttl_s > now)
        }

    def delete_by_operator(self, keys: list[str], kind: str, now: float) -> None:
        """Record that packs may be missed: for good if their objects were deleted, until their next upload if objects
        of the index were.
        """
        if kind != "/packs/":
            for name in self.payloads:
                self.deleted[name].append(Span(now, now))
        for name in [name for name in self.payloads if any(f"/packs/{name.hex()}" in key for key in keys)]:
            self.deleted[name].append(Span(now, float("inf")))

    def _must_hold(self, name: bytes, stored: list[Span], now: float) -> bool:
        gone = max((span.end for span in self.deleted[name]), default=-1.0)
        if gone < 0 and self._ttl_s is None:
            return True
        after = [span.begin for span in stored if span.begin > gone and span.uploads]
        return bool(after) and (self._ttl_s is None or max(after) + self._ttl_s > now)


class History:
    """One store and the machines that use it.

    :param seed: determines everything.
    :param directory: for the local catalogues.
    """

    def __init__(self, seed: int, directory: Path) -> None:
        draw = self._draw = random.Random(seed)
        self.world = World(seed, MIXES[seed % len(MIXES)], page=draw.choice((3, 20, 1000)))
        self.ttl_s = draw.choice((None, None, 20 * HOUR_S))
        self.model = Model(self.ttl_s)
        self._directory = directory
        self._key = draw.random() < 0.3
        self._operator = random.Random(f"operator {seed}")
        self._damaged: dict[str, str] = {}
        """Keys of damaged heads → their ETags."""
        self._lacks_index = False  # whether the operator has deleted objects of the index
        self.deletes = draw.choice((0.0, 0.0, 0.08))
        """Probability that an engine deletes a pack."""
        self.pool = draw.choice((4, 30))
        """Number of different packs."""
        self._sleep_at = draw.uniform(60, 150)
        self._wake_at = self._sleep_at + (draw.uniform(12, 40) * HOUR_S if draw.random() < 0.25 else 0.0)
        self.until = self._wake_at + 60.0
        """Simulated time at which engines stop."""
        self._writers = draw.randrange(2, 5)
        self._readers = draw.randrange(2)
        self._hangs = self._operator.random() < 0.3
        """Whether leaders hang, see ``_hang_leader``. Engines then live longer and store more, so that one is elected
        meanwhile and the former leader commits meanwhile.
        """
        self.life_s = 400.0 if self._hangs else 100.0
        """Mean time after which an engine ends."""
        self.stores = 0.6 if self._hangs else 0.35
        """Probability that an engine stores packs."""
        self._lives = 0

    def run(self) -> None:
        """Run the history and check its promises."""
        with pytest.MonkeyPatch.context() as patch:
            simulate_locks(patch)
            self._run()

    def _run(self) -> None:
        for number in range(self._writers + self._readers):
            self._start(f"engine{number}", reader=number >= self._writers)
        for disturb in (self._cut_off, self._suspend):
            for _ in range(self._draw.randrange(3)):
                self.world.at(self._draw.uniform(5, self._sleep_at), disturb)
        if self._operator.random() < 0.3:
            self.world.at(self._operator.uniform(20, self._sleep_at), self._delete_objects)
        if self._operator.random() < 0.3:
            self.world.at(self._operator.uniform(20, self._sleep_at), self._damage_head)
        if self._hangs:
            for _ in range(2):
                self.world.at(self._operator.uniform(5, self._sleep_at / 2), self._hang_leader)
        if self._wake_at > self._sleep_at:
            self.world.at(self._sleep_at - 10.0, lambda: self._suspend(self._wake_at - self.world.now + 20.0))
        self.world.run(self.until)
        self.world.faults = CALM
        objects = self.world.server.objects
        if not any(objects[key].etag == etag for key, etag in self._damaged.items()):
            self._check("right after the last fault")  # readers refuse a head that nobody has repaired
        self.world.note("SETTLING")
        self._run_process("settler", self._settle)
        self._check("after a calm minute")

    def pause_s(self) -> float:
        """Return how long engines must sleep now, in seconds: in some histories all engines sleep for hours."""
        return self._wake_at - self.world.now if self._sleep_at <= self.world.now < self._wake_at else 0.0

    def _process(self, name: str, program: Callable[[Process], None]) -> Process:
        return Process(self.world, name, program, wall_ahead_s=self._draw.choice((0.0, 0.0, 3.0, -40.0, YEAR_S)))

    def _run_process(self, name: str, program: Callable[[Process], None]) -> None:
        """Run a process to its end; other processes continue meanwhile."""
        process, limit = self._process(name, program), self.world.now + 10 * SETTLE_S
        while not process.ended:
            self.world.run(self.world.now + 1.0)
            assert self.world.now < limit, f"{name} did not end"

    def _alive(self) -> list[Process]:
        return [process for process in self.world.processes if not process.dead and not process.ended]

    def _cut_off(self) -> None:
        """Disconnect one engine for two minutes."""
        for process in self._draw.sample(self._alive(), min(1, len(self._alive()))):
            process.cut_off_until = self.world.now + 120.0
            self.world.note(f"{process.name}: CUT OFF for 120 s")

    def _damage_head(self) -> None:
        """Cut the head short; nothing else is lost, so engines repair it without loss."""
        if self._lacks_index:
            return
        server = self.world.server
        for key in [key for key in server.objects if key.startswith("store/persistkv")]:
            self._damaged[key] = server.put(key, server.objects[key].data[:-4], None)
            self.world.note(f"OPERATOR cuts {key} short")
        if self._operator.random() < 0.5:  # the first repair knows nothing that is published in the meantime
            self.world.hangs.append(Hang("LIST", "/feed/", self._operator.uniform(10, 100), before=False))

    def _hang_leader(self) -> None:
        """Suspend the thread that leads in the upload of a feed object, for longer than every timeout of requests and
        the takeover. The other thread of the process commits, gets no reply, and polls.
        """
        seconds = self._operator.uniform(50, 150)
        self.world.hangs.append(Hang("PUT", "/feed/", seconds, before=True, unanswered="/inbox/"))

    def _delete_objects(self) -> None:
        """Delete a few objects of one kind, as an operator may do by mistake."""
        server, now = self.world.server, self.world.now
        kind = self._operator.choice(("/packs/", "/packs/", "/feed/", "/snapshots/", "/segments/"))
        found = sorted(key for key in server.objects if kind in key)
        chosen = self._operator.sample(found, min(3, len(found)))
        if not chosen or (kind != "/packs/" and self._damaged):
            return
        self._lacks_index = kind != "/packs/"
        server.delete(chosen)
        self.world.note(f"OPERATOR deletes {', '.join(chosen)}")
        self.model.delete_by_operator(chosen, kind, now)

    def _suspend(self, seconds: float = 0.0) -> None:
        """Suspend one engine in the middle of its next request: if it leads, it resumes after its successor."""
        for process in self._draw.sample(self._alive(), min(1, len(self._alive()))):
            process.suspended_s = seconds or self._draw.uniform(16, 200)

    def _start(self, machine: str, *, reader: bool) -> None:
        """Start an engine on a machine, whose disk keeps the catalogue of previous engines."""
        self._lives += 1

        def live(process: Process) -> None:
            try:
                Engine(self, process, machine, reader=reader).live()
            finally:
                again = self.world.now + self._draw.uniform(1, 40)
                if again < self.until:
                    self.world.at(again, lambda: self._start(machine, reader=reader))

        self._process(f"{machine}.{self._lives}", live)

    def open(self, process: Process, machine: str | None, *, reader: bool = False) -> S3Backend:
        """Open a handle; without a machine, with an empty cache."""
        options = S3Options(
            cache=str(self._directory / (machine or process.name)),
            connections=1,
            refresh_s=1.0,
            ttl_s=self.ttl_s,
            key_env="PERSISTKV_TEST_KEY" if self._key else None,
            read_only=reader,
        )
        transport = SimulatedTransport(process)
        return S3Backend(PLACE, options, transport, clock=process, background=False)

    def _settle(self, process: Process) -> None:
        """Commit once, and lead until everything is merged."""
        backend = self.open(process, None)
        for number, identity in enumerate(IDENTITIES):
            backend.open_namespace(identity)
            pack, begin = pack_of(1_000_000 + number, 0), self.world.now
            self.model.payloads[pack.pack_id].add(payload_of(pack))
            backend.commit(identity.digest, CommitBatch([pack]))
            self.model.stored[pack.pack_id].append(Span(begin, self.world.now))
        until = self.world.now + SETTLE_S
        while self.world.now < until:
            process.sleep(min(backend.step(), 2.0))
        backend.close()

    def _check(self, when: str) -> None:
        """Read everything with a new reader."""
        expected, requests = self.model.must_hold(self.world.now), self.model.must_hold_requests(self.world.now)
        found: dict[bytes, bytes | None] = {}
        held: dict[str, bool] = {}

        def look(process: Process) -> None:
            backend = self.open(process, None, reader=True)
            for namespace in NAMESPACES:
                if backend.holds(namespace):  # or nobody has stored in it
                    self._look(backend, namespace, found, held)
            backend.close()

        if not self.model.stored:  # there may be no store; the second check always reads one
            return
        self._run_process(f"reader {when}", look)
        expected &= self.model.must_hold(self.world.now)  # an engine that was suspended may have deleted one since
        requests &= self.model.must_hold_requests(self.world.now)
        problems = [f"pack {name.hex()[:8]} is lost" for name in sorted(expected - found.keys())]
        problems += [
            f"pack {name.hex()[:8]} has no object" for name in sorted(expected) if found.get(name, b"") is None
        ]
        problems += [f"request {name} is lost" for name in sorted(requests) if not held.get(name)]
        assert not problems, f"{when}: {'; '.join(problems)}"

    def _look(
        self,
        backend: S3Backend,
        namespace: bytes,
        found: dict[bytes, bytes | None],
        held: dict[str, bool],
    ) -> None:
        for name, table in tables(backend, namespace).items():
            found[name] = self.read(backend, namespace, table)
        names = [manifest.id for manifest in backend.manifests(namespace)]
        keys = backend.manifest_keys(namespace, names)
        held.update({name: key is not None for name, key in zip(names, keys, strict=True)})

    def read(self, backend: S3Backend, namespace: bytes, table: PackTable) -> bytes | None:
        """Read a pack and check its bytes; None if it is a miss."""
        payload = read_pack(backend, namespace, table)
        stored = self.model.payloads[table.pack_id]
        assert payload is None or payload in stored, f"wrong bytes of pack {table.pack_id.hex()[:8]}"
        return payload


class Engine:
    """One run of an engine: it stores, reads, deletes and does background work until it is killed or its time ends."""

    def __init__(self, history: History, process: Process, machine: str, *, reader: bool) -> None:
        self._history = history
        self._model = history.model
        self._world = history.world
        self._process = process
        self._machine = machine
        self._reader = reader
        self._draw = random.Random(f"life {process.name} {history.world.seed}")
        self._variant = self._draw.randrange(3)
        self._known: dict[bytes, dict[bytes, PackTable]] = {name: {} for name in NAMESPACES}
        self._cursors: dict[bytes, bytes | None] = dict.fromkeys(NAMESPACES)
        self._commits = 0
        self._stopping = self._stopped = False

    def live(self) -> None:
        """Run until the history ends."""
        self._process.sleep(self._draw.uniform(0, 10))
        try:
            backend = self._history.open(self._process, self._machine, reader=self._reader)
        except StoreError as error:
            self._note(f"could not open: {error}")
            return
        self._process.spawn(lambda: self._work(backend))
        try:
            self._use(backend)
            self._stopping = True
            while not self._stopped:
                self._process.sleep(0.5)
        finally:
            backend.close()

    def _work(self, backend: S3Backend) -> None:
        """Do the background work of the handle in the second thread."""
        try:
            while not self._stopping:
                self._process.sleep(self._history.pause_s() or min(backend.step(), 2.0))
        finally:
            self._stopped = True

    def _use(self, backend: S3Backend) -> None:
        opened: set[bytes] = set()
        ends = self._world.now + self._draw.expovariate(1 / self._history.life_s)
        while self._world.now < min(ends, self._history.until):
            try:
                number = self._draw.randrange(2)
                namespace = NAMESPACES[number]
                if namespace not in opened:
                    backend.open_namespace(IDENTITIES[number])
                    opened.add(namespace)
                self._act(backend, namespace)
            except StoreError as error:
                self._note(f"{type(error).__name__}: {error}")
            self._process.sleep(self._history.pause_s() or self._draw.uniform(0.1, 3.0))

    def _act(self, backend: S3Backend, namespace: bytes) -> None:
        choice = self._draw.random()
        stores, deletes = self._history.stores, self._history.deletes
        if choice < stores and not self._reader:
            self._store(backend, namespace)
        elif choice < stores + deletes and not self._reader:
            self._delete(backend, namespace)
        elif choice < stores + 0.35:
            self._read(backend, namespace)

    def _store(self, backend: S3Backend, namespace: bytes) -> None:
        seeds = self._draw.sample(
            range(NAMESPACES.index(namespace), 2 * self._history.pool, 2), self._draw.randrange(1, 4)
        )
        packs = [pack_of(seed, seed + 1000 * self._variant) for seed in seeds]
        names = [pack.pack_id for pack in packs]
        for pack in packs:
            self._model.payloads[pack.pack_id].add(payload_of(pack))
        self._commits += 1
        manifests: list[ManifestWrite] = []
        if self._draw.random() < 0.5:
            manifests = [sample_manifest(f"{self._process.name}-{self._commits}", packs=names, ordered=False)]
        begin = self._world.now
        self._process.written.clear()
        self._note(f"STORE {', '.join(name.hex()[:8] for name in names)}")
        backend.commit(namespace, CommitBatch(packs, manifests))
        at = Span(begin, self._world.now)
        self._note(f"STORED {', '.join(name.hex()[:8] for name in names)}")
        uploads = "".join(self._process.written)
        for name in names:
            self._model.stored[name].append(at._replace(uploads=f"/packs/{name.hex()}" in uploads))
        for write in manifests:
            self._model.requests[write.manifest.id] = Held(names, at)

    def _delete(self, backend: S3Backend, namespace: bytes) -> None:
        self._refresh(backend, namespace)
        if not self._known[namespace]:
            return
        name = self._draw.choice(sorted(self._known[namespace]))
        spans = self._model.deleted[name]
        number = len(spans)
        spans.append(Span(self._world.now, float("inf")))
        batch = CommitBatch(bad=[name]) if self._draw.random() < 0.3 else CommitBatch(deletions=[name])
        self._note(f"DELETE {name.hex()[:8]}")
        backend.commit(namespace, batch)
        spans[number] = Span(spans[number].begin, self._world.now)
        self._note(f"DELETED {name.hex()[:8]}")

    def _read(self, backend: S3Backend, namespace: bytes) -> None:
        self._refresh(backend, namespace)
        known = list(self._known[namespace].values())
        for table in self._draw.sample(known, min(2, len(known))):
            self._history.read(backend, namespace, table)

    def _refresh(self, backend: S3Backend, namespace: bytes) -> None:
        changes = backend.changes(namespace, self._cursors[namespace])
        known = self._known[namespace]
        if changes.reset:
            known.clear()
        for name in changes.removed:
            known.pop(name, None)
        known.update((table.pack_id, table) for table in changes.added)
        self._cursors[namespace] = changes.cursor

    def _note(self, text: str) -> None:
        self._world.note(f"{self._process.name}: {text}")


def simulate_locks(patch: pytest.MonkeyPatch) -> None:
    """Let threads wait in simulated time for locks that are held during requests."""
    simulated = SimpleNamespace(**vars(threading))
    simulated.RLock = SimulatedLock
    for module in (backend, session, head):
        patch.setattr(module, "threading", simulated)
    locks: defaultdict[Path, SimulatedLock] = defaultdict(SimulatedLock)
    original = Catalogue.rows

    @contextmanager
    def rows(self: Catalogue, *, write: bool = False, rollback: bool = False) -> Iterator[LocalRows]:
        if not write and not rollback:
            with original(self) as found:
                yield found
            return
        with locks[self.path], original(self, write=write, rollback=rollback) as found:
            yield found

    patch.setattr(Catalogue, "rows", rows)


def run_histories(directory: Path, first: int, count: int) -> set[str]:
    """Run histories; return which ``EVENTS`` occurred. Half of them write snapshots of all rows every few seconds."""
    occurred: set[str] = set()
    for seed in range(first, first + count):
        history = History(seed, directory / str(seed))
        try:
            with pytest.MonkeyPatch.context() as patch:
                if seed % 2:
                    patch.setattr(leader, "SNAPSHOT_AFTER", 3)
                    patch.setattr(leader, "_MOST_TAILS", 2)
                history.run()
        except Exception as error:
            lines = "\n".join(history.world.steps or ())
            pytest.fail(f"history {seed}: {type(error).__name__}: {error}\nsteps:\n{lines}")
        finally:
            history.world.end()
            shutil.rmtree(directory / str(seed))
        steps = "\n".join(history.world.steps or ())
        occurred |= {event for event in EVENTS if event in steps}
    return occurred


def test_random_histories_lose_no_acknowledged_pack(directory: Path) -> None:
    assert run_histories(directory, 0, 30) == set(EVENTS)


FIRST_HISTORY = int(os.environ.get("PERSISTKV_FIRST_HISTORY", "1000"))
HISTORIES = int(os.environ.get("PERSISTKV_HISTORIES", "150"))
AT_ONCE = 30  # histories of a test: half a minute, so that workers share them


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST_HISTORY, FIRST_HISTORY + HISTORIES, AT_ONCE))
def test_many_random_histories_lose_no_acknowledged_pack(directory: Path, first: int) -> None:
    run_histories(directory, first, min(AT_ONCE, FIRST_HISTORY + HISTORIES - first))


def plant_newest_etag(patch: pytest.MonkeyPatch) -> None:
    """Write each head with the newest known ETag, instead of that of the version from which it was derived."""
    original = StoreHead.write

    def write(self: StoreHead, head: Head, base: HeadVersion, term: bytes = b"") -> bool:
        return original(self, head, base._replace(etag=self.version.etag), term)

    patch.setattr(StoreHead, "write", write)


def plant_repair_of_any_version(patch: pytest.MonkeyPatch) -> None:
    """Let a repaired head replace the version in the bucket, instead of the damaged one that was read."""
    original_open, original_put = StoreHead.open, Bucket.put
    opening: list[tuple[int, str]] = []

    def open_head(self: StoreHead, policy: Policy, *, create: bool) -> None:
        repair = (threading.get_ident(), self.names.head)
        opening.append(repair)
        try:
            original_open(self, policy, create=create)
        finally:
            opening.remove(repair)

    def put(self: Bucket, key: str, pieces: Sequence[Buffer], *, condition: str | None = None) -> str:
        if (threading.get_ident(), key) in opening and condition != ABSENT:
            condition = self.get_if_changed(key, None)[1]
        return original_put(self, key, pieces, condition=condition)

    patch.setattr(StoreHead, "open", open_head)
    patch.setattr(Bucket, "put", put)


@pytest.mark.slow
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize(("plant", "first"), [(plant_newest_etag, 30), (plant_repair_of_any_version, 72)])
def test_histories_find_a_planted_bug(
    directory: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], first: int
) -> None:
    plant(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="is lost"):
        run_histories(directory, first, 200)
