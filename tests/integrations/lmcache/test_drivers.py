"""LMCache's own drivers with the adapter: its benchmark, and its server, which is killed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest

from persistkv_tools.cli import main
from tests.integrations.lmcache.conftest import HAS_LMCACHE

pytestmark = [
    pytest.mark.skipif(not HAS_LMCACHE, reason="LMCache is not installed"),
    pytest.mark.timeout(600),
]

COMMAND = [sys.executable, "-m", "lmcache.cli.main"]
QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
SHAPE = "(2,1024,16,8,128):bfloat16:4"


def adapter_json(url: str, model: str) -> str:
    """Return the value of ``--l2-adapter``, as the docs have it."""
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "persistkv.integrations.lmcache.adapter",
            "class_name": "PersistKVL2Adapter",
            "adapter_params": {
                "url": url,
                "models": {model: "name:test"},
                "engine": "test",
            },
        }
    )


def run(*arguments: str) -> str:
    """Run a command of LMCache; return its output."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **QUIET},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_benchmark(url: str, kib: int) -> None:
    """Run LMCache's benchmark, which compares the bytes, on a new store."""
    adapter = adapter_json(url, "bench-model")
    arguments = ["--rounds", "2", "--num-keys", "16", "--data-size-kb", str(kib)]
    arguments += ["--l1-align-bytes", "4096", "--lookup-max-hit-rate", "1"]
    output = run("bench", "l2", "--l2-adapter", adapter, "--no-skip-verify", *arguments)
    assert len(re.findall(r"Total success: +32\b", output)) == 3, output
    assert "Actual hit rate:                                            1.00" in output
    assert "mismatch" not in output.lower()


@pytest.mark.parametrize("kib", [64, 512, 2048])
def test_benchmark_with_verification_passes(tmp_path: Path, kib: int) -> None:
    check_benchmark(f"lmdb://{tmp_path}/store?capacity=2GiB", kib)


def test_benchmark_on_s3_with_verification_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LMCache requires awscrt, with which botocore reads and signs bodies in another way."""
    from moto.server import ThreadedMotoServer

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="kv-cache")
        client.close()
        check_benchmark(f"s3://kv-cache/store?endpoint_url={endpoint}", 512)
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


@contextmanager
def server(
    adapter: str, log: Path
) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """Run LMCache's server until the end of the ``with`` block, which kills it; yield its two URLs
    and the process."""
    port, http = free_port(), free_port()
    arguments = ["--port", str(port), "--http-port", str(http), "--l1-size-gb", "1"]
    arguments += ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-metrics"]
    arguments += ["--shm-name", f"persistkv-{port}"]
    arguments += ["--supported-transfer-mode", "auto", "--l2-adapter", adapter]
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*COMMAND, "server", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUIET},
        ) as process,
    ):
        try:
            wait_for(f"http://127.0.0.1:{http}/", process)
            yield f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http}", process
        finally:
            process.kill()
    Path(f"/dev/shm/lmcache_l1_pool_persistkv-{port}").unlink(missing_ok=True)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server does not answer")


@pytest.mark.slow
def test_killed_server_finds_every_chunk_again(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = adapter_json(f"lmdb://{tmp_path}/store?capacity=4GiB", "test-model")
    bench = ["bench", "server", "--mode", "cpu", "--transfer-mode", "engine_driven"]
    bench += ["--start", "0", "--end", "3", "--kvcache-shape-spec", SHAPE]
    with server(adapter, tmp_path / "first.log") as (rpc, http, _):
        before = run(*bench, "--rpc-url", rpc, "--url", http)
        wait_until_stored(tmp_path / "store", 6)
    with server(adapter, tmp_path / "second.log") as (rpc, http, _):
        after = run(*bench, "--rpc-url", rpc, "--url", http)
    # of the KV that each prompt had before it was stored, and of the KV that was loaded
    stored = re.findall(r"\[seq (\d+)/cold\] CHECKSUM: (\w+)", before)
    loaded = re.findall(r"\[seq (\d+)/warm\] CHECKSUM: (\w+)", after)
    assert len(stored) == 3, before
    assert loaded == stored, after
    first = (tmp_path / "first.log").read_text()
    second = (tmp_path / "second.log").read_text()
    assert "failed for keys" not in first + second
    hits = re.findall(r"retained keys \((\d) L1, (\d) L2\)", second)
    # two chunks for each of three prompts: the first lookup of each finds both in the store
    assert hits.count(("0", "2")) >= 3, second
    with pytest.raises(SystemExit) as verified:
        main(["verify", f"{tmp_path}/store"])
    assert not verified.value.code, capsys.readouterr().out


def wait_until_stored(store: Path, num_objects: int) -> None:
    """Wait until a store holds so many blocks, as its commands see it."""
    from persistkv import open_store

    deadline = time.monotonic() + 60
    held = 0
    while held < num_objects and time.monotonic() < deadline:
        time.sleep(0.2)
        with open_store(store) as opened:
            held = opened.stats().blocks
    assert held == num_objects
