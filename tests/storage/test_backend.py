"""What ``Backend`` answers for a kind of store that lacks something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import StoreError
from persistkv.storage import BACKENDS, open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.testing import MemoryBlobs
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.samples import sample_pack

NAMESPACE = sample_identity().digest


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Backend]:
    backend = open_backend(f"lmdb://{tmp_path}/store?capacity=16MiB")
    backend.open_namespace(sample_identity())
    yield backend
    backend.close()


@pytest.fixture
def shared() -> Iterator[Backend]:
    backend = SharedBackend(MemoryBlobs().handle(), SharedOptions(cache=False))
    backend.open_namespace(sample_identity())
    yield backend
    backend.close()


def test_local_store_has_no_inbox_requests_and_breaker(local: Backend) -> None:
    local.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1)]))
    assert local.merge_state(NAMESPACE) is None
    assert local.requests == {}
    assert local.breaker_state is None


def test_shared_store_has_no_free_space_and_no_quarantine(shared: Backend) -> None:
    pack = sample_pack(NAMESPACE, 1)
    shared.commit(NAMESPACE, CommitBatch([pack]))
    shared.commit(NAMESPACE, CommitBatch(deletions=[pack.pack_id]))
    assert shared.free_space() is None
    assert shared.release_free() == 0
    assert shared.stats().quarantined == ()
    assert shared.delete_quarantined() == 0


def test_local_driver_has_no_plain_client_and_erases_no_directory(
    tmp_path: Path,
) -> None:
    url = StoreUrl.parse(f"lmdb://{tmp_path}/store")
    driver = BACKENDS.get(url.scheme)
    driver.open(url).close()
    assert driver.plain_medium(url) is None
    with pytest.raises(StoreError, match="is a directory: delete that"):
        driver.erase(url)
    driver.open(url, read_only=True).close()
