"""The driver in examples/ against the rules of stores; its own tests are those of media."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from persistkv.testing.conformance import BackendConformance
from persistkv_sqlite import SqliteBackend, SqliteBlobs
from tests.backends.catalogue_rules import CatalogueRules
from tests.backends.eviction_rules import EvictionRules
from tests.backends.raw_shared import RawShared


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory: hundreds of synced commits to a disk would take long."""
    with tempfile.TemporaryDirectory(
        prefix="persistkv-sqlite-", dir="/dev/shm"
    ) as name:
        yield Path(name)


class TestSqliteExample(BackendConformance, CatalogueRules, EvictionRules):
    driver = SqliteBackend
    ends_namespaces = False

    @pytest.fixture
    def url(self, directory: Path) -> str:
        return f"sqlite://{directory}/kv.db?refresh=0s&cache={directory}/cache"

    @pytest.fixture
    def raw(self, directory: Path, backend: SqliteBackend) -> RawShared:
        return RawShared(SqliteBlobs(directory / "kv.db"), backend)
