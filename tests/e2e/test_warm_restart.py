"""Warm start of an engine after its predecessor was killed with SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunEngine = Callable[..., dict[str, Any]]

SCRIPT = Path(__file__).with_name("engine_process.py")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?capacity=256MiB"


@pytest.fixture
def run_engine(checkpoint: Path, url: str, environment: dict[str, str]) -> RunEngine:
    """Run an engine until it has printed its report. Kill it in every mode other than ``warm``."""

    def run(mode: str, checkpoint: Path = checkpoint) -> dict[str, Any]:
        command = [sys.executable, str(SCRIPT), str(checkpoint), url, mode]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if mode != "warm":
                    process.send_signal(signal.SIGKILL)
                code = process.wait(timeout=60)
            finally:
                process.kill()
        assert code == (0 if mode == "warm" else -signal.SIGKILL)
        report: dict[str, Any] = json.loads(line)
        return report

    return run


def test_engine_restart_after_sigkill_restores_identical_pages_and_answer(
    run_engine: RunEngine,
) -> None:
    killed = run_engine("cold")
    assert killed["durable"]
    warm = run_engine("warm")
    assert warm["restored"] == 688
    for name in ("tokens", "logits", "pages"):
        assert warm[name] == killed[name], name


@pytest.mark.slow
def test_engine_restart_after_sigkill_hybrid_model_restores_window_pages(
    run_engine: RunEngine, hybrid_checkpoint: Path
) -> None:
    killed = run_engine("cold", hybrid_checkpoint)
    assert killed["durable"]
    warm = run_engine("warm", hybrid_checkpoint)
    assert warm["restored"] == 688
    for name in ("tokens", "logits"):
        assert warm[name] == killed[name], name
    sliding, full = warm["pages"]
    assert (len(full), len(sliding)) == (43, 4)
    for restored, computed in zip(warm["pages"], killed["pages"], strict=True):
        assert restored.items() <= computed.items()


@pytest.mark.slow
def test_engine_killed_without_wait_persisted_leaves_usable_store(
    run_engine: RunEngine,
) -> None:
    killed = run_engine("unwaited")
    for _ in range(2):
        warm = run_engine("warm")
        assert warm["tokens"] == killed["tokens"]
    assert warm["restored"] == 688
