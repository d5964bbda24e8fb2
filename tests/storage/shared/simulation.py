"""A medium in memory, and processes that use it in simulated time.

1. Each process has one thread or more. One thread runs at a time: it runs until it makes a request,
   sleeps or waits for a ``SimulatedLock``. All of these take simulated time, and the thread with
   the earliest time runs next. The same seed gives the same history.
2. A request takes effect at one moment, some time after it was sent and before its reply arrives.
   Faults move that moment, also by minutes and behind the end of the process, repeat the effect, or
   replace the reply.
3. The medium keeps the contract of ``Blobs``, and nothing beyond it: a list is read in two halves
   at different times.
4. A machine may be copied while a process runs on it, also in the middle of calls: a snapshot that
   is restored, or a clone. The copy runs the same program again with the recorded replies
   (``Past``), which takes no simulated time, and continues from there next to the original.
   ``Process.random`` is the random source of the operating system: the copy does not repeat it.
"""

from __future__ import annotations

import heapq
import random
import re
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import count, islice
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar
from unittest import mock

from persistkv.errors import StoreError
from persistkv.storage.blobs import (
    MAX_NAME,
    BlobInfo,
    BlobMissingError,
    Blobs,
    RefusedError,
    UnavailableError,
)
from persistkv.storage.format.codec import Buffer
from persistkv.storage.shared.clock import Clock

T = TypeVar("T")

START = 1_800_000_000.0
"""Time on the medium's clock at the beginning of a simulation, in seconds since the epoch."""
MINUTE_S = 60.0
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

_NAME = re.compile(r"[a-z0-9-]+(/[a-z0-9-]+)*")
_MOST_WAIT_S = 30.0  # longest time after which a client gives up a call


class Killed(BaseException):
    """The process was killed in the middle of a call."""


class LostReplyError(UnavailableError, Generic[T]):
    """The call took effect, but the reply was lost, in whole or in part."""

    def __init__(self, text: str, reply: T) -> None:
        super().__init__(text)
        self.reply = reply


class StoredBlob(NamedTuple):
    """Content of one name."""

    data: bytes
    time: float
    """When it was written, on the medium's clock: seconds since the epoch."""


class Medium:
    """The blobs of one store. Every call is atomic and takes no time.

    :param clock: returns the right time, in seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.ahead_s = 0.0
        """By how much the medium's clock is wrong."""
        self.blobs: dict[str, StoredBlob] = {}
        self.replaced: defaultdict[str, list[bytes]] = defaultdict(list)
        """For each name that was written again with other bytes, the earlier bytes, oldest
        first."""
        self.deleted: dict[str, bytes] = {}
        """Last content of each name that was deleted."""
        self.on_delete: Callable[[str], object] = lambda name: None
        """Called with each name that is deleted, before."""
        self._names: list[str] = []  # sorted

    def now(self) -> float:
        """Return the time on the medium's clock, in seconds since the epoch."""
        return self._clock() + self.ahead_s

    def put(self, name: str, data: bytes) -> float:
        """Write a blob; return the time on the medium's clock."""
        held = self.blobs.get(name)
        if held is not None and held.data != data:
            self.replaced[name].append(held.data)
        if held is None:
            insort(self._names, name)
        written = self.now()
        self.blobs[name] = StoredBlob(data, written)
        return written

    def get(self, name: str, offset: int, length: int) -> bytes:
        """Return at most ``length`` bytes of a blob, from ``offset`` on.

        :raises BlobMissingError: there is no such blob.
        """
        held = self.blobs.get(name)
        if held is None:
            raise BlobMissingError(f"{name}: no such blob")
        return held.data[offset : offset + length]

    def delete(self, names: Iterable[str]) -> None:
        """Delete blobs; missing ones are ignored."""
        for name in names:
            if name in self.blobs:
                self.on_delete(name)
            held = self.blobs.pop(name, None)
            if held is not None:
                self.deleted[name] = held.data
                del self._names[bisect_left(self._names, name)]

    def half(self, prefix: str, after: str, half: int) -> list[BlobInfo]:
        """Return one half of the blobs with a prefix: those whose last character is even or odd."""
        found: list[BlobInfo] = []
        begin = max(bisect_left(self._names, prefix), bisect_right(self._names, after))
        for name in islice(self._names, begin, None):
            if not name.startswith(prefix):
                break
            if ord(name[-1]) % 2 == half:
                held = self.blobs[name]
                found.append(BlobInfo(name, len(held.data), float(int(held.time))))
        return found

    def contents(self) -> dict[str, bytes]:
        """Return the bytes of all blobs, by name."""
        return {name: held.data for name, held in self.blobs.items()}

    def names(self, *parts: str) -> list[str]:
        """Return the names that contain all ``parts``, ascending."""
        return [name for name in self._names if all(part in name for part in parts)]


class Faults(NamedTuple):
    """Probabilities of faults, of each request; at most one occurs."""

    failed: float = 0.0
    """No effect; ``UnavailableError``."""
    refused: float = 0.0
    """No effect; ``RefusedError``."""
    lost: float = 0.0
    """The reply is lost after the effect; a reader may have got a part."""
    late: float = 0.0
    """``UnavailableError``; the effect of a write or deletion follows seconds, minutes or hours
    later."""
    repeated: float = 0.0
    """A write or deletion takes effect at once, and again seconds, minutes or hours later."""
    misdated: float = 0.0
    """The reply to a write has a date that is months ahead or back."""
    slow: float = 0.0
    """Request or reply takes up to 20 s."""
    pause: float = 0.0
    """The thread is suspended, before or after the effect; for how long, ``World.draw_pause``
    says."""
    freeze: float = 0.0
    """All threads of the process are suspended."""
    death: float = 0.0
    """The process is killed, before or after the effect, which may follow late."""


CALM = Faults()
_OF_WRITES = ("late", "repeated", "misdated")
MISDATED_S = 200 * DAY_S
"""Error of a wrong date. No machine's clock is wrong by as much: a wrong date that the machine's
clock confirms cannot be noticed."""


class Hang(NamedTuple):
    """Suspension of one thread in the next request of a kind, of any process; its other threads
    continue."""

    kind: str
    part: str
    """Part of the name, or of the prefix of a list."""
    seconds: float
    before: bool
    """Whether the request takes effect after the suspension."""
    follows: str = ""
    """Part of the name that the process has written last, in the same namespace; empty: any."""


def draw_late(draw: random.Random) -> float:
    """Return the seconds after which a late request takes effect: a minute on average, sometimes an
    hour."""
    if draw.random() < 0.15:
        return draw.uniform(10 * MINUTE_S, 90 * MINUTE_S)
    return draw.expovariate(1 / MINUTE_S)


def draw_pause(draw: random.Random) -> float:
    """Return the seconds of a suspension: seconds, minutes, sometimes hours, seldom days."""
    chance = draw.random()
    if chance < 0.5:
        return draw.uniform(1, MINUTE_S)
    if chance < 0.8:
        return draw.uniform(MINUTE_S, 30 * MINUTE_S)
    if chance < 0.97:
        return draw.uniform(2 * HOUR_S, 13 * HOUR_S)
    return 8 * DAY_S


class Wait(NamedTuple):
    """The end of a wait in one thread of a process."""

    thread: int
    """Number of the thread, in the order in which they were started."""
    what: str
    """The request, ``sleep``, ``lock``, or ``start`` for the begin of the thread."""
    time: float
    """In simulated seconds."""
    result: object = None
    """Result of a request."""
    error: StoreError | None = None
    """Error of a request."""


class Past:
    """Replay of a process from its beginning to the moment at which its machine was copied.

    The threads run in the recorded order, with the recorded replies. A wait that had not ended at
    that moment has no recorded reply: the copy itself waits for one.

    :param waits: the waits that had ended.
    :param end: the moment, in simulated seconds.
    """

    def __init__(self, waits: Sequence[Wait], end: float) -> None:
        self._waits = deque(waits)
        self.end = end
        self.now = waits[0].time
        """Time in the replay, in simulated seconds."""
        self.reply: Wait | None = None
        """The wait after which the next thread runs; None: it had not ended."""

    def next_turn(self, process: Process) -> _Turn | None:
        """Return the thread that ran next; None: the replay has ended."""
        self.reply = None
        if not self._waits:
            self.now = self.end
            return None
        self.reply = self._waits.popleft()
        self.now = self.reply.time
        return process.started[self.reply.thread]


class _Turn:
    """One thread of a process, and what wakes it."""

    def __init__(self, process: Process, program: Callable[[], None]) -> None:
        self.process = process
        self.number = len(process.started)
        self.lock: SimulatedLock | None = None
        """The lock that it waits for; None: it waits for something else."""
        # number of waits so far: an event of an earlier wait does not wake it
        self.waits = 0
        self._lock = threading.Lock()
        self._lock.acquire()
        self._thread = threading.Thread(
            target=process._run, args=(self, program), name=process.name, daemon=True
        )
        self._started = False

    def wake(self) -> None:
        if self._started:
            self._lock.release()
            return
        self._started = True
        self._thread.start()

    def wait(self) -> None:
        self._lock.acquire()


class _Running(threading.local):
    turn: _Turn | None = None
    """Turn of the calling thread; None: the thread is not simulated."""


_running = _Running()


def _own_turn() -> _Turn:
    if _running.turn is None:
        raise RuntimeError("called in a thread that the simulation does not know")
    return _running.turn


class World:
    """Simulated time, the medium, and all processes.

    :param seed: seed of all random choices.
    :param faults: faults of requests from now on; may be replaced at any time.
    """

    def __init__(self, seed: int, faults: Faults = CALM) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.seed = seed
        self.faults = faults
        self.draw_pause: Callable[[random.Random], float] = draw_pause
        """Returns the length of a suspension in seconds."""
        self.draw_late: Callable[[random.Random], float] = draw_late
        """Returns the delay of a late effect in seconds."""
        self.hangs: list[Hang] = []
        """Planned suspensions; each occurs once."""
        self.wake_at = float("inf")
        """Simulated time at which the last suspension ends."""
        self.latency_s = (0.005, 0.08)
        """Bounds of the time of a request without faults, half of it before its effect."""
        self.most_requests = 100_000
        """A world with more requests fails: a process repeats them without end."""
        self.medium = Medium(lambda: START + self.now)
        self.requests: Counter[tuple[str, str]] = Counter()
        """Number of requests by process and kind."""
        self.steps: list[str] = []
        """Requests, faults and notes so far, one line each."""
        self.failures: list[BaseException] = []
        """Exceptions that ended threads or calls."""
        self.processes: list[Process] = []
        """All processes, also those that have ended."""
        self._events: list[tuple[float, int, _Turn | Callable[[], None], int]] = []
        self._numbers = count()
        self._until = 0.0
        self._ended = False
        self._main = threading.Lock()  # held while a simulated thread runs
        self._main.acquire()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule a call, which must not wait."""
        heapq.heappush(self._events, (when, next(self._numbers), call, 0))

    def run(self, until: float = float("inf")) -> None:
        """Run events until there are none before ``until``.

        :raises BaseException: the first exception that ended a thread.
        """
        self._until = until
        turn = self._next_turn()
        if turn is not None:
            turn.wake()
            self._main.acquire()
        if self.failures:
            raise self.failures[0]
        if until != float("inf"):
            self.now = max(self.now, until)

    def end(self) -> None:
        """Kill all processes, which ends their threads. The world must not be used any more."""
        self._ended = True
        for process in self.processes:
            process.kill()
        while self._events:
            _, _, turn, waits = heapq.heappop(self._events)
            if isinstance(turn, _Turn) and turn.waits == waits and turn._started:
                turn.wake()
                self._main.acquire()

    def note(self, line: str) -> None:
        """Record what happened, for the report of a failure."""
        self.steps.append(f"{self.now:12.3f} {line}")

    def _skip_to(self, when: float) -> bool:
        """Move the time to ``when`` unless something else comes first; return whether it was
        moved."""
        if self._events and self._events[0][0] <= when:
            return False
        if when > self._until or self._ended or self.failures:
            return False
        self.now = max(self.now, when)
        return True

    def _resume_at(self, when: float, turn: _Turn) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), turn, turn.waits))

    def _next_turn(self) -> _Turn | None:
        """Make the calls that are due; return the thread that runs next. None: ``run`` returns."""
        while self._events and not self.failures and not self._ended:
            if self._events[0][0] > self._until:
                return None
            when, number, event, waits = heapq.heappop(self._events)
            if isinstance(event, _Turn):
                if event.waits != waits:
                    continue
                frozen_until = event.process.frozen_until
                if frozen_until > when and not event.process.dead:
                    heapq.heappush(self._events, (frozen_until, number, event, waits))
                    continue
                self.now = max(self.now, when)
                return event
            self.now = max(self.now, when)
            try:
                event()
            except BaseException as error:
                self.failures.append(error)
        return None

    def _pass_on(self) -> None:
        """Let the next thread run. The calling thread ends."""
        turn = self._next_turn()
        if turn is None:
            self._main.release()
        else:
            turn.wake()

    def _wait(self, own: _Turn) -> None:
        """Let others run until an event resumes the calling thread.

        :raises Killed: the process was killed meanwhile.
        """
        turn = self._next_turn()
        if turn is not own:
            if turn is None:
                self._main.release()
            else:
                turn.wake()
            own.wait()
        own.waits += 1
        if own.process.dead:
            raise Killed


class SimulatedLock:
    """A reentrant lock whose owner may make requests and sleep. Others wait in simulated time, in
    order of arrival."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: _Turn | None = None
        self._depth = 0
        self._waiting: deque[_Turn] = deque()

    def __enter__(self) -> None:
        turn = _own_turn()
        if turn.process.dead:
            raise Killed
        if self._owner is None:
            self._owner = turn
        elif self._owner is not turn:
            self._wait(turn)
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._release()

    def _wait(self, turn: _Turn) -> None:
        self._waiting.append(turn)
        turn.lock = self
        try:
            turn.process.wait_for_lock(turn, lambda: self._owner is turn)
        except Killed:
            if self._owner is turn:
                self._release()
            else:
                self._waiting.remove(turn)
            raise
        finally:
            turn.lock = None

    def is_waiting(self, turn: _Turn) -> bool:
        """Return whether a thread waits until another one releases the lock."""
        return turn in self._waiting

    def _release(self) -> None:
        self._owner = None
        if self._waiting:
            self._owner = self._waiting.popleft()
            if not self._owner.process.is_replayed:
                self._world._resume_at(self._world.now, self._owner)


class _Outcome(Generic[T]):
    """Effect of one request, and its result."""

    def __init__(self, world: World, text: str, effect: Callable[[], T]) -> None:
        self._world = world
        self._text = text
        self._effect = effect
        self._result: T | StoreError | None = None

    def act(self) -> None:
        """Let the request take effect."""
        try:
            self._result = self._effect()
            self._world.note(f"{self._text}: done")
        except BlobMissingError as error:
            self._result = error
            self._world.note(f"{self._text}: missing")

    def misdate(self, ahead_s: float) -> None:
        """Give the reply another date, if it has one."""
        if isinstance(self._result, float):
            self._result += ahead_s  # type: ignore[assignment]

    def act_late(self) -> None:
        """Let the request take effect when no thread waits for it any more."""
        with suppress(BlobMissingError):
            self._effect()
        self._world.note(f"{self._text}: took effect LATE")

    def reply(self) -> T:
        """Return the result.

        :raises StoreError: the error of the medium.
        """
        if isinstance(self._result, StoreError):
            raise self._result
        return self._result  # type: ignore[return-value]


class _Random(random.Random):
    """Source of jitter and of names."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.names = random.Random(f"names {seed}")
        """Source of names."""

    def randbytes(self, n: int) -> bytes:
        return self.names.randbytes(n)


class Process(Clock):
    """A process, and its clock. Each process has a monotonic clock that starts at a different
    number.

    :param name: unique.
    :param program: called with the process in a thread of its own; ends by returning or with
        ``Killed``.
    :param machine: processes of one machine follow each other.
    :param wall_ahead_s: local wall-clock time minus the medium's.
    :param is_recorded: whether the machine may be copied.
    :param original: process that this one is a copy of.
    :param past: of the original, until it was copied.
    """

    repeats_names = False
    """Whether a copy draws the same names as its original: a planted bug."""

    def __init__(
        self,
        world: World,
        name: str,
        program: Callable[[Process], None],
        *,
        machine: str = "",
        wall_ahead_s: float = 0.0,
        is_recorded: bool = False,
        original: Process | None = None,
        past: Past | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.machine = machine or name
        self.started: list[_Turn] = []
        """All threads, also those that have ended."""
        self._waits: list[Wait] | None = [] if is_recorded else None
        self._past = past
        self._first_name: str = name if original is None else original._first_name
        self._sources: list[random.Random] = []
        source = _Random(f"{world.seed} {self._first_name}")
        self.random = source
        self._names = source.names
        self.dead = False
        """Whether it was killed."""
        self.ended = False
        """Whether its program has ended."""
        self.frozen_until = 0.0
        """Simulated time until which none of its threads runs. Its requests take effect
        meanwhile."""
        self.suspended_s = 0.0
        """Seconds for which the thread of its next request is suspended, before or after the
        effect."""
        self.cut_off_until = 0.0
        """Simulated time until which none of its requests arrives."""
        self.wall_ahead_s = wall_ahead_s
        self.written: list[str] = []
        """Names of its writes; may be cleared."""
        self._last_written = ""
        self._turns: list[_Turn] = []
        self._faults = random.Random(f"faults {world.seed} {name}")
        self._offset = self.random.uniform(0, 1e6)
        world.processes.append(self)
        self.spawn(lambda: self._main(program))

    def new_random(self, purpose: str) -> random.Random:
        """Return a source of random numbers. Copies of this process draw others from it after the
        replay."""
        source = random.Random(f"{purpose} {self.world.seed} {self._first_name}")
        self._sources.append(source)
        return source

    @property
    def is_alive(self) -> bool:
        return not self.dead and not self.ended

    @property
    def now(self) -> float:
        """The present, in simulated seconds."""
        return self.world.now if self._past is None else self._past.now

    def spawn(self, program: Callable[[], None]) -> None:
        """Run ``program`` in another thread of this process, which is killed, frozen and cut off
        with it."""
        turn = _Turn(self, program)
        self._turns.append(turn)
        self.started.append(turn)
        if self._past is None or turn.number == 0:
            self.world._resume_at(self.world.now, turn)

    def monotonic(self) -> float:
        return self._offset + self.now

    def wall(self) -> float:
        """Return the process's wall-clock time, in seconds since the epoch."""
        return START + self.now + self.wall_ahead_s

    def note(self, line: str) -> None:
        """Record what the program does, for the report of a failure."""
        if self._past is None:
            self.world.note(f"{self.name}: {line}")

    # Copies

    @property
    def is_replayed(self) -> bool:
        """Whether it is a copy that does again what its original did."""
        return self._past is not None

    def past(self) -> Past | None:
        """Return the replay of a copy that is made now; None: the process has not begun, or is not
        recorded."""
        return Past(list(self._waits), self.world.now) if self._waits else None

    def _record(
        self,
        what: str,
        result: object = None,
        error: StoreError | None = None,
    ) -> None:
        if self._waits is not None:
            self._waits.append(
                Wait(_own_turn().number, what, self.world.now, result, error)
            )

    def _replay(self, own: _Turn, what: str) -> Wait | None:
        """Continue the replay until the calling thread has its reply; return it, or None if the
        replay has ended.

        :raises Killed: the process was killed after the replay, before anything woke the thread.
        """
        past = self._past
        assert past is not None
        turn = past.next_turn(self)
        if turn is None:
            self._begin_own_life(past, own)
            return None
        if turn is not own:
            turn.wake()
            own.wait()
        if self._past is None:
            own.waits += 1
            if self.dead:
                raise Killed
            return None
        reply = past.reply
        assert reply is not None
        assert reply.what == what, (
            f"{self.name} differs from its original: {what} instead of {reply.what}"
        )
        return reply

    def _begin_own_life(self, past: Past, running: _Turn | None) -> None:
        """End the replay: wake all threads except the running one, and those that wait for each
        other."""
        self._past = None
        # the machine's clock stood still meanwhile
        self._offset -= self.world.now - past.end
        sources = [*self._sources, self.random]
        if not self.repeats_names:
            sources.append(self._names)
        for number, source in enumerate(sources):
            source.seed(f"{number} {self.world.seed} {self.name}")
        for turn in self._turns:
            if turn is not running and (
                turn.lock is None or not turn.lock.is_waiting(turn)
            ):
                self.world._resume_at(self.world.now, turn)

    def wait_for_lock(self, turn: _Turn, is_owner: Callable[[], bool]) -> None:
        """Wait until the calling thread has become the owner of a lock."""
        if self._past is not None and self._replay(turn, "lock") is not None:
            return
        if not is_owner():
            self.world._wait(turn)
        self._record("lock")

    def lock(self) -> AbstractContextManager[object]:
        """Return a reentrant lock for the threads of this process."""
        return SimulatedLock(self.world)

    def sleep(self, seconds: float) -> None:
        """Let other threads run for ``seconds`` of simulated time.

        :raises Killed: the process was killed meanwhile.
        """
        if self.dead:
            raise Killed
        if self._past is not None:
            until = self.now + max(seconds, 0.0)
            if self._replay(_own_turn(), "sleep") is not None:
                return
            # Long sleeps represent hours without activity, which have passed for the copy, too.
            seconds = until - self.world.now
        self._sleep(seconds)
        self._record("sleep")

    def _sleep(self, seconds: float) -> None:
        self._sleep_until(self.world.now + max(seconds, 0.0))

    def _sleep_until(self, when: float) -> None:
        turn, world = _own_turn(), self.world
        # most often no other thread runs meanwhile
        if self.frozen_until <= when and world._skip_to(when):
            return
        world._resume_at(when, turn)
        world._wait(turn)

    def kill(self) -> None:
        """End the process: its threads end at once, and its requests may still take effect."""
        if not self.dead:
            self.dead = True
            for turn in self._turns:
                self.world._resume_at(self.world.now, turn)

    def request(self, kind: str, name: str, effect: Callable[[], T]) -> T:
        """Send a request, let it take effect, and wait for the reply; one of the world's faults may
        occur.

        :param kind: ``PUT``, ``GET``, ``LIST`` or ``DELETE``.
        :param effect: called once, more than once or never.
        :raises StoreError: the medium's error, or that of a fault.
        :raises Killed: the process is dead.
        """
        if self.dead:
            raise Killed
        self._count(kind, name)
        what = f"{kind} {name}"
        if self._past is not None:
            reply = self._replay(_own_turn(), what)
            if reply is not None and reply.error is not None:
                raise reply.error
            if reply is not None:
                return reply.result  # type: ignore[return-value]
            if self._faults.random() < 0.5:
                raise UnavailableError(
                    f"{what}: the copy of the machine has no connection"
                )
            # Otherwise the client sends it again.
        try:
            result = self._send(kind, name, effect)
        except StoreError as error:
            self._record(what, error=error)
            raise
        self._record(what, result)
        return result

    def _send(self, kind: str, name: str, effect: Callable[[], T]) -> T:
        world, draw = self.world, self._faults
        text = f"{self.name} {kind} {name}"
        fault = self._draw_fault(writes=kind in ("PUT", "DELETE"))
        outbound_s = draw.uniform(*world.latency_s) / 2
        inbound_s = draw.uniform(*world.latency_s) / 2
        if world.now < self.cut_off_until:
            fault = "failed"
        if fault in ("failed", "refused"):
            self._fail(fault, text)
        outcome = _Outcome(world, text, effect)
        if fault == "late":
            world.note(f"{text}: reply LOST, the effect follows")
            world.at(world.now + world.draw_late(draw), outcome.act_late)
            self._sleep(draw.uniform(0, _MOST_WAIT_S))
            raise UnavailableError(f"{text}: no reply")
        if fault == "death":
            self._die(text, outcome)
        before_s, after_s = self._suspension(fault, kind, name, text)
        if before_s:
            self._sleep(before_s)
        effect_at = world.now + outbound_s
        reply_at = world.now + (outbound_s + inbound_s + after_s)
        if fault == "repeated":
            world.note(f"{text}: REPEATED later")
            world.at(effect_at + world.draw_late(draw), outcome.act_late)
        if world._skip_to(effect_at):
            outcome.act()
        else:
            world.at(effect_at, outcome.act)
        self._sleep_until(reply_at)
        if fault == "lost":
            world.note(f"{text}: reply LOST")
            self._sleep(draw.uniform(0, _MOST_WAIT_S))
            raise LostReplyError(f"{text}: no reply", outcome.reply())
        if fault == "misdated":
            world.note(f"{text}: reply MISDATED")
            outcome.misdate(draw.choice((-MISDATED_S, MISDATED_S)))
        return outcome.reply()

    def _count(self, kind: str, name: str) -> None:
        if kind == "PUT":
            self.written.append(name)
            self._last_written = name
        if self._past is not None:
            return
        self.world.requests[self.name, kind] += 1
        self.world.most_requests -= 1
        if self.world.most_requests < 0:
            raise AssertionError(
                f"requests without end; the last one is {self.name} {kind} {name}"
            )

    def _draw_fault(self, *, writes: bool) -> str:
        """Draw the fault of a request; empty: none."""
        if self.world.faults is CALM:
            return ""
        choice = self._faults.random()
        for name, probability in zip(Faults._fields, self.world.faults, strict=True):
            choice -= probability
            if choice < 0:
                return name if writes or name not in _OF_WRITES else ""
        return ""

    def _fail(self, fault: str, text: str) -> None:
        self.world.note(f"{text}: {fault.upper()}")
        if fault == "refused":
            self._sleep(0.05)
            raise RefusedError(f"{text}: refused")
        self._sleep(self._faults.uniform(0, _MOST_WAIT_S))
        raise UnavailableError(f"{text}: no connection")

    def _die(self, text: str, outcome: _Outcome[T]) -> None:
        chance = self._faults.random()
        effect = "no effect"
        if chance < 0.4:
            effect = "the effect follows"
            self.world.at(self.world.now + 0.01, outcome.act)
        elif chance < 0.6:
            effect = "the effect follows late"
            self.world.at(
                self.world.now + self.world.draw_late(self._faults), outcome.act_late
            )
        self.world.note(f"{text}: the process DIES, {effect}")
        self.kill()
        raise Killed

    def _suspension(
        self,
        fault: str,
        kind: str,
        name: str,
        text: str,
    ) -> tuple[float, float]:
        """Return the seconds for which the thread is suspended before its request arrives, and
        after the effect."""
        hang = self._planned_hang(kind, name)
        before = self._faults.random() < 0.5
        seconds, self.suspended_s = self.suspended_s, 0.0
        if hang is not None:
            seconds, before = hang.seconds, hang.before
        elif fault == "slow":
            seconds = self._faults.uniform(0, 20)
        elif fault in ("pause", "freeze"):
            seconds = self.world.draw_pause(self._faults)
        seconds = max(0.0, min(seconds, self.world.wake_at - self.world.now))
        if not seconds:
            return 0.0, 0.0
        if fault == "freeze":
            self.frozen_until = self.world.now + seconds
        if fault != "slow":
            whole = "process FROZEN" if fault == "freeze" else "SUSPENDED"
            self.world.note(
                f"{text}: {whole} {seconds:.0f} s {'before' if before else 'after'} its effect"
            )
        return (seconds, 0.0) if before else (0.0, seconds)

    def _planned_hang(self, kind: str, name: str) -> Hang | None:
        """Return the planned suspension that this request meets, and remove it from the plan."""
        for hang in self.world.hangs:
            is_meant = hang.kind == kind and hang.part in name
            if is_meant and self._follows(name, hang.follows):
                self.world.hangs.remove(hang)
                return hang
        return None

    def _follows(self, name: str, part: str) -> bool:
        """Return whether the last write had a name with this part, in the same namespace."""
        if not part:
            return True
        base = name.split("/")[0]
        return part in self._last_written and self._last_written.startswith(base)

    def _main(self, program: Callable[[Process], None]) -> None:
        try:
            program(self)
        finally:
            self.ended = True

    def _run(self, turn: _Turn, program: Callable[[], None]) -> None:
        turn.waits += 1
        _running.turn = turn
        try:
            if not self.dead:
                self._begin(turn)
                program()
        except Killed:
            pass
        except BaseException as error:
            self.world.failures.append(error)
        turn.waits += 1
        self._turns.remove(turn)
        self._pass_on()

    def _begin(self, turn: _Turn) -> None:
        """Record that a thread has begun, or note it in the replay: the first thread begins the
        replay."""
        if self._past is None:
            self._record("start")
        elif turn.number == 0:
            self._past.next_turn(self)

    def _pass_on(self) -> None:
        """Let the next thread run. The calling thread ends."""
        if self._past is not None:
            turn = self._past.next_turn(self)
            if turn is not None:
                turn.wake()
                return
            self._begin_own_life(self._past, None)
        self.world._pass_on()


class SimulatedBlobs(Blobs):
    """The medium as one process sees it."""

    latency_s = 0.05
    connections = 1

    def __init__(self, process: Process) -> None:
        self._process = process
        self._medium = process.world.medium
        self._draw = process.new_random("blobs")
        self._counts: Counter[str] = Counter()
        self._closed = False

    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        if len(name) > MAX_NAME or not _NAME.fullmatch(name):
            raise ValueError(f"invalid name: {name!r}")
        data = b"".join(pieces)
        return self._request("PUT", name, lambda: self._medium.put(name, data))

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        try:
            data = self._request(
                "GET", name, lambda: self._medium.get(name, offset, length)
            )
        except LostReplyError as error:
            part = int(len(error.reply) * self._draw.random())
            _fill(buffers, error.reply[:part])
            raise
        return _fill(buffers, data)

    def delete(self, names: Sequence[str]) -> None:
        if names:
            shown = (
                names[0]
                if len(names) == 1
                else f"{names[0]} and {len(names) - 1} more: {' '.join(names[1:])}"
            )
            chosen = list(names)
            self._request("DELETE", shown, lambda: self._medium.delete(chosen))

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"invalid prefix: {prefix!r}")
        return self._halves(prefix, after)

    def _halves(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        """Read the two halves of a list, one after the other, in random order."""
        first = self._draw.randrange(2)
        found: list[BlobInfo] = []
        for half in (first, 1 - first):
            if self._process.world.faults is not CALM and self._draw.random() < 0.1:
                self._process.sleep(self._draw.uniform(0, 20))
            try:
                found += self._request(
                    "LIST", prefix, partial(self._medium.half, prefix, after, half)
                )
            except UnavailableError:
                found.sort()
                yield from (
                    found[: self._draw.randint(0, len(found))] if half != first else ()
                )
                raise
        found.sort()
        yield from found

    def close(self) -> None:
        self._closed = True

    def requests(self) -> Mapping[str, int]:
        return dict(self._counts)

    def _request(self, kind: str, name: str, effect: Callable[[], T]) -> T:
        if self._closed:
            raise StoreError("the medium is closed")
        self._counts[kind] += 1
        return self._process.request(kind, name, effect)


def _fill(buffers: Iterable[memoryview], data: bytes) -> int:
    """Fill buffers one after the other; return the number of bytes."""
    written = 0
    for buffer in buffers:
        room = memoryview(buffer).cast("B")
        piece = data[written : written + len(room)]
        room[: len(piece)] = piece
        written += len(piece)
        if len(piece) < len(room):
            break
    return written


@contextmanager
def wrong_wall_clocks() -> Iterator[None]:
    """Let ``time.time`` return the wall-clock time of the calling process."""
    real = time.time

    def wall() -> float:
        return real() if _running.turn is None else _running.turn.process.wall()

    with mock.patch.object(time, "time", wall):
        yield
