"""Engines with one worker and with two over one store."""

from __future__ import annotations

import pytest

from tests.integrations.vllm.conftest import (
    SHORT,
    StartEngine,
    prompt,
    tier,
    wait_stored,
)
from tests.integrations.vllm.engines import TWO_WORKERS, Engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(1), prompt(2)]


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers of an engine without a connector."""
    answers: list[list[int]] = plain_engine.generate(*PROMPTS)["tokens"]
    return answers


def test_engines_canonical_layout_hit_contexts_of_other_world_size(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    canonical = {"extra": {"canonical_layout": True}}
    one = start_engine(tier(url), **canonical)
    assert one.generate(PROMPTS[0]) == {"tokens": expected[:1], "cached": [0]}
    one.close()
    two = start_engine(tier(url), **canonical, **TWO_WORKERS)
    assert two.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 0]}
    two.generate(SHORT)
    wait_stored(url, 2)
    two.close()
    one = start_engine(tier(url), **canonical)
    assert one.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}


def test_engines_direct_layout_miss_contexts_of_other_world_size(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    one = start_engine(tier(url))
    one.generate(PROMPTS[0])
    one.close()
    two = start_engine(tier(url), **TWO_WORKERS)
    assert two.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    assert "canonical_layout" in two.log
