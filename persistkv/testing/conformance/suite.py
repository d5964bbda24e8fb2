"""What the parts of the suite share: fixtures, and the medium without the driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from typing import ClassVar

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.backend import ReadSpan
from persistkv.storage.extensions import BackendStats, InspectableBackend
from persistkv.storage.identity import Identity
from persistkv.storage.pack import PackTable


class RawKind(Enum):
    """What a store keeps."""

    PAYLOAD = "payload"
    """Name: a pack id; the frames with their padding."""
    TABLE = "table"
    """Name: a pack id; the catalogue's row, whatever the driver puts around the table."""
    MANIFEST = "manifest"
    """Name: a manifest's id, UTF-8; its head."""
    MANIFEST_KEYS = "manifest keys"
    """Name: a manifest's id, UTF-8; its keys."""


class RawStore(ABC):
    """The medium through its own client. It works while the store is open."""

    @abstractmethod
    def get(self, kind: RawKind, namespace: bytes, name: bytes) -> bytes:
        """What lies there."""

    @abstractmethod
    def put(self, kind: RawKind, namespace: bytes, name: bytes, data: bytes) -> None:
        """Put something of the same length in its place."""

    def flip(self, kind: RawKind, namespace: bytes, name: bytes, offset: int) -> None:
        """Invert one byte; a negative offset counts from the end."""
        data = bytearray(self.get(kind, namespace, name))
        data[offset] ^= 0xFF
        self.put(kind, namespace, name, bytes(data))


class BackendSuite:
    """Fixtures. A driver's tests override ``driver``, ``url``, ``raw``, and what follows from its options."""

    driver: ClassVar[type[InspectableBackend]]
    """What is tested."""
    changes_kept: ClassVar[int | None] = None
    """Changes after which a cursor is too old at the latest; None: never."""

    @pytest.fixture
    def url(self) -> str:
        """A store that is not there yet, with room for 256 MiB."""
        raise NotImplementedError

    @pytest.fixture
    def small_url(self) -> str | None:
        """Another one, with a capacity of 4 MiB; None where the driver knows no bound."""
        return None

    @pytest.fixture
    def ttl_url(self) -> str | None:
        """Another one, with a ttl of an hour by ``time.time``; None where the driver knows none."""
        return None

    @pytest.fixture
    def raw(self, url: str, backend: InspectableBackend) -> RawStore:
        """The medium of ``url``."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self, url: str) -> Iterator[InspectableBackend]:
        """The store of ``url``, open for writing."""
        backend = self.open(url)
        yield backend
        backend.close()

    @pytest.fixture
    def namespace(self, backend: InspectableBackend) -> bytes:
        """The id of a namespace in it."""
        return backend.open_namespace(sample_identity()).id

    def open(self, url: str, *, read_only: bool = False) -> InspectableBackend:
        """Open with the driver under test."""
        backend = self.driver.open(StoreUrl.parse(url), read_only=read_only)
        assert isinstance(backend, InspectableBackend)
        return backend

    def need_persistence(self) -> None:
        """Skip where a store ends with its handle."""
        if not self.driver.capabilities.persistent:
            pytest.skip("the driver keeps nothing")

    def need_sharing(self) -> None:
        """Skip where a store has one process."""
        if not self.driver.capabilities.shared:
            pytest.skip("the driver's stores are not shared")


def sample_identity(number: int = 0) -> Identity:
    """One of many identities."""
    return Identity.of({"weights": f"sha256:{number:064x}", "config": {"rope_theta": 1e4, "größe": [1, None, True]}})


def read_pack(backend: InspectableBackend, namespace: bytes, table: PackTable) -> bytes | None:
    """A whole payload; None: a miss."""
    buffer = bytearray(table.payload_length)
    span = ReadSpan(table.pack_id, 0, [memoryview(buffer)])
    return bytes(buffer) if backend.read(namespace, [span]) == [True] else None


def tables(backend: InspectableBackend, namespace: bytes) -> dict[bytes, PackTable]:
    """The whole catalogue, by pack id."""
    return {table.pack_id: table for table in backend.changes(namespace, None).added}


def check_totals(backend: InspectableBackend) -> BackendStats:
    """Compare the totals with a recount."""
    names = [namespace.id for namespace in backend.namespaces()]
    found = [table for name in names for table in tables(backend, name).values()]
    stats = backend.stats()
    assert stats.packs == len(found)
    assert stats.blocks == sum(len(table.keys) for table in found)
    assert stats.raw_bytes == sum(table.raw_length for table in found)
    assert stats.stored_bytes == sum(table.payload_length for table in found)
    assert stats.requests == sum(len(list(backend.manifests(name))) for name in names)
    assert stats.disk_bytes >= stats.stored_bytes or not stats.stored_bytes
    assert stats.capacity is None or stats.disk_bytes <= stats.capacity
    return stats
