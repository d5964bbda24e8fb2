"""Shared parts of the suite: fixtures, and access to the medium without the driver."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import ClassVar

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.backend import (
    Backend,
    Changes,
    CommitBatch,
    CommitResult,
    ManifestWrite,
    ReadSpan,
)
from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import NewPack, PackWriter
from persistkv.storage.identity import Identity
from persistkv.storage.stats import BackendStats
from persistkv.testing.samples import open_payload, payload_of, sample_pack


class RawKind(Enum):
    """Kind of stored data."""

    PAYLOAD = "payload"
    """Frames of a pack with their padding; the name is the pack id."""
    TABLE = "table"
    """Catalogue row of a pack, with all data that the driver adds to the table; the name is the
    pack id."""
    MANIFEST = "manifest"
    """Head of a manifest; the name is the manifest's id in UTF-8."""
    MANIFEST_KEYS = "manifest keys"
    """Keys of a manifest; the name is the manifest's id in UTF-8."""


class RawStore(ABC):
    """Access to a store's bytes through the medium's own client, without the driver; also while the
    store is open."""

    @abstractmethod
    def get(
        self,
        kind: RawKind,
        namespace: bytes,
        name: bytes,
    ) -> bytes:
        """Return the stored bytes of one item; ``RawKind`` defines its name."""

    @abstractmethod
    def put(
        self,
        kind: RawKind,
        namespace: bytes,
        name: bytes,
        data: bytes,
    ) -> None:
        """Replace the stored bytes of one item by ``data``, which has the same length."""

    def flip(
        self,
        kind: RawKind,
        namespace: bytes,
        name: bytes,
        offset: int,
    ) -> None:
        """Invert one stored byte of an item; a negative offset counts from the end."""
        stored = self.get(kind, namespace, name)
        data = bytearray(stored)
        data[offset] ^= 0xFF
        self.put(kind, namespace, name, bytes(data))


@contextmanager
def other_process(
    target: Callable[..., None],
    *arguments: object,
) -> Iterator[Connection]:
    """Call ``target(*arguments, connection)`` in a new process, and yield the other end of its
    connection. Kill the process at the end of the ``with`` block.

    :param target: a function of a module; its arguments can be pickled.
    """
    # a fork of a process that has imported this package starts 20 times as fast as a new one
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["persistkv.testing.conformance"])
    ours, theirs = context.Pipe()
    environment = dict(os.environ)
    target_arguments = (*arguments, theirs)
    process = context.Process(
        target=_call_with_environment,
        args=(environment, target, target_arguments),
        daemon=True,
    )
    process.start()
    # only the other process holds its end now: if it ends, reads of ours raise EOFError
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _call_with_environment(
    environment: dict[str, str],
    target: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    """Call ``target`` with the environment of the test, in addition to that of the server that
    forks this process: an earlier test may have started the server."""
    os.environ.update(environment)
    target(*arguments)


class BackendSuite:
    """Base class of the conformance tests, with their fixtures.

    A driver's test class overrides ``driver``, ``url``, ``raw``, and the fixtures for options that
    the driver supports.
    """

    driver: ClassVar[type[Backend]]
    """The driver under test."""
    ends_namespaces: ClassVar[bool] = True
    """Whether a namespace without content takes no room, is not listed, and can be opened
    read-only. False for drivers that keep each namespace from its first opening on."""

    @pytest.fixture
    def url(self) -> str:
        """URL of a store that does not exist yet, with room for 256 MiB."""
        raise NotImplementedError

    @pytest.fixture
    def small_url(self) -> str | None:
        """URL of another store, with a capacity of 4 MiB; None if the driver does not support a
        capacity."""
        return None

    @pytest.fixture
    def raw(self, url: str, backend: Backend) -> RawStore:
        """The medium of ``url``."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self, url: str) -> Iterator[Backend]:
        """The store of ``url``, see ``opened``."""
        yield from self.opened(url)

    @pytest.fixture
    def namespace(self, backend: Backend) -> bytes:
        """The id of a namespace in ``backend``."""
        return backend.open_namespace(sample_identity()).id

    @pytest.fixture
    def small(self, small_url: str | None) -> Iterator[Backend]:
        """The store of ``small_url``, see ``opened``."""
        yield from self.opened(small_url)

    @pytest.fixture
    def name(self, small: Backend) -> bytes:
        """The id of a namespace in ``small``."""
        return small.open_namespace(sample_identity()).id

    @pytest.fixture
    def rig(self, backend: Backend) -> NamespaceRig:
        """A namespace in ``backend``."""
        return NamespaceRig(backend)

    @pytest.fixture
    def small_rig(self, small: Backend) -> NamespaceRig:
        """A namespace in ``small``."""
        return NamespaceRig(small)

    def opened(self, url: str | None) -> Iterator[Backend]:
        """Open a store for writing; after the test, which must not close it, check its totals and
        close it. Skip the test if ``url`` is None.
        """
        if url is None:
            pytest.skip("the driver does not support this option")
        backend = self.open(url)
        yield backend
        check_totals(backend)
        backend.close()

    def open(self, url: str, *, read_only: bool = False) -> Backend:
        """Open a store with the driver under test."""
        return self.driver.open(StoreUrl.parse(url), read_only=read_only)

    def open_rig(self, url: str, *, read_only: bool = False) -> NamespaceRig:
        """Open a store with the driver under test, and a namespace in it."""
        return NamespaceRig(self.open(url, read_only=read_only))

    def need_ending_namespaces(self) -> None:
        """Skip the test if the driver keeps namespaces without content."""
        if not self.ends_namespaces:
            pytest.skip("the driver keeps namespaces without content")

    def need_plain(self, rig: NamespaceRig) -> None:
        """Skip the test if the store has a key: its bytes are hidden, and ids of packs random."""
        if rig.backend.seal.encrypts:
            pytest.skip("the store has a key")

    def need_sharing(self) -> None:
        """Skip the test if the driver's stores end with their handle."""
        if not self.driver.capabilities.shared:
            pytest.skip("the driver's stores are not shared")


class NamespaceRig:
    """A namespace of an open store, as tests use it: that of ``sample_identity()``."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.opened = backend.open_namespace(sample_identity())
        """The namespace with its identity and time of creation."""
        self.namespace = self.opened.id
        """Id of the namespace."""

    def pack(
        self,
        seed: int,
        *,
        blocks: int = 4,
        block_bytes: int = 4096,
        content: int | None = None,
    ) -> PackWriter:
        """Return a pack of the namespace; see ``sample_pack``."""
        return sample_pack(
            self.namespace,
            seed,
            blocks=blocks,
            block_bytes=block_bytes,
            content=content,
            seal=self.backend.seal,
        )

    def packs(
        self,
        count: int,
        *,
        blocks: int = 4,
        block_bytes: int = 4096,
    ) -> list[PackWriter]:
        """Return different packs, with the seeds from 0 on."""
        packs = []
        for seed in range(count):
            pack = self.pack(seed, blocks=blocks, block_bytes=block_bytes)
            packs.append(pack)
        return packs

    def commit(
        self,
        *packs: NewPack,
        manifests: Sequence[ManifestWrite] = (),
        deletions: Sequence[bytes] = (),
        seen: bytes | None = None,
        needs: Sequence[bytes] | None = None,
    ) -> CommitResult:
        """Commit a batch; parameters as the fields of ``CommitBatch``."""
        batch = CommitBatch(
            packs=packs,
            manifests=manifests,
            deletions=deletions,
            seen=seen,
            needs=needs,
        )
        return self.commit_batch(batch)

    def commit_batch(self, batch: CommitBatch) -> CommitResult:
        return self.backend.commit(self.namespace, batch)

    def read(self, pack: NewPack) -> bytes | None:
        """Return the whole payload of a pack; None if the read is a miss."""
        return read_pack(self.backend, self.namespace, pack.table)

    def fill(self, *spans: ReadSpan) -> list[bool]:
        """Read spans; return for each whether it was filled."""
        return self.backend.read(self.namespace, spans)

    def changes(self, cursor: bytes | None) -> Changes:
        return self.backend.changes(self.namespace, cursor)

    def check_holds(self, *packs: NewPack) -> None:
        """Assert that the namespace holds these packs, with their bytes, and no others."""
        expected = {pack.pack_id: pack.table for pack in packs}
        assert self.tables() == expected
        for pack in packs:
            self.check_read(pack)

    def check_read(self, pack: NewPack) -> None:
        """Assert that the bytes of a pack can be read."""
        assert self.read(pack) == payload_of(pack)

    def check_added(self, cursor: bytes, *packs: NewPack) -> None:
        """Assert that these packs were added after a cursor, in this order, and no others."""
        added = [pack.table for pack in packs]
        assert list(self.changes(cursor).added) == added

    def check_nothing_added(self, cursor: bytes) -> None:
        """Assert that no pack was added after a cursor."""
        assert list(self.changes(cursor).added) == []

    def tables(self) -> dict[bytes, PackTable]:
        """Return the tables of all packs, by pack id."""
        return tables(self.backend, self.namespace)

    def tables_of(self, pack_ids: Sequence[bytes]) -> list[PackTable]:
        """Return the tables of the packs with these ids that are held."""
        return list(self.backend.tables(self.namespace, pack_ids))

    def manifests(self) -> list[RequestManifest]:
        """Return the heads of all manifests."""
        return list(self.backend.catalogue(self.namespace).manifests())

    def manifest_ids(self) -> set[str]:
        """Return the ids of all manifests."""
        return {head.id for head in self.manifests()}

    def manifest_keys(self, ids: Sequence[str]) -> list[ManifestKeys | None]:
        """Return the keys of manifests; None for one that is not held or damaged."""
        return list(self.backend.manifest_keys(self.namespace, ids))

    def check_totals(self) -> BackendStats:
        """See the function ``check_totals``."""
        return check_totals(self.backend)

    def close(self) -> None:
        self.backend.close()


def sample_identity(number: int = 0) -> Identity:
    """Return a made-up identity of a model; different numbers give different identities."""
    # values of each type, and a name that is not ASCII
    config = {"rope_theta": 1e4, "größe": [1, None, True]}
    return Identity.of({"weights": f"sha256:{number:064x}", "config": config})


def read_pack(
    backend: Backend,
    namespace: bytes,
    table: PackTable,
) -> bytes | None:
    """Return the whole payload of a pack, with opened frames; None if the read is a miss."""
    buffer = bytearray(table.payload_length)
    span = ReadSpan(table.pack_id, 0, [memoryview(buffer)])
    (filled,) = backend.read(namespace, [span])
    if not filled:
        return None
    if backend.seal.encrypts:
        # Read the table again: each time that a pack is written, another key seals it, and
        # ``table`` may be from another write than the stored pack.
        stored_tables = backend.tables(namespace, [table.pack_id])
        if not stored_tables:
            return None
        (stored_table,) = stored_tables
        open_payload(backend.seal, stored_table, memoryview(buffer))
    return bytes(buffer)


def tables(backend: Backend, namespace: bytes) -> dict[bytes, PackTable]:
    """Return the tables of all packs of a namespace, by pack id."""
    content = backend.changes(namespace, cursor=None)  # None: from the beginning
    return {table.pack_id: table for table in content.added}


def check_totals(backend: Backend) -> BackendStats:
    """Assert that ``backend.stats()`` and ``backend.tenants()`` equal a count of all packs and
    manifests; return the stats."""
    packs: list[PackTable] = []
    num_requests = 0
    for namespace in backend.namespaces():
        packs += tables(backend, namespace.id).values()
        manifests = backend.catalogue(namespace.id).manifests()
        num_requests += len(list(manifests))
    num_blocks = sum(len(pack.keys) for pack in packs)
    raw_bytes = sum(pack.raw_length for pack in packs)
    stored_bytes = sum(pack.payload_length for pack in packs)
    stats = backend.stats()
    # compare these totals; the test cannot count the other fields, which keep their values
    assert stats == replace(
        stats,
        packs=len(packs),
        blocks=num_blocks,
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        requests=num_requests,
    )
    assert stats.disk_bytes >= stats.stored_bytes
    check_tenants(backend, packs)
    if stats.capacity is not None:
        assert stats.disk_bytes <= stats.capacity
    return stats


def check_tenants(backend: Backend, packs: Sequence[PackTable]) -> None:
    """Assert that ``backend.tenants()`` equals a count of ``packs``, all packs of the store."""
    expected: dict[str, TenantTotals] = {}
    for pack in packs:
        totals = expected.setdefault(pack.tenant, TenantTotals(pack.tenant))
        totals.packs += 1
        totals.stored_bytes += pack.payload_length
    for tenant, quota in backend.policy().quotas.items():
        totals = expected.setdefault(tenant, TenantTotals(tenant))
        totals.quota = quota
    by_name = sorted(expected.values(), key=attrgetter("tenant"))
    assert backend.tenants() == by_name
