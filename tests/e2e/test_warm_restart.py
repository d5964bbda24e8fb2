"""Warm start of an engine after its predecessor was killed with SIGKILL."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.e2e import engine_process
from tests.e2e.engine_process import Report

Kill = Callable[..., Report]
Restart = Callable[..., Report]

SCRIPT = Path(__file__).with_name("engine_process.py")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?capacity=256MiB"


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let both engines compute with one thread, so that their sums have the same order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_and_kill(checkpoint: Path, url: str) -> Kill:
    """Return a function that runs an engine in a process, kills it when it has printed its report,
    and returns the report."""

    def run(mode: str, checkpoint: Path = checkpoint) -> Report:
        command = [sys.executable, str(SCRIPT), str(checkpoint), url, mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
        return msgspec.json.decode(line, type=Report)

    return run


@pytest.fixture
def restart(checkpoint: Path, url: str) -> Restart:
    """Return a function that runs the prompt in a new engine, and returns its report."""

    def run(checkpoint: Path = checkpoint) -> Report:
        with engine_process.open_engine(checkpoint, [url]) as engine:
            return engine_process.run(engine, "warm")

    return run


def test_engine_restart_after_sigkill_restores_identical_pages_and_answer(
    run_and_kill: Kill,
    restart: Restart,
) -> None:
    killed = run_and_kill("cold")
    assert killed.durable
    warm = restart()
    assert warm.restored == 688
    assert warm.tokens == killed.tokens
    assert warm.logits == killed.logits
    assert warm.pages == killed.pages


@pytest.mark.slow
def test_engine_restart_after_sigkill_hybrid_model_restores_window_pages(
    run_and_kill: Kill,
    restart: Restart,
    hybrid_checkpoint: Path,
) -> None:
    killed = run_and_kill("cold", hybrid_checkpoint)
    assert killed.durable
    warm = restart(hybrid_checkpoint)
    assert warm.restored == 688
    assert warm.tokens == killed.tokens
    assert warm.logits == killed.logits
    sliding, full = warm.pages
    assert (len(full), len(sliding)) == (43, 4)
    for restored, computed in zip(warm.pages, killed.pages, strict=True):
        assert restored.items() <= computed.items()


@pytest.mark.slow
def test_engine_killed_without_wait_persisted_leaves_usable_store(
    run_and_kill: Kill,
    restart: Restart,
) -> None:
    killed = run_and_kill("unwaited")
    for _ in range(2):
        warm = restart()
        assert warm.tokens == killed.tokens
    assert warm.restored == 688
