"""Bodies, sinks, retries, deadlines and the circuit breaker, tested with a scripted client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random
from threading import Event

import pytest

from persistkv.errors import CorruptPackError
from persistkv_s3.client.bucket import Breaker, Bucket
from persistkv_s3.client.transport import (
    MOST_DELETED,
    Body,
    BreakerOpenError,
    BrokenError,
    Clock,
    ConditionFailedError,
    Deadline,
    LateError,
    ListPage,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    S3Error,
    Sink,
    ThrottledError,
    Transport,
    WholeSink,
)
from tests.tools.signals import run_interrupted

DATA = bytes(range(256)) * 4


class Scripted(Transport):
    """Transport with one step per call: an error to raise, a number of bytes after which a body breaks off, or None."""

    def __init__(self, *steps: S3Error | int | None, after: Callable[[], object] = lambda: None) -> None:
        self.steps = list(steps)
        self.calls: list[tuple[object, ...]] = []
        self.after = after

    def _step(self, *call: object) -> int | None:
        self.calls.append(call)
        step = self.steps.pop(0) if self.steps else None
        self.after()
        if isinstance(step, S3Error):
            raise step
        return step

    def put(self, key: str, body: Body, deadline: Deadline, *, condition: str | None = None) -> str:
        self._step("put", key, condition)
        return '"etag"'

    def get(
        self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline, *, known: str | None = None
    ) -> str:
        broken_after = self._step("get", key, start, stop)
        whole = DATA * 1024
        data = DATA if stop is None else whole[start:stop]
        sink.expect(len(data))
        left = data if broken_after is None else data[:broken_after]
        while left:
            room = sink.room()[: len(left)]
            room[:], left = left[: len(room)], left[len(room) :]
            sink.advance(len(room))
        if broken_after is not None:
            raise BrokenError("the body broke off")
        return '"etag"'

    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        self._step("head", key)
        return ObjectInfo(key, 1, 0.0)

    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        self._step("list", prefix, page)
        number = int(page or 0)
        return ListPage([ObjectInfo(f"{prefix}{number}", 1, 0.0)], str(number + 1) if number < 2 else None)

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._step("delete", *keys)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record each pause, in seconds, instead of sleeping."""
    slept: list[float] = []
    monkeypatch.setattr("persistkv_s3.client.transport.time.sleep", slept.append)
    return slept


def make_bucket(client: Transport, deadline_s: float = 10.0) -> Bucket:
    return Bucket(client, Breaker("test", 10.0, Clock()), deadline_s, 1, Clock())


def test_body_reads_pieces_at_send_time_and_rewinds() -> None:
    row = bytearray(b"row")
    body = Body([memoryview(row), b"", b"table"], Deadline(10))
    assert len(body) == 8
    row[:] = b"ROW"
    assert [bytes(body.read(1)), bytes(body.read()), body.read(100)] == [b"ROW", b"table", b""]
    assert (body.seek(0), bytes(body.read()), body.tell(), body.seek(0, 2), body.read()) == (0, b"ROW", 3, 8, b"")
    with pytest.raises(ValueError, match="seek"):
        body.seek(1)


def test_body_splits_large_piece_into_1_mib_reads() -> None:
    body = Body([bytes(5 << 20), b"x"], Deadline(10))
    assert max(len(piece) for piece in iter(body.read, b"")) == 1 << 20


def test_body_read_past_deadline_raises() -> None:
    body = Body([b"a", b"b"], Deadline(0.0))
    with pytest.raises(LateError):
        body.read()


@pytest.mark.parametrize(("start", "stop", "expected"), [(10, 500, DATA[10:500]), (0, 1, DATA[:1])])
def test_fill_broken_body_resumes_at_broken_offset(start: int, stop: int, expected: bytes) -> None:
    client = Scripted(0, 0) if stop == 1 else Scripted(7, 90)
    buffers = [bytearray(3), bytearray(0), bytearray(stop - start - 3)] if stop > 4 else [bytearray(1)]
    make_bucket(client).fill("k", start, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == expected
    starts = [10, 17, 107] if stop > 4 else [0, 0, 0]
    assert [call[2] for call in client.calls] == starts


def test_get_broken_body_fetches_only_remaining_bytes() -> None:
    client = Scripted(100, None)
    assert bytes(make_bucket(client).get("k")) == DATA
    assert client.calls == [("get", "k", None, None), ("get", "k", 100, len(DATA))]


def test_fill_broken_body_takes_each_buffer_once() -> None:
    came: list[tuple[int, bytes]] = []
    buffer = memoryview(bytearray(20))
    client = Scripted(3, 0, 8, 40)
    buffers = [buffer[:10], buffer[:1], buffer[:0], memoryview(bytearray(24)), buffer]
    make_bucket(client).fill("k", 5, buffers, lambda number, data: came.append((number, bytes(data))))
    assert came == [(0, DATA[5:15]), (1, DATA[15:16]), (3, DATA[16:40]), (4, DATA[40:60])]
    assert [call[2] for call in client.calls] == [5, 8, 8, 16, 56]


def test_sinks_longer_body_than_expected_raises() -> None:
    with pytest.raises(BrokenError):
        Sink([memoryview(bytearray(4))]).expect(5)
    with pytest.raises(CorruptPackError):
        WholeSink(100).expect(101)


def test_whole_sink_object_replaced_between_attempts_restarts() -> None:
    sink = WholeSink(100)
    sink.expect(4)
    sink.expect(60)
    assert len(sink.room()) == 60
    sink.advance(20)
    sink.expect(40)
    with pytest.raises(BrokenError):
        sink.expect(41)


@pytest.mark.parametrize("error", [BrokenError("x"), ThrottledError("x")])
def test_put_transient_error_is_retried_after_pause(error: S3Error, pauses: list[float]) -> None:
    client = Scripted(error, error, None)
    make_bucket(client).put("k", [b"x"])
    assert len(client.calls) == 3
    assert all(pause >= error.pause_s for pause in pauses)


def test_get_deadline_passed_in_retry_raises_with_first_failure() -> None:
    with pytest.raises(LateError, match="took too long; the attempt before failed: connection refused"):
        make_bucket(Scripted(BrokenError("connection refused"), LateError("took too long"))).get("k")


@pytest.mark.parametrize("error", [RefusedError("x"), ObjectMissingError("x"), LateError("x")])
def test_head_permanent_error_is_not_retried(error: S3Error) -> None:
    client = Scripted(error)
    with pytest.raises(type(error)):
        make_bucket(client).head("k")
    assert len(client.calls) == 1


def test_list_pause_beyond_deadline_raises_without_waiting(pauses: list[float]) -> None:
    slow_down = ThrottledError("x")
    slow_down.pause_s = 5.0
    with pytest.raises(ThrottledError):
        list(make_bucket(Scripted(slow_down), deadline_s=4).list("p"))
    assert pauses == []


def test_put_412_after_lost_reply_is_marked_uncertain() -> None:
    with pytest.raises(ConditionFailedError) as caught:
        make_bucket(Scripted(BrokenError("lost"), ThrottledError("503"), ConditionFailedError("412"))).put("k", [b"x"])
    assert caught.value.uncertain
    with pytest.raises(ConditionFailedError) as caught:
        make_bucket(Scripted(ThrottledError("503"), ConditionFailedError("412"))).put("k", [b"x"])
    assert not caught.value.uncertain


def test_bucket_long_list_and_delete_send_several_requests() -> None:
    client = Scripted()
    bucket = make_bucket(client)
    assert [info.key for info in bucket.list("p")] == ["p0", "p1", "p2"]
    assert [call[2] for call in client.calls] == [None, "1", "2"]
    keys = [f"k{number}" for number in range(2 * MOST_DELETED + 1)]
    bucket.delete(keys)
    assert [call[1:] for call in client.calls[3:]] == [
        tuple(keys[:MOST_DELETED]),
        tuple(keys[MOST_DELETED : 2 * MOST_DELETED]),
        tuple(keys[2 * MOST_DELETED :]),
    ]
    bucket.delete([])
    bucket.close()


class NoJitter(Random):
    def random(self) -> float:
        return 1.0


class BreakerClock(Clock):
    random = NoJitter()

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def make_breaker(clock: BreakerClock) -> Breaker:
    return Breaker("test", 2.0, clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.admit()
        breaker.record(well=False, seconds=0.1)


def test_breaker_opens_probes_once_and_closes() -> None:
    clock = BreakerClock()
    breaker = make_breaker(clock)
    fail(breaker, 4)
    assert breaker.admit()
    breaker.record(well=True, seconds=0.1)
    fail(breaker, 5)
    assert breaker.state == "open"
    assert not breaker.admit()
    clock.now += 1.01
    assert breaker.state == "half-open"
    assert [breaker.admit(), breaker.admit()] == [True, False]
    breaker.record(well=False, seconds=0.1)
    clock.now += 1.01
    assert not breaker.admit(), "the pause doubled"
    clock.now += 1.01
    assert breaker.admit()
    breaker.record(well=True, seconds=0.1)
    assert breaker.state == "closed"
    fail(breaker, 4)
    assert breaker.admit()


def test_breaker_slow_or_half_failed_requests_opens() -> None:
    clock = BreakerClock()
    slow, mixed = make_breaker(clock), make_breaker(clock)
    for _ in range(5):
        slow.record(well=True, seconds=2.1)
    assert slow.state == "open"
    for number in range(20):
        mixed.record(well=bool(number % 2), seconds=0.1)
    assert mixed.state == "open"


def test_breaker_opens_when_throughput_falls_below_1_mib_s() -> None:
    breaker = make_breaker(BreakerClock())
    for _ in range(20):
        breaker.record(well=True, seconds=30.0, num_bytes=32 << 20)
    assert breaker.state == "closed", "more than 1 MiB/s"
    for _ in range(5):
        breaker.record(well=True, seconds=35.0, num_bytes=32 << 20)
    assert breaker.state == "open"


@pytest.mark.parametrize("verb", ["put", "fill", "head"])
def test_bucket_slow_large_transfers_keep_breaker_closed(verb: str) -> None:
    """Each transfer takes five times the limit for a small request."""
    bucket = Bucket(Scripted(after=lambda: Event().wait(0.05)), Breaker("test", 0.01, Clock()), 10.0, 1, Clock())
    for _ in range(5):
        if verb == "put":
            bucket.put("k", [bytes(1 << 20)])
        elif verb == "fill":
            bucket.fill("k", 0, [memoryview(bytearray(1 << 20))])
        else:
            bucket.head("k")
    assert bucket.breaker.state == ("open" if verb == "head" else "closed")


def test_breaker_open_ignores_results_of_earlier_requests() -> None:
    clock = BreakerClock()
    breaker = make_breaker(clock)
    fail(breaker, 5)
    for well in (False, True):
        breaker.record(well=well, seconds=0.1)
    assert breaker.state == "open"
    clock.now += 1.01
    assert breaker.admit()


def test_bucket_open_breaker_raises_without_request() -> None:
    client = Scripted(*[RefusedError("403")] * 5)
    bucket = make_bucket(client)
    for _ in range(5):
        with pytest.raises(RefusedError):
            bucket.head("k")
    with pytest.raises(BreakerOpenError):
        bucket.head("k")
    assert len(client.calls) == 5


def test_bucket_missing_objects_keep_breaker_closed() -> None:
    bucket = make_bucket(Scripted(*[ObjectMissingError("404")] * 50))
    for _ in range(50):
        with pytest.raises(ObjectMissingError):
            bucket.head("k")
    assert bucket.breaker.state == "closed"


def test_breaker_half_open_admits_one_of_many_threads() -> None:
    clock = BreakerClock()
    breaker = make_breaker(clock)
    fail(breaker, 5)
    clock.now += 2
    admitted: list[bool] = []
    threads = [threading.Thread(target=lambda: admitted.append(breaker.admit())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(admitted) == 1


INTERRUPTED_CALLS = """
from persistkv_s3.client.bucket import Breaker, Bucket
from persistkv_s3.client.transport import Clock, Transport

class Idle(Transport):
    put = get = head = list = delete = close = lambda *arguments, **options: None

begun = []

def hang(number):
    begun.append(number)
    time.sleep(3600)

bucket = Bucket(Idle(), Breaker("test", 10.0, Clock()), 30.0, 2, Clock())
interrupt_in(0.3)
begin = time.monotonic()
try:
    bucket.all(hang, range(10))
except KeyboardInterrupt:
    bucket.close()
    print(len(begun), time.monotonic() - begin)
"""


def test_bucket_parallel_calls_interrupted_do_not_block_exit() -> None:
    """The server hangs. Running calls are abandoned, and queued calls never start."""
    begun, seconds = run_interrupted(INTERRUPTED_CALLS).split()
    assert int(begun) == 2
    assert float(seconds) < 10
