"""Every call has a deadline, also those that open, clear and close a store whose medium hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from persistkv import StoreError
from persistkv_lmdb.files import WRITER_LOCK_FILE
from tests.integrations.sglang.conftest import (
    Open,
    fill,
    make_pool,
    page_keys,
)
from tests.integrations.sglang.host_pools import page_indices

if TYPE_CHECKING:
    from persistkv.integrations.sglang.backend import PersistKVStorage

MOST_S = 5.0
"""An upper bound of a call with a deadline. Without one, opening takes 30 s, and commits 10 s."""
KEYS = page_keys(range(4))


@contextmanager
def hung_store(path: Path) -> Iterator[None]:
    """Hold a store's lock for writing, as a stopped process does."""
    with (path / WRITER_LOCK_FILE).open("rb+") as file:
        flock(file, LOCK_EX)
        yield


@contextmanager
def deadline() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < MOST_S


@pytest.fixture
def store(tmp_path: Path, open_backend: Open) -> Path:
    """The directory of a store with four pages."""
    pool = make_pool()
    fill(pool, 1)
    backend = open_backend(pool)
    assert all(backend.batch_set_v1(KEYS, page_indices(0, 4)))
    backend.close()
    return tmp_path / "store"


def wait_until_open(backend: PersistKVStorage) -> None:
    end = time.monotonic() + 60
    while backend.batch_exists(KEYS) < len(KEYS):
        assert time.monotonic() < end, "the store does not open"
        time.sleep(0.05)


def test_constructor_returns_at_the_deadline_and_the_store_opens_later(
    open_backend: Open,
    store: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool()
    with hung_store(store):
        with deadline():
            backend = open_backend(pool, timeout_s=0.3)
            assert backend.batch_exists(KEYS) == 0
            assert backend.batch_set_v1(KEYS, page_indices(0, 4)) == [False] * 4
            assert backend.batch_get_v1(KEYS, page_indices(0, 4)) == [False] * 4
            with pytest.raises(StoreError, match="not open"):
                backend.clear()
        assert "does not open within 0.3 s" in caplog.text
    wait_until_open(backend)


def test_retried_opening_holds_no_call(
    open_backend: Open,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persistkv.integrations.sglang.opening.RETRY_S", 0.0)
    elsewhere = store.rename(store.with_name("elsewhere"))
    store.write_text("no directory")
    backend = open_backend(make_pool(), timeout_s=0.3)
    store.unlink()
    elsewhere.rename(store)
    with hung_store(store), deadline():
        # each call would begin an attempt
        for _ in range(3):
            assert backend.batch_exists(KEYS) == 0
            time.sleep(0.1)
    wait_until_open(backend)


def test_clear_raises_at_the_deadline(open_backend: Open, store: Path) -> None:
    backend = open_backend(make_pool(), timeout_s=0.1)
    wait_until_open(backend)
    with hung_store(store), deadline(), pytest.raises(StoreError, match="within"):
        backend.clear()


def test_store_that_opens_after_close_is_closed(
    open_backend: Open,
    store: Path,
) -> None:
    with hung_store(store), deadline():
        backend = open_backend(make_pool(), timeout_s=0.1)
        backend.close()
        assert backend.batch_exists(KEYS) == 0
    assert backend.batch_exists(KEYS) == 0
    # the store is not open in two places
    wait_until_open(open_backend(make_pool()))
