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
    "no reference": "del engine, engines",
}
HOSTS = ("process", "thread")

SCRIPT = """
import os, sys, torch
from persistkv import Engine
path, store, *prompt = sys.argv[1:]
torch.set_num_threads(1)
engines = []
for host in ("process", "thread"):
    engines.append(Engine.open(path, f"{store}/{host}", cpu_bytes="8MiB", host=host))
for engine in engines:
    engine.generate([int(token) for token in prompt], 40)
"""
FORKED = """
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
for engine in engines:
    engine.generate([int(token) ^ 1 for token in prompt], 40)
"""


@pytest.fixture(scope="module")
def checkpoint(
    model: LlamaForCausalLM,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    return path


def run_script(
    end: str,
    checkpoint: Path,
    prompt: list[int],
    directory: Path,
) -> subprocess.CompletedProcess[str]:
    """Run ``SCRIPT`` and the lines ``end`` in a new process."""
    command = [sys.executable, "-c", SCRIPT + end, str(checkpoint), str(directory)]
    words = map(str, prompt)
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "end",
    [
        "end of script",
        pytest.param("exit", marks=pytest.mark.slow),
        pytest.param("exception", marks=pytest.mark.slow),
        pytest.param("no reference", marks=pytest.mark.slow),
    ],
)
def test_script_without_close_keeps_its_context(
    checkpoint: Path,
    prompt: list[int],
    tmp_path: Path,
    end: str,
) -> None:
    done = run_script(ENDS[end], checkpoint, prompt, tmp_path)
    assert done.returncode == {"exit": 3, "exception": 1}.get(end, 0), done.stderr
    for host in HOSTS:
        with persistkv.open_store(tmp_path / host) as store:
            (request,) = store.requests().requests
        assert request.tokens == len(prompt) + 39


@pytest.mark.slow
def test_forked_child_that_exits_leaves_engine_open(
    checkpoint: Path,
    prompt: list[int],
    tmp_path: Path,
) -> None:
    done = run_script(FORKED, checkpoint, prompt, tmp_path)
    assert done.returncode == 0, done.stderr
    for host in HOSTS:
        with persistkv.open_store(tmp_path / host) as store:
            assert len(store.requests().requests) == 2
