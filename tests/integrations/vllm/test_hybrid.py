"""Real vLLM engines with a model of two KV cache groups: full attention and a sliding window."""

from __future__ import annotations

import contextlib

import pytest

from persistkv.storage import open_backend
from tests.integrations.vllm.conftest import prompt, tier, wait_stored
from tests.integrations.vllm.tiny_model import make_hybrid_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(1, 700), prompt(2, 300)]


def test_a_model_with_a_sliding_window_starts_warm(start_engine, url, tmp_path):
    place = make_hybrid_model(tmp_path / "hybrid")
    plain = start_engine(checkpoint=place)
    right = plain.generate(*PROMPTS)
    plain.close()
    filling = start_engine(tier(url), checkpoint=place)
    assert filling.generate(*PROMPTS) == right
    filling.close()
    wait_stored(url, 2)
    with contextlib.closing(open_backend(url, read_only=True)) as store:
        (namespace,) = store.namespaces()
        assert all(len(manifest.group_blocks) == 2 for manifest in store.manifests(namespace.id))
    warm = start_engine(tier(url), checkpoint=place)
    again = warm.generate(*PROMPTS)
    assert again["tokens"] == right["tokens"]
    assert again["cached"] == [672, 288]
