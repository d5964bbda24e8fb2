"""Random histories of engines on one simulated medium that loses, delays and repeats requests.

Promises after each history:

1. An acknowledged pack is held, with its bytes, unless a tombstone was written for it, its ttl has passed, or an
   operator deleted or changed it or an object that named it.
2. No read returned bytes that no engine stored under these keys.
3. The store opens from an empty replica, with a bounded number of requests.
4. Engines that keep running agree with a fresh reader after calm minutes.
5. Then the inbox is empty and the capacity is kept. Days later, all blobs of packs are named.

Each engine has two namespaces and a second thread that merges. Histories have bursts of activity, and hours or days
between them, in which all engines are suspended. A failure prints its seed and its last steps. For the long test,
``PERSISTKV_HISTORIES`` is the number of histories, and ``PERSISTKV_FIRST_HISTORY`` the seed of the first one.

A check of the histories: each function in ``PLANTED`` breaks one rule, and some history must fail, except for the rules
in ``NOT_FOUND``.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from traceback import format_exception
from typing import NamedTuple
from unittest import mock

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.blobs import BlobInfo, Blobs
from persistkv.storage.catalog.rows import manifest_row
from persistkv.storage.format.authentication import Authenticator
from persistkv.storage.format.pack import ID_BYTES, PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.shared import SharedBackend, SharedOptions, format, inbox, merge, sweep
from persistkv.storage.shared import namespace as namespace_module
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import Delta, Names, decode_delta, unseal
from persistkv.storage.shared.index import IndexReader
from persistkv.storage.shared.merge import Merger
from persistkv.storage.shared.replica import Replica
from persistkv.storage.shared.sweep import Sweeper
from persistkv.testing.conformance.suite import read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from tests.storage.shared.simulation import (
    CALM,
    DAY_S,
    HOUR_S,
    MINUTE_S,
    START,
    Faults,
    Hang,
    Process,
    SimulatedBlobs,
    World,
    wrong_wall_clocks,
)

IDENTITIES = (sample_identity(0), sample_identity(1))
NAMESPACES = tuple(identity.digest for identity in IDENTITIES)
YEAR_S = 365 * DAY_S
_GAPS_S = (5 * MINUTE_S, 20 * MINUTE_S, 2 * HOUR_S, 11 * HOUR_S, 13 * HOUR_S, 25 * HOUR_S, 8 * DAY_S)
_CAPACITY = 40 << 10  # 40 KiB: about eight packs
_SHOWN_STEPS = 300
_HANGS = (
    ("PUT", "/inbox/", ""),
    ("PUT", "/index/", ""),
    ("PUT", "/latest", ""),
    ("DELETE", "/", ""),
    ("LIST", "/index/", ""),
    ("LIST", "/index/", "/swept"),
    ("LIST", "/inbox/", "/swept"),
    ("DELETE", "/packs/", "/swept"),
)
"""Requests that hang: kind, part of the name, part of the name that the process has written last."""
_AT_ONCE = 25  # histories of one job
CALM_S = 7 * MINUTE_S
"""Seconds in which engines merge what is left, and read what others have merged: idle ones list after 5 minutes."""

MIXES = (
    Faults(),
    Faults(failed=0.02, lost=0.05, slow=0.05),
    Faults(late=0.05, repeated=0.08, slow=0.1),
    Faults(pause=0.02, freeze=0.01, death=0.004, slow=0.05),
    Faults(0.01, 0.003, 0.03, 0.03, 0.04, 0.03, 0.01, 0.005, 0.004),
)
EVENTS = (
    "FAILED",
    "REFUSED",
    "reply LOST, the effect follows",
    "took effect LATE",
    "REPEATED",
    "SUSPENDED",
    "FROZEN",
    "DIES",
    "CUT OFF",
    "STORED",
    "DELETED",
    "OPERATOR",
)
"""Each of them occurs in 30 histories."""


@cache
def pack_of(number: int, content: int = 0) -> PackWriter:
    """Return a pack; no two namespaces have equal packs."""
    return sample_pack(NAMESPACES[number % 2], number, blocks=1 + number % 3, block_bytes=64, content=number + content)


@cache
def payload(number: int, content: int = 0) -> bytes:
    return payload_of(pack_of(number, content))


class Span(NamedTuple):
    """Time of a call, in simulated seconds."""

    begin: float
    end: float


class Held(NamedTuple):
    """An acknowledged request."""

    digest: bytes
    packs: list[bytes]
    at: Span


class Ended(NamedTuple):
    """What index objects that were ever written have ended."""

    blobs: set[bytes]
    """Names (pack id and nonce) of blobs of packs, for which there is a tombstone."""
    requests: set[bytes]
    """Digests of deleted requests."""


class Stored(NamedTuple):
    """An acknowledged commit of a pack."""

    at: Span
    blobs: frozenset[bytes]
    """Names (pack id and nonce) of blobs that the commit wrote; empty: it found the pack in its catalogue."""


class Model:
    """What was acknowledged, and what ended it.

    :param ttl_s: see ``SharedOptions``.
    """

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = ttl_s
        self.payloads: defaultdict[bytes, set[bytes]] = defaultdict(set)
        """For each pack, the payloads that any engine tried to store."""
        self.stored: defaultdict[bytes, list[Stored]] = defaultdict(list)
        self.requests: dict[str, Held] = {}
        self.deleted: set[bytes] = set()
        """Packs that an engine has tried to delete."""
        self.damaged: set[bytes] = set()
        """Packs that were damaged by an operator, or that an object named which was."""
        self.damaged_requests: set[bytes] = set()
        """Digests of requests, in the same sense."""

    def must_hold(self, now: float, ended: Ended) -> set[bytes]:
        """Return the packs that the store must hold."""
        found: set[bytes] = set()
        for pack_id, commits in self.stored.items():
            if pack_id in self.damaged:
                continue
            newest = max(stored.at.begin for stored in commits)
            if self._ttl_s is not None and newest + self._ttl_s <= now + HOUR_S:
                continue
            if self._is_alive(pack_id, commits, ended.blobs):
                found.add(pack_id)
        return found

    def _is_alive(self, pack_id: bytes, commits: list[Stored], tombstones: set[bytes]) -> bool:
        ended = any(name[:ID_BYTES] == pack_id for name in tombstones)
        if not ended:
            return True
        # A commit that wrote no blob trusts one that may have ended meanwhile.
        return any(stored.blobs - tombstones for stored in commits)

    def must_hold_requests(self, now: float, ended: Ended) -> set[str]:
        """Return the requests that the store must hold: nothing has ended them or any blob of their packs."""
        packs = self.must_hold(now, ended)
        without = {name[:ID_BYTES] for name in ended.blobs} | self.deleted
        found: set[str] = set()
        for name, held in self.requests.items():
            is_young = self._ttl_s is None or held.at.begin + self._ttl_s > now + HOUR_S
            is_whole = packs.issuperset(held.packs) and without.isdisjoint(held.packs)
            if is_young and is_whole and held.digest not in ended.requests:
                found.add(name)
        return found


class View(NamedTuple):
    """What a handle shows."""

    packs: frozenset[bytes]
    requests: frozenset[str]


def decoded(world: World) -> Iterator[tuple[str, Delta]]:
    """Iterate over all index objects that were ever written, with their names."""
    medium = world.medium
    for name, data in [*medium.deleted.items(), *((name, held.data) for name, held in medium.blobs.items())]:
        delta = decode(name, data)
        if delta is not None:
            yield name, delta


def decode(name: str, data: bytes) -> Delta | None:
    """Return the content of an index object; None: it is none."""
    for namespace in NAMESPACES:
        if Names(namespace).is_object(name):
            with suppress(CorruptPackError):
                return decode_delta(unseal(name, data, Authenticator(), namespace))
    return None


def ended_in(world: World, since: float = 0.0) -> Ended:
    """Return what has ended.

    :param since: only at this time or later, on the medium's clock.
    """
    ended = Ended(set(), set())
    for _, delta in decoded(world):
        ended.blobs.update(tombstone.name for tombstone in delta.removed if tombstone.time >= since)
        ended.requests.update(dropped.digest for dropped in delta.dropped if dropped.time >= since)
    return ended


def newer(name: str, namespace: bytes) -> bytes:
    """Return the bytes of an index object in a format that a later release writes."""
    with mock.patch.object(format, "FORMAT_VERSION", format.FORMAT_VERSION + 1):
        return format.seal(name, b"content of a later release", Authenticator(), namespace)


class SimulatedStore(SharedBackend):
    """A handle of a simulated process."""

    @classmethod
    def open_blobs(cls, url: StoreUrl, options: Mapping[str, str], *, read_only: bool) -> Blobs:
        raise NotImplementedError

    def abandon(self) -> None:
        """Release what the operating system releases when a process is killed."""
        for namespace in self._opened.values():
            namespace.replica._env.close()
            namespace._folder._release()


class Timeline:
    """Bursts of activity, the hours or days between them, and calm minutes at the end.

    :param draw: source of all choices.
    """

    def __init__(self, draw: random.Random) -> None:
        self._bursts: list[Span] = []
        begin = 0.0
        for _ in range(draw.choice((1, 2, 2, 3))):
            self._bursts.append(Span(begin, begin + draw.uniform(15, 40)))
            begin = self._bursts[-1].end + draw.choice(_GAPS_S) * draw.uniform(0.9, 1.1)
        self.until = self._bursts[-1].end
        """Simulated time at which the last burst ends."""
        self.calm = Span(self.until + 2 * HOUR_S, self.until + 2 * HOUR_S + CALM_S)
        """Minutes without faults and commits. Late requests have taken effect before."""
        self._bursts.append(self.calm)

    def pause_s(self, now: float, draw: random.Random) -> float:
        """Return how long a thread sleeps now, in seconds: between bursts it seldom runs."""
        for burst in self._bursts:
            if now < burst.begin:
                whole = burst.begin - now
                return whole * draw.random() if draw.random() < 0.3 else whole + draw.uniform(0, 3)
            if now < burst.end:
                return 0.0
        return 0.0

    def suspension_s(self, now: float, draw: random.Random) -> float:
        """Return the length of a suspension that begins now, in seconds. Half of them end in a later burst."""
        later = [burst for burst in self._bursts if burst.begin > now]
        if not later or draw.random() < 0.5:
            return 1 + draw.expovariate(1 / 10)
        burst = draw.choice(later)
        return burst.begin - now + draw.uniform(0, min(60.0, burst.end - burst.begin))


class History:
    """One store and the machines that use it.

    :param seed: determines everything.
    :param directory: for the replicas.
    :param hangs: of ``_HANGS``, those that occur; none: every now and then any.
    """

    def __init__(self, seed: int, directory: Path, hangs: Sequence[tuple[str, str, str]] = ()) -> None:
        draw = self._draw = random.Random(seed)
        self._hangs = hangs
        self.world = World(seed, MIXES[seed % len(MIXES)])
        self.time = Timeline(draw)
        self.world.draw_pause = lambda source: self.time.suspension_s(self.world.now, source)
        self.ttl_s = draw.choice((None, None, None, 20 * HOUR_S))
        self.capacity = draw.choice((None, None, None, _CAPACITY))
        self.model = Model(self.ttl_s)
        self.deletes = draw.choice((0.0, 0.0, 0.1))
        """Probability that an engine deletes a pack."""
        self.pool = draw.choice((0, 0, 6))
        """Number of different packs; 0: all are different."""
        self.views: dict[str, dict[bytes, View]] = {}
        """What engines show after the calm minutes, by process."""
        self._directory = directory
        self._operator = Operator(self, random.Random(f"operator {seed}"))
        self._writers = draw.randrange(2, 6)
        self._lives = 0
        self._handles: list[SimulatedStore] = []
        self._numbers = count(10_000)  # of packs

    def run(self) -> None:
        """Run the history and check its promises."""
        with pytest.MonkeyPatch.context() as patch, wrong_wall_clocks():
            self._tune(patch)
            self._run()

    def _tune(self, patch: pytest.MonkeyPatch) -> None:
        """Let some histories write bases after few segments, and sweep blobs after minutes instead of a day."""
        if self._draw.random() < 0.6 or self._hangs:
            patch.setattr(merge, "_MOST_SEGMENTS", 2)
            patch.setattr(merge, "_LEAST_BASE_BYTES", 0)
            patch.setattr(merge, "_OTHERS_BASE_S", 10.0)
            patch.setattr(merge, "_INCLUDED_S", self._draw.choice((3.0, 600.0)))
            patch.setattr(merge, "_PART_BYTES", self._draw.choice((1500, 16 << 20)))
        if self._draw.random() < 0.3:
            patch.setattr(merge, "MOST_COMMITS", 2)
        if self._draw.random() < 0.4 or self._hangs:
            # A commit is acknowledged only within half of the age at which a sweep deletes its blobs.
            patch.setattr(inbox, "_MOST_COMMIT_S", 200.0)
            patch.setattr(sweep, "_LEAST_AGE_S", 400.0)
            patch.setattr(sweep, "INTERVAL_S", 20.0)
            patch.setattr(namespace_module, "_SWEEP_CHECK_S", 8.0)

    def _run(self) -> None:
        draw, world = self._draw, self.world
        for number in range(self._writers):
            self._start(f"engine{number}")
        for _ in range(draw.randrange(3)):
            world.at(draw.uniform(1, self.time.until), self._cut_off)
        if draw.random() < 0.3:
            for _ in range(draw.randrange(1, 4)):
                world.at(draw.uniform(5, self.time.until), self._operator.act)
        if draw.random() < 0.5 or self._hangs:
            for _ in range(draw.randrange(1, 6)):
                world.at(draw.uniform(0, self.time.until), self._hang)
        world.wake_at = self.time.calm.begin + MINUTE_S
        world.run(self.time.until)
        world.faults = CALM
        world.hangs.clear()
        self._check("right after the last fault")
        if draw.random() < 0.6:
            return  # only some of the histories have calm minutes: they take most of the time
        world.run(self.time.calm.begin)
        world.note("CALM")
        self._process("settler", self._settle)
        world.run(self.time.calm.end + 15 * MINUTE_S)
        left = set(world.medium.names("/inbox/")) - self._operator.junk
        assert not left, f"commits are not merged: {sorted(left)}"
        shown = self._check("after calm minutes")
        self._check_calm(shown)
        if draw.random() < 0.1:
            self._check_days_later()

    def end(self) -> None:
        """End all processes, and delete their files."""
        self.world.end()
        for handle in self._handles:
            handle.abandon()
        shutil.rmtree(self._directory, ignore_errors=True)

    def next_pack(self) -> int:
        """Return the number of the pack that an engine stores."""
        return self._draw.randrange(2 * self.pool) if self.pool else next(self._numbers)

    def open(self, process: Process, *, reader: bool = False) -> SharedBackend:
        """Open a handle of a process."""
        options = SharedOptions(
            capacity=self.capacity,
            ttl_s=self.ttl_s,
            cache=str(self._directory / process.machine),
        )
        blobs = SimulatedBlobs(process)
        backend = SimulatedStore(blobs, options, read_only=reader, clock=process, background=False)
        self._handles.append(backend)
        return backend

    def read(self, backend: SharedBackend, namespace: bytes, table: PackTable) -> bytes | None:
        """Read a pack and check its bytes; None if it is a miss."""
        data = read_pack(backend, namespace, table)
        known = self.model.payloads[table.pack_id]
        is_ours = data is None or data in known or table.pack_id in self.model.damaged
        assert is_ours, f"wrong bytes of pack {table.pack_id.hex()[:8]}"
        return data

    def look(self, backend: SharedBackend, namespace: bytes) -> View:
        """Return what a handle shows of a namespace."""
        packs = frozenset(tables(backend, namespace))
        return View(packs, frozenset(manifest.id for manifest in backend.manifests(namespace)))

    # Processes

    def _process(self, name: str, program: Callable[[Process], None], machine: str = "") -> Process:
        ahead_s = self._draw.choice((0.0, 0.0, 3.0, -40.0, YEAR_S, -YEAR_S))
        return Process(self.world, name, program, machine=machine, wall_ahead_s=ahead_s)

    def _run_process(self, name: str, program: Callable[[Process], None]) -> None:
        process = self._process(name, program)
        while not process.ended:
            self.world.run(self.world.now + 10.0)

    def _start(self, machine: str) -> None:
        """Start an engine on a machine, whose disk keeps the replica of previous engines."""
        self._lives += 1

        def live(process: Process) -> None:
            try:
                Engine(self, process).live()
            finally:
                again = self.world.now + self._draw.uniform(1, 20)
                if again < self.time.until:
                    self.world.at(again, lambda: self._start(machine))

        self._process(f"{machine}.{self._lives}", live, machine)

    def _cut_off(self) -> None:
        alive = [process for process in self.world.processes if not process.dead and not process.ended]
        for process in self._draw.sample(alive, min(1, len(alive))):
            seconds = self._draw.choice((5.0, 40.0, 5 * MINUTE_S, 4 * HOUR_S))
            process.cut_off_until = min(self.world.now + seconds, self.time.calm.begin)
            self.world.note(f"{process.name} is CUT OFF for {process.cut_off_until - self.world.now:.0f} s")

    def _hang(self) -> None:
        """Let the next request of some kind suspend its thread, also in the middle of a list."""
        kind, part, follows = self._draw.choice(self._hangs or _HANGS)
        seconds = self._draw.choice((self._draw.uniform(1, 30), self.time.suspension_s(self.world.now, self._draw)))
        self.world.hangs.append(Hang(kind, part, seconds, before=self._draw.random() < 0.7, follows=follows))

    def _settle(self, process: Process) -> None:
        """Do what is due until the calm minutes end."""
        backend = self.open(process)
        for identity in IDENTITIES:
            backend.open_namespace(identity)
        while self.world.now < self.time.calm.end + 14 * MINUTE_S:  # merges what engines publish when they are closed
            process.sleep(min(max(backend.step(), 15.0), MINUTE_S))
        backend.close()

    # Checks

    def _check(self, when: str) -> dict[bytes, View]:
        """Read everything with a new reader; return what it shows."""
        model, world = self.model, self.world
        expected = model.must_hold(world.now, ended_in(world))
        requests = model.must_hold_requests(world.now, ended_in(world))
        shown: dict[bytes, View] = {}
        found: dict[bytes, bytes | None] = {}
        keys: set[str] = set()

        def look(process: Process) -> None:
            backend = self.open(process)
            for identity in IDENTITIES:
                namespace = backend.open_namespace(identity).id
                shown[namespace] = self.look(backend, namespace)
                sent = sum(number for (name, _), number in world.requests.items() if name == process.name)
                assert sent <= 40 + 4 * len(world.medium.blobs), f"{when}: {sent} requests to open"
                for name, table in tables(backend, namespace).items():
                    found[name] = self._read_again(backend, namespace, table)
                names = sorted(shown[namespace].requests)
                held = backend.manifest_keys(namespace, names)
                keys.update(name for name, value in zip(names, held, strict=True) if value is not None)
            self._check_capacity(backend, when)
            backend.close()

        self._run_process(f"reader {when}", look)
        ended = ended_in(world)
        expected &= model.must_hold(world.now, ended)  # an engine that was suspended may have ended one since
        requests &= model.must_hold_requests(world.now, ended)
        problems = [f"pack {name.hex()[:8]} is lost" for name in sorted(expected - found.keys())]
        for name in sorted(expected & found.keys()):
            if found[name] is None:
                problems.append(f"pack {name.hex()[:8]} has no bytes")
        problems += [f"request {name} is lost" for name in sorted(requests - keys)]
        assert not problems, f"{when}: {'; '.join(problems)}"
        return shown

    def _read_again(self, backend: SharedBackend, namespace: bytes, table: PackTable) -> bytes | None:
        """Read a pack that may have several blobs, some of which are gone: each miss removes one."""
        for _ in range(3):
            data = self.read(backend, namespace, table)
            if data is not None:
                return data
        return None

    def _check_capacity(self, backend: SharedBackend, when: str) -> None:
        if self.capacity is None or when.startswith("right"):
            return
        stored = backend.stats().stored_bytes
        assert stored <= 1.05 * self.capacity, f"{when}: {stored} bytes are stored, the capacity is {self.capacity}"

    def _check_calm(self, shown: dict[bytes, View]) -> None:
        """Compare engines with the newest reader."""
        damaged = self.model.damaged
        ended = ended_in(self.world, since=START + self.time.calm.end - 2 * MINUTE_S)
        ignored = damaged | {name[:ID_BYTES] for name in ended.blobs} | self._without_blobs(shown)
        for name, views in sorted(self.views.items()):
            for namespace, view in views.items():
                differ = (view.packs ^ shown[namespace].packs) - ignored
                packs = ", ".join(pack.hex()[:8] for pack in sorted(differ))
                assert not differ, f"{name} differs from a new reader in packs {packs}"
                if not ignored:
                    requests = view.requests ^ shown[namespace].requests
                    assert not requests, f"{name} differs from a new reader in requests {sorted(requests)}"

    def _without_blobs(self, shown: dict[bytes, View]) -> set[bytes]:
        """Return the packs that an engine shows and whose bytes are gone. An engine that was suspended for days may
        know a pack whose tombstone has been dropped meanwhile: its reads are misses.
        """
        blobs = {name.rsplit("/", 1)[1][: 2 * ID_BYTES] for name in self.world.medium.names("/packs/")}
        views = [view for of_engine in self.views.values() for view in of_engine.values()]
        packs = set().union(*(view.packs for view in [*views, *shown.values()]))
        return {pack for pack in packs if pack.hex() not in blobs}

    def _check_days_later(self) -> None:
        """Let one engine run for three days, and look for blobs that nothing names."""
        end = self.world.now + 3 * DAY_S

        def idle(process: Process) -> None:
            backend = self.open(process)
            for identity in IDENTITIES:
                backend.open_namespace(identity)
            while self.world.now < end:
                backend.step()
                process.sleep(30 * MINUTE_S)
            backend.close()

        self._run_process("janitor", idle)
        shown = self._check("days later")
        if self._operator.junk:
            return
        held = set().union(*(view.packs for view in shown.values()))
        blobs = self.world.medium.names("/packs/")
        extra = [name for name in blobs if bytes.fromhex(name.rsplit("/", 1)[1][: 2 * ID_BYTES]) not in held]
        assert not extra, f"{len(extra)} blobs of packs are not named and not deleted: {extra[:3]}"


class Operator:
    """Mistakes of the people who have access to the medium."""

    def __init__(self, history: History, draw: random.Random) -> None:
        self._history = history
        self._draw = draw
        self.junk: set[str] = set()
        """Names of blobs that no engine has written in this way. Some prevent a sweep."""

    def act(self) -> None:
        """Do one of the mistakes."""
        mistake = self._draw.choice((self._delete, self._delete, self._garble, self._restore, self._add_junk))
        mistake()

    def _choose(self) -> list[str]:
        medium = self._history.world.medium
        part = self._draw.choice(("/index/", "/inbox/", "/packs/", "/latest", "totals/", "policy"))
        names = medium.names(part)
        return self._draw.sample(names, min(len(names), self._draw.randrange(1, 3)))

    def _delete(self) -> None:
        names = self._choose()
        for name in names:
            self._damage(name)
        self._note("deletes", *names)
        self._history.world.medium.delete(names)

    def _garble(self) -> None:
        medium = self._history.world.medium
        for name in self._choose()[:1]:
            self._damage(name)
            self._note("garbles", name)
            length = self._draw.choice((0, 10, len(medium.blobs[name].data)))
            medium.deleted[name] = medium.blobs[name].data
            medium.put(name, self._draw.randbytes(length))
            self.junk.add(name)

    def _restore(self) -> None:
        """Replace a blob that is written again and again by an older version."""
        medium = self._history.world.medium
        names = [name for name in sorted(medium.replaced) if "/packs/" not in name]
        for name in names[:1]:
            self._note("restores an old version of", name)
            medium.put(name, self._draw.choice(medium.replaced[name]))

    def _add_junk(self) -> None:
        namespace = self._draw.choice(NAMESPACES)
        names = Names(namespace)
        name = self._draw.choice((names.new_commit(self._draw), names.new_index(1, START, self._draw)))
        if self._draw.random() < 0.3:
            name += "-junk"
        data = self._draw.choice((self._draw.randbytes(50), newer(name, namespace)))
        self._note("adds", name)
        self._history.world.medium.put(name, data)
        self.junk.add(name)

    def _damage(self, name: str) -> None:
        """Record what may be missed when this blob is gone."""
        model, data = self._history.model, self._history.world.medium.blobs[name].data
        for namespace in NAMESPACES:
            blob = Names(namespace).pack_name(name)
            if blob is not None:
                model.damaged.add(blob[:ID_BYTES])
        delta = decode(name, data)
        if delta is not None:
            model.damaged.update(entry.pack_id for entry in delta.packs)
            model.damaged.update(tombstone.name[:ID_BYTES] for tombstone in delta.removed)  # they may return
            for entry in delta.manifests:
                model.damaged.update(format.split_ids(entry.packs))

    def _note(self, does: str, *names: str) -> None:
        if names:
            self._history.world.note(f"OPERATOR {does} {', '.join(names)}")


class Engine:
    """One run of an engine: it stores, reads, deletes and does background work until it is killed or its time ends."""

    def __init__(self, history: History, process: Process) -> None:
        self._history = history
        self._model = history.model
        self._world = history.world
        self._process = process
        self._draw = random.Random(f"life {process.name} {history.world.seed}")
        self._content = self._draw.randrange(2)
        self._known: dict[bytes, dict[bytes, PackTable]] = {name: {} for name in NAMESPACES}
        self._cursors: dict[bytes, bytes | None] = dict.fromkeys(NAMESPACES)
        self._opened: set[bytes] = set()
        self._commits = 0
        self._is_stopping = False
        self._is_stopped = False

    def live(self) -> None:
        """Run until the history ends."""
        self._process.sleep(self._draw.uniform(0, 5))
        try:
            backend = self._history.open(self._process)
        except StoreError as error:
            self._note(f"could not open: {error}")
            return
        self._process.spawn(lambda: self._work(backend))
        self._use(backend)
        calm = self._history.time.calm
        if self._world.now < self._history.time.until:
            self._stop(backend)
            return
        self._process.sleep(calm.end - self._world.now)
        self._compare(backend)
        self._stop(backend)

    def _stop(self, backend: SharedBackend) -> None:
        self._is_stopping = True
        wait_s = 0.5
        while not self._is_stopped:
            self._process.sleep(wait_s)
            wait_s = min(2 * wait_s, 5 * MINUTE_S)  # the thread may be suspended for days
        with suppress(StoreError):
            backend.close()

    def _work(self, backend: SharedBackend) -> None:
        """Do the background work of the handle, in the second thread."""
        try:
            while not self._is_stopping:
                # In the calm minutes the thread is slow, which makes the simulation fast.
                least_s = 15.0 if self._world.now >= self._history.time.calm.begin else 0.05
                wait_s = min(max(backend.step(), least_s), MINUTE_S)
                self._process.sleep(self._pause_s() or wait_s)
        finally:
            self._is_stopped = True

    def _pause_s(self) -> float:
        return self._history.time.pause_s(self._world.now, self._draw)

    def _use(self, backend: SharedBackend) -> None:
        until = self._history.time.until
        while self._world.now < until and self._draw.random() > 0.04:
            namespace = self._draw.choice(NAMESPACES)
            try:
                if namespace not in self._opened:
                    backend.open_namespace(IDENTITIES[NAMESPACES.index(namespace)])
                    self._opened.add(namespace)
                self._act(backend, namespace)
            except StoreError as error:
                self._note(f"{type(error).__name__}: {error}")
            self._process.sleep(self._pause_s() or self._draw.uniform(0.2, 6.0))

    def _act(self, backend: SharedBackend, namespace: bytes) -> None:
        choice = self._draw.random()
        if choice < 0.5:
            self._store(backend, namespace)
        elif choice < 0.5 + self._history.deletes:
            self._delete(backend, namespace)
        elif choice < 0.85:
            self._read(backend, namespace)

    def _store(self, backend: SharedBackend, namespace: bytes) -> None:
        numbers = {self._history.next_pack() for _ in range(self._draw.randrange(1, 4))}
        numbers = {2 * (number // 2) + NAMESPACES.index(namespace) for number in numbers}
        packs = [pack_of(number, self._content) for number in sorted(numbers)]
        names = [pack.pack_id for pack in packs]
        for number in sorted(numbers):
            pack_id = pack_of(number, self._content).pack_id
            self._model.payloads[pack_id].add(payload(number, self._content))
        self._commits += 1
        manifests: list[ManifestWrite] = []
        if self._draw.random() < 0.4:
            name = f"{self._process.name}-{self._commits}"
            manifests = [sample_manifest(name, packs=names, ordered=False)]
        begin = self._world.now
        self._process.written.clear()
        shown = ", ".join(name.hex()[:8] for name in names)
        self._note(f"STORE {shown}")
        backend.commit(namespace, CommitBatch(packs, manifests))
        self._note(f"STORED {shown}")
        at = Span(begin, self._world.now)
        written = [Names(namespace).pack_name(blob) for blob in self._process.written]
        for pack_id in names:
            blobs = frozenset(blob for blob in written if blob is not None and blob[:ID_BYTES] == pack_id)
            self._model.stored[pack_id].append(Stored(at, blobs))
        for write in manifests:
            digest = manifest_row(namespace, write.manifest.id)[ID_BYTES:]
            self._model.requests[write.manifest.id] = Held(digest, names, at)

    def _delete(self, backend: SharedBackend, namespace: bytes) -> None:
        self._refresh(backend, namespace)
        if not self._known[namespace]:
            return
        name = self._draw.choice(sorted(self._known[namespace]))
        self._model.deleted.add(name)
        batch = CommitBatch(bad=[name]) if self._draw.random() < 0.3 else CommitBatch(deletions=[name])
        self._note(f"DELETE {name.hex()[:8]}")
        backend.commit(namespace, batch)
        self._note(f"DELETED {name.hex()[:8]}")

    def _read(self, backend: SharedBackend, namespace: bytes) -> None:
        self._refresh(backend, namespace)
        known = sorted(self._known[namespace])
        for name in self._draw.sample(known, min(2, len(known))):
            self._history.read(backend, namespace, self._known[namespace][name])

    def _refresh(self, backend: SharedBackend, namespace: bytes) -> None:
        changes = backend.changes(namespace, self._cursors[namespace])
        known = self._known[namespace]
        if changes.reset:
            known.clear()
        for name in changes.removed:
            known.pop(name, None)
        for table in changes.added:
            known[table.pack_id] = table
        self._cursors[namespace] = changes.cursor

    def _compare(self, backend: SharedBackend) -> None:
        """Record what the handle shows after the calm minutes, and that ``changes`` led to the same."""
        views: dict[bytes, View] = {}
        for namespace in sorted(self._opened):
            views[namespace] = self._history.look(backend, namespace)
            self._refresh(backend, namespace)
            differ = views[namespace].packs ^ self._known[namespace].keys()
            assert not differ, f"{self._process.name}: changes differ from the catalogue in {len(differ)} packs"
        self._history.views[self._process.name] = views

    def _note(self, text: str) -> None:
        self._world.note(f"{self._process.name}: {text}")


def fail_or_events(seed: int, directory: Path, hangs: Sequence[tuple[str, str, str]] = ()) -> tuple[str, set[str]]:
    """Run a history; return the text of its failure, empty if it has none, and which ``EVENTS`` occurred."""
    history = History(seed, directory / str(seed), hangs)
    text = ""
    try:
        history.run()
    except Exception as error:
        lines = "\n".join(history.world.steps[-_SHOWN_STEPS:])
        trace = "".join(format_exception(error)[-5:])
        text = f"history {seed}: {type(error).__name__}: {error}\n{trace}\nlast steps:\n{lines}"
    finally:
        history.end()
    steps = "\n".join(history.world.steps)
    return text, {event for event in EVENTS if event in steps}


def run_histories(directory: Path, first: int, number: int, hangs: Sequence[tuple[str, str, str]] = ()) -> set[str]:
    """Run histories until one fails; return which ``EVENTS`` occurred."""
    occurred: set[str] = set()
    for seed in range(first, first + number):
        text, events = fail_or_events(seed, directory, hangs)
        if text:
            pytest.fail(text)
        occurred |= events
    return occurred


def test_histories_random_lose_no_acknowledged_pack(tmp_path: Path) -> None:
    assert run_histories(tmp_path, 0, 30) == set(EVENTS)


def test_history_same_seed_gives_same_steps(tmp_path: Path) -> None:
    steps: list[list[str]] = []
    for number in range(2):
        history = History(4, tmp_path / str(number))
        history.run()
        history.end()
        steps.append(history.world.steps)
    assert steps[0] == steps[1]


def _failures(job: tuple[int, int, str]) -> list[str]:
    """Run some histories in a process of its own; return the texts of failures."""
    first, number, directory = job
    texts: list[str] = []
    for seed in range(first, first + number):
        text, _ = fail_or_events(seed, Path(directory))
        texts += [text] * bool(text)
        if seed % 10 == 9:
            gc.collect()
    return texts


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_histories_many_random_lose_no_acknowledged_pack(tmp_path: Path) -> None:
    first = int(os.environ.get("PERSISTKV_FIRST_HISTORY", "1000"))
    number = int(os.environ.get("PERSISTKV_HISTORIES", "200"))
    jobs = [
        (begin, min(_AT_ONCE, first + number - begin), str(tmp_path))
        for begin in range(first, first + number, _AT_ONCE)
    ]
    texts: list[str] = []
    with get_context("spawn").Pool() as pool:
        for found in pool.imap_unordered(_failures, jobs):
            texts += found
            if len(texts) >= 5:
                pool.terminate()
                break
    assert not texts, f"{len(texts)} of {number} histories fail:\n" + "\n\n".join(texts[:5])


def plant_included(patch: pytest.MonkeyPatch) -> None:
    """Delete what a segment includes before the segment is durable."""
    publish = Merger._publish

    def planted(self: Merger, segment: Delta, began: float, planned: float) -> None:
        self._medium.blobs.delete(list(segment.includes))
        publish(self, segment, began, planned)

    patch.setattr(Merger, "_publish", planted)


def plant_unread(patch: pytest.MonkeyPatch) -> None:
    """Let a base include objects that its writer has listed and not read."""
    write_base = Merger.write_base

    def planted(self: Merger) -> None:
        infos = self._medium.listed(self._names.index, settled=True)
        self._reader._note_list(infos)
        self._replica.mark_contained([info.name for info in infos if self._names.is_object(info.name)])
        write_base(self)

    patch.setattr(Merger, "write_base", planted)


def plant_inbox(patch: pytest.MonkeyPatch) -> None:
    """Open without reading the inbox."""
    read = IndexReader._read
    patch.setattr(
        IndexReader, "_read", lambda self, *, with_inbox, settled: read(self, with_inbox=False, settled=settled)
    )


class _RepeatedNames(random.Random):
    """Jitter of its own, and names that another process has drawn, too."""

    names = random.Random()

    def randbytes(self, n: int) -> bytes:
        return self.names.randbytes(n)


def plant_names(patch: pytest.MonkeyPatch) -> None:
    """Draw names from a source that a process repeats after its predecessor on the machine, as a restored VM does."""

    def make_random(self: Process) -> random.Random:
        source = _RepeatedNames(f"{self.world.seed} {self.name}")
        source.names = random.Random(f"{self.world.seed} {self.machine}")
        return source

    patch.setattr(Process, "make_random", make_random)


def plant_order(patch: pytest.MonkeyPatch) -> None:
    """Let a sweep read once, the index before the inbox, and delete what the replica holds."""
    patch.setattr(Replica, "live_names", lambda self, names: set())
    patch.setattr(Sweeper, "_all_deltas", lambda self, now: _read_once(self, ("index", "inbox"), settled=True))


def plant_once(patch: pytest.MonkeyPatch) -> None:
    """Let a sweep read once, trust a single list, and delete what the replica holds."""
    patch.setattr(Replica, "live_names", lambda self, names: set())
    patch.setattr(Sweeper, "_all_deltas", lambda self, now: _read_once(self, ("inbox", "index"), settled=False))


_is_second: defaultdict[Sweeper, bool] = defaultdict(bool)


def _read_once(sweeper: Sweeper, order: Sequence[str], *, settled: bool) -> Iterator[Delta]:
    _is_second[sweeper] = not _is_second[sweeper]
    if not _is_second[sweeper]:
        return
    for part in order:
        for info in sweeper._medium.listed(getattr(sweeper._names, part), settled=settled):
            found = sweeper._fetch(info)
            if isinstance(found, Delta):
                yield found


def plant_before(patch: pytest.MonkeyPatch) -> None:
    """Check the age of a commit before its last request, not after it."""
    put_sealed = Medium.put_sealed

    def planted(self: Medium, name: str, body: bytes, namespace: bytes) -> BlobInfo:
        before = self.time.now()
        written = put_sealed(self, name, body, namespace)
        return written._replace(time=before) if "/inbox/" in name else written

    patch.setattr(Medium, "put_sealed", planted)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "included": plant_included,
    "unread": plant_unread,
    "inbox": plant_inbox,
    "names": plant_names,
    "order": plant_order,
    "once": plant_once,
    "before": plant_before,
}
"""For each rule of the protocol, a function that breaks it."""


NOT_FOUND = {"order", "once"}
"""Rules whose planted bugs no history has found yet, in a few hundred of them."""
HANGS_FOR = {
    "order": [("LIST", "/inbox/", "/swept")],
    "once": [("LIST", "/index/", "/swept")],
    "before": [("PUT", "/inbox/", "")],
}
"""For some rules, the requests that must hang before a history without them loses content."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rule", sorted(PLANTED.keys() - NOT_FOUND))
def test_histories_find_a_planted_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    PLANTED[rule](monkeypatch)
    with pytest.raises(pytest.fail.Exception):
        run_histories(tmp_path, 0, 2000, HANGS_FOR.get(rule, ()))
