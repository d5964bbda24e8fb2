"""Real vLLM engines with a model of two KV cache groups: full attention and a sliding window."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from tests.integrations.vllm.conftest import StartEngine, prompt, tier, wait_stored
from tests.integrations.vllm.tiny_model import make_hybrid_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(1, 700), prompt(2, 300)]


def test_engine_restart_sliding_window_model_starts_warm(
    start_engine: StartEngine, url: str, tmp_path: Path
) -> None:
    checkpoint = make_hybrid_model(tmp_path / "hybrid")
    plain = start_engine(checkpoint=checkpoint)
    right = plain.generate(*PROMPTS)
    plain.close()
    writer = start_engine(tier(url), checkpoint=checkpoint)
    assert writer.generate(*PROMPTS) == right
    writer.close()
    wait_stored(url, 2)
    with contextlib.closing(open_backend(url, read_only=True)) as store:
        (namespace,) = store.namespaces()
        assert all(
            len(manifest.group_blocks) == 2
            for manifest in store.catalogue(namespace.id).manifests()
        )
    warm = start_engine(tier(url), checkpoint=checkpoint)
    again = warm.generate(*PROMPTS)
    assert again["tokens"] == right["tokens"]
    assert again["cached"] == [672, 288]
