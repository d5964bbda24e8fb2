from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.store_rig import Job, fresh_keys
from persistkv.storage import open_backend
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import ProcessHost
from persistkv.storage.host.status import EngineStatus, read_statuses
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreCounters
from persistkv.storage.store.savings import SavingsRecorder
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv_tools.inspect.top import Watch, engine_name, hit_rate
from tests.storage.statuses import make_status
from tests.tools.conftest import Run
from tests.tools.contexts import begin_namespace
from tests.tools.signals import obey_ctrl_c
from tests.tools.terminals import ESCAPES, on_terminal

BLOCKS = 8
JOB_BYTES = 4 << 20  # large enough to be written at once; smaller jobs are staged


@pytest.fixture
def engine(url: str) -> Iterator[StoreClient]:
    """Client whose host process has stored one request and loaded it again."""
    job = Job(BLOCKS, JOB_BYTES)
    with closing(job.rig.client(url)) as client:
        client.open()
        keys = fresh_keys(BLOCKS)
        job.store(client, 1, keys)
        client.end_request(RequestEnd("r", "r", (keys,), BLOCKS, 1))
        assert client.flush(60)
        job.load(client, 2, keys)
        wait_for(
            url,
            lambda statuses: any(
                status.counters.loaded_blocks == BLOCKS for status in statuses
            ),
        )
        yield client


def wait_for(url: str, condition: Callable[[Sequence[EngineStatus]], bool]) -> None:
    deadline = time.monotonic() + 60
    with closing(open_backend(url, read_only=True)) as backend:
        while not condition(read_statuses(backend)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_top_engine_shows_counters_until_closed(
    run: Run, url: str, engine: StoreClient
) -> None:
    found = json.loads(run("top", url, "--interval", "1s", "--json").stdout)
    (view,) = found["engines"]
    assert (view["live"], view["hit_rate"], view["breaker"]) == (True, 0.5, None)
    assert isinstance(engine.host, ProcessHost)
    assert (view["pid"], view["engine_pid"]) == (engine.host.pid, os.getpid())
    assert view["indexed_blocks"] == BLOCKS
    assert (view["counters"]["stored_raw_bytes"], view["counters"]["loaded_bytes"]) == (
        JOB_BYTES,
        JOB_BYTES,
    )
    assert found["requests"] == 1
    shown = run("top", url, "--interval", "1s").stdout
    assert "50.0%" in shown
    engine.close()
    assert (
        "no engine has published a status" in run("top", url, "--interval", "1s").stdout
    )


@pytest.mark.slow
def test_top_interrupted_on_terminal_exits_0(url: str, engine: StoreClient) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "persistkv_tools", "top", url, "--interval", "1s"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        preexec_fn=obey_ctrl_c,
    )
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 60
    while b"50.0%" not in shown and time.monotonic() < deadline:
        if select.select([master], [], [], 1)[0]:
            shown += os.read(master, 65_536)
    process.send_signal(signal.SIGINT)
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                shown += os.read(master, 65_536)
            except OSError:  # the other end is closed
                break
    assert process.wait(60) == 0, shown
    os.close(master)
    assert b"50.0%" in shown
    assert b"Traceback" not in shown


@pytest.fixture
def status_backend(
    memory_store: Callable[[], MemoryBackend],
) -> Callable[[dict[str, EngineStatus]], FaultyBackend[MemoryBackend]]:
    """Return a function that returns a store, which reports the current content of ``statuses``."""

    def report(statuses: dict[str, EngineStatus]) -> FaultyBackend[MemoryBackend]:
        backend = FaultyBackend.of(memory_store())
        backend.after(
            "statuses",
            lambda _: {name: status.encode() for name, status in statuses.items()},
        )
        return backend

    return report


class TestWatch:
    def test_rates_are_change_per_second_between_status_rows(
        self,
        status_backend: Callable[
            [dict[str, EngineStatus]], FaultyBackend[MemoryBackend]
        ],
    ) -> None:
        rows: dict[str, EngineStatus] = {}
        watch = Watch("lmdb:///x", status_backend(rows))
        rows["e1"] = make_status(
            time=1000.0, counters=StoreCounters(stored_raw_bytes=100, evicted_blocks=1)
        )
        (view,) = watch.snapshot().engines
        assert view.rates is None
        rows["e1"] = make_status(
            time=1004.0, counters=StoreCounters(stored_raw_bytes=500, evicted_blocks=3)
        )
        (view,) = watch.snapshot().engines
        assert view.rates is not None
        assert (
            view.rates.stored_raw_bytes,
            view.rates.evicted_blocks,
            view.rates.loaded_bytes,
        ) == (100.0, 0.5, 0.0)
        (view,) = watch.snapshot().engines  # the row is unchanged
        assert view.rates is not None
        assert view.rates.stored_raw_bytes == 100.0

    def test_outdated_engines_sort_last(
        self,
        status_backend: Callable[
            [dict[str, EngineStatus]], FaultyBackend[MemoryBackend]
        ],
    ) -> None:
        now = time.time()
        rows = {
            "old": make_status("old", started=1.0),
            "new": make_status("new", started=2.0, time=now),
        }
        assert [
            (view.engine, view.live)
            for view in Watch("", status_backend(rows)).snapshot().engines
        ] == [
            ("new", True),
            ("old", False),
        ]

    def test_engine_has_model_name_and_pid_of_engine_process(
        self,
        status_backend: Callable[
            [dict[str, EngineStatus]], FaultyBackend[MemoryBackend]
        ],
    ) -> None:
        rows: dict[str, EngineStatus] = {}
        backend = status_backend(rows)
        namespace = begin_namespace(
            backend, Identity.of({"model_name": "/models/llama"})
        ).hex()
        rows["e1"] = make_status(
            namespace=namespace, pid=7, engine_pid=6, host="here", time=time.time()
        )
        rows["e2"] = make_status("e2", pid=9, host="here", time=time.time())
        views = {view.engine: view for view in Watch("", backend).snapshot().engines}
        assert (views["e1"].model, engine_name(views["e1"])) == (
            "/models/llama",
            "here:6",
        )
        assert (views["e2"].model, engine_name(views["e2"])) == ("", "here:9")

    def test_hit_rate_is_share_of_loaded_blocks_or_none(self) -> None:
        assert hit_rate(StoreCounters()) is None
        assert hit_rate(StoreCounters(loaded_blocks=3, stored_blocks=1)) == 0.75
        assert hit_rate(StoreCounters(held_blocks=3, dropped_blocks=1)) == 0.0


def test_top_shows_savings(run: Run, filled: str) -> None:
    with closing(open_backend(filled)) as backend:
        recorder = SavingsRecorder(backend, Identity.of({"model_name": "m"}))
        recorder.add(4000, {}, 0, 0.0)
        recorder.write()
    shown = run("top", filled, "--interval", "0.01s").stdout
    assert "saved: 4,000 tokens in 1 request\n" in shown


@pytest.mark.parametrize("width", [40, 59])
def test_top_narrow_terminal_shows_each_engine_in_lines_that_fit(
    url: str, tmp_path: Path, width: int
) -> None:
    with closing(open_backend(url)) as backend:
        begin_namespace(backend, Identity.of({"model_name": "/models/llama"}))
        for name, host in (("e1", "gpu-node-017.cluster"), ("e2", "b")):
            row = make_status(name, time=time.time(), interval_s=600.0, host=host)
            backend.publish_status(name, row.encode())
        arguments = ("top", url.partition("?")[0], "--count", "1", "--interval", "0.1s")
        text, code = on_terminal(width, *arguments, cwd=tmp_path)
    lines = [ESCAPES.sub("", line).rstrip() for line in text.split("\n")]
    assert code == 0
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for name in ("gpu-node-017.cluster:1", "breaker", "loaded/s", "dropped"):
        assert any(name in line for line in lines), name
