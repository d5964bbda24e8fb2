"""The media of ``persistkv.testing``: the one in memory, and the wrapper that injects faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from persistkv.storage.blobs import (
    BlobMissingError,
    Blobs,
    RefusedError,
    UnavailableError,
)
from persistkv.testing.blobs import FaultyBlobs, MemoryBlobs, in_first_half
from persistkv.testing.conformance.blobs import BlobsConformance, RawBlobs


class RawMemoryBlobs(RawBlobs):
    """Another handle: there is no other client of this process's memory."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        self.blobs = blobs

    def get(self, name: str) -> bytes:
        (size,) = (info.size for info in self.blobs.list("") if info.name == name)
        data = bytearray(size)
        self.blobs.read(name, 0, len(data), [memoryview(data)])
        return bytes(data)

    def put(self, name: str, data: bytes) -> None:
        self.blobs.put(name, [data])

    def names(self) -> Sequence[str]:
        return [info.name for info in self.blobs.list("")]


@pytest.fixture
def medium() -> MemoryBlobs:
    return MemoryBlobs()


class TestMemoryBlobs(BlobsConformance):
    crosses_processes = False

    @pytest.fixture
    def opener(self, medium: MemoryBlobs) -> Callable[[], Blobs]:
        return medium.handle

    @pytest.fixture
    def raw(self, medium: MemoryBlobs) -> RawBlobs:
        return RawMemoryBlobs(medium.handle())


class TestFaultyBlobsWithoutFaults(BlobsConformance):
    crosses_processes = False

    @pytest.fixture
    def opener(self, medium: MemoryBlobs) -> Callable[[], Blobs]:
        return lambda: FaultyBlobs(medium.handle())

    @pytest.fixture
    def raw(self, medium: MemoryBlobs) -> RawBlobs:
        return RawMemoryBlobs(medium.handle())


class TestFaultyBlobsWithSplitLists(TestFaultyBlobsWithoutFaults):
    """A list in two halves still meets the contract."""

    @pytest.fixture
    def opener(self, medium: MemoryBlobs) -> Callable[[], Blobs]:
        def open_split() -> Blobs:
            blobs = FaultyBlobs(medium.handle())
            blobs.split_lists()
            return blobs

        return open_split


@pytest.fixture
def faulty(medium: MemoryBlobs) -> FaultyBlobs:
    return FaultyBlobs(medium.handle())


def names_of(blobs: Blobs) -> list[str]:
    return [info.name for info in blobs.list("")]


def read(blobs: Blobs, name: str) -> bytes:
    data = bytearray(100)
    return bytes(data[: blobs.read(name, 0, len(data), [memoryview(data)])])


def test_memory_clock_is_time_of_put_and_list() -> None:
    now = 1000.0
    blobs = MemoryBlobs(clock=lambda: now)
    assert blobs.put("a", [b"data"]) == 1000.0
    now = 2000.0
    assert blobs.handle().put("b", [b"data"]) == 2000.0
    assert [info.time for info in blobs.list("")] == [1000.0, 2000.0]


def test_memory_handle_of_closed_medium_is_open(medium: MemoryBlobs) -> None:
    medium.put("a", [b"data"])
    medium.close()
    assert names_of(medium.handle()) == ["a"]


@pytest.mark.parametrize("method", ["put", "read", "delete", "list"])
def test_fail_before_call_has_no_effect(
    faulty: FaultyBlobs,
    medium: MemoryBlobs,
    method: str,
) -> None:
    medium.put("a/b", [b"old"])
    faulty.fail(method, RefusedError("forbidden"), times=1)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: faulty.put("a/b", [b"new"]),
        "read": lambda: read(faulty, "a/b"),
        "delete": lambda: faulty.delete(["a/b"]),
        "list": lambda: names_of(faulty),
    }
    with pytest.raises(RefusedError, match="forbidden"):
        calls[method]()
    assert read(medium, "a/b") == b"old"

    calls[method]()  # only once
    assert [call for call, _ in faulty.calls] == [method, method]


def test_fail_after_put_has_taken_effect(
    faulty: FaultyBlobs,
    medium: MemoryBlobs,
) -> None:
    faulty.fail("put", UnavailableError("no reply"), after=True, times=1)
    with pytest.raises(UnavailableError):
        faulty.put("a", [b"data"])
    assert read(medium, "a") == b"data"


def test_fail_after_delete_has_taken_effect(
    faulty: FaultyBlobs,
    medium: MemoryBlobs,
) -> None:
    medium.put("a", [b"data"])
    faulty.fail("delete", UnavailableError("no reply"), after=True)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            faulty.delete(["a"])
    assert names_of(medium) == []


def test_fail_after_list_ends_iteration(
    faulty: FaultyBlobs,
    medium: MemoryBlobs,
) -> None:
    medium.put("a", [b"data"])
    faulty.fail("list", UnavailableError("connection reset"), after=True)
    listed = faulty.list("")
    assert next(listed).name == "a"
    with pytest.raises(UnavailableError):
        next(listed)


def test_fail_only_affects_matching_names(faulty: FaultyBlobs) -> None:
    faulty.fail(
        "put", RefusedError("forbidden"), only=lambda name: name.startswith("index/")
    )
    faulty.put("inbox/a", [b"data"])
    with pytest.raises(RefusedError):
        faulty.put("index/a", [b"data"])
    assert names_of(faulty) == ["inbox/a"]
    assert ("put", "index/a") in faulty.calls


def test_delay_lasts_as_long(faulty: FaultyBlobs) -> None:
    faulty.delay("put", 0.2, times=1)
    began = time.monotonic()
    faulty.put("a", [b"data"])
    assert time.monotonic() - began >= 0.2


def test_postponed_put_takes_effect_later(
    faulty: FaultyBlobs,
    medium: MemoryBlobs,
) -> None:
    faulty.postpone("put", times=1)
    piece = bytearray(b"data")
    with pytest.raises(UnavailableError):
        faulty.put("a", [piece])
    piece[:] = b"else"
    with pytest.raises(BlobMissingError):
        read(medium, "a")

    assert faulty.run_postponed() == 1
    assert read(medium, "a") == b"data"
    assert faulty.run_postponed() == 0


def test_postponed_delete_takes_effect_later(
    faulty: FaultyBlobs,
    medium: MemoryBlobs,
) -> None:
    medium.put("a", [b"data"])
    faulty.postpone("delete")
    with pytest.raises(UnavailableError):
        faulty.delete(["a"])
    assert names_of(medium) == ["a"]
    faulty.clear_faults()
    faulty.run_postponed()
    assert names_of(medium) == []


def test_split_list_shows_each_half_at_its_time(
    faulty: FaultyBlobs,
    medium: MemoryBlobs,
) -> None:
    names = [f"{number:02}" for number in range(40)]
    early = [name for name in names if in_first_half(name)]
    late = [name for name in names if not in_first_half(name)]
    assert len(early) > 4
    assert len(late) > 4
    for name in (*early[:2], *late[:2]):
        medium.put(name, [b"data"])

    def change() -> None:
        for name in (early[2], late[2]):
            medium.put(name, [b"data"])
        medium.delete([early[0], late[0]])

    faulty.split_lists(between=change)
    assert names_of(faulty) == sorted([early[0], early[1], late[1], late[2]])
    faulty.clear_faults("list")
    assert names_of(faulty) == sorted([early[1], early[2], late[1], late[2]])


def test_fault_of_unknown_method_is_refused(faulty: FaultyBlobs) -> None:
    with pytest.raises(ValueError, match="no method 'get'"):
        faulty.fail("get", UnavailableError("no reply"))
    with pytest.raises(ValueError, match="read"):
        faulty.postpone("read")
