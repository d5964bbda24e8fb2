from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreCounters
from persistkv.storage.store.savings import SavingsRecorder
from tests.storage.statuses import make_status
from tests.tools.conftest import Run
from tests.tools.signals import obey_ctrl_c

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"


def parsed(text: str) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name, sample.labels.get("engine")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def shown(filled: str) -> Iterator[str]:
    """URL of a store with the status rows of two engines, one of them outdated."""
    counters = StoreCounters(stored_blocks=7, loaded_bytes=4096)
    with closing(open_backend(filled)) as backend:
        backend.publish_status(
            "e1",
            make_status(
                "e1", time=time.time(), counters=counters, breaker="open"
            ).encode(),
        )
        backend.publish_status("e2", make_status("e2").encode())
        yield filled


def test_serve_metrics_exports_totals_and_live_engines(run: Run, shown: str) -> None:
    done = run("serve-metrics", shown, "--once")
    assert done.returncode == 0, done.stderr
    found = parsed(done.stdout)
    totals = json.loads(run("stat", shown, "--json").stdout)
    for name in ("packs", "blocks", "requests", "raw_bytes", "stored_bytes"):
        assert found[f"persistkv_store_{name}", None] == totals[name]
    assert found["persistkv_store_capacity_bytes", None] == totals["capacity"]
    assert found["persistkv_up", None] == 1
    assert found["persistkv_engines", None] == 1
    assert found["persistkv_engine_stored_blocks_total", "e1"] == 7
    assert found["persistkv_engine_loaded_bytes_total", "e1"] == 4096
    assert found["persistkv_engine_breaker", "e1"] == 2
    assert not [name for name, engine in found if engine == "e2"]


def test_serve_metrics_exports_every_store_counter(run: Run, shown: str) -> None:
    found = parsed(run("serve-metrics", shown, "--once").stdout)
    for name in StoreCounters.__struct_fields__:
        assert (f"persistkv_engine_{name}_total", "e1") in found


def test_grafana_dashboard_uses_only_exported_metrics(run: Run, shown: str) -> None:
    names = {name for name, _ in parsed(run("serve-metrics", shown, "--once").stdout)}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    used = {name for expr in asked for name in re.findall(r"persistkv_\w+", expr)}
    assert len(used) > 10
    assert used <= names


@contextmanager
def serving(url: str, cwd: Path) -> Iterator[str]:
    """Yield the address of an exporter of the store, and end it by Ctrl-C."""
    command = [
        sys.executable,
        "-m",
        "persistkv_tools",
        "serve-metrics",
        url,
        "--listen",
        "127.0.0.1:0",
        "--json",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        preexec_fn=obey_ctrl_c,
    )
    try:
        assert process.stdout is not None
        lines = ""
        while "}" not in lines:
            line = process.stdout.readline()
            assert line, process.communicate(timeout=60)
            lines += line
        yield json.loads(lines)["address"]
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def scrape(address: str) -> dict[tuple[str, str | None], float]:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return parsed(answer.read().decode())


@pytest.mark.slow
def test_serve_metrics_interrupted_exits_0(shown: str, tmp_path: Path) -> None:
    with serving(shown, tmp_path) as address:
        assert scrape(address)["persistkv_up", None] == 1


@pytest.mark.slow
def test_serve_metrics_absent_store_is_down_until_created(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store?capacity=1GiB"
    with serving(url, tmp_path) as address:
        assert scrape(address) == {("persistkv_up", None): 0}
        open_backend(url).close()
        assert scrape(address)["persistkv_up", None] == 1


def test_store_collector_moved_store_is_down_until_restored_and_logs_both_once(
    shown: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from persistkv_tools.inspect.serve_metrics import StoreCollector

    with (
        closing(StoreCollector(f"{shown}&nonsense=1")) as broken,
        pytest.raises(Exception, match="nonsense"),
    ):
        broken.collect()
    path = Path(shown.partition("://")[2].partition("?")[0])
    with closing(StoreCollector(shown)) as collector:
        collector.close()
        os.rename(path, path.with_name("away"))
        for _ in range(3):
            (up,) = collector.collect()
            assert up.samples[0].value == 0
        os.rename(path.with_name("away"), path)
        for _ in range(3):
            assert collector.collect()[0].samples[0].value == 1
    down, back = [record.getMessage() for record in caplog.records]
    assert "cannot be read: " in down
    assert back.endswith("can be read again")


def test_store_collector_scrapes_of_hanging_store_do_not_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several servers scrape one exporter."""
    pytest.importorskip("boto3")
    from persistkv_tools.inspect.serve_metrics import StoreCollector

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    # accepts connections and never answers
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        endpoint = f"endpoint_url=http://127.0.0.1:{port}&deadline=2s"
        with closing(StoreCollector(f"s3://bucket/kv?{endpoint}")) as collector:
            begin = time.monotonic()
            with ThreadPoolExecutor(4) as scrapes:
                found = list(scrapes.map(lambda _: collector.collect(), range(4)))
            seconds = time.monotonic() - begin
    for (up,) in found:
        assert up.samples[0].value == 0
    assert seconds < 6, "four times the deadline would be 8"


@pytest.mark.parametrize("listen", ["9464", "host:", "host:70000", "host:x"])
def test_serve_metrics_bad_listen_address_exits_2(
    run: Run, filled: str, listen: str
) -> None:
    done = run("serve-metrics", filled, "--listen", listen)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--listen" in done.stderr


def test_serve_metrics_once_absent_store_exits_3(run: Run, tmp_path: Path) -> None:
    assert run("serve-metrics", f"lmdb://{tmp_path}/absent", "--once").returncode == 3


def test_serve_metrics_savings_are_0_from_the_start(run: Run, shown: str) -> None:
    found = parsed(run("serve-metrics", shown, "--once").stdout)
    for name in ("requests", "tokens", "seconds"):
        assert found[f"persistkv_saved_{name}_total", None] == 0


def test_serve_metrics_exports_savings(run: Run, shown: str) -> None:
    with closing(open_backend(shown)) as backend:
        recorder = SavingsRecorder(backend, Identity.of({"model_name": "m"}))
        recorder.add(4000, {"user": "anna"}, 1000, 2.0)
        recorder.write()
    text = run("serve-metrics", shown, "--once").stdout
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model") == "m"
    }
    assert found == {
        "persistkv_saved_requests_total": 1,
        "persistkv_saved_tokens_total": 4000,
        "persistkv_saved_seconds_total": 8.0,
    }
    assert "anna" not in text
