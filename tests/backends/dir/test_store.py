"""The store in a directory against the conformance suite and the rules of the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from persistkv.testing.conformance import BackendConformance
from persistkv_dir import DirBackend, DirBlobs
from tests.backends.catalogue_rules import CatalogueRules
from tests.backends.eviction_rules import EvictionRules
from tests.backends.raw_shared import RawShared


class TestDirBackend(BackendConformance, CatalogueRules, EvictionRules):
    driver = DirBackend
    ends_namespaces = False

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/store?refresh=0s&cache={tmp_path}/cache"

    @pytest.fixture
    def raw(self, tmp_path: Path, backend: DirBackend) -> RawShared:
        return RawShared(DirBlobs(tmp_path / "store"), backend)


class TestDirBackendWithKey(BackendConformance):
    """The conformance suite for a store with a key. The rules of the catalogue know packs by ids
    that follow from their keys, and those of a store with a key are random.
    """

    driver = DirBackend
    ends_namespaces = False

    @pytest.fixture
    def url(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
        options = f"refresh=0s&cache={tmp_path}/cache&key_env=PERSISTKV_TEST_KEY"
        return f"file://{tmp_path}/store?{options}"

    @pytest.fixture
    def raw(self, tmp_path: Path, backend: DirBackend) -> RawShared:
        return RawShared(DirBlobs(tmp_path / "store"), backend)
