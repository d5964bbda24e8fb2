"""Threads that run the blocking calls of a store: order, errors, shutdown."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from persistkv.storage.threads import StoreThreads, ThreadPool

TIMEOUT_S = 30.0


class Call:
    """Call that can be abandoned if it has a result so far."""

    def __init__(self, call: Callable[[], int], so_far: int | None = None) -> None:
        self._call = call
        self._so_far = so_far

    def __call__(self) -> int:
        return self._call()

    def abandon(self) -> int | None:
        return self._so_far


@pytest.fixture
def threads() -> Iterator[StoreThreads]:
    made = StoreThreads(3)
    yield made
    made.close()


def test_read_results_keep_call_order(threads: StoreThreads) -> None:
    async def read() -> list[list[int]]:
        calls = [partial(int, number) for number in range(20)]
        return [await threads.read(calls), await threads.read([])]

    assert asyncio.run(read()) == [list(range(20)), []]


def test_writes_never_overlap_and_keep_their_order(threads: StoreThreads) -> None:
    inside, most = 0, 0
    order: list[int] = []

    def call(number: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threading.Event().wait(0.001)
        order.append(number)
        inside -= 1

    async def write() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(threads.write(partial(call, number)))

    asyncio.run(write())
    assert most == 1
    assert order == list(range(20))


def test_read_error_is_raised_after_all_calls_end(threads: StoreThreads) -> None:
    """The task may free its buffers after the error, so no call may still write to them."""
    release, ended = threading.Event(), threading.Event()

    def slow() -> None:
        assert release.wait(TIMEOUT_S)
        ended.set()

    def bad() -> None:
        raise ValueError("no")

    async def read() -> None:
        reading = asyncio.create_task(threads.read([bad, slow]))
        await threads.write(lambda: None)
        assert not reading.done(), "other tasks go on meanwhile"
        release.set()
        with pytest.raises(ValueError, match="no"):
            await reading
        assert ended.is_set()

    asyncio.run(read())


def test_read_until_drops_calls_that_have_not_begun_at_deadline(
    threads: StoreThreads,
) -> None:
    """Those in progress end first: the task may reuse their buffers afterwards."""
    release = threading.Event()
    begun: list[int] = []

    def call(number: int) -> int:
        begun.append(number)
        assert release.wait(TIMEOUT_S)
        return number

    async def read() -> list[int | None]:
        loop = asyncio.get_running_loop()
        calls = [Call(partial(call, number)) for number in range(5)]
        reading = asyncio.create_task(threads.read_until(calls, loop.time() + 0.05))
        while len(begun) < 3 or loop.time() < reading_ends:
            await asyncio.sleep(0.001)
        assert not reading.done()
        release.set()
        return await reading

    reading_ends = asyncio.run(_loop_time()) + 0.2
    assert asyncio.run(read()) == [0, 1, 2, None, None]
    assert sorted(begun) == [0, 1, 2]


def test_read_until_abandons_running_calls_and_replaces_their_threads(
    threads: StoreThreads,
) -> None:
    """As many threads are replaced as there are; further calls wait for those."""
    release = threading.Event()

    def call() -> int:
        assert release.wait(TIMEOUT_S)
        return 1

    async def read(so_far: int) -> list[int | None]:
        calls = [Call(call, so_far) for _ in range(3)]
        now = asyncio.get_running_loop().time()
        return await threads.read_until(calls, now + 0.2)

    async def read_often() -> None:
        assert await read(5) == [5, 5, 5]
        async with asyncio.timeout(TIMEOUT_S):
            assert await threads.read([partial(int, 7)]) == [7]
        assert await read(6) == [6, 6, 6]
        assert await read(7) == [None, None, None], "no thread is free"
        release.set()
        async with asyncio.timeout(TIMEOUT_S):
            assert await threads.read([partial(int, 8)] * 5) == [8] * 5

    asyncio.run(read_often())


@pytest.mark.parametrize("num_hanging", [1, 2])
def test_close_does_not_wait_for_abandoned_calls(num_hanging: int) -> None:
    """Nor for one whose thread was not replaced, because as many as the pool has were."""
    threads = StoreThreads(1)
    release = threading.Event()

    def call() -> int:
        return release.wait(TIMEOUT_S)

    async def read() -> list[int | None]:
        now = asyncio.get_running_loop().time()
        return await threads.read_until([Call(call, 5)], now + 0.1)

    for _ in range(num_hanging):
        assert asyncio.run(read()) == [5]
    closing = threading.Thread(target=threads.close)
    closing.start()
    closing.join(TIMEOUT_S / 2)
    has_ended = not closing.is_alive()
    release.set()
    closing.join()
    assert has_ended


def test_read_until_call_dropped_while_all_threads_hang_is_released() -> None:
    """It may reference rows, and stays in the queue for as long as the medium hangs."""
    threads = StoreThreads(1)
    release = threading.Event()
    dropped = Call(pytest.fail)
    is_released = weakref.ref(dropped)

    async def read(call: Call) -> list[int | None]:
        now = asyncio.get_running_loop().time()
        return await threads.read_until([call], now + 0.1)

    for _ in range(2):
        hanging = Call(lambda: release.wait(TIMEOUT_S), 5)
        assert asyncio.run(read(hanging)) == [5]
    assert asyncio.run(read(dropped)) == [None]
    del dropped
    gc.collect()
    assert is_released() is None
    release.set()
    threads.close()


async def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def test_read_until_past_deadline_begins_no_call(threads: StoreThreads) -> None:
    async def read() -> list[int | None]:
        return await threads.read_until([Call(pytest.fail)], _past())

    def _past() -> float:
        return asyncio.get_running_loop().time() - 1

    assert asyncio.run(read()) == [None]


def test_read_until_without_deadline_returns_all_results(
    threads: StoreThreads,
) -> None:
    async def read() -> list[int | None]:
        calls = [Call(partial(int, 1)), Call(partial(int, 2))]
        return await threads.read_until(calls, None)

    assert asyncio.run(read()) == [1, 2]


def test_longest_s_reports_oldest_running_call(threads: StoreThreads) -> None:
    release = threading.Event()

    async def write() -> None:
        assert threads.longest_s() == 0.0
        writing = asyncio.create_task(threads.write(lambda: release.wait(TIMEOUT_S)))
        async with asyncio.timeout(TIMEOUT_S):
            while threads.longest_s() == 0.0:
                await asyncio.sleep(0.001)
        assert not writing.done()
        release.set()
        assert await writing
        assert threads.longest_s() == 0.0

    asyncio.run(write())


def test_close_waits_for_running_call() -> None:
    threads = StoreThreads(2)
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        release.wait(TIMEOUT_S)
        ended.set()

    async def cancel() -> None:
        reading = asyncio.create_task(threads.read([call]))
        await asyncio.sleep(0)
        assert begun.wait(TIMEOUT_S)
        reading.cancel()
        threading.Timer(0.05, release.set).start()
        threads.close()
        assert ended.is_set()
        threads.close()

    asyncio.run(cancel())


@pytest.mark.parametrize("fails", [False, True])
def test_ahead_returns_or_raises_as_its_call(
    threads: StoreThreads,
    fails: bool,
) -> None:
    def call() -> int:
        if fails:
            raise OSError("gone")
        return 5

    wait = threads.start(call)
    if fails:
        with pytest.raises(OSError, match="gone"):
            wait()
    else:
        assert wait() == 5


@pytest.mark.parametrize("kind", ["read", "write"])
def test_failed_call_keeps_no_reference_to_arguments(
    threads: StoreThreads,
    kind: str,
) -> None:
    """The arguments may include rows, and a remaining reference would keep the rows mapped."""
    memory = bytearray(8)

    def fail(rows: memoryview) -> None:
        raise OSError(len(rows))

    async def run(rows: memoryview) -> str:
        call = partial(fail, rows)
        try:
            await (
                threads.write(call) if kind == "write" else threads.read([call, call])
            )
        except OSError as error:
            return str(error)
        return ""

    async def check() -> None:
        assert await run(memoryview(memory)) == "8"
        threads.close()
        memory.extend(b"BufferError, were it held")

    gc.disable()
    try:
        asyncio.run(check())
    finally:
        gc.enable()


def test_thread_pool_failed_thread_start_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, start = threading.active_count(), threading.Thread.start
    started: list[threading.Thread] = []

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_two)
        with pytest.raises(RuntimeError, match="new thread"):
            ThreadPool(3, "test")
    assert (len(started), threading.active_count()) == (2, before)


AT_EXIT = """
import atexit, threading
from persistkv.storage.threads import ThreadPool
pool = ThreadPool(1, "test")
atexit.register(lambda: print(pool.submit(lambda: "stored").result(10), flush=True))
"""
HUNG = """
import threading
from persistkv.storage.threads import ThreadPool
begun = threading.Event()
ThreadPool(1, "test").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("script", "output"),
    [(AT_EXIT, "stored\n"), (HUNG, "ended\n")],
    ids=["atexit", "hung"],
)
def test_thread_pool_interpreter_exit_serves_atexit_and_ignores_hung_call(
    script: str,
    output: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == (output, "")
