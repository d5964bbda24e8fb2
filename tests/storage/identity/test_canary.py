"""Adoption of another release's namespace: required evidence, and the blocks that are served
afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, Changes, CommitBatch
from persistkv.storage.identity.verdict import Verdict, read_verdict
from persistkv.storage.records import StoreReport
from persistkv.testing.memory import MemoryBackend
from tests.storage.identity.releases import (
    BLOCKS,
    KV,
    Release,
    compute,
    identity,
    keys_of,
    prompt,
)

OLD, NEW = "0.31", "0.32"
PROMPTS = [prompt(number) for number in range(4)]


@pytest.fixture(scope="module")
def contexts() -> list[KV]:
    """KV of the prompts."""
    return [compute(tokens) for tokens in PROMPTS]


@pytest.fixture(params=["memory", "lmdb"])
def backend(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    contexts: list[KV],
) -> Iterator[Backend]:
    """Store that holds the contexts of the old release, on each driver."""
    is_lmdb = request.param == "lmdb"
    backend = (
        open_backend(f"lmdb://{tmp_path}/store?capacity=64MiB")
        if is_lmdb
        else MemoryBackend()
    )
    old = Release(backend, OLD)
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        old.run(tokens, kv)
    old.end()
    yield backend
    backend.close()


def verdict_of(backend: Backend) -> Verdict | None:
    return read_verdict(backend, identity(NEW).digest, identity(OLD).digest)


def kind_of(backend: Backend) -> str | None:
    verdict = verdict_of(backend)
    return None if verdict is None else verdict.verdict


def depths_of(backend: Backend) -> tuple[int, ...]:
    verdict = verdict_of(backend)
    return () if verdict is None else verdict.depths


def test_canary_equal_blocks_of_two_requests_adopt_namespace(
    backend: Backend,
    contexts: list[KV],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "persistkv")
    new = Release(backend, NEW)
    assert new.load(PROMPTS[2]) == [False] * BLOCKS
    new.run(PROMPTS[0], contexts[0])
    assert new.load(PROMPTS[2]) == [False] * BLOCKS
    new.run(PROMPTS[1], contexts[1])
    assert new.load(PROMPTS[2]) == [True] * BLOCKS
    verdict = verdict_of(backend)
    assert verdict is not None
    assert (verdict.verdict, verdict.depths, verdict.error) == (
        "adopted",
        (BLOCKS,),
        0.0,
    )
    assert any(
        "adopted the blocks of namespace" in record.message for record in caplog.records
    )


def test_canary_recorded_adoption_serves_next_start_immediately(
    backend: Backend,
    contexts: list[KV],
) -> None:
    first = Release(backend, NEW)
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        first.run(tokens, kv)
    first.end()
    second = Release(backend, NEW)
    assert second.load(PROMPTS[3]) == [True] * BLOCKS
    assert second.compares


def test_canary_adopted_blocks_equal_bytes_of_old_release(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        new.run(tokens, kv)
    new.load(PROMPTS[2])
    with closing(MemoryBackend()) as store:
        other = Release(store, OLD)
        other.run(PROMPTS[2], contexts[2])
        other.load(PROMPTS[2])
    assert np.array_equal(new.rows.array[:BLOCKS], other.rows.array[:BLOCKS])


def test_canary_different_block_refuses_for_all_later_starts(
    backend: Backend,
    contexts: list[KV],
    caplog: pytest.LogCaptureFixture,
) -> None:
    changed = contexts[0].copy()
    changed[2, 1, 0] *= 1.5
    new = Release(backend, NEW)
    new.run(PROMPTS[0], changed)
    assert kind_of(backend) == "refused"
    assert "are not used" in caplog.text
    for tokens, kv in zip(PROMPTS[1:], contexts[1:], strict=True):
        new.run(tokens, kv)
    new.end()
    assert kind_of(backend) == "refused"
    assert not Release(backend, NEW).compares


def test_canary_one_request_is_undecided_and_stores_its_blocks(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    new.run(PROMPTS[0], contexts[0])
    assert verdict_of(backend) is None
    assert new.load(PROMPTS[0]) == [True] * BLOCKS
    assert new.store.counters.stored_blocks == BLOCKS


def test_canary_option_adopt_never_disables_comparison(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW, adopt="never")
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        new.run(tokens, kv)
    assert verdict_of(backend) is None
    assert not new.compares


def test_canary_namespace_with_other_weights_is_no_candidate(backend: Backend) -> None:
    assert Release(backend, NEW).compares
    assert not Release(backend, NEW, fields={"weights": "others"}).compares


def test_canary_undescribed_rows_are_never_compared(backend: Backend) -> None:
    assert not Release(backend, NEW, described=False).compares


def test_canary_request_with_held_first_block_is_no_evidence(
    backend: Backend,
    contexts: list[KV],
) -> None:
    """The request may have loaded its first block instead of computing it."""
    new = Release(backend, NEW)
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        new.run(tokens[:16], kv[:, :, :, :16])  # 64 tokens in all are too few
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        new.run(tokens, kv)
    assert verdict_of(backend) is None


def test_canary_request_without_first_blocks_is_no_evidence(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        new.run(tokens, kv, first=2)
    assert verdict_of(backend) is None


def test_canary_request_loaded_by_another_tier_is_no_evidence(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        new.canary.loaded_elsewhere(keys_of(tokens)[:1])
        new.run(tokens, kv)
    assert verdict_of(backend) is None


def test_canary_unknown_loads_of_other_tiers_end_comparison(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    new.canary.loaded_elsewhere([])
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        new.run(tokens, kv)
    assert verdict_of(backend) is None


def test_canary_short_requests_adopt_only_their_depths_until_longer_agree(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    short = 64  # tokens: 4 blocks
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        new.run(tokens[:short], kv[:, :, :, :short])
    assert depths_of(backend) == (4,)
    assert new.load(PROMPTS[2]) == [True] * 4 + [False] * 4
    new.run(PROMPTS[2], contexts[2])  # computed from the loaded blocks on
    assert depths_of(backend) == (BLOCKS,)
    assert new.load(PROMPTS[3]) == [True] * BLOCKS


def test_canary_difference_beyond_adopted_depths_keeps_adoption(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        new.run(tokens[:64], kv[:, :, :, :64])
    changed = contexts[2].copy()
    changed[:, 0, :, 64:] *= -1
    new.run(PROMPTS[2], changed)
    new.run(PROMPTS[3], contexts[3])
    verdict = verdict_of(backend)
    assert verdict is not None
    assert (verdict.verdict, verdict.depths, verdict.final) == ("adopted", (4,), True)


def test_canary_used_adopted_blocks_are_stored_in_own_namespace(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        new.run(tokens, kv)
    before = new.store.counters.stored_blocks
    new.load(PROMPTS[2])
    new.run(PROMPTS[2], contexts[2])
    assert new.store.counters.stored_blocks == before + BLOCKS
    assert len(list(backend.catalogue(identity(NEW).digest).manifests())) == 3


def test_canary_deleted_blocks_of_old_release_miss(
    backend: Backend,
    contexts: list[KV],
) -> None:
    new = Release(backend, NEW)
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        new.run(tokens, kv)
    old = identity(OLD).digest
    packs = [table.pack_id for table in backend.changes(old, None).added]
    backend.commit(old, CommitBatch(deletions=packs))
    new.store.refresh()
    assert new.load(PROMPTS[3]) == [False] * BLOCKS
    assert new.load(PROMPTS[0]) == [True] * BLOCKS


def test_canary_own_index_is_reloaded_candidate_is_read_again_once(
    backend: Backend,
    contexts: list[KV],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = Release(backend, NEW)
    new.run(PROMPTS[0], contexts[0])
    assert verdict_of(backend) is None  # it is compared
    new.store.view.cursor = None  # as after a lack of memory
    new.store.refresh()

    whole_reads: list[bytes] = []
    changes = backend.changes

    def counted(namespace: bytes, since: bytes | None) -> Changes:
        if since is None:
            whole_reads.append(namespace)
        return changes(namespace, since)

    monkeypatch.setattr(backend, "changes", counted)
    new.store.refresh()
    assert whole_reads == []


@pytest.mark.parametrize("log", ["complete", "truncated"])
def test_canary_adopted_packs_that_are_deleted_make_report_incomplete(
    backend: Backend,
    contexts: list[KV],
    monkeypatch: pytest.MonkeyPatch,
    log: str,
) -> None:
    """Consumers of events must learn that adopted keys may be gone, also if the log of the other
    namespace no longer has the deletion."""
    new = Release(backend, NEW, events=True)
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        new.run(tokens, kv)
    new.store.refresh()
    view = new.store.view
    assert set(keys_of(PROMPTS[3])) <= set(view.report.stored)
    view.report = StoreReport()
    old = identity(OLD).digest
    packs = [table.pack_id for table in backend.changes(old, None).added]
    backend.commit(old, CommitBatch(deletions=packs))
    changes = backend.changes
    if log == "truncated":
        monkeypatch.setattr(backend, "changes", lambda name, _: changes(name, None))

    new.store.refresh()

    assert not any(new.load(PROMPTS[3]))
    assert view.report.lost
