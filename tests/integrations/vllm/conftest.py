"""Engines for tests that need vLLM (``make test-vllm``); these are skipped where vLLM is not
installed."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.host.status import read_statuses
from tests.integrations.vllm import server as serving
from tests.integrations.vllm.engines import (
    AWS_ACCESS,
    ENVIRONMENT,
    Engine,
    spawn_engine,
)
from tests.integrations.vllm.programs import Program, Zygote, new_process
from tests.integrations.vllm.tiny_model import VOCABULARY, make_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``vllm`` where vLLM is not installed; allow them more time, because engines
    start slowly."""
    installed = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1200))
            if not installed:
                item.add_marker(
                    pytest.mark.skip(reason="vLLM is not installed: make test-vllm")
                )


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Give persistkv a log handler, so that tiers leave its configuration to pytest."""
    handler = logging.NullHandler()
    logger = logging.getLogger("persistkv")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def prompt(number: int, length: int = 400) -> list[int]:
    """Return the tokens of a prompt that shares no prefix with the prompt of another number."""
    return [
        3 + (7 * number + 5 * index * index + index) % (VOCABULARY - 3)
        for index in range(length)
    ]


SHORT = prompt(99, 10)
"""Prompt shorter than one block. These engines step, and apply store events, only while they have
requests."""


PREWARM: dict[str, Any] = {"type": "persistkv-prewarm", "share": 0.9}
"""Entry of ``secondary_tiers``, after the entries of ``tier``."""


def tier(url: str, **options: Any) -> dict[str, Any]:
    """Return an entry of ``secondary_tiers``. Whatever the store holds is loaded by default: such
    small models compute about as fast as a store loads."""
    return {"type": "persistkv", "url": url, "load_policy": "always", **options}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a checkpoint."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Process that forks the engines."""
    zygote = Zygote(ENVIRONMENT)
    yield zygote
    zygote.close()


StartEngine = Callable[..., Engine]


@pytest.fixture
def start_engine(tmp_path: Path, model: Path, zygote: Zygote) -> Iterator[StartEngine]:
    """Return a function that starts engines; end the remaining engines after the test."""
    engines: list[Engine] = []

    def start(
        *tiers: dict[str, Any],
        checkpoint: Path = model,
        extra: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        command: list[str] | None = None,
        **options: Any,
    ) -> Engine:
        """Start an engine.

        :param tiers: entries of ``secondary_tiers``; without any there is no connector.
        :param extra: further options of the connector.
        :param command: command line that starts a Python interpreter; None to fork the engine.
        :param options: of the engine.
        """
        connector = {
            "spec_name": "PersistKVSpec",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": list(tiers),
        }
        connector |= extra or {}
        settings = {
            "model": str(checkpoint),
            "connector": connector if tiers else None,
            "engine": options,
        }
        environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), **(environment or {})}
        spawn = spawn_engine(zygote, settings, environment, command)
        engines.append(Engine(spawn, tmp_path / "engine.log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.release()


StartServer = Callable[..., serving.Server]


@pytest.fixture
def start_server(zygote: Zygote, model: Path, tmp_path: Path) -> Iterator[StartServer]:
    """Return a function that starts servers; kill the remaining servers after the test."""
    servers: list[serving.Server] = []

    def start(
        *tiers: dict[str, Any],
        new: bool = False,
        shutdown_timeout: int = 120,
    ) -> serving.Server:
        """Start a server.

        :param tiers: entries of ``secondary_tiers``.
        :param new: start a new process instead of a fork.
        :param shutdown_timeout: as for ``server_arguments``.
        """
        connector = {
            "spec_name": "PersistKVSpec",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": list(tiers),
        }
        sock = tmp_path / f"{len(servers)}.sock"
        arguments = serving.server_arguments(model, sock, connector, shutdown_timeout)
        environment = serving.ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        if new:
            spawn = new_process(
                [sys.executable, "-m", serving.PROGRAM, *arguments],
                ENVIRONMENT | environment,
            )
        else:
            spawn = zygote.fork(serving.PROGRAM, arguments, environment)
        servers.append(serving.Server(spawn, tmp_path / "server.log", sock))
        return servers[-1]

    yield start
    for server in servers:
        server.release()


S3_SERVER = """
import json, logging, sys
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(json.dumps(server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def s3_server(tmp_path: Path) -> Iterator[Program]:
    """Process that runs moto, a simulator of S3."""
    server = Program(
        new_process([sys.executable, "-c", S3_SERVER], {}), tmp_path / "moto.log"
    )
    yield server
    server.release()


@pytest.fixture
def bucket_url(s3_server: Program, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a store in a bucket for one test."""
    boto3 = pytest.importorskip("boto3")
    for name, value in AWS_ACCESS.items():
        monkeypatch.setenv(name, value)
    host, port = s3_server.answer()
    endpoint, bucket = f"http://{host}:{port}", f"test-{uuid.uuid4().hex}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    client.close()
    return f"s3://{bucket}/kv?endpoint_url={endpoint}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """URL of a store for one test."""
    return f"lmdb://{tmp_path}/store?capacity=1GiB"


def stored_contexts(url: str) -> int:
    """Return the number of durable contexts in a store, of all models."""
    try:
        backend = open_backend(url, read_only=True)
    except StoreError:  # the store does not exist yet
        return 0
    try:
        return sum(
            len(list(backend.catalogue(namespace.id).manifests()))
            for namespace in backend.namespaces()
        )
    finally:
        backend.close()


def wait_stored(url: str, count: int, timeout_s: float = 120.0) -> None:
    """Wait until ``count`` contexts are durable."""
    deadline = time.monotonic() + timeout_s
    while (found := stored_contexts(url)) < count:
        assert time.monotonic() < deadline, f"{found} contexts are stored, not {count}"
        time.sleep(0.2)


def wait_loaded(url: str, count: int, timeout_s: float = 120.0) -> None:
    """Wait until a running engine has loaded ``count`` blocks."""
    backend = open_backend(url, read_only=True)
    try:
        deadline = time.monotonic() + timeout_s
        while (
            found := max(
                (row.counters.loaded_blocks for row in read_statuses(backend)),
                default=0,
            )
        ) < count:
            assert time.monotonic() < deadline, (
                f"{found} blocks are loaded, not {count}"
            )
            time.sleep(0.2)
    finally:
        backend.close()


def damage_payloads(url: str) -> None:
    """Overwrite some bytes in each 4 KiB of the payloads of a store on LMDB."""
    damaged = list(
        Path(url.partition("?")[0].removeprefix("lmdb://")).glob("segments/*")
    )
    assert damaged
    for file in damaged:
        with file.open("r+b") as opened:
            for offset in range(64, file.stat().st_size, 4096):
                opened.seek(offset)
                opened.write(b"damage")


@pytest.fixture(scope="session")
def plain_engine(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    zygote: Zygote,
) -> Iterator[Engine]:
    """Engine without a connector."""
    directory = tmp_path_factory.mktemp("plain")
    settings: dict[str, Any] = {
        "model": str(model),
        "connector": None,
        "engine": {},
    }
    engine = Engine(
        spawn_engine(zygote, settings, {"XDG_CACHE_HOME": str(directory)}),
        directory / "engine.log",
    )
    yield engine
    engine.close()
    engine.release()
