"""Conformance suite of media, as one test class.

A medium's tests subclass it. They define how a handle is opened, and a way around the code under
test:

    class TestMyBlobs(BlobsConformance):
        @pytest.fixture
        def opener(self, tmp_path):
            return partial(MyBlobs, tmp_path / "medium")

        @pytest.fixture
        def raw(self, tmp_path):
            return MyRawBlobs(tmp_path / "medium")  # the medium's own client

Each test starts with an empty medium.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import repeat
from typing import ClassVar, TypeAlias

import pytest

from persistkv.errors import StoreError
from persistkv.storage.blobs import MAX_NAME, BlobInfo, BlobMissingError, Blobs

_KIB = 1 << 10
_MIB = 1 << 20
_PATIENCE_S = 60  # seconds after which a thread or process counts as hung
_ROUNDING_S = 1.0  # times may be rounded down to a second
_THREADS = 64  # more than the medium has connections

_ORDER = (
    "a-b",
    "a-b-c/d",
    "a-c/x",
    "a/b",
    "a/c-d",
    "a/c/e",
    "a0",
    "a1/x",
    "ab",
)
"""Names in ascending order: as in ASCII, ``-`` comes before ``/``, and both before digits and
letters."""

_INVALID = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a.b",
    "A",
    "a_b",
    "a b",
    "a\n",
    "a\x00b",
    "ä",
    "a" * (MAX_NAME + 1),
)


Opener: TypeAlias = Callable[[], Blobs]
"""Opens a handle of a medium."""


class RawBlobs(ABC):
    """A medium's own client, without the code under test. Handles may be open meanwhile."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the bytes of a blob."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a blob, or replace it."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Return the names of all blobs."""

    def fill(self, names: Iterable[str]) -> None:
        """Write blobs of these names with the bytes ``data``."""
        for name in names:
            self.put(name, b"data")


class BlobsConformance:
    """Tests of the contract in ``persistkv.storage.blobs``; subclasses override ``opener`` and
    ``raw``."""

    crosses_processes: ClassVar[bool] = True
    """Whether other processes can open the medium. ``opener`` must be picklable then."""
    large_listing: ClassVar[int] = 3000
    """Number of blobs in the test of a listing of several pages."""

    @pytest.fixture
    def opener(self) -> Opener:
        """Return a function that opens a handle of the test's medium. The suite closes handles."""
        raise NotImplementedError(
            "a subclass of BlobsConformance overrides the fixture opener"
        )

    @pytest.fixture
    def raw(self) -> RawBlobs:
        """Access to the test's medium without the code under test."""
        raise NotImplementedError(
            "a subclass of BlobsConformance overrides the fixture raw"
        )

    @pytest.fixture
    def blobs(self, opener: Opener) -> Iterator[Blobs]:
        """An open handle of the test's medium."""
        with closing(opener()) as blobs:
            yield blobs

    # put

    def test_put_stores_concatenated_pieces(self, blobs: Blobs, raw: RawBlobs) -> None:
        pieces = (
            b"one",
            bytearray(b"two"),
            memoryview(b"three"),
            b"",
            memoryview(bytearray(b"four")),
        )
        blobs.put("a/b-1", pieces)
        assert raw.get("a/b-1") == b"onetwothreefour"
        assert list(raw.names()) == ["a/b-1"]

    @pytest.mark.parametrize(
        "pieces",
        [[], [b""], [b"", b""]],
        ids=["none", "empty", "two-empty"],
    )
    def test_put_empty_blob_exists(
        self,
        blobs: Blobs,
        raw: RawBlobs,
        pieces: list[bytes],
    ) -> None:
        blobs.put("empty", pieces)
        assert raw.get("empty") == b""
        assert _read(blobs, "empty") == b""
        assert _sizes(blobs) == {"empty": 0}

    def test_put_many_small_pieces_stores_all(
        self,
        blobs: Blobs,
        raw: RawBlobs,
    ) -> None:
        pieces = [number.to_bytes(3, "little") for number in range(5000)]
        blobs.put("many", pieces)
        assert raw.get("many") == b"".join(pieces)

    def test_put_large_pieces_stores_all(self, blobs: Blobs, raw: RawBlobs) -> None:
        large = _large_bytes(5 * _MIB)
        # the last piece is not aligned in memory
        pieces = (large, b"between", memoryview(large)[1:])
        blobs.put("large", pieces)
        assert raw.get("large") == b"".join(pieces)

    def test_put_keeps_no_reference_to_pieces(self, blobs: Blobs) -> None:
        piece = bytearray(b"before")
        blobs.put("a", [piece])
        piece[:] = b"after!"
        assert _read(blobs, "a") == b"before"

    def test_put_existing_name_replaces_blob(self, blobs: Blobs, raw: RawBlobs) -> None:
        blobs.put("a/b", [b"a long old value"])
        blobs.put("a/b", [b"new"])
        assert raw.get("a/b") == b"new"
        assert _sizes(blobs) == {"a/b": 3}

    def test_put_longest_names_are_stored(self, blobs: Blobs, raw: RawBlobs) -> None:
        one_part = "a" * MAX_NAME
        most_parts = "b/" * (MAX_NAME // 2 - 1) + "bc"
        assert len(most_parts) == MAX_NAME
        all_kinds_of_characters = "0-9/--/-"
        names = [one_part, most_parts, all_kinds_of_characters]
        for name in names:
            blobs.put(name, [name.encode()])
        assert _names(blobs) == sorted(names)
        for name in names:
            content = _read(blobs, name, length=MAX_NAME)
            assert content == name.encode()
        blobs.delete(names)
        assert not list(raw.names())

    @pytest.mark.parametrize("name", _INVALID, ids=repr)
    def test_methods_invalid_name_raises_value_error(
        self,
        blobs: Blobs,
        raw: RawBlobs,
        name: str,
    ) -> None:
        with pytest.raises(ValueError, match="name"):
            _put(blobs, name)
        with pytest.raises(ValueError, match="name"):
            _read(blobs, name)
        _put(blobs, "valid")
        with pytest.raises(ValueError, match="name"):
            blobs.delete(["valid", name])
        # all names are checked before any is deleted
        assert list(raw.names()) == ["valid"]

    @pytest.mark.parametrize(
        "prefix",
        ["a", "/", "a//", "/a/", "A/", "../", "a/b"],
    )
    def test_list_invalid_prefix_raises_value_error(
        self,
        blobs: Blobs,
        prefix: str,
    ) -> None:
        with pytest.raises(ValueError, match="prefix"):
            list(blobs.list(prefix))

    def test_put_is_visible_to_another_handle(
        self,
        blobs: Blobs,
        opener: Opener,
    ) -> None:
        with closing(opener()) as other:
            _check_missing(other, "a/b")
            assert not list(other.list(""))

            _put(blobs, "a/b")
            assert _read(other, "a/b") == b"data"
            assert _names(other, "a/") == ["a/b"]

            other.put("a/b", [b"changed"])
            assert _read(blobs, "a/b") == b"changed"

            other.delete(["a/b"])
            _check_missing(blobs, "a/b")

    def test_put_is_visible_to_another_process(
        self,
        blobs: Blobs,
        opener: Opener,
    ) -> None:
        if not self.crosses_processes:
            pytest.skip("the medium belongs to one process")
        blobs.put("a/from-here", [b"here"])
        context = multiprocessing.get_context("spawn")
        arguments = (opener, "a/from-here", "a/from-there")
        process = context.Process(target=_copy_in_process, args=arguments)
        process.start()
        process.join(_PATIENCE_S)
        assert process.exitcode == 0
        assert _read(blobs, "a/from-there") == b"here"
        assert _names(blobs, "a/") == ["a/from-here", "a/from-there"]

    def test_put_remains_after_close(self, blobs: Blobs, opener: Opener) -> None:
        _put(blobs, "a")
        blobs.close()
        with closing(opener()) as other:
            assert _read(other, "a") == b"data"

    def test_put_replacing_under_reader_gives_whole_blobs(self, blobs: Blobs) -> None:
        # two versions of different bytes and lengths: a mixture equals neither of them
        size = 256 * _KIB
        first = b"\1" * (size + 1)
        second = b"\2" * (size + 2)
        blobs.put("latest", [first])

        def replace_by(version: bytes) -> None:
            cut = 100 * _KIB
            blobs.put("latest", [version[:cut], version[cut:]])

        def replace_often() -> None:
            for _ in range(30):
                replace_by(first)
                replace_by(second)

        with ThreadPoolExecutor(1) as writer:
            writing = writer.submit(replace_often)
            while not writing.done():
                found = _read(blobs, "latest", length=size + 10, step=32 * _KIB)
                assert found in (first, second)
                # no name of an incomplete blob is listed
                sizes = _sizes(blobs)
                assert set(sizes) <= {"latest"}
                assert set(sizes.values()) <= {len(first), len(second)}
            writing.result()

    def test_put_returns_time_not_before_listed_time(self, blobs: Blobs) -> None:
        for name in ("a", "b/c", "a"):
            returned = blobs.put(name, [b"data"])
            times = {info.name: info.time for info in blobs.list("")}
            listed = times[name]
            assert listed <= returned + _ROUNDING_S
            # both times are of this put, which took no longer
            assert returned - listed < _PATIENCE_S

    def test_put_times_ascend(self, blobs: Blobs, opener: Opener) -> None:
        with closing(opener()) as other:
            first = blobs.put("a", [b"data"])
            # wait longer than the rounding of both times
            time.sleep(2 * _ROUNDING_S + 0.1)
            second = other.put("b", [b"data"])
        assert second > first
        a, b = blobs.list("")
        assert b.time > a.time
        assert b.time > first - _ROUNDING_S

    # read

    @pytest.mark.parametrize(
        ("offset", "length"),
        [
            (0, 10),
            (0, 1000),
            (1, 1),
            (990, 10),
            (3, 500),
        ],
    )
    def test_read_range_returns_its_bytes(
        self,
        blobs: Blobs,
        offset: int,
        length: int,
    ) -> None:
        content = _distinct_bytes(1000)
        expected = content[offset : offset + length]
        blobs.put("a/b", [content])
        in_one_buffer = _read(blobs, "a/b", offset, length)
        assert in_one_buffer == expected
        in_many_buffers = _read(blobs, "a/b", offset, length, step=7)
        assert in_many_buffers == expected

    @pytest.mark.parametrize("offset", [0, 4, 9])
    def test_read_beyond_end_returns_fewer_bytes(
        self,
        blobs: Blobs,
        offset: int,
    ) -> None:
        content = b"0123456789"
        blobs.put("a", [content])
        found = _read(blobs, "a", offset, 100, step=3)
        assert found == content[offset:]

    @pytest.mark.parametrize("offset", [10, 11, 1 << 40])
    def test_read_at_or_after_end_returns_no_bytes(
        self,
        blobs: Blobs,
        offset: int,
    ) -> None:
        blobs.put("a", [b"0123456789"])
        buffer = bytearray(b"untouched")
        count = blobs.read("a", offset, len(buffer), [memoryview(buffer)])
        assert count == 0
        assert buffer == b"untouched"

    def test_read_large_blob_fills_all_buffers(
        self,
        blobs: Blobs,
        raw: RawBlobs,
    ) -> None:
        # read the blob from the second byte on into two buffers
        content = _large_bytes(33 * _MIB)
        raw.put("large", content)
        length = len(content) - 1
        found = bytearray(length)
        view = memoryview(found)
        cut = 20 * _MIB
        buffers = [view[:cut], view[cut:]]
        count = blobs.read("large", 1, length, buffers)
        assert count == length
        assert found == content[1:]

    def test_read_takes_next_buffer_when_previous_is_full(self, blobs: Blobs) -> None:
        content = _distinct_bytes(300 * _KIB)
        blobs.put("a", [content])
        first = 5
        lengths = (1, 100 * _KIB, 0, 4096, 64 * _KIB, 10)
        exhausted = False

        def buffers() -> Iterator[memoryview]:
            nonlocal exhausted
            offset = first
            for length in lengths:
                buffer = bytearray(length)
                yield memoryview(buffer)
                # the buffer must be full when the next one is taken
                assert buffer == content[offset : offset + length]
                offset += length
            exhausted = True

        total = sum(lengths)
        count = blobs.read("a", first, total, buffers())
        assert count == total
        assert exhausted

    def test_read_short_blob_takes_no_buffer_after_partial_one(
        self,
        blobs: Blobs,
    ) -> None:
        blobs.put("a", [b"0123456789"])
        buffers = [bytearray(4) for _ in range(5)]
        taken = []

        def views() -> Iterator[memoryview]:
            for number, buffer in enumerate(buffers):
                taken.append(number)
                yield memoryview(buffer)

        # ten bytes fill two buffers of four, and a part of the third
        count = blobs.read("a", 0, 20, views())
        assert count == 10
        assert b"".join(buffers[:3])[:10] == b"0123456789"
        assert taken == [0, 1, 2]

    def test_read_error_of_iterator_is_raised(self, blobs: Blobs) -> None:
        blobs.put("a", [bytes(100 * _KIB)])

        def buffers() -> Iterator[memoryview]:
            yield memoryview(bytearray(4096))
            raise OSError("raised by the caller")

        # Repeat the read more often than the medium has connections. A read that lost its
        # connection would leave none for the last read.
        for _ in range(20):
            with pytest.raises(OSError, match="raised by the caller"):
                blobs.read("a", 0, 100 * _KIB, buffers())
        assert _read(blobs, "a", length=5) == bytes(5)

    def test_read_missing_blob_raises(self, blobs: Blobs) -> None:
        _put(blobs, "a/b")
        for name in ("b", "a/c", "c/b", "c/d/e"):
            _check_missing(blobs, name)

    # delete

    def test_delete_removes_named_blobs_only(self, blobs: Blobs, raw: RawBlobs) -> None:
        _put(blobs, *_ORDER)
        deleted = ["a/b", "a-b"]
        blobs.delete(deleted)
        remaining = [name for name in _ORDER if name not in deleted]
        assert sorted(raw.names()) == remaining
        _check_missing(blobs, "a/b")

    def test_delete_missing_names_is_ignored(self, blobs: Blobs, raw: RawBlobs) -> None:
        _put(blobs, "a/b", "c")
        blobs.delete([])
        blobs.delete(["x", "a/x", "x/y/z", "a/b", "a/b"])
        blobs.delete(["a/b"])
        assert list(raw.names()) == ["c"]

    def test_delete_many_names_removes_all(self, blobs: Blobs, raw: RawBlobs) -> None:
        held = [f"packs/{number}" for number in range(20)]
        # more than one request of an object store can name
        missing = [f"packs/missing-{number}" for number in range(2100)]
        raw.fill(held)
        blobs.delete([*missing, *held])
        assert not list(raw.names())

    def test_erase_removes_named_blobs_and_ignores_missing_names(
        self,
        blobs: Blobs,
        raw: RawBlobs,
    ) -> None:
        for name in ("a/b", "a/c", "c"):
            for content in (b"old", b"new"):
                blobs.put(name, [content])
        # erase twice: the second call finds no blob
        for _ in range(2):
            left = blobs.erase("a/", ["a/b", "a/x"])
            assert list(left) == []
            assert sorted(raw.names()) == ["a/c", "c"]

    def test_put_after_delete_stores_blob(self, blobs: Blobs) -> None:
        for content in (b"one", b"two"):
            blobs.put("a/b/c", [content])
            assert _read(blobs, "a/b/c") == content
            blobs.delete(["a/b/c"])
            assert not list(blobs.list(""))

    # list

    def test_list_empty_medium_is_empty(self, blobs: Blobs) -> None:
        assert list(blobs.list("")) == []
        assert list(blobs.list("a/b/")) == []

    def test_list_ascends_by_full_name(self, blobs: Blobs, raw: RawBlobs) -> None:
        # each name has a size of its own
        size_of = {name: size for size, name in enumerate(_ORDER)}
        for name in reversed(_ORDER):
            raw.put(name, bytes(size_of[name]))
        listed = list(blobs.list(""))
        assert all(isinstance(info, BlobInfo) for info in listed)
        found = [(info.name, info.size) for info in listed]
        assert found == list(size_of.items())

    @pytest.mark.parametrize(
        "prefix",
        ["a/", "a/c/", "a-c/", "b/", "a/b/", "a0/"],
    )
    def test_list_prefix_selects_names(
        self,
        blobs: Blobs,
        raw: RawBlobs,
        prefix: str,
    ) -> None:
        raw.fill(_ORDER)
        expected = [name for name in _ORDER if name.startswith(prefix)]
        assert _names(blobs, prefix) == expected

    @pytest.mark.parametrize("prefix", ["", "a/", "a-b-c/"])
    def test_list_after_excludes_smaller_and_equal_names(
        self,
        blobs: Blobs,
        raw: RawBlobs,
        prefix: str,
    ) -> None:
        raw.fill(_ORDER)
        selected = [name for name in _ORDER if name.startswith(prefix)]
        # names that no blob has, also outside of the prefix
        absent = (
            "0",
            "a",
            "a-b-c",
            "a-b-c/",
            "a/",
            "a/bb",
            "a/c",
            "a/c/",
            "a/d",
            "zz",
        )
        for after in (*_ORDER, *absent):
            larger = [name for name in selected if name > after]
            assert _names(blobs, prefix, after) == larger, after

    def test_list_many_names_is_complete(self, blobs: Blobs, raw: RawBlobs) -> None:
        numbers = range(self.large_listing)
        names = [f"packs/{number % 7}/{number}" for number in numbers]
        with ThreadPoolExecutor(8) as writers:
            contents = repeat(b"x")
            writes = writers.map(raw.put, names, contents)
            list(writes)  # raises the error of a write that failed
        names.sort()
        assert _names(blobs) == names
        # list also from the middle on, which may be within a page
        middle = len(names) // 2
        after = names[middle]
        assert _names(blobs, "packs/", after) == names[middle + 1 :]

    def test_list_during_changes_includes_durable_blobs(
        self,
        blobs: Blobs,
        opener: Opener,
    ) -> None:
        durable = {f"{number % 3}/{number}" for number in range(120)}
        _put(blobs, *durable)
        ended = threading.Event()

        def change(thread: int) -> None:
            """Put and delete blobs among the durable ones until the lists have ended."""
            with closing(opener()) as other:
                for number in itertools.count():
                    prefix = f"{number % 3}/"
                    name = f"{prefix}{thread}-{number}"
                    _put(other, name)
                    assert name in _names(other, prefix)
                    other.delete([name])
                    if ended.is_set():
                        return

        with ThreadPoolExecutor(4) as changers:
            changing = [changers.submit(change, thread) for thread in range(4)]
            try:
                for _ in range(20):
                    listed = _names(blobs)
                    # names ascend, each of them once
                    assert listed == sorted(set(listed))
                    assert durable <= set(listed)
            finally:
                ended.set()
            for changer in changing:
                changer.result(_PATIENCE_S)

    def test_list_blob_deleted_during_iteration_continues(
        self,
        blobs: Blobs,
        raw: RawBlobs,
    ) -> None:
        names = [f"{number % 3}/{number:02}" for number in range(30)]
        deleted = {name for name in names if name.endswith("5")}
        raw.fill(names)
        listed = set()
        for info in blobs.list(""):
            listed.add(info.name)
            blobs.delete(sorted(deleted))
        # the deleted blobs may be listed or not
        assert listed >= set(names) - deleted

    # all methods

    def test_methods_64_threads_succeed(self, blobs: Blobs) -> None:
        together = threading.Barrier(_THREADS)

        def use(number: int) -> None:
            together.wait(_PATIENCE_S)
            _use_all_methods(blobs, f"{number}/")

        with ThreadPoolExecutor(_THREADS) as threads:
            uses = [threads.submit(use, number) for number in range(_THREADS)]
            for done in uses:
                done.result(_PATIENCE_S)
        # one blob of each thread remains
        assert len(_names(blobs)) == _THREADS

    def test_methods_after_close_raise(self, blobs: Blobs) -> None:
        _put(blobs, "a")
        # close it twice: closing is idempotent
        blobs.close()
        blobs.close()
        with pytest.raises(StoreError):
            _put(blobs, "a")
        with pytest.raises(StoreError):
            _read(blobs, "a")
        with pytest.raises(StoreError):
            blobs.delete(["a"])
        with pytest.raises(StoreError):
            list(blobs.list(""))

    def test_attributes_of_open_medium_have_valid_values(self, blobs: Blobs) -> None:
        _put(blobs, "a")
        assert blobs.latency_s >= 0
        assert blobs.connections >= 1
        assert blobs.state() == "closed"
        assert all(count >= 0 for count in blobs.requests().values())


def _names(
    blobs: Blobs,
    prefix: str = "",
    after: str = "",
) -> list[str]:
    """Return the names of the blobs that a list shows."""
    return [info.name for info in blobs.list(prefix, after)]


def _sizes(blobs: Blobs) -> dict[str, int]:
    """Return the bytes of all blobs, as a list shows them, by name."""
    return {info.name: info.size for info in blobs.list("")}


def _distinct_bytes(count: int) -> bytes:
    """Return bytes whose period, 251, divides no buffer and no page: wrong offsets are noticed."""
    return bytes(number % 251 for number in range(count))


def _large_bytes(count: int) -> bytes:
    """Return many bytes fast; ``count`` is a multiple of 256, which is their period."""
    return bytes(range(256)) * (count // 256)


def _use_all_methods(blobs: Blobs, prefix: str) -> None:
    """Put three blobs of this prefix, read them, and delete the second and third."""
    names = [f"{prefix}{index}" for index in range(3)]
    for name in names:
        blobs.put(name, [name.encode(), bytes(10 * _KIB)])
    assert _names(blobs, prefix) == names
    for name in names:
        beginning = _read(blobs, name, offset=0, length=len(name))
        assert beginning == name.encode()
    first, *deleted = names
    blobs.delete(deleted)
    assert _names(blobs, prefix) == [first]


def _put(blobs: Blobs, *names: str) -> None:
    """Put blobs with the bytes ``data``."""
    for name in names:
        blobs.put(name, [b"data"])


def _check_missing(blobs: Blobs, name: str) -> None:
    """Assert that a read of this name finds no blob."""
    with pytest.raises(BlobMissingError):
        _read(blobs, name)


def _read(
    blobs: Blobs,
    name: str,
    offset: int = 0,
    length: int = 100,
    step: int | None = None,
) -> bytes:
    """Return up to ``length`` bytes, read into buffers of ``step`` bytes; None: into one
    buffer."""
    found = bytearray(length)
    view = memoryview(found)
    if step is None:
        step = length
    buffers = [view[start : start + step] for start in range(0, length, step)]
    count = blobs.read(name, offset, length, buffers)
    return bytes(found[:count])


def _copy_in_process(
    opener: Opener,
    source: str,
    target: str,
) -> None:
    """Copy a blob, in a process that has opened a handle of its own."""
    with closing(opener()) as blobs:
        blobs.put(target, [_read(blobs, source)])
