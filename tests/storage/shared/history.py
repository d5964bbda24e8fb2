"""A random history of engines on one simulated medium that loses, delays and repeats requests.

Promises after each history:

1. An acknowledged pack is held, with its bytes, unless a tombstone was written for it, its ttl has
   passed, or an operator deleted or changed it or an object that named it. Its blob is not deleted
   before there is a tombstone.
2. No read returned bytes that no engine stored under these keys.
3. The store opens from an empty replica, with a bounded number of requests.
4. Engines that keep running agree with a fresh reader after calm minutes.
5. When a tenant was forgotten, no reader that opens the store shows what the destroyed data keys
   seal, and engines that run do not after calm minutes. Content under later keys is kept.
6. Then the inbox is empty and the capacity is kept. Days later, all blobs of packs are named.

Each engine has two namespaces and a second thread that merges. Histories have bursts of activity,
and hours or days between them, in which all engines are suspended. A failure prints its seed and
its last steps.
"""

from __future__ import annotations

import fcntl
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from traceback import format_exception
from typing import NamedTuple, TextIO

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, CorruptPackError, StoreError
from persistkv.storage.blobs import Blobs
from persistkv.storage.format.pack import ID_BYTES, PackTable
from persistkv.storage.shared import SharedBackend, SharedOptions, inbox
from persistkv.storage.shared.index import follower, merge, sweep
from persistkv.testing.conformance.suite import read_pack, tables
from tests.storage.shared.engines import Engine
from tests.storage.shared.model import (
    FORGOTTEN,
    IDENTITIES,
    KEYS,
    NEW_KEY,
    Model,
    Span,
    View,
    ended_in,
    indexes,
)
from tests.storage.shared.operators import Operator
from tests.storage.shared.simulation import (
    CALM,
    DAY_S,
    HOUR_S,
    MINUTE_S,
    MISDATED_S,
    START,
    Faults,
    Hang,
    Past,
    Process,
    SimulatedBlobs,
    World,
    wrong_wall_clocks,
)

YEAR_S = 365 * DAY_S
_GAPS_S = (
    5 * MINUTE_S,
    20 * MINUTE_S,
    2 * HOUR_S,
    11 * HOUR_S,
    13 * HOUR_S,
    25 * HOUR_S,
    8 * DAY_S,
)
_CAPACITY = 40 << 10  # 40 KiB: about eight packs
_SHOWN_STEPS = 300
_KEY_SHARE = 0.3  # of the histories whose store has a key
_KEY_VARIABLES = ("PERSISTKV_HISTORY_KEY", "PERSISTKV_HISTORY_NEW_KEY")
CALM_S = 7 * MINUTE_S
"""Seconds in which engines merge the remaining commits, and read the merged ones: idle engines list
after 5 minutes."""

MIXES = (
    Faults(),
    Faults(failed=0.02, lost=0.05, slow=0.05),
    Faults(late=0.05, repeated=0.08, slow=0.1),
    Faults(pause=0.02, freeze=0.01, death=0.004, slow=0.05),
    Faults(misdated=0.1, slow=0.05),
    Faults(0.01, 0.01, 0.03, 0.03, 0.04, 0.02, 0.03, 0.01, 0.005, 0.004),
)
EVENTS = (
    "FAILED",
    "REFUSED",
    "reply LOST, the effect follows",
    "took effect LATE",
    "REPEATED",
    "MISDATED",
    "CLOCK",
    "SUSPENDED",
    "FROZEN",
    "DIES",
    "CUT OFF",
    "COPIED",
    "STORED",
    "DELETED",
    "FORGOTTEN",
    "OPERATOR",
)
"""Each of them occurs in 30 histories."""


class HangKind(NamedTuple):
    """Requests that hang."""

    kind: str
    part: str
    """Part of the name, or of the prefix of a list."""
    follows: str = ""
    """Part of the name that the process has written last; empty: any."""
    before: float = 0.7
    """Probability that the request takes effect after the suspension. Otherwise a list hangs
    between its halves."""


_HANGS = (
    HangKind("PUT", "/inbox/"),
    HangKind("PUT", "/index/"),
    HangKind("PUT", "/latest"),
    HangKind("DELETE", "/"),
    HangKind("LIST", "/index/"),
    HangKind("LIST", "/index/", "/swept", 0.3),
    HangKind("LIST", "/inbox/", "/swept"),
    HangKind("DELETE", "/packs/", "/swept"),
)


class SimulatedStore(SharedBackend):
    """A handle of a simulated process."""

    @classmethod
    def open_blobs(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
        *,
        read_only: bool,
    ) -> Blobs:
        raise NotImplementedError

    def abandon(self) -> None:
        """Release what the operating system releases when a process is killed."""
        for namespace in self._opened:
            namespace.discard()


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

    def pauses(self) -> Iterator[tuple[Span, Span]]:
        """Iterate over the bursts without the last one, each with the one that follows it."""
        return pairwise(self._bursts[:-1])

    def pause_s(self, now: float, draw: random.Random) -> float:
        """Return how long a thread sleeps now, in seconds: between bursts it seldom runs."""
        for burst in self._bursts:
            if now < burst.begin:
                whole = burst.begin - now
                return (
                    whole * draw.random()
                    if draw.random() < 0.3
                    else whole + draw.uniform(0, 3)
                )
            if now < burst.end:
                return 0.0
        return 0.0

    def suspension_s(self, now: float, draw: random.Random) -> float:
        """Return the length of a suspension that begins now, in seconds. Half of them end in a
        later burst."""
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

    def __init__(
        self,
        seed: int,
        directory: Path,
        hangs: Sequence[HangKind] = (),
    ) -> None:
        draw = self._draw = random.Random(seed)
        self._hangs = hangs
        self.world = World(seed, MIXES[seed % len(MIXES)])
        self.time = Timeline(draw)
        self.world.draw_pause = lambda source: self.time.suspension_s(
            self.world.now, source
        )
        self.ttl_s = draw.choice((None, None, None, 20 * HOUR_S))
        self.capacity = draw.choice((None, None, None, _CAPACITY))
        self.model = Model(self.ttl_s)
        self.deletes = draw.choice((0.0, 0.0, 0.1))
        """Probability that an engine deletes a pack."""
        self.pool = draw.choice((0, 0, 6))
        """Number of different packs; 0: all are different."""
        self.world.medium.on_delete = self._note_deletion
        self.views: dict[str, dict[bytes, View]] = {}
        """Content of each engine after the calm minutes, by process."""
        self._directory = directory
        self._operator = Operator(self, random.Random(f"operator {seed}"))
        self._writers = draw.randrange(2, 6)
        self._lives = 0
        self._has_copies = draw.random() < 0.2
        self._clock_jumps = False
        source = random.Random(f"key {seed}")
        self.has_key = source.random() < _KEY_SHARE
        """Whether a key seals the store."""
        self.is_rotated = False
        """Whether another key has replaced the first one."""
        self._rotates = self.has_key and source.random() < 0.5
        self.forgets = self.has_key and source.random() < 0.6
        """Whether a tenant has content, and is forgotten."""
        self.destroyed: set[bytes] = set()
        """Ids of the data keys that were destroyed before the calm minutes."""
        # a copy that does again what its original did would draw other salts
        self._has_copies = self._has_copies and not self.has_key
        self._copies = 0
        self._locks: list[TextIO] = []
        self._handles: list[SimulatedStore] = []

    def run(self) -> None:
        """Run the history and check its promises."""
        with pytest.MonkeyPatch.context() as patch, wrong_wall_clocks():
            self._tune(patch)
            self._run()

    def _tune(self, patch: pytest.MonkeyPatch) -> None:
        """Let some histories write bases after few segments, and sweep blobs after minutes instead
        of a day."""
        for variable, key in zip(_KEY_VARIABLES, KEYS, strict=True):
            patch.setenv(variable, key)
        if self._draw.random() < 0.6 or self._hangs:
            patch.setattr(merge, "LEAST_BASE_BYTES", 0)
            patch.setattr(merge, "OTHERS_BASE_S", 10.0)
            patch.setattr(merge, "INCLUDED_S", self._draw.choice((3.0, 600.0)))
            patch.setattr(merge, "PART_BYTES", self._draw.choice((1500, 16 << 20)))
        if self._draw.random() < 0.3:
            patch.setattr(merge, "MOST_COMMITS", 2)
        if self._draw.random() < 0.4 or self._hangs:
            # A commit is acknowledged only within half of the age at which a sweep deletes its
            # blobs.
            patch.setattr(inbox, "MOST_COMMIT_S", 200.0)
            patch.setattr(sweep, "LEAST_AGE_S", 400.0)
            patch.setattr(sweep, "INTERVAL_S", 20.0)
            patch.setattr(sweep, "CHECK_S", 8.0)
        if self._draw.random() < 0.3 or self._hangs:
            patch.setattr(follower, "LIST_S", 8.0)

    def _run(self) -> None:
        world = self.world
        for number in range(self._writers):
            self._start(f"engine{number}")
        self._schedule_faults()
        self._schedule_hangs()
        world.wake_at = self.time.calm.begin + MINUTE_S
        world.run(self.time.until)
        world.faults = CALM
        world.hangs.clear()
        self._check("right after the last fault")
        # Only some of the histories have calm minutes, which take most of the time. A sweep that
        # hangs may delete blobs after the check above.
        if self._draw.random() < 0.4 or self._hangs:
            self._run_calm()

    def _run_calm(self) -> None:
        """Let the engines merge the remaining commits, and compare them."""
        world = self.world
        world.run(self.time.calm.begin)
        world.note("CALM")
        self.destroyed = ended_in(world).keys
        self._process("settler", self._settle)
        world.run(self.time.calm.end + 15 * MINUTE_S)
        left = set(world.medium.names("/inbox/")) - self._operator.junk
        assert not left, f"commits are not merged: {sorted(left)}"
        shown = self._check("after calm minutes")
        self._check_calm(shown)
        if self._draw.random() < 0.1:
            self._check_days_later()

    def _schedule_faults(self) -> None:
        """Choose when machines lose their connection or are copied, the medium's clock jumps, and
        operators act."""
        draw, until = self._draw, self.time.until
        self._schedule(draw.randrange(3), self._cut_off)
        if self._has_copies:
            self._schedule(draw.randrange(1, 4), self._copy)
        if draw.random() < 0.3:
            self._schedule(draw.randrange(1, 4), self._operator.act)
        if self._rotates:
            self._schedule(1, self._rotate)
        if self.forgets:
            self._schedule(2, self._forget)
        if draw.random() < 0.2:
            self._clock_jumps = True
            self._schedule(draw.randrange(1, 5), self._jump)
            self.world.at(until, self._set_clock_right)

    def _schedule(self, number: int, act: Callable[[], None]) -> None:
        for _ in range(number):
            self.world.at(self._draw.uniform(1, self.time.until), act)

    def _schedule_hangs(self) -> None:
        """Choose which requests hang. A planted bug may need those at the beginning of a burst."""
        draw, world = self._draw, self.world
        if draw.random() < 0.3 or self._hangs:
            for burst, following in self.time.pauses():
                sleep = partial(self._sleep_machines, following)
                world.at(burst.end - draw.uniform(0, 2), sleep)
                for _ in self._hangs:
                    world.at(following.begin - 1, self._hang)
                    world.at(following.begin, self._start_sweeper)
        if draw.random() < 0.5 or self._hangs:
            self._schedule(draw.randrange(1, 6), self._hang)

    def _note_deletion(self, name: str) -> None:
        for _, names in indexes():
            blob = names.pack_name(name)
            if blob is not None and blob not in ended_in(self.world).blobs:
                self.model.unmarked.add(blob)

    def _start_sweeper(self) -> None:
        """Let a process that does nothing else sweep: it does not merge old commits before, as an
        engine does that wakes up."""
        self._lives += 1
        self._process(f"sweeper{self._lives}", self._sweep)

    def _rotate(self) -> None:
        """Let a process replace the key; if it fails or is killed, another one tries again."""

        def rotate(process: Process) -> None:
            try:
                backend = self._open(process, _KEY_VARIABLES[0])
                backend.rotate_key(NEW_KEY)
                self.is_rotated = True
                backend.close()
            except ConfigurationError:
                # all was done, but the rotation before has not learned it
                self.is_rotated = True
            except StoreError as error:
                process.note(f"could not rotate the key: {error}")
            finally:
                if not self.is_rotated and self.world.now < self.time.until:
                    self.world.at(self.world.now + MINUTE_S, self._rotate)

        self._lives += 1
        self._process(f"rotator{self._lives}", rotate)

    def _forget(self) -> None:
        """Let a process forget a tenant; if it fails or is killed, another one tries again."""
        is_done = False

        def forget(process: Process) -> None:
            nonlocal is_done
            try:
                backend = self.open(process)
                done = backend.forget(FORGOTTEN)
                process.note(f"FORGOTTEN {', '.join(done.key_ids)}")
                is_done = True
                backend.close()
            except (StoreError, ConfigurationError) as error:
                process.note(f"could not forget: {error}")
            finally:
                if not is_done and self.world.now < self.time.until:
                    self.world.at(self.world.now + MINUTE_S, self._forget)

        self._lives += 1
        self._process(f"forgetter{self._lives}", forget)

    def _sweep(self, process: Process) -> None:
        # the key may be replaced before the medium has answered the handle
        with suppress(StoreError, ConfigurationError):
            backend = self.open(process)
            for identity in IDENTITIES:
                namespace = backend.open_namespace(identity).id
                backend.opened_namespace(namespace).sweep()
            backend.close()

    def _jump(self) -> None:
        """Let the medium's clock jump: months ahead, back, or to the right time."""
        medium = self.world.medium
        medium.ahead_s = self._draw.choice((0.0, MISDATED_S, -MISDATED_S))
        self.world.note(f"CLOCK of the medium: {medium.ahead_s:+.0f} s")

    def _set_clock_right(self) -> None:
        self.world.medium.ahead_s = 0.0

    def end(self) -> None:
        """End all processes, and delete their files."""
        self.world.end()
        for handle in self._handles:
            handle.abandon()
        for lock in self._locks:
            lock.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def open(self, process: Process) -> SharedBackend:
        """Open a handle of a process. While the key is being replaced, one of the two opens the
        store."""
        if not self.has_key:
            return self._open(process, None)
        old, new = _KEY_VARIABLES
        if not self.is_rotated:
            with suppress(ConfigurationError):
                return self._open(process, old)
        return self._open(process, new)

    def _open(self, process: Process, key: str | None) -> SharedBackend:
        options = SharedOptions(
            capacity=self.capacity,
            ttl_s=self.ttl_s,
            cache=str(self._directory / process.machine),
            key_env=key,
        )
        blobs = SimulatedBlobs(process)
        backend = SimulatedStore(blobs, options, clock=process, background=False)
        self._handles.append(backend)
        return backend

    def read(
        self,
        backend: SharedBackend,
        namespace: bytes,
        table: PackTable,
    ) -> bytes | None:
        """Read a pack and check its bytes; None if it is a miss."""
        try:
            data = read_pack(backend, namespace, table)
        except CorruptPackError:
            # its table is that of another blob of the pack by now
            return None
        known = self.model.payloads[table.pack_id]
        is_ours = data is None or data in known or table.pack_id in self.model.damaged
        assert is_ours, f"wrong bytes of pack {table.pack_id.hex()[:8]}"
        return data

    def look(self, backend: SharedBackend, namespace: bytes) -> View:
        """Return the content of a namespace in the view of a handle."""
        packs = frozenset(tables(backend, namespace))
        return View(
            packs,
            frozenset(
                manifest.id for manifest in backend.catalogue(namespace).manifests()
            ),
        )

    # Processes

    def _process(
        self,
        name: str,
        program: Callable[[Process], None],
        machine: str = "",
        *,
        is_recorded: bool = False,
        is_right: bool = False,
    ) -> Process:
        ahead_s = self._draw.choice((0.0, 0.0, 3.0, -40.0, YEAR_S, -YEAR_S))
        if is_right:
            ahead_s = 0.0
        return Process(
            self.world,
            name,
            program,
            machine=machine,
            wall_ahead_s=ahead_s,
            is_recorded=is_recorded,
        )

    def _run_process(self, name: str, program: Callable[[Process], None]) -> None:
        # a machine whose clock is wrong does not sweep
        process = self._process(name, program, is_right=True)
        while not process.ended:
            self.world.run(self.world.now + 10.0)

    def _start(self, machine: str) -> None:
        """Start an engine on a machine, whose disk keeps the replica of previous engines."""
        self._lives += 1
        name = f"{machine}.{self._lives}"
        if self._has_copies:
            self._copy_disk(machine, f"{name}.start")
        self._process(
            name,
            self._life(machine, self._lives),
            machine,
            is_recorded=self._has_copies,
        )

    def _life(self, machine: str, number: int) -> Callable[[Process], None]:
        """Return the program of an engine. When it ends, another one starts on its machine."""

        def live(process: Process) -> None:
            try:
                Engine(self, process, 10_000 + 1000 * number).live()
            finally:
                again = self.world.now + self._draw.uniform(1, 20)
                if again < self.time.until:
                    self.world.at(again, lambda: self._start(machine))

        return live

    def _copy(self) -> None:
        """Take a snapshot of a machine, and start a copy of its engine from it: at once, or hours
        later."""
        draw, now = self._draw, self.world.now
        pasts = [
            (process, process.past())
            for process in self.world.processes
            if process.is_alive
        ]
        found = [(process, past) for process, past in pasts if past is not None]
        if not found:
            return
        original, past = draw.choice(found)
        seconds = draw.choice(
            (0.0, draw.uniform(1, 20), self.time.suspension_s(now, draw))
        )
        self.world.note(
            f"{original.name} is COPIED, the copy starts in {seconds:.0f} s"
        )
        if draw.random() < 0.2:
            original.kill()  # the snapshot replaces it
        if now + seconds < self.time.until:
            self.world.at(now + seconds, lambda: self._start_copy(original, past))

    def _copy_disk(self, machine: str, name: str) -> None:
        """Copy the replicas of a machine; those in use are in use in the copy, too."""
        source, target = self._directory / machine, self._directory / name
        if not source.exists():
            return
        shutil.copytree(source, target)
        for path in source.rglob("*.lock"):
            with path.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held = (target / path.relative_to(source)).open()
                    fcntl.flock(held, fcntl.LOCK_EX)
                    self._locks.append(held)

    def _start_copy(self, original: Process, past: Past) -> None:
        self._copies += 1
        machine = f"copy{self._copies}"
        self._copy_disk(f"{original.name}.start", machine)
        number = int(original.name.rsplit(".", 1)[1])
        name = f"{machine}.{number}"
        live = self._life(machine, number)
        ahead_s = original.wall_ahead_s
        Process(
            self.world,
            name,
            live,
            machine=machine,
            wall_ahead_s=ahead_s,
            original=original,
            past=past,
        )

    def _cut_off(self) -> None:
        alive = [process for process in self.world.processes if process.is_alive]
        for process in self._draw.sample(alive, min(1, len(alive))):
            seconds = self._draw.choice((5.0, 40.0, 5 * MINUTE_S, 4 * HOUR_S))
            process.cut_off_until = min(self.world.now + seconds, self.time.calm.begin)
            self.world.note(
                f"{process.name} is CUT OFF for {process.cut_off_until - self.world.now:.0f} s"
            )

    def _hang(self) -> None:
        """Let the next request of some kind suspend its thread, also in the middle of a list."""
        hang = self._draw.choice(self._hangs or _HANGS)
        seconds = self._draw.choice(
            (
                self._draw.uniform(1, 30),
                self.time.suspension_s(self.world.now, self._draw),
            )
        )
        before = self._draw.random() < hang.before
        self.world.hangs.append(
            Hang(hang.kind, hang.part, seconds, before=before, follows=hang.follows)
        )

    def _sleep_machines(self, following: Span) -> None:
        """Suspend some machines from the end of a burst until the next one: commits stay in the
        inbox, and other engines merge them then.
        """
        alive = [process for process in self.world.processes if process.is_alive]
        share = self._draw.choice((0.6, 1.0))
        for process in alive:
            if self._draw.random() < share:
                process.frozen_until = following.begin + self._draw.uniform(0, 20)
                self.world.note(
                    f"{process.name} is FROZEN for {process.frozen_until - self.world.now:.0f} s"
                )

    def _settle(self, process: Process) -> None:
        """Do the due work until the calm minutes end."""
        backend = self.open(process)
        for identity in IDENTITIES:
            backend.open_namespace(identity)
        # merges the commits that engines publish when they are closed
        while self.world.now < self.time.calm.end + 14 * MINUTE_S:
            process.sleep(min(max(backend.step(), 15.0), MINUTE_S))
        backend.close()

    # Checks

    def _check(self, when: str) -> dict[bytes, View]:
        """Read everything with a new reader; return its view."""
        model, world = self.model, self.world
        began = world.now
        ended = ended_in(world)
        expected = model.must_hold(began, ended)
        requests = model.must_hold_requests(world.now, ended)
        destroyed = ended.keys
        forgotten = model.forgotten_requests(destroyed)
        shown: dict[bytes, View] = {}
        found: dict[bytes, bytes | None] = {}
        keys: set[str] = set()

        def look(process: Process) -> None:
            backend = self.open(process)
            for identity in IDENTITIES:
                namespace = backend.open_namespace(identity).id
                view = self.look(backend, namespace)
                shown[namespace] = view
                self._check_requests(process, when)
                assert not view.requests & forgotten, f"{when}: forgotten requests"
                for name, table in tables(backend, namespace).items():
                    assert table.data_key not in destroyed, (
                        f"{when}: pack {name.hex()[:8]} of a forgotten tenant"
                    )
                    found[name] = self._read_again(backend, namespace, table)
                keys.update(self._with_keys(backend, namespace, view.requests))
            self._check_capacity(backend, when)
            backend.close()

        self._run_process(f"reader {when}", look)
        ended = ended_in(world)
        # an engine that was suspended may have ended one since
        expected &= model.must_hold(world.now, ended, began)
        requests &= model.must_hold_requests(world.now, ended)
        problems: list[str] = []
        for name in sorted(expected):
            if name not in found:
                problems.append(f"pack {name.hex()[:8]} is lost")
            elif found[name] is None:
                problems.append(f"pack {name.hex()[:8]} has no bytes")
        for name in sorted(model.wrongly_deleted(ended.keys)):
            problems.append(f"pack {name.hex()[:8]} was deleted without a tombstone")
        problems += [f"request {name} is lost" for name in sorted(requests - keys)]
        assert not problems, f"{when}: {'; '.join(problems)}"
        return shown

    def _check_requests(self, process: Process, when: str) -> None:
        """Check that a process has opened the store with a bounded number of requests."""
        sent = 0
        for (name, _), number in self.world.requests.items():
            if name == process.name:
                sent += number
        most = 40 + 4 * len(self.world.medium.blobs)
        assert sent <= most, f"{when}: {sent} requests to open"

    def _with_keys(
        self,
        backend: SharedBackend,
        namespace: bytes,
        requests: Iterable[str],
    ) -> set[str]:
        """Return those of the requests whose keys can be read."""
        names = sorted(requests)
        found = backend.manifest_keys(namespace, names)
        pairs = zip(names, found, strict=True)
        return {name for name, keys in pairs if keys is not None}

    def _read_again(
        self,
        backend: SharedBackend,
        namespace: bytes,
        table: PackTable,
    ) -> bytes | None:
        """Read a pack that may have several blobs, some of which are gone: each miss removes
        one."""
        for _ in range(3):
            data = self.read(backend, namespace, table)
            if data is not None:
                return data
        return None

    def _check_capacity(self, backend: SharedBackend, when: str) -> None:
        if self.capacity is None or when.startswith("right"):
            return
        stored = backend.stats().stored_bytes
        assert stored <= 1.05 * self.capacity, (
            f"{when}: {stored} bytes are stored, the capacity is {self.capacity}"
        )

    def _check_calm(self, shown: dict[bytes, View]) -> None:
        """Compare engines with the newest reader."""
        damaged = self.model.damaged
        since = START + self.time.calm.end - 2 * MINUTE_S
        if self._clock_jumps:
            # A base drops a tombstone early that has the time of a clock that was months back. An
            # engine that was suspended keeps the pack until it reads it, which is a miss.
            since = 0.0
        ended = ended_in(self.world, since)
        ignored = (
            damaged
            | {name[:ID_BYTES] for name in ended.blobs}
            | self._without_blobs(shown)
        )
        for name, views in sorted(self.views.items()):
            for namespace, view in views.items():
                differ = (view.packs ^ shown[namespace].packs) - ignored
                packs = ", ".join(pack.hex()[:8] for pack in sorted(differ))
                assert not differ, f"{name} differs from a new reader in packs {packs}"
                if not ignored:
                    requests = view.requests ^ shown[namespace].requests
                    # their ttl may have passed since the engine ended
                    requests -= self.model.dropped_requests(ended)
                    assert not requests, (
                        f"{name} differs from a new reader in requests {sorted(requests)}"
                    )

    def _without_blobs(self, shown: dict[bytes, View]) -> set[bytes]:
        """Return the packs that an engine shows and whose bytes are gone. An engine that was
        suspended for days may know a pack whose tombstone has been dropped meanwhile: its reads are
        misses.
        """
        blobs = {
            name.rsplit("/", 1)[1][: 2 * ID_BYTES]
            for name in self.world.medium.names("/packs/")
        }
        views = [
            view for of_engine in self.views.values() for view in of_engine.values()
        ]
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
        if self._operator.junk or self._clock_jumps:
            return  # blobs of the time when the clock was ahead are young for months
        held = set().union(*(view.packs for view in shown.values()))
        blobs = self.world.medium.names("/packs/")
        extra = [
            name
            for name in blobs
            if bytes.fromhex(name.rsplit("/", 1)[1][: 2 * ID_BYTES]) not in held
        ]
        assert not extra, (
            f"{len(extra)} blobs of packs are not named and not deleted: {extra[:3]}"
        )


def fail_or_events(
    seed: int,
    directory: Path,
    hangs: Sequence[HangKind] = (),
) -> tuple[str, set[str]]:
    """Run a history; return the text of its failure, empty if it has none, and which ``EVENTS``
    occurred."""
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
