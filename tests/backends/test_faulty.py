"""``FaultyBackend`` applies faults to the chosen methods only, and forwards all calls without
faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import CorruptPackError, StoreError, StoreFullError
from persistkv.storage.backend import Backend, CommitBatch, ReadSpan
from persistkv.storage.identity import Identity
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.conformance import BackendConformance
from persistkv.testing.samples import payload_of, sample_pack
from tests.backends.raw_shared import RawShared


class TestFaultyBackendWithoutFaults(BackendConformance):
    """The wrapped backend passes the suite."""

    driver = MemoryBackend
    ends_namespaces = False

    @pytest.fixture
    def url(self) -> str:
        return "memory://test"

    def open(
        self,
        url: str,
        *,
        read_only: bool = False,
    ) -> FaultyBackend[MemoryBackend]:
        return FaultyBackend.of(
            MemoryBackend.open(StoreUrl.parse(url), read_only=read_only)
        )

    @pytest.fixture
    def raw(self, backend: FaultyBackend[MemoryBackend]) -> RawShared:
        return RawShared(backend.inner.blobs, backend.inner)


@pytest.fixture
def backend(memory_store: Callable[[], MemoryBackend]) -> FaultyBackend[MemoryBackend]:
    return FaultyBackend.of(memory_store())


@pytest.fixture
def namespace(backend: FaultyBackend[MemoryBackend]) -> bytes:
    return backend.open_namespace(Identity.of({})).id


def store_one(backend: Backend, namespace: bytes) -> tuple[ReadSpan, bytes]:
    """Store a pack; return a span over its payload, and the payload."""
    pack = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([pack]))
    payload = payload_of(sample_pack(namespace, 1))
    return ReadSpan(pack.pack_id, 0, [memoryview(bytearray(len(payload)))]), payload


def test_fail_with_times_raises_that_often_without_calling_method(
    backend: FaultyBackend[MemoryBackend],
    namespace: bytes,
) -> None:
    backend.fail("commit", StoreFullError("no room"), times=2)
    for _ in range(2):
        with pytest.raises(StoreFullError, match="no room"):
            store_one(backend, namespace)
    assert backend.stats().packs == 0
    store_one(backend, namespace)
    assert backend.stats().packs == 1
    assert backend.calls == [
        "open_namespace",
        "commit",
        "commit",
        "stats",
        "commit",
        "stats",
    ]


def test_fail_without_times_lasts_until_clear_faults(
    backend: FaultyBackend[MemoryBackend],
) -> None:
    backend.fail("stats", StoreError())
    backend.fail("namespaces", StoreError())
    for _ in range(3):
        with pytest.raises(StoreError):
            backend.stats()
    backend.clear_faults("stats")
    assert backend.stats().packs == 0
    with pytest.raises(StoreError):
        backend.namespaces()
    backend.clear_faults()
    assert list(backend.namespaces()) == []


def test_fail_several_calls_raise_separate_copies_of_error(
    backend: FaultyBackend[MemoryBackend],
) -> None:
    error = CorruptPackError("magic", "wrong value")
    backend.fail("stats", error)
    raised = []
    for _ in range(2):
        with pytest.raises(CorruptPackError, match="magic: wrong value") as caught:
            backend.stats()
        assert (caught.value.args, vars(caught.value)) == (error.args, vars(error))
        raised.append(caught.value)
    assert len({id(one) for one in [error, *raised]}) == 3
    assert error.__traceback__ is None


def test_before_several_callbacks_run_in_order_with_arguments(
    backend: FaultyBackend[MemoryBackend],
    namespace: bytes,
) -> None:
    seen: list[object] = []
    backend.before("changes", lambda *arguments: seen.append(arguments))
    backend.before("changes", lambda *arguments: seen.append("second"))
    assert list(backend.changes(namespace, None).added) == []
    assert seen == [(namespace, None), "second"]


def test_after_callback_replaces_result(
    backend: FaultyBackend[MemoryBackend],
    namespace: bytes,
) -> None:
    span, payload = store_one(backend, namespace)

    def tear(filled: list[bool], namespace: bytes, spans: list[ReadSpan]) -> list[bool]:
        spans[0].buffers[0][5] ^= 1
        return [False for _ in filled]

    backend.after("read", tear)
    assert backend.read(namespace, [span]) == [False]
    assert span.buffers[0][5] == payload[5] ^ 1
    backend.clear_faults("read")
    assert backend.read(namespace, [span]) == [True]
    assert bytes(span.buffers[0]) == payload


def test_after_method_raised_is_not_called(
    backend: FaultyBackend[MemoryBackend],
    namespace: bytes,
) -> None:
    called: list[object] = []
    backend.after("stats", called.append)
    backend.fail("stats", StoreError(), times=1)
    with pytest.raises(StoreError):
        backend.stats()
    assert called == []


def test_before_after_and_fail_unknown_method_raise(
    backend: FaultyBackend[MemoryBackend],
) -> None:
    for add in (backend.before, backend.after):
        with pytest.raises(ValueError, match="MemoryBackend has no method 'comit'"):
            add("comit", print)
    with pytest.raises(ValueError, match="no method 'capabilities'"):
        backend.fail("capabilities", StoreError())


def test_faulty_backend_has_attributes_and_own_methods_of_wrapped_backend(
    backend: FaultyBackend[MemoryBackend],
) -> None:
    class Named(MemoryBackend):
        name = "one"

        def rename(self, name: str) -> None:
            self.name = name

    assert backend.capabilities == MemoryBackend.capabilities
    wrapped: Any = FaultyBackend.of(Named())
    wrapped.fail("rename", StoreError(), times=1)
    with pytest.raises(StoreError):
        wrapped.rename("two")
    assert wrapped.name == "one"
    wrapped.rename("three")
    assert wrapped.name == "three"
    wrapped.close()


def test_close_closes_wrapped_backend(backend: FaultyBackend[MemoryBackend]) -> None:
    backend.close()
    with pytest.raises(StoreError, match="closed"):
        backend.inner.stats()
