"""Adoption of another release's namespace in a bucket."""

from __future__ import annotations

import pytest

from persistkv.storage.identity.verdict import read_verdict
from tests.backends.s3.conftest import Opener
from tests.storage.identity.releases import BLOCKS, Release, compute, identity, prompt

PROMPTS = [prompt(number) for number in range(3)]


@pytest.mark.parametrize(
    "options", ["refresh=0s", "refresh=0s&key_env=PERSISTKV_TEST_KEY"]
)
def test_canary_matching_kv_adopts_namespace_for_all_handles(
    open_store: Opener,
    options: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
    contexts = [compute(tokens) for tokens in PROMPTS]
    backend = open_store(options).backend
    old = Release(backend, "0.31")
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        old.run(tokens, kv)
    old.end()
    new = Release(backend, "0.32")
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        assert not any(new.load(tokens))
        new.run(tokens, kv)
    assert new.load(PROMPTS[2]) == [True] * BLOCKS
    new.end()
    other = open_store(options).backend
    verdict = read_verdict(other, identity("0.32").digest, identity("0.31").digest)
    assert verdict is not None
    assert (verdict.verdict, verdict.depths) == ("adopted", (BLOCKS,))
    again = Release(other, "0.32")
    assert again.load(PROMPTS[2]) == [True] * BLOCKS
    again.end()
