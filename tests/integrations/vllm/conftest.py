"""Engines for tests that need vLLM (``make test-vllm``); these are skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.host.status import read_statuses
from tests.integrations.vllm.engines import ENVIRONMENT, Engine, spawn_engine
from tests.integrations.vllm.programs import Zygote
from tests.integrations.vllm.tiny_model import VOCABULARY, make_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``vllm`` where vLLM is not installed; allow them more time, because engines start slowly."""
    installed = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1200))
            if not installed:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


def prompt(number: int, length: int = 400) -> list[int]:
    """Return the tokens of a prompt that shares no prefix with the prompt of another number."""
    return [3 + (7 * number + 5 * index * index + index) % (VOCABULARY - 3) for index in range(length)]


SHORT = prompt(99, 10)
"""Prompt that fills no block. Engines in this mode step only while they have requests; steps apply store events."""


PREWARM: dict[str, Any] = {"type": "persistkv-prewarm", "share": 0.9}
"""Entry of ``secondary_tiers``, after the entries of ``tier``."""


def tier(url: str, **options: Any) -> dict[str, Any]:
    """Return an entry of ``secondary_tiers``."""
    return {"type": "persistkv", "url": url, **options}


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
        connector = {"spec_name": "PersistKVSpec", "cpu_bytes_to_use": 64 << 20, "secondary_tiers": list(tiers)}
        connector |= extra or {}
        settings = {"model": str(checkpoint), "connector": connector if tiers else None, "engine": options}
        environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), **(environment or {})}
        spawn = spawn_engine(zygote, settings, environment, command)
        engines.append(Engine(spawn, tmp_path / "engine.log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.release()


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
        return sum(len(list(backend.manifests(namespace.id))) for namespace in backend.namespaces())
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
        while (found := max((row.counters.loaded_blocks for row in read_statuses(backend)), default=0)) < count:
            assert time.monotonic() < deadline, f"{found} blocks are loaded, not {count}"
            time.sleep(0.2)
    finally:
        backend.close()


@pytest.fixture(scope="session")
def plain_engine(tmp_path_factory: pytest.TempPathFactory, model: Path, zygote: Zygote) -> Iterator[Engine]:
    """Engine without a connector."""
    place = tmp_path_factory.mktemp("plain")
    settings = {"model": str(model), "connector": None, "engine": {}}
    engine = Engine(spawn_engine(zygote, settings, {"XDG_CACHE_HOME": str(place)}), place / "engine.log")
    yield engine
    engine.close()
    engine.release()
