"""Executors run flows (coroutines) on one thread and their blocking calls on others: order, errors,
shutdown."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from persistkv.storage.executor import Executor, ThreadPool

TIMEOUT_S = 30.0


@pytest.fixture(params=["in place", "threads"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made = Executor() if request.param == "in place" else Executor(3, lambda: None)
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[Executor]:
    made = Executor(3, lambda: None)
    yield made
    made.close()


def test_executor_begin_write_flows_run_one_after_another(executor: Executor) -> None:
    steps: list[tuple[str, int]] = []

    async def flow(name: str) -> None:
        for step in range(3):
            steps.append((name, await executor.write(lambda step=step: step)))  # type: ignore[misc]

    for name in "abc":
        executor.begin_write(flow(name))
    executor.run_until(lambda: not executor.writing)
    assert steps == [(name, step) for name in "abc" for step in range(3)]


def test_executor_read_results_keep_call_order(executor: Executor) -> None:
    results: list[list[int]] = []

    async def flow() -> None:
        results.append(await executor.read([lambda n=n: n for n in range(20)]))  # type: ignore[misc]
        results.append(await executor.read([]))

    executor.begin(flow())
    executor.run_until(lambda: len(results) == 2)
    assert results == [list(range(20)), []]


def test_executor_writes_never_overlap(threads: Executor) -> None:
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


def test_executor_read_error_is_raised_after_all_calls_end(threads: Executor) -> None:
    """The flow may free its buffers after the error, so no call may still write to them."""
    release, ended = threading.Event(), threading.Event()
    caught: list[str] = []

    def slow() -> None:
        assert release.wait(TIMEOUT_S)
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


def test_executor_flow_error_is_raised_in_run_until(executor: Executor) -> None:
    async def flow() -> None:
        await executor.write(lambda: 1 // 0)

    def run() -> None:
        executor.begin_write(flow())
        executor.run_until(lambda: not executor.writing)

    with pytest.raises(ZeroDivisionError):
        run()
    assert not executor.writing


def test_executor_wakes_owner_and_reports_longest_running_call() -> None:
    woken, release = threading.Event(), threading.Event()
    executor = Executor(1, woken.set)
    done: list[int] = []

    async def flow() -> None:
        await executor.write(lambda: release.wait(TIMEOUT_S))
        done.append(1)

    assert executor.longest_s() == 0.0
    executor.begin(flow())
    assert not executor.run_ready()
    while executor.longest_s() == 0.0:
        assert not woken.is_set()
    release.set()
    assert woken.wait(TIMEOUT_S)
    assert executor.run_ready()
    assert done == [1]
    executor.close()


def test_executor_close_waits_for_running_call() -> None:
    executor = Executor(2, lambda: None)
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        release.wait(TIMEOUT_S)
        ended.set()

    async def flow() -> None:
        await executor.read([call])

    executor.begin(flow())
    assert begun.wait(TIMEOUT_S)
    threading.Timer(0.05, release.set).start()
    executor.close()
    assert ended.is_set()
    executor.close()


@pytest.mark.parametrize("fails", [False, True])
def test_executor_ahead_returns_or_raises_as_its_call(
    executor: Executor, fails: bool
) -> None:
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


def test_executor_close_runs_finally_of_suspended_flow() -> None:
    executor = Executor(2, lambda: None)
    left: list[str] = []

    async def flow() -> None:
        try:
            await executor.read([lambda: None, lambda: None])
        finally:
            left.append("here")

    executor.begin(flow())
    executor.close()
    assert left == ["here"]


def test_executor_read_several_calls_wakes_owner_once() -> None:
    woken: list[int] = []
    executor = Executor(3, lambda: woken.append(1))
    done: list[int] = []

    async def flow() -> None:
        done.extend(await executor.read([lambda n=n: n for n in range(20)]))  # type: ignore[misc]

    executor.begin(flow())
    executor.run_until(lambda: bool(done))
    executor.close()
    assert (done, woken) == (list(range(20)), [1])


@pytest.mark.parametrize("kind", ["read", "write"])
def test_executor_failed_call_keeps_no_reference_to_arguments(
    threads: Executor, kind: str
) -> None:
    """The arguments may include rows, and a remaining reference would keep the rows mapped."""
    memory = bytearray(8)
    caught: list[str] = []

    def fail(rows: memoryview) -> None:
        raise OSError(len(rows))

    async def flow(rows: memoryview) -> None:
        call = partial(fail, rows)
        try:
            await (
                threads.write(call) if kind == "write" else threads.read([call, call])
            )
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


@pytest.mark.parametrize(
    ("script", "output"),
    [(AT_EXIT, "stored\n"), (HUNG, "ended\n")],
    ids=["atexit", "hung"],
)
def test_thread_pool_interpreter_exit_serves_atexit_and_ignores_hung_call(
    script: str, output: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == (output, "")
