"""Scripts that end without ``close``: their contexts are stored all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import persistkv

ENDS = {
    "end of script": "",
    "exit": "sys.exit(3)",
    "exception": "raise ValueError('end of the script')",
    "local engine": "del engine",
}

SCRIPT = """
import os, sys, torch
from persistkv import Engine
path, store, host, *prompt = sys.argv[1:]
torch.set_num_threads(1)
engine = Engine.open(path, store, cpu_bytes="8MiB", host=host)
engine.generate([int(token) for token in prompt], 40)
"""


@pytest.fixture(scope="module")
def checkpoint(
    model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("host", "end"),
    [
        ("process", "end of script"),
        ("thread", "exception"),
        pytest.param("process", "exit", marks=pytest.mark.slow),
        pytest.param("process", "exception", marks=pytest.mark.slow),
        pytest.param("process", "local engine", marks=pytest.mark.slow),
        pytest.param("thread", "end of script", marks=pytest.mark.slow),
    ],
)
def test_script_without_close_keeps_its_context(
    checkpoint: Path, prompt: list[int], tmp_path: Path, host: str, end: str
) -> None:
    script = SCRIPT + ENDS[end]
    command = [
        sys.executable,
        "-c",
        script,
        str(checkpoint),
        str(tmp_path / "kv"),
        host,
        *map(str, prompt),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == {"exit": 3, "exception": 1}.get(end, 0), (
        finished.stderr
    )
    with persistkv.open_store(tmp_path / "kv") as store:
        (request,) = store.requests().requests
    assert request.tokens == len(prompt) + 39


FORKED = (
    SCRIPT
    + """
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
engine.generate([int(token) ^ 1 for token in prompt], 40)
"""
)


@pytest.mark.slow
def test_forked_child_that_exits_leaves_engine_open(
    checkpoint: Path, prompt: list[int], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-c",
        FORKED,
        str(checkpoint),
        str(tmp_path / "kv"),
        "process",
        *map(str, prompt),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    with persistkv.open_store(tmp_path / "kv") as store:
        assert len(store.requests().requests) == 2
