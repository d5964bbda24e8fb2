"""An object store in memory, and processes that use it in simulated time.

1. Each process has one thread or more. One thread runs at a time: it runs until it makes a request, sleeps or waits for
   a ``SimulatedLock``, which takes simulated time, and the thread with the earliest time runs next. The same seed gives
   the same history.
2. A request takes effect at one moment, some time after it was sent and before its reply arrives. Faults move that
   moment, repeat the effect, or replace the reply.
3. The server behaves like S3: ETags are hashes of the content, conditions are checked atomically, listings are ordered
   and have pages, and ``Date`` has whole seconds.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import NamedTuple, TypeVar

from persistkv_s3.client.transport import (
    ABSENT,
    Body,
    BrokenError,
    Clock,
    ConditionFailedError,
    Deadline,
    LateError,
    ListPage,
    ObjectInfo,
    ObjectMissingError,
    S3Error,
    Sink,
    ThrottledError,
    Transport,
    UnchangedError,
)

T = TypeVar("T")

START = 1_800_000_000.0
"""Server's time at the beginning of a simulation, in seconds since the epoch."""

PRICE_OF = {"PUT": 0.005, "LIST": 0.005, "GET": 0.0004, "HEAD": 0.0004, "DELETE": 0.0}
"""Price in US dollars of 1,000 requests. S3 Standard in us-east-1, https://aws.amazon.com/s3/pricing/, as of 2025."""


class Killed(BaseException):
    """The process was killed in the middle of a call."""


class StoredObject(NamedTuple):
    """Content of one key."""

    data: bytes
    etag: str
    modified: float
    """Seconds since the epoch, by the server's clock."""


class Server:
    """One bucket. Conditions and effects as on S3; every call is atomic.

    :param now: returns the server's time, in seconds since the epoch.
    :param page: maximum number of keys in one page of a listing.
    """

    def __init__(self, now: Callable[[], float], page: int = 1000) -> None:
        self.now = now
        self.objects: dict[str, StoredObject] = {}
        self.honours = {"If-None-Match", "If-Match"}
        """Conditions that are checked; the others are ignored."""
        self.unquoted = False
        """Whether ``If-Match`` needs an ETag without quotes, as in Ceph."""
        self.deleted: set[str] = set()
        """Keys that were deleted at least once."""
        self._keys: list[str] = []
        self._page = page

    def put(self, key: str, data: bytes, condition: str | None) -> str:
        """Store an object; return its ETag.

        :raises ConditionFailedError: ``condition`` is ``ABSENT`` or an ETag, and does not hold.
        :raises ObjectMissingError: ``condition`` is an ETag, and there is no object.
        """
        held = self.objects.get(key)
        if condition == ABSENT:
            if held is not None and "If-None-Match" in self.honours:
                raise ConditionFailedError(f"PUT {key}: 412, it exists")
        elif condition is not None and "If-Match" in self.honours:
            if held is None:
                raise ObjectMissingError(f"PUT {key}: 404")
            if condition != (held.etag.strip('"') if self.unquoted else held.etag):
                raise ConditionFailedError(f"PUT {key}: 412, it has another ETag")
        if held is None:
            insort(self._keys, key)
        self.objects[key] = StoredObject(data, f'"{hashlib.md5(data).hexdigest()}"', self.now())
        return self.objects[key].etag

    def get(
        self, key: str, start: int | None = None, stop: int | None = None, known: str | None = None
    ) -> StoredObject:
        """Return an object with the bytes of a range, which ``Transport.get`` describes.

        :raises UnchangedError: the object still has the ETag ``known``.
        :raises ObjectMissingError: there is no such object, or it is shorter.
        """
        found = self.objects.get(key)
        if found is None:
            raise ObjectMissingError(f"{key}: 404")
        if found.etag == known:
            raise UnchangedError(f"{key}: 304")
        if stop is None:
            return found
        if start is not None and len(found.data) < stop:
            raise ObjectMissingError(f"{key} has {len(found.data)} bytes instead of {stop} or more")
        return found._replace(data=found.data[start:stop])

    def head(self, key: str) -> ObjectInfo:
        """:raises ObjectMissingError: there is no such object."""
        found = self.get(key)
        return ObjectInfo(key, len(found.data), float(int(found.modified)))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        for key in keys:
            if self.objects.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]
                self.deleted.add(key)

    def list(self, prefix: str, page: str | None) -> ListPage:
        """Return a page of the objects whose keys start with ``prefix``; ``page`` is the last key of the previous."""
        start = bisect_left(self._keys, prefix if page is None else page + "\0")
        found: list[ObjectInfo] = []
        for key in islice(self._keys, start, start + self._page):
            if not key.startswith(prefix):
                return ListPage(found, None)
            held = self.objects[key]
            found.append(ObjectInfo(key, len(held.data), float(int(held.modified))))
        following = self._keys[start + len(found) : start + len(found) + 1]
        more = bool(following) and following[0].startswith(prefix)
        return ListPage(found, found[-1].key if more else None)


def deliver(data: bytes, sink: Sink) -> None:
    """Write the body of a reply to a sink."""
    sink.expect(len(data))
    left = memoryview(data)
    while left:
        room = sink.room()[: len(left)]
        room[:], left = left[: len(room)], left[len(room) :]
        sink.advance(len(room))


class Faults(NamedTuple):
    """Probabilities of faults, of each request; at most one occurs."""

    failed: float = 0.0
    """The connection breaks before the effect."""
    late: float = 0.0
    """The connection breaks, and the effect of a PUT or DELETE follows up to ``LATE_S`` later."""
    throttled: float = 0.0
    """503 SlowDown, half of the time after the effect of a PUT or DELETE."""
    slow: float = 0.0
    """Request or reply take up to 5 s."""
    pause: float = 0.0
    """The process is suspended for 5 to 300 s, before or after the effect."""
    death: float = 0.0
    """The process is killed, before or after the effect."""
    repeated: float = 0.0
    """A PUT or DELETE arrives a second time, up to ``LATE_S`` later; the client gets the first reply."""
    doubled: float = 0.0
    """A PUT or DELETE arrives twice at once, as after a retry in the network; the client gets the second reply."""
    lost: float = 0.0
    """The reply is lost after the effect."""


class Hang(NamedTuple):
    """Suspension of one thread in its next request of a kind, of any process; its other threads continue."""

    kind: str
    part: str
    """Part of the key, or of the prefix of a listing."""
    seconds: float
    before: bool
    """Whether the request takes effect after the suspension."""
    unanswered: str = ""
    """Meanwhile the other threads' PUTs of keys with this part take effect, and no reply comes; empty: no PUTs."""


CALM = Faults()
LATE_S = 60.0
_TIMEOUT_S = 10.0  # time after which a client stops waiting for a lost reply


class World:
    """Simulated time, the server, and all processes.

    :param seed: seed of all random choices.
    :param faults: faults of requests from now on; may be replaced at any time.
    """

    def __init__(self, seed: int, faults: Faults = CALM, page: int = 1000) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.seed = seed
        self.faults = faults
        self.hangs: list[Hang] = []
        """Planned suspensions; each occurs once."""
        self.latency_s = (0.01, 0.1)
        """Bounds of the time of a request without faults, half of it before its effect."""
        self.server = Server(lambda: START + self.now, page)
        self.requests: Counter[tuple[str, str]] = Counter()
        """Number of requests by process and kind."""
        self.steps: list[str] | None = []
        """Requests, faults and notes so far, one line each; None: they are not recorded."""
        self.failures: list[BaseException] = []
        """Exceptions that ended processes."""
        self.processes: list[Process] = []
        """All processes, also those that have ended."""
        self._ended = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._yielded = threading.Semaphore(0)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule a call, which must not wait."""
        if not self._ended:
            heapq.heappush(self._events, (when, next(self._numbers), call))

    def run(self, until: float = float("inf")) -> None:
        """Run events until there are none before ``until``.

        :raises BaseException: the first exception that ended a process.
        """
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
            if self.failures:
                raise self.failures[0]
        if until != float("inf"):
            self.now = until

    def end(self) -> None:
        """Kill all processes, which ends their threads. The world must not be used any more."""
        self._ended = True
        for process in self.processes:
            process.dead = True
        while self._events:
            heapq.heappop(self._events)[2]()

    def note(self, line: str) -> None:
        """Record what happened, for the report of a failure."""
        if self.steps is not None:
            self.steps.append(f"{self.now:10.3f} {line}")

    def cost(self, process: str | None = None) -> float:
        """Return the price in US dollars of the requests so far, of one process or all."""
        of = ((kind, n) for (name, kind), n in self.requests.items() if process in (None, name))
        return sum(PRICE_OF[kind] * n / 1000 for kind, n in of)


_running = threading.local()
"""Its attribute ``process`` is the process of the calling thread."""


class SimulatedLock:
    """A reentrant lock whose owner may make requests and sleep. Others wait in simulated time."""

    def __init__(self) -> None:
        self._owner = 0
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        pause_s = 0.01
        while self._owner not in (0, me):
            _running.process.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)  # an owner may be suspended for hours
        self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0


class Process(Clock):
    """A process, and its clock. Each process has a monotonic clock that starts at a different number.

    :param name: unique.
    :param program: called with the process in a thread of its own; ends by returning or with ``Killed``.
    :param wall_ahead_s: local wall-clock time minus the server's.
    """

    def __init__(
        self, world: World, name: str, program: Callable[[Process], None], *, wall_ahead_s: float = 0.0
    ) -> None:
        self.world = world
        self.name = name
        self.random = random.Random(f"{world.seed} {name}")
        self.dead = False
        """Whether it was killed."""
        self.ended = False
        """Whether its program has ended."""
        self.suspended_s = 0.0
        """Seconds for which its next request is suspended, before or after its effect."""
        self.cut_off_until = 0.0
        """Simulated time until which none of its requests arrives."""
        self.wall_ahead_s = wall_ahead_s
        self.written: list[str] = []
        """Keys of its PUTs; may be cleared."""
        self._unanswered = ("", 0.0)  # part of the keys of its PUTs that get no reply, and until when
        self._program = program
        self._faults = random.Random(f"faults {world.seed} {name}")
        self._offset = self.random.uniform(0, 1e6)
        world.processes.append(self)
        world.at(world.now, lambda: self._start(self._main))

    def spawn(self, program: Callable[[], None]) -> None:
        """Run ``program`` in another thread of this process, which is killed and cut off with it. Faults suspend only
        the thread whose request they meet.
        """
        self.world.at(self.world.now, lambda: self._start(program))

    def _start(self, program: Callable[[], None]) -> None:
        if self.dead:
            return
        threading.Thread(target=self._run, args=(program,), name=self.name, daemon=True).start()
        self.world._yielded.acquire()

    def _main(self) -> None:
        try:
            self._program(self)
        finally:
            self.ended = True

    def _run(self, program: Callable[[], None]) -> None:
        _running.process = self
        try:
            program()
        except Killed:
            pass
        except BaseException as error:
            self.world.failures.append(error)
        finally:
            self.world._yielded.release()

    def monotonic(self) -> float:
        return self._offset + self.world.now

    def wall(self) -> float:
        """Return the process's wall-clock time, in seconds since the epoch."""
        return START + self.world.now + self.wall_ahead_s

    def sleep(self, seconds: float) -> None:
        """Let other processes run for ``seconds`` of simulated time.

        :raises Killed: the process was killed meanwhile.
        """
        if self.dead:
            raise Killed
        resumed = threading.Semaphore(0)
        self.world.at(self.world.now + max(seconds, 0.0), lambda: self._resume(resumed))
        self.world._yielded.release()
        resumed.acquire()
        if self.dead:
            raise Killed

    def _resume(self, resumed: threading.Semaphore) -> None:
        resumed.release()
        self.world._yielded.acquire()

    def kill(self) -> None:
        """End the process at its next request or pause; none of its requests has an effect from now on."""
        self.dead = True

    def request(self, kind: str, key: str, effect: Callable[[], T], deadline: Deadline) -> T:
        """Send a request, let it take effect, and wait for the reply; one of the world's faults may occur.

        :raises S3Error: the server's error, or that of a fault.
        :raises Killed: the process is dead.
        """
        if self.dead:
            raise Killed
        world, draw, text, writes = self.world, self._faults, f"{self.name} {kind} {key}", kind in ("PUT", "DELETE")
        world.requests[self.name, kind] += 1
        if kind == "PUT":
            self.written.append(key)
        fault = self._fault(writes=writes)
        outbound_s, return_s = draw.uniform(*world.latency_s) / 2, draw.uniform(*world.latency_s) / 2
        before = draw.random() < 0.5
        if world.now < self.cut_off_until:
            self.sleep(min(1.0, deadline.remaining))
            raise BrokenError(f"{text}: no route to the server")
        hang = self._planned_hang(kind, key)
        if hang is not None:
            fault = "hang"
            outbound_s, return_s = (hang.seconds, 0.0) if hang.before else (0.0, hang.seconds)
            world.note(f"{text}: HANGS {hang.seconds:.0f} s {'before' if hang.before else 'after'} its effect")
        elif kind == "PUT" and self._unanswered[0] in key and world.now < self._unanswered[1]:
            fault = "unanswered"
        suspended_s, self.suspended_s = self.suspended_s, 0.0
        if fault == "slow":
            suspended_s = draw.uniform(0, 5)
        elif fault == "pause":
            suspended_s = draw.uniform(5, 300)
        outbound_s, return_s = (outbound_s + suspended_s, return_s) if before else (outbound_s, return_s + suspended_s)
        if suspended_s > 5:
            world.note(f"{text}: SUSPENDED {suspended_s:.0f} s {'before' if before else 'after'} its effect")
        if fault == "late":
            world.note(f"{text}: reply LOST, effect follows")
            self._act_later(text, effect)
            self._lose(text, deadline)
        if fault == "death" and before:
            self._die(text)
        self.sleep(outbound_s)
        if fault == "failed":
            world.note(f"{text}: FAILED before its effect")
            raise BrokenError(f"{text}: connection reset")
        if fault == "throttled":
            world.note(f"{text}: 503 {'before' if before else 'after'} its effect")
            if writes and not before:
                with suppress(S3Error):
                    effect()
            raise ThrottledError(f"{text}: 503 SlowDown")
        if fault == "repeated":
            world.note(f"{text}: REPEATED later")
            self._act_later(text, effect)
        if fault == "doubled":
            world.note(f"{text}: DOUBLED")
            with suppress(S3Error):
                effect()
        try:
            result = effect()
        except S3Error as error:
            world.note(f"{text}: {type(error).__name__}")
            self._await_reply(fault, return_s, text, deadline)
            raise
        world.note(f"{text}: done")
        self._await_reply(fault, return_s, text, deadline)
        return result

    def _fault(self, *, writes: bool) -> str:
        """Draw the fault of a request; empty: none."""
        choice = self._faults.random()
        for name, probability in zip(Faults._fields, self.world.faults, strict=True):
            choice -= probability
            if choice < 0:
                return name if writes or name not in ("late", "repeated", "doubled") else ""
        return ""

    def _planned_hang(self, kind: str, key: str) -> Hang | None:
        """Return the planned suspension that this request meets, and remove it from the plan."""
        for hang in self.world.hangs:
            if hang.kind == kind and hang.part in key:
                self.world.hangs.remove(hang)
                if hang.unanswered:
                    self._unanswered = (hang.unanswered, self.world.now + hang.seconds)
                return hang
        return None

    def _act_later(self, text: str, effect: Callable[[], object]) -> None:
        def arrive() -> None:
            try:
                effect()
                self.world.note(f"{text}: took effect late")
            except S3Error:
                self.world.note(f"{text}: arrived late, without effect")

        self.world.at(self.world.now + self._faults.uniform(0.0, LATE_S), arrive)

    def _await_reply(self, fault: str, seconds: float, text: str, deadline: Deadline) -> None:
        if fault == "death":
            self._die(text)
        if fault == "lost":
            self.world.note(f"{text}: reply LOST")
            self._lose(text, deadline)
        if fault == "unanswered":
            self.world.note(f"{text}: reply LOST, also those of all retries")
            self.sleep(max(0.0, deadline.remaining))
            raise LateError(f"{text}: the deadline passed")
        self.sleep(seconds)

    def _lose(self, text: str, deadline: Deadline) -> None:
        """Wait for a reply that never comes."""
        self.sleep(min(_TIMEOUT_S, max(0.0, deadline.remaining)))
        if deadline.remaining <= 0:
            raise LateError(f"{text}: the deadline passed")
        raise BrokenError(f"{text}: no reply")

    def _die(self, text: str) -> None:
        self.world.note(f"{text}: the process DIES")
        self.dead = True
        raise Killed


class SimulatedTransport(Transport):
    """Client of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._server = process.world.server
        self._date = 0.0
        self._ahead_s: float | None = None
        """Server's clock minus the process's, from the dates of replies as in ``BotoClient``."""
        self._counts: Counter[str] = Counter()

    @property
    def requests(self) -> dict[str, int]:
        return dict(self._counts)

    def server_time(self) -> float:
        return self._process.wall() if self._ahead_s is None else self._process.monotonic() + self._ahead_s

    def _send(self, kind: str, key: str, effect: Callable[[], T], deadline: Deadline) -> T:
        def dated() -> T:
            self._date = float(int(self._server.now()))
            return effect()

        deadline.check(f"{kind} {key}")
        self._counts[kind] += 1
        try:
            result = self._process.request(kind, key, dated, deadline)
        except S3Error as error:
            if error.healthy:
                self._compare_clocks()
            raise
        self._compare_clocks()
        return result

    def _compare_clocks(self) -> None:
        ahead_s = self._date - self._process.monotonic()
        if self._ahead_s is None or not -5.0 < ahead_s - self._ahead_s <= 0.0:
            self._ahead_s = ahead_s

    def put(self, key: str, body: Body, deadline: Deadline, *, condition: str | None = None) -> str:
        data = b"".join(iter(body.read, b""))
        return self._send("PUT", key, lambda: self._server.put(key, data, condition), deadline)

    def get(
        self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline, *, known: str | None = None
    ) -> str:
        found = self._send("GET", key, lambda: self._server.get(key, start, stop, known), deadline)
        deliver(found.data, sink)
        return found.etag

    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        return self._send("HEAD", key, lambda: self._server.head(key), deadline)

    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        return self._send("LIST", prefix, lambda: self._server.list(prefix, page), deadline)

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        shown = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
        self._send("DELETE", shown, lambda: self._server.delete(keys), deadline)

    def close(self) -> None:
        """Nothing to release."""
