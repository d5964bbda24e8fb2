"""Several engines on one bucket, each with its own LMDB store before the bucket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaForCausalLM

from persistkv import Engine
from tests.e2e.engine_process import PROMPT, Report, open_engine, page_digests

SCRIPT = Path(__file__).with_name("engine_process.py")
BLOCKS = len(PROMPT) // 16

pytestmark = pytest.mark.slow


@pytest.fixture
def other_weights(checkpoint: Path, tmp_path: Path) -> Path:
    """The same model with one different weight."""
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def near_url(tmp_path: Path, name: str) -> str:
    return f"lmdb://{tmp_path}/{name}?capacity=256MiB"


def compute_and_kill(checkpoint: Path, urls: list[str]) -> Report:
    """Run an engine in its own process until its context is durable in all stores, then kill it."""
    command = [sys.executable, str(SCRIPT), str(checkpoint), " ".join(urls), "cold"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
        try:
            assert process.stdout is not None
            report = msgspec.json.decode(process.stdout.readline(), type=Report)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
    return report


def restore(engine: Engine, expected: Report) -> int:
    """Check that answers and pages equal those of the other engine. Return the number of tokens
    loaded from a store."""
    result = engine.generate(PROMPT, 12)
    assert result.tokens == expected.tokens
    assert page_digests(engine, 0, result.block_hashes[:BLOCKS]) == expected.pages[0]
    assert engine.wait_persisted(result)
    return int(result.stats.persistent_tokens)


def test_engines_on_one_bucket_hit_and_other_weights_miss(
    checkpoint: Path,
    other_weights: Path,
    endpoint: str,
    bucket: str,
    tmp_path: Path,
) -> None:
    shared = f"s3://{bucket}/{uuid.uuid4().hex}?endpoint_url={endpoint}"
    stored = compute_and_kill(checkpoint, [near_url(tmp_path, "a"), shared])
    assert stored.durable
    with open_engine(checkpoint, [near_url(tmp_path, "b"), shared]) as engine:
        assert restore(engine, stored) == 688
    with open_engine(checkpoint, [near_url(tmp_path, "b")]) as engine:
        assert restore(engine, stored) == 688, (
            "blocks from the bucket were written through"
        )

    with open_engine(other_weights, []) as engine:
        right = engine.generate(PROMPT, 12).tokens
    with open_engine(other_weights, [near_url(tmp_path, "c"), shared]) as engine:
        result = engine.generate(PROMPT, 12)
        assert (result.stats.restored_tokens, result.tokens) == (0, right)
