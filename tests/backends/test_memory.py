"""The memory backend against the conformance suite and the rules of the catalogue."""

import hashlib
import subprocess
import sys

import pytest

from persistkv.storage.catalog import LOG_ENTRIES
from persistkv.testing.conformance import BackendConformance, RawKind, RawStore
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.memory import MemoryBackend
from tests.backends.catalogue_rules import CatalogueRules
from tests.backends.eviction_rules import EvictionRules

TABLE_OF = {
    RawKind.PAYLOAD: "pieces",
    RawKind.TABLE: "packs",
    RawKind.MANIFEST: "manifests",
    RawKind.MANIFEST_KEYS: "manifest_keys",
}


class RawMemory(RawStore):
    def __init__(self, backend: MemoryBackend) -> None:
        self.backend = backend

    def get(self, kind: RawKind, namespace: bytes, name: bytes) -> bytes:
        return b"".join(value for _, value in self._held(kind, namespace, name))

    def put(self, kind: RawKind, namespace: bytes, name: bytes, data: bytes) -> None:
        held = self._held(kind, namespace, name)
        with self.backend.rows(write=True) as rows:
            for key, value in held:
                rows.put(TABLE_OF[kind], key, data[: len(value)])
                data = data[len(value) :]

    def _held(self, kind: RawKind, namespace: bytes, name: bytes) -> list[tuple[bytes, bytes]]:
        if kind in (RawKind.MANIFEST, RawKind.MANIFEST_KEYS):
            name = hashlib.blake2b(name, digest_size=16).digest()
        with self.backend.rows() as rows:
            return [(bytes(key), bytes(value)) for key, value in rows.starting_with(TABLE_OF[kind], namespace + name)]


class TestMemoryBackend(BackendConformance, CatalogueRules, EvictionRules):
    driver = MemoryBackend
    changes_kept = LOG_ENTRIES

    @pytest.fixture
    def url(self) -> str:
        return "memory://test?capacity=256MiB"

    @pytest.fixture
    def small_url(self) -> str:
        return "memory://small?capacity=4MiB"

    @pytest.fixture
    def ttl_url(self) -> str:
        return "memory://aging?ttl=1h"

    @pytest.fixture
    def raw(self, backend: MemoryBackend) -> RawMemory:
        return RawMemory(backend)


def test_memory_backend_each_instance_is_separate_store() -> None:
    first, second = MemoryBackend(), MemoryBackend()
    first.open_namespace(sample_identity())
    assert not list(second.namespaces())


def test_import_testing_package_loads_neither_torch_nor_pytest() -> None:
    code = "import sys, persistkv.testing; print([name for name in ('torch', 'pytest') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
