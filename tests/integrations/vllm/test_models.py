"""Real vLLM engines with models that keep something else than keys and values: states of layers, latent vectors."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from persistkv.storage import open_backend
from tests.integrations.vllm.conftest import prompt, tier, wait_stored
from tests.integrations.vllm.tiny_model import MLA, STATES, make_model_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(1, 700), prompt(2, 300)]
HYBRIDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    # vLLM's kernel for Mamba 2 on CPUs returns the state at the end of a step only, so each step ends with a block.
    "granitemoehybrid": ({"max_num_batched_tokens": 64}, [640, 256]),
    "lfm2": ({}, [672, 288]),
}
"""Options of the engine, and the tokens of each prompt that a warm engine reuses."""


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_restart_hybrid_model_reuses_states_and_answers_as_computed(start_engine, url, tmp_path, model_type):
    options, reused = HYBRIDS[model_type]
    place = make_model_of(tmp_path / "model", model_type, STATES[model_type])
    plain = start_engine(checkpoint=place, **options)
    right = [plain.generate(one) for one in PROMPTS]
    plain.close()
    filling = start_engine(tier(url), checkpoint=place, **options)
    assert [filling.generate(one) for one in PROMPTS] == right
    filling.close()
    wait_stored(url, 2)
    with contextlib.closing(open_backend(url, read_only=True)) as store:
        (namespace,) = store.namespaces()
        groups = [sorted(manifest.group_blocks) for manifest in store.manifests(namespace.id)]
    assert all(0 < states < attention for states, attention in groups), groups  # states of a few positions only
    warm = start_engine(tier(url), checkpoint=place, **options)
    again = [warm.generate(one) for one in PROMPTS]
    assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in right]
    assert [answer["cached"][0] for answer in again] == reused


def test_restart_model_with_latent_vectors_answers_as_from_the_cpu_tier(start_engine, url, tmp_path):
    place = make_model_of(tmp_path / "model", "deepseek_v2", MLA)
    filling = start_engine(tier(url), checkpoint=place, block_size=16)
    computed = [filling.generate(one) for one in PROMPTS]
    # vLLM's MLA for CPUs has no prefix cache: the second answer comes from the CPU tier. It is not that of the first
    # time, because vLLM's kernels for MLA on CPUs compute one token differently than many.
    expected = [filling.generate(one) for one in PROMPTS]
    filling.close()
    assert [answer["cached"] for answer in computed] == [[0], [0]]
    wait_stored(url, 2)
    warm = start_engine(tier(url), checkpoint=place, block_size=16)
    assert [warm.generate(one) for one in PROMPTS] == expected
    assert [answer["cached"] for answer in expected] == [[688], [288]]
