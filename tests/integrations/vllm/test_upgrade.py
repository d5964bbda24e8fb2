"""Engines of two vLLM releases on one store: the newer one reuses chunks of the older one after a
comparison.

``VLLM_OLDER_PYTHON`` is the interpreter of a virtual environment with the older release.
"""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from persistkv.storage import open_backend
from persistkv.storage.identity.verdict import verdicts
from tests.integrations.vllm.conftest import (
    SHORT,
    StartEngine,
    prompt,
    tier,
    wait_stored,
)
from tests.integrations.vllm.engines import Engine

OLDER = os.environ.get("VLLM_OLDER_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not OLDER, reason="no older vLLM: VLLM_OLDER_PYTHON"),
]

PROMPTS = [prompt(number) for number in range(1, 21)]
CACHED = 384
"""Tokens of the whole chunks of a prompt."""


def test_engine_newer_release_adopts_chunks_of_older_release(
    start_engine: StartEngine,
    url: str,
    plain_engine: Engine,
) -> None:
    older = start_engine(tier(url), command=[OLDER])
    older.generate(*PROMPTS)
    older.generate(SHORT)
    older.close()
    wait_stored(url, len(PROMPTS))
    cold = plain_engine.generate(*PROMPTS)["tokens"]
    newer = start_engine(tier(url))
    for number in range(2):  # computed and compared
        assert newer.generate(PROMPTS[number]) == {
            "tokens": [cold[number]],
            "cached": [0],
        }
    newer.generate(SHORT)  # its steps end the earlier requests
    wait_stored(url, len(PROMPTS) + 2)
    assert newer.generate(*PROMPTS[2:]) == {
        "tokens": cold[2:],
        "cached": [CACHED] * (len(PROMPTS) - 2),
    }
    assert "adopted the blocks of namespace" in newer.log
    newer.close()
    restarted = start_engine(tier(url))
    assert restarted.generate(*PROMPTS) == {
        "tokens": cold,
        "cached": [CACHED] * len(PROMPTS),
    }
    with closing(open_backend(url, read_only=True)) as backend:
        (verdict,) = verdicts(backend, list(backend.namespaces())).values()
    assert (verdict.verdict, verdict.depths) == ("adopted", (CACHED // 32,))


def test_engine_adopt_never_misses_chunks_of_older_release(
    start_engine: StartEngine,
    url: str,
    plain_engine: Engine,
) -> None:
    older = start_engine(tier(url), command=[OLDER])
    older.generate(*PROMPTS[:3])
    older.close()
    wait_stored(url, 3)
    newer = start_engine(tier(url, adopt="never"))
    expected = {
        "tokens": plain_engine.generate(*PROMPTS[:3])["tokens"],
        "cached": [0, 0, 0],
    }
    assert newer.generate(*PROMPTS[:3]) == expected
