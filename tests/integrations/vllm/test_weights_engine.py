"""Weights that change while a real vLLM engine runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integrations.vllm.conftest import (
    SHORT,
    StartEngine,
    prompt,
    stored_contexts,
    tier,
    wait_stored,
)
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.tiny_model import make_model

pytestmark = pytest.mark.vllm

BEFORE, AFTER = prompt(1), prompt(2)
NOTICE = "weights changed while the engine runs"
FUNCTIONS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
# two more import vLLM: minutes on two busy cores, so slow
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers with the weights of the checkpoint."""
    answers: list[list[int]] = plain_engine.generate(BEFORE, AFTER)["tokens"]
    return answers


@pytest.mark.parametrize(
    ("how", "environment"),
    [
        pytest.param("function", FUNCTIONS, id="function"),
        pytest.param("memory", FUNCTIONS, id="memory"),
        pytest.param(
            "function",
            FUNCTIONS | PROCESSES,
            id="function-processes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_engine_changed_weights_detaches_and_keeps_store_clean(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
    how: str,
    environment: dict[str, str],
) -> None:
    plain = start_engine(environment=FUNCTIONS)
    plain.ask(do="change", how="function")
    changed = plain.generate(BEFORE, AFTER)["tokens"]
    plain.close()
    assert changed != expected
    engine = start_engine(tier(url), environment=environment)
    assert engine.generate(BEFORE) == {"tokens": expected[:1], "cached": [0]}
    engine.generate(SHORT)
    wait_stored(url, 1)
    assert engine.ask(do="reset")
    engine.ask(do="rest", seconds=0.2)
    # from the store
    assert engine.generate(BEFORE) == {"tokens": expected[:1], "cached": [384]}
    engine.generate(SHORT)
    engine.ask(do="change", how=how)
    assert engine.ask(do="reset")
    assert engine.generate(BEFORE, AFTER) == {"tokens": changed, "cached": [0, 0]}
    engine.generate(SHORT)
    engine.close()
    assert engine.log.count(NOTICE) == 1
    clean = start_engine(tier(url))
    assert clean.generate(BEFORE, AFTER) == {"tokens": expected, "cached": [384, 0]}
    assert clean.log.count(NOTICE) == 1  # the engines of a test share their log


def test_engine_reloaded_weights_detaches(
    start_engine: StartEngine, url: str, tmp_path: Path
) -> None:
    checkpoint = make_model(tmp_path / "changing")
    engine = start_engine(tier(url), checkpoint=checkpoint)
    engine.generate(BEFORE)
    engine.generate(SHORT)
    wait_stored(url, 1)
    make_model(checkpoint, seed=1)
    engine.ask(do="change", how="reload_weights")
    assert engine.ask(do="reset")
    plain = start_engine(checkpoint=checkpoint)
    right = plain.generate(BEFORE, AFTER)
    plain.close()
    assert engine.generate(BEFORE, AFTER) == right
    assert "(call of reload_weights)" in engine.log


def test_engine_unchanged_weights_after_function_and_reset_uses_store(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    engine = start_engine(tier(url), environment=FUNCTIONS)
    engine.generate(BEFORE)
    engine.generate(SHORT)
    wait_stored(url, 1)
    engine.ask(do="look")
    assert engine.ask(do="reset")
    assert engine.generate(BEFORE, AFTER) == {"tokens": expected, "cached": [384, 0]}
    engine.generate(SHORT)
    wait_stored(url, 2)
    assert NOTICE not in engine.log


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(FUNCTIONS, id="one-process"),
        pytest.param(FUNCTIONS | PROCESSES, id="processes", marks=pytest.mark.slow),
    ],
)
def test_engine_named_weights_continue_under_their_own_identity(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
    environment: dict[str, str],
) -> None:
    named = {"persistkv": {"weights": "step-1"}}
    engine = start_engine(tier(url), environment=environment)
    engine.generate(BEFORE)
    engine.generate(SHORT)
    wait_stored(url, 1)
    engine.ask(do="change", how="function")
    # vLLM's own caches are not reset
    engine.generate(SHORT, params={"persistkv": {"weights": "early"}})
    deadline = time.monotonic() + 120
    while stored_contexts(url) < 2:
        assert time.monotonic() < deadline, engine.log[-3000:]
        # chunks that were computed while the store opened are not offered again
        assert engine.ask(do="reset")
        right = engine.generate(BEFORE, params=named)["tokens"]
        engine.generate(SHORT, params=named)
    assert right != expected[:1]
    assert (
        "requests with the weights early neither use nor fill the store" in engine.log
    )
    assert engine.ask(do="reset")
    assert engine.generate(BEFORE, params=named) == {"tokens": right, "cached": [384]}
    assert engine.ask(do="reset")
    # a request without the name
    assert engine.generate(BEFORE) == {"tokens": right, "cached": [0]}
    engine.close()
    clean = start_engine(tier(url))
    assert clean.generate(BEFORE, AFTER) == {"tokens": expected, "cached": [384, 0]}
