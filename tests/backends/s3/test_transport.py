"""Bodies, the sink, retries, deadlines and the circuit breaker, tested with a scripted client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from random import Random
from threading import Event

import pytest

from persistkv.storage.shared import Clock
from persistkv_s3.client.bucket import Breaker, Bucket
from persistkv_s3.client.transport import (
    MOST_DELETED,
    Body,
    BreakerOpenError,
    BrokenError,
    Deadline,
    KeysRefusedError,
    LateError,
    ListPage,
    NoCredentialsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectReplacedError,
    RequestRefusedError,
    S3Error,
    Sink,
    ThrottledError,
    Transport,
)

DATA = bytes(range(256)) * 4


class Scripted(Transport):
    """Transport with one step per call: an error to raise, a number of bytes after which a body
    breaks off, or None."""

    def __init__(
        self,
        *steps: S3Error | int | None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
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

    def put(self, key: str, body: Body, deadline: Deadline) -> float:
        self._step("put", key)
        return 0.0

    def get(
        self,
        key: str,
        start: int,
        stop: int,
        sink: Sink,
        deadline: Deadline,
    ) -> None:
        broken_after = self._step("get", key, start, stop)
        data = (DATA * 1024)[start:stop]
        sink.expect(len(data), '"etag"')
        left = data if broken_after is None else data[:broken_after]
        while left:
            room = sink.room()[: len(left)]
            room[:], left = left[: len(room)], left[len(room) :]
            sink.advance(len(room))
        if broken_after is not None:
            raise BrokenError("the body broke off")

    def head(self, key: str, deadline: Deadline) -> None:
        self._step("head", key)

    def list(
        self,
        prefix: str,
        page: str | None,
        deadline: Deadline,
        *,
        after: str = "",
    ) -> ListPage:
        self._step("list", prefix, page)
        number = int(page or 0)
        return ListPage(
            [ObjectInfo(f"{prefix}{number}", 1, 0.0)],
            str(number + 1) if number < 2 else None,
        )

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._step("delete", *keys)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record each pause, in seconds, instead of sleeping."""
    slept: list[float] = []
    monkeypatch.setattr("persistkv.storage.shared.clock.time.sleep", slept.append)
    return slept


def make_bucket(client: Transport, deadline_s: float = 10.0) -> Bucket:
    return Bucket(client, Breaker("test", 10.0, Clock()), deadline_s, Clock())


def test_body_reads_pieces_at_send_time_and_rewinds() -> None:
    row = bytearray(b"row")
    body = Body([memoryview(row), b"", b"table"], Deadline(10))
    assert len(body) == 8
    row[:] = b"ROW"
    assert [bytes(body.read(1)), bytes(body.read()), body.read(100)] == [
        b"ROW",
        b"table",
        b"",
    ]
    assert (
        body.seek(0),
        bytes(body.read()),
        body.tell(),
        body.seek(0, 2),
        body.read(),
    ) == (0, b"ROW", 3, 8, b"")
    with pytest.raises(ValueError, match="seek"):
        body.seek(1)


def test_body_splits_large_piece_into_1_mib_reads() -> None:
    body = Body([bytes(5 << 20), b"x"], Deadline(10))
    assert max(len(piece) for piece in iter(body.read, b"")) == 1 << 20


def test_body_readinto_fills_buffers_of_any_size() -> None:
    body = Body([b"abcde", b"fg"], Deadline(10))
    buffer = memoryview(bytearray(3))
    found = b""
    while count := body.readinto(buffer):
        found += buffer[:count]
        assert body.tell() == len(found)
    assert found == b"abcdefg"
    body.seek(0)
    assert body.readinto(buffer) == 3
    assert bytes(body.read()) == b"de"
    assert body.seek(0, 2) == 7


def test_body_read_past_deadline_raises() -> None:
    body = Body([b"a", b"b"], Deadline(0.0))
    with pytest.raises(LateError):
        body.read()


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(10, 500, DATA[10:500]), (0, 1, DATA[:1])]
)
def test_read_broken_body_resumes_at_broken_offset(
    start: int,
    stop: int,
    expected: bytes,
) -> None:
    client = Scripted(0, 0) if stop == 1 else Scripted(7, 90)
    buffers = (
        [bytearray(3), bytearray(0), bytearray(stop - start - 3)]
        if stop > 4
        else [bytearray(1)]
    )
    make_bucket(client).read(
        "k", start, stop - start, [memoryview(buffer) for buffer in buffers]
    )
    assert b"".join(buffers) == expected
    starts = [10, 17, 107] if stop > 4 else [0, 0, 0]
    assert [call[2] for call in client.calls] == starts


def test_read_broken_body_takes_each_buffer_when_the_one_before_is_full() -> None:
    client = Scripted(3, 0, 8, 40)
    whole = bytearray(60)
    came: list[bytes] = []

    def buffers() -> Iterator[memoryview]:
        end = 0
        for length in (10, 1, 0, 24, 20):
            with memoryview(whole)[end : end + length] as buffer:
                yield buffer
                came.append(bytes(buffer))
            end += length

    assert make_bucket(client).read("k", 5, 55, buffers()) == 55
    assert b"".join(came) == DATA[5:60]
    assert [call[2] for call in client.calls] == [5, 8, 8, 16, 56]


def test_sink_longer_body_than_expected_raises() -> None:
    sink = Sink(4, [memoryview(bytearray(4))])
    with pytest.raises(BrokenError):
        sink.expect(5, '"etag"')


def test_sink_object_that_ends_is_complete_early() -> None:
    sink = Sink(8, [memoryview(bytearray(8))])
    sink.expect(3, '"etag"')
    assert len(sink.room()) == 3
    sink.advance(3)
    assert sink.complete
    assert not len(sink.room())


def test_sink_object_replaced_between_attempts_raises() -> None:
    sink = Sink(8, [memoryview(bytearray(8))])
    sink.expect(8, '"etag"')
    sink.advance(3)
    with pytest.raises(ObjectReplacedError):
        sink.expect(5, '"other"')


@pytest.mark.parametrize("error", [BrokenError("x"), ThrottledError("x")])
def test_put_transient_error_is_retried_after_pause(
    error: S3Error,
    pauses: list[float],
) -> None:
    client = Scripted(error, error, None)
    make_bucket(client).put("k", [b"x"])
    assert len(client.calls) == 3
    assert all(pause >= error.pause_s for pause in pauses)


def test_read_deadline_passed_in_retry_raises_with_first_failure() -> None:
    client = Scripted(BrokenError("connection refused"), LateError("took too long"))
    with pytest.raises(
        LateError, match="took too long; the attempt before failed: connection refused"
    ):
        make_bucket(client).read("k", 0, 1, [memoryview(bytearray(1))])


@pytest.mark.parametrize(
    "error", [RequestRefusedError("x"), ObjectMissingError("x"), LateError("x")]
)
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


@pytest.mark.parametrize("verb", ["put", "read", "head"])
def test_bucket_slow_large_transfers_keep_breaker_closed(verb: str) -> None:
    """Each transfer takes five times the limit for a small request."""
    bucket = Bucket(
        Scripted(after=lambda: Event().wait(0.05)),
        Breaker("test", 0.01, Clock()),
        10.0,
        Clock(),
    )
    for _ in range(5):
        if verb == "put":
            bucket.put("k", [bytes(1 << 20)])
        elif verb == "read":
            bucket.read("k", 0, 1 << 18, [memoryview(bytearray(1 << 18))])
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
    client = Scripted(*[LateError("late")] * 5)
    bucket = make_bucket(client)
    for _ in range(5):
        with pytest.raises(LateError):
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


@pytest.mark.parametrize(
    "error",
    [RequestRefusedError("403"), KeysRefusedError("403"), ObjectReplacedError("etag")],
)
def test_bucket_answers_about_objects_keep_breaker_closed(error: S3Error) -> None:
    bucket = make_bucket(Scripted(*[error] * 50))
    for _ in range(50):
        with pytest.raises(type(error)):
            bucket.head("k")
    assert bucket.breaker.state == "closed"


@pytest.mark.parametrize("error", [LateError("x"), NoCredentialsError("x")])
def test_bucket_missing_answers_open_breaker(error: S3Error) -> None:
    bucket = make_bucket(Scripted(*[error] * 5))
    for _ in range(5):
        with pytest.raises(type(error)):
            bucket.head("k")
    assert bucket.breaker.state == "open"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("of the sink's owner")])
def test_bucket_exception_that_is_not_the_servers_frees_half_open_breaker(
    error: BaseException,
) -> None:
    clock = BreakerClock()
    breaker = make_breaker(clock)
    fail(breaker, 5)
    clock.now += 2

    def interrupt() -> None:
        raise error

    client = Scripted(after=interrupt)
    bucket = Bucket(client, breaker, 10.0, clock)
    for _ in range(3):
        with pytest.raises(type(error)):
            bucket.head("k")
        assert breaker.state == "half-open"
    client.after = lambda: None
    bucket.head("k")
    assert breaker.state == "closed"


def test_breaker_half_open_admits_one_of_many_threads() -> None:
    clock = BreakerClock()
    breaker = make_breaker(clock)
    fail(breaker, 5)
    clock.now += 2
    admitted: list[bool] = []
    threads = [
        threading.Thread(target=lambda: admitted.append(breaker.admit()))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(admitted) == 1
