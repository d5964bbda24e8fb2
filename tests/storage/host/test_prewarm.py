from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage import open_backend
from persistkv.storage.host.prewarm import (
    acknowledge_warm,
    pending_warm,
    request_warm,
    warm_answers,
    withdraw_warm,
)
from persistkv.storage.host.status import read_statuses
from persistkv.testing.memory import MemoryBackend
from persistkv_lmdb import LmdbBackend
from tests.storage.statuses import make_status

SPACE, OTHER = bytes(range(16)), bytes(16)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?capacity=16MiB"


@pytest.fixture
def backend(url: str) -> Iterator[LmdbBackend]:
    with closing(LmdbBackend.open(StoreUrl.parse(url))) as backend:
        yield backend


def test_request_warm_is_pending_until_each_engine_acknowledges(
    backend: LmdbBackend, url: str
) -> None:
    first, second = (
        request_warm(backend, SPACE, "r1"),
        request_warm(backend, SPACE, "r2"),
    )
    request_warm(backend, OTHER, "r1")
    with closing(open_backend(url, read_only=True)) as reader:
        assert pending_warm(reader, SPACE, "e1") == [first, second]
    acknowledge_warm(backend, first, "e1", blocks=7, missing=1)
    assert pending_warm(backend, SPACE, "e1") == [second]
    assert pending_warm(backend, SPACE, "e2") == [first, second]
    acknowledge_warm(backend, first, "e2", blocks=0, missing=8)
    answers = {
        answer.engine: (answer.blocks, answer.missing)
        for answer in warm_answers(backend, first)
    }
    assert answers == {"e1": (7, 1), "e2": (0, 8)}
    assert warm_answers(backend, second) == []


def test_request_warm_repeated_is_pending_again(backend: LmdbBackend) -> None:
    first = request_warm(backend, SPACE, "r1")
    acknowledge_warm(backend, first, "e1", blocks=1, missing=0)
    again = request_warm(backend, SPACE, "r1")
    assert again.asked != first.asked
    assert pending_warm(backend, SPACE, "e1") == [again]
    assert warm_answers(backend, again) == []


def test_request_warm_expired_is_not_pending_and_is_deleted(
    backend: LmdbBackend,
) -> None:
    request_warm(backend, SPACE, "r1", ttl_s=-1.0)
    assert pending_warm(backend, SPACE, "e1") == []
    assert len(backend.statuses()) == 1
    request_warm(backend, SPACE, "r2")
    assert len(backend.statuses()) == 1


def test_withdraw_warm_deletes_request_and_answers(backend: LmdbBackend) -> None:
    acknowledge_warm(
        backend, request_warm(backend, SPACE, "r1"), "e1", blocks=1, missing=0
    )
    for _ in range(2):
        withdraw_warm(backend, SPACE, "r1")
    assert backend.statuses() == {}


def test_pending_warm_skips_foreign_and_unreadable_rows(backend: LmdbBackend) -> None:
    backend.publish_status("e1", make_status("e1", time=time.time()).encode())
    backend.publish_status("ask00", b"no row")
    asked = request_warm(backend, SPACE, "r1")
    backend.publish_status("warmed00bye1", b'{"engine": 1}')
    assert pending_warm(backend, SPACE, "e1") == [asked]
    assert [status.engine for status in read_statuses(backend)] == ["e1"]


def test_request_warm_unshared_or_read_only_store_raises(
    backend: LmdbBackend, url: str
) -> None:
    with closing(MemoryBackend()) as unshared, pytest.raises(StoreUnavailableError):
        request_warm(unshared, SPACE, "r1")
    with (
        closing(open_backend(url, read_only=True)) as reader,
        pytest.raises(StoreError),
    ):
        request_warm(reader, SPACE, "r1")
