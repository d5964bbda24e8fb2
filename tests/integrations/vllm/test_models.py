"""Real vLLM engines with models whose cache holds layer states or latent vectors instead of keys
and values."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from persistkv.storage import open_backend
from tests.integrations.vllm.conftest import StartEngine, prompt, tier, wait_stored
from tests.integrations.vllm.tiny_model import MLA, STATES, make_model_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(1, 700), prompt(2, 300)]
HYBRIDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    # vLLM's kernel for Mamba 2 on CPUs returns the state only at the end of a step, so each step
    # must end with a block.
    "granitemoehybrid": ({"max_num_batched_tokens": 64}, [640, 256]),
    "lfm2": ({}, [672, 288]),
}
"""Options of the engine, and the tokens of each prompt that a warm engine reuses."""


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_engine_restart_hybrid_model_restores_layer_states_and_answer(
    start_engine: StartEngine,
    url: str,
    tmp_path: Path,
    model_type: str,
) -> None:
    options, reused = HYBRIDS[model_type]
    checkpoint = make_model_of(tmp_path / "model", model_type, STATES[model_type])
    plain = start_engine(checkpoint=checkpoint, **options)
    right = [plain.generate(one) for one in PROMPTS]
    plain.close()
    writer = start_engine(tier(url), checkpoint=checkpoint, **options)
    assert [writer.generate(one) for one in PROMPTS] == right
    writer.close()
    wait_stored(url, 2)
    with contextlib.closing(open_backend(url, read_only=True)) as store:
        (namespace,) = store.namespaces()
        groups = [
            sorted(manifest.group_blocks)
            for manifest in store.catalogue(namespace.id).manifests()
        ]
    # states of a few positions only
    assert all(0 < states < attention for states, attention in groups), groups
    warm = start_engine(tier(url), checkpoint=checkpoint, **options)
    again = [warm.generate(one) for one in PROMPTS]
    assert [answer["tokens"] for answer in again] == [
        answer["tokens"] for answer in right
    ]
    assert [answer["cached"][0] for answer in again] == reused


def test_engine_restart_mla_model_answers_as_from_cpu_tier(
    start_engine: StartEngine, url: str, tmp_path: Path
) -> None:
    checkpoint = make_model_of(tmp_path / "model", "deepseek_v2", MLA)
    writer = start_engine(tier(url), checkpoint=checkpoint, block_size=16)
    computed = [writer.generate(one) for one in PROMPTS]
    # vLLM's MLA for CPUs has no prefix cache: the second answer comes from the CPU tier. It differs
    # from the first answer, because vLLM's kernels for MLA on CPUs compute one token differently
    # from many tokens.
    expected = [writer.generate(one) for one in PROMPTS]
    writer.close()
    assert [answer["cached"] for answer in computed] == [[0], [0]]
    wait_stored(url, 2)
    warm = start_engine(tier(url), checkpoint=checkpoint, block_size=16)
    assert [warm.generate(one) for one in PROMPTS] == expected
    assert [answer["cached"] for answer in expected] == [[688], [288]]
