"""The memory backend against the conformance suite."""

import subprocess
import sys
from dataclasses import replace

import pytest

from persistkv.storage.backend import Backend
from persistkv.storage.registry import open_backend
from persistkv.testing.conformance import BackendConformance, RawKind, RawStore
from persistkv.testing.memory import MemoryBackend
from persistkv.testing.memory_commit import StoredManifest, StoredPack


class RawMemory(RawStore):
    def __init__(self, backend: MemoryBackend) -> None:
        self.spaces = backend.spaces

    def get(self, kind: RawKind, namespace: bytes, name: bytes) -> bytes:
        space = self.spaces[namespace]
        if kind in (RawKind.PAYLOAD, RawKind.TABLE):
            pack = space.packs[name]
            return bytes(pack.payload if kind is RawKind.PAYLOAD else pack.table)
        manifest = space.manifests[name.decode()]
        return manifest.head if kind is RawKind.MANIFEST else manifest.keys

    def put(self, kind: RawKind, namespace: bytes, name: bytes, data: bytes) -> None:
        space = self.spaces[namespace]
        packs, manifests = dict(space.packs), dict(space.manifests)
        if kind is RawKind.PAYLOAD:
            packs[name] = StoredPack(packs[name].table, bytearray(data))
        elif kind is RawKind.TABLE:
            packs[name] = StoredPack(data, packs[name].payload)
        elif kind is RawKind.MANIFEST:
            manifests[name.decode()] = StoredManifest(data, manifests[name.decode()].keys)
        else:
            manifests[name.decode()] = StoredManifest(manifests[name.decode()].head, data)
        self.spaces[namespace] = replace(space, packs=packs, manifests=manifests)


class TestMemoryBackend(BackendConformance):
    driver = MemoryBackend
    changes_kept = MemoryBackend.changes_kept

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
    def raw(self, backend: Backend) -> RawMemory:
        assert isinstance(backend, MemoryBackend)
        return RawMemory(backend)


def test_each_open_is_a_store_of_its_own() -> None:
    first, second = open_backend("memory://one"), open_backend("memory://one")
    assert isinstance(first, MemoryBackend)
    assert isinstance(second, MemoryBackend)
    assert first.spaces is not second.spaces


def test_package_needs_neither_torch_nor_pytest() -> None:
    code = "import sys, persistkv.testing; print([name for name in ('torch', 'pytest') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
