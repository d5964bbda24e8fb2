"""The driver in examples/ against the rules of the catalogue; its own tests run the conformance suite."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from persistkv.storage.catalog import LOG_ENTRIES
from persistkv_sqlite import SqliteBackend
from tests.backends.catalogue_rules import CatalogueRules
from tests.backends.eviction_rules import EvictionRules


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory: hundreds of synced commits to a disk would take long."""
    with tempfile.TemporaryDirectory(prefix="persistkv-sqlite-", dir="/dev/shm") as name:
        yield Path(name)


class TestSqliteExample(CatalogueRules, EvictionRules):
    driver = SqliteBackend
    changes_kept = LOG_ENTRIES

    @pytest.fixture
    def url(self, directory: Path) -> str:
        return f"sqlite://{directory}/kv.db?capacity=256MiB"

    @pytest.fixture
    def small_url(self, directory: Path) -> str:
        return f"sqlite://{directory}/small.db?capacity=4MiB"

    @pytest.fixture
    def ttl_url(self, directory: Path) -> str:
        return f"sqlite://{directory}/aging.db?ttl=1h"
