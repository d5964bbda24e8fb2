"""Flows on one thread, blocking calls on other threads: order, errors, shutdown."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from persistkv.storage.executor import Executor, InPlaceExecutor, ThreadExecutor, ThreadPool

PATIENCE_S = 30.0


@pytest.fixture(params=["in place", "threads"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made = InPlaceExecutor() if request.param == "in place" else ThreadExecutor(3, lambda: None)
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadExecutor]:
    made = ThreadExecutor(3, lambda: None)
    yield made
    made.close()


def test_flows_that_write_take_turns_as_a_whole(executor: Executor) -> None:
    steps: list[tuple[str, int]] = []

    async def flow(name: str) -> None:
        for step in range(3):
            steps.append((name, await executor.write(lambda step=step: step)))  # type: ignore[misc]

    for name in "abc":
        executor.begin_write(flow(name))
    executor.run_until(lambda: not executor.writing)
    assert steps == [(name, step) for name in "abc" for step in range(3)]


def test_results_come_in_order(executor: Executor) -> None:
    results: list[list[int]] = []

    async def flow() -> None:
        results.append(await executor.read([lambda n=n: n for n in range(20)]))  # type: ignore[misc]
        results.append(await executor.read([]))

    executor.begin(flow())
    executor.run_until(lambda: len(results) == 2)
    assert results == [list(range(20)), []]


def test_writes_never_run_beside_one_another(threads: ThreadExecutor) -> None:
    inside, most = 0, 0
    done: list[int] = []

    def call() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threading.Event().wait(0.001)
        inside -= 1

    async def flow() -> None:
        await threads.write(call)
        done.append(1)

    for _ in range(20):
        threads.begin(flow())
    threads.run_until(lambda: len(done) == 20)
    assert most == 1


def test_an_error_comes_out_when_all_calls_have_ended(threads: ThreadExecutor) -> None:
    """The flow may free the buffers on the error, so no call may still write to them."""
    release, ended = threading.Event(), threading.Event()
    caught: list[str] = []

    def slow() -> None:
        assert release.wait(PATIENCE_S)
        ended.set()

    def bad() -> None:
        raise ValueError("no")

    async def flow() -> None:
        try:
            await threads.read([bad, slow])
        except ValueError as error:
            assert ended.is_set()
            caught.append(str(error))

    async def other() -> None:
        await threads.write(lambda: None)
        caught.append("other")

    threads.begin(flow())
    threads.begin(other())
    threads.run_until(lambda: bool(caught))
    assert caught == ["other"], "other flows go on meanwhile"
    release.set()
    threads.run_until(lambda: len(caught) == 2)
    assert caught == ["other", "no"]


def test_what_a_flow_raises_comes_out_at_its_owner(executor: Executor) -> None:
    async def flow() -> None:
        await executor.write(lambda: 1 // 0)

    def run() -> None:
        executor.begin_write(flow())
        executor.run_until(lambda: not executor.writing)

    with pytest.raises(ZeroDivisionError):
        run()
    assert not executor.writing


def test_the_owner_is_woken_and_told_how_long_a_call_takes() -> None:
    woken, release = threading.Event(), threading.Event()
    executor = ThreadExecutor(1, woken.set)
    done: list[int] = []

    async def flow() -> None:
        await executor.write(lambda: release.wait(PATIENCE_S))
        done.append(1)

    assert executor.longest_s() == 0.0
    executor.begin(flow())
    assert not executor.run_ready()
    while executor.longest_s() == 0.0:
        assert not woken.is_set()
    release.set()
    assert woken.wait(PATIENCE_S)
    assert executor.run_ready()
    assert done == [1]
    executor.close()


def test_closing_waits_for_what_runs() -> None:
    executor = ThreadExecutor(2, lambda: None)
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        release.wait(PATIENCE_S)
        ended.set()

    async def flow() -> None:
        await executor.read([call])

    executor.begin(flow())
    assert begun.wait(PATIENCE_S)
    threading.Timer(0.05, release.set).start()
    executor.close()
    assert ended.is_set()
    executor.close()


@pytest.mark.parametrize("fails", [False, True])
def test_calls_begun_ahead_give_what_they_give(executor: Executor, fails: bool) -> None:
    def call() -> int:
        if fails:
            raise OSError("gone")
        return 5

    wait: Callable[[], int] = executor.ahead(call)
    if fails:
        with pytest.raises(OSError, match="gone"):
            wait()
    else:
        assert wait() == 5


def test_a_flow_that_nobody_goes_on_with_lets_go_of_what_it_holds() -> None:
    executor = ThreadExecutor(2, lambda: None)
    left: list[str] = []

    async def flow() -> None:
        try:
            await executor.read([lambda: None, lambda: None])
        finally:
            left.append("here")

    executor.begin(flow())
    executor.close()
    assert left == ["here"]


def test_read_several_calls_wakes_owner_once() -> None:
    woken: list[int] = []
    executor = ThreadExecutor(3, lambda: woken.append(1))
    done: list[int] = []

    async def flow() -> None:
        done.extend(await executor.read([lambda n=n: n for n in range(20)]))  # type: ignore[misc]

    executor.begin(flow())
    executor.run_until(lambda: bool(done))
    executor.close()
    assert (done, woken) == (list(range(20)), [1])


@pytest.mark.parametrize("kind", ["read", "write"])
def test_call_that_failed_keeps_nothing_it_was_given(threads: ThreadExecutor, kind: str) -> None:
    """The arguments may include rows, and a remaining reference would prevent their unmapping."""
    memory = bytearray(8)
    caught: list[str] = []

    def fail(rows: memoryview) -> None:
        raise OSError(len(rows))

    async def flow(rows: memoryview) -> None:
        call = partial(fail, rows)
        try:
            await (threads.write(call) if kind == "write" else threads.read([call, call]))
        except OSError as error:
            caught.append(str(error))

    gc.disable()
    try:
        threads.begin(flow(memoryview(memory)))
        threads.run_until(lambda: bool(caught))
        threads.close()
        memory.extend(b"BufferError, were it held")
    finally:
        gc.enable()
    assert caught == ["8"]


def test_thread_pool_too_few_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
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
from persistkv.storage.executor import ThreadPool
pool = ThreadPool(1, "test")
atexit.register(lambda: print(pool.submit(lambda: "stored").result(10), flush=True))
"""
HUNG = """
import threading
from persistkv.storage.executor import ThreadPool
begun = threading.Event()
ThreadPool(1, "test").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
print("ended", flush=True)
"""


@pytest.mark.parametrize(("script", "output"), [(AT_EXIT, "stored\n"), (HUNG, "ended\n")], ids=["atexit", "hung"])
def test_thread_pool_at_the_exit_of_the_interpreter(script: str, output: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (output, "")
