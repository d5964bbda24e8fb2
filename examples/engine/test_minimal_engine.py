from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import minimal_engine
from minimal_engine import BLOCK_TOKENS, MinimalEngine, block_keys

PROMPT = list(range(500))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/kv?capacity=1GiB"


def test_answer_new_process_restores_full_blocks_with_stored_bytes(url: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("minimal_engine.py")), url],
        capture_output=True,
    )
    assert done.stdout.split()[0] == b"0"
    engine = MinimalEngine(url)
    try:
        assert (
            engine.answer("second", PROMPT)
            == len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
        )
        blocks = range(-(-len(PROMPT) // BLOCK_TOKENS))
        for position, token in enumerate(PROMPT):
            kv = engine.token_kv(blocks, position)
            assert torch.equal(kv, torch.full_like(kv, token * 1000 + position))
    finally:
        engine.close()


def test_step_reports_durable_blocks(url: str) -> None:
    engine = MinimalEngine(url)
    try:
        engine.answer("first", PROMPT)
        deadline = time.monotonic() + 60
        while engine.durable != set(block_keys(PROMPT)) and time.monotonic() < deadline:
            engine.step()
            time.sleep(0.01)
        assert engine.durable == set(block_keys(PROMPT))
    finally:
        engine.close()


def test_answer_other_prompt_restores_common_prefix_only(url: str) -> None:
    engine = MinimalEngine(url)
    try:
        engine.answer("first", PROMPT)
        assert (
            engine.answer("second", [*PROMPT[:100], *range(1000, 1200)])
            == 100 // BLOCK_TOKENS * BLOCK_TOKENS
        )
    finally:
        engine.close()


def test_main_unknown_scheme_lists_valid_schemes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["minimal_engine.py", "tape:///dev/st0"])
    with pytest.raises(SystemExit, match="'tape' is not valid; expected one of"):
        minimal_engine.main()
