"""Real vLLM engines on a bucket, and on a disk tier before a bucket."""

from __future__ import annotations

import pytest

from tests.integrations.vllm.conftest import (
    SHORT,
    StartEngine,
    prompt,
    tier,
    wait_stored,
)
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.programs import Program

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(1), prompt(2)]


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers of an engine without a connector."""
    answers: list[list[int]] = plain_engine.generate(*PROMPTS)["tokens"]
    return answers


def test_engine_start_on_filled_bucket_hits_and_fills_own_disk(
    start_engine: StartEngine,
    bucket_url: str,
    url: str,
    expected: list[list[int]],
) -> None:
    first = start_engine(tier(bucket_url))
    assert first.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    first.generate(SHORT)
    wait_stored(bucket_url, 2)
    first.kill()
    second = start_engine(tier(url), tier(bucket_url))
    assert second.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}
    second.close()
    wait_stored(url, 2)


@pytest.mark.slow
def test_engine_bucket_lost_while_serving_answers_and_stores_on_disk(
    start_engine: StartEngine,
    bucket_url: str,
    s3_server: Program,
    url: str,
    plain_engine: Engine,
    expected: list[list[int]],
) -> None:
    first = start_engine(tier(url), tier(bucket_url, deadline="2s"))
    assert first.generate(PROMPTS[0])["cached"] == [0]
    first.generate(SHORT)
    wait_stored(bucket_url, 1)
    s3_server.kill()
    prompts = [prompt(number, 1500) for number in range(20, 32)]
    right = plain_engine.generate(*prompts)["tokens"]
    assert first.generate(*prompts)["tokens"] == right
    assert first.generate(PROMPTS[1])["tokens"] == expected[1:]
    first.kill()
    wait_stored(url, 2)
    second = start_engine(tier(url))
    assert second.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}
