"""The allocator, compared with a model that records the owner of each page; files that grow, shrink
and fail."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import lmdb
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreError, StoreFullError
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.catalogue import TableRows
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.layout import DATABASES
from persistkv_lmdb.payloads.allocator import (
    Allocator,
    pages_of,
    read_extents,
    read_reserved,
    split,
)
from persistkv_lmdb.payloads.segments import Extent
from tests import forked
from tests.backends.lmdb.conftest import Opener, stdout_of
from tests.backends.lmdb.consistency import find_faults

P = ParamSpec("P")
T = TypeVar("T")
FREE, RESERVED, HOLE = 0, -1, -2


class AllocatorMachine(RuleBasedStateMachine):
    """Allocator and model. Each rule is one transaction."""

    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.env = lmdb.open(
            self.directory.name, map_size=64 << 20, max_dbs=32, sync=False
        )
        self.db = {name: self.env.open_db(name.encode()) for name in DATABASES}
        self.pages: dict[tuple[int, int], int] = {}
        self.held: set[int] = set()
        self.reserved: dict[int, set[tuple[int, int]]] = {}
        self.number = 0

    def change(self, change: Callable[[Allocator, TableRows], T]) -> T:
        with self.env.begin(write=True, buffers=True) as txn:
            rows = TableRows(txn, self.db)
            space = Allocator(rows)
            found = change(space, rows)
            space.finish()
        return found

    @rule(segment=st.integers(0, 2), more=st.integers(1, 40))
    def grow(self, segment: int, more: int) -> None:
        held = sum(1 for page in self.pages if page[0] == segment)
        self.change(lambda space, rows: space.fill(Extent(segment, held, more), more))
        self.pages.update({(segment, held + page): FREE for page in range(more)})

    @rule(pages=st.integers(1, 60), at_most=st.integers(1, 3))
    def empty(self, pages: int, at_most: int) -> None:
        """Free pages become holes, and count neither as free nor as disk space."""
        free = sum(owner == FREE for owner in self.pages.values())
        holes = self.change(lambda space, rows: space.make_holes(pages, at_most))
        assert len(holes) <= at_most
        assert pages_of(holes) <= min(pages, free)
        assert pages_of(holes) == min(pages, free) or len(holes) == at_most
        for extent in holes:
            for page in range(extent.page, extent.end):
                assert self.pages[extent.segment, page] == FREE
                self.pages[extent.segment, page] = HOLE

    @rule(pages=st.integers(1, 60))
    def fill(self, pages: int) -> None:
        """The first pages of the first hole are free again."""

        def work(space: Allocator, rows: TableRows) -> Extent | None:
            hole = next(space.holes(), None)
            if hole is not None:
                hole_part = hole._replace(pages=min(pages, hole.pages))
                space.fill(hole, hole_part.pages)
                return hole_part
            return None

        filled = self.change(work)
        if filled is not None:
            self.pages.update(
                dict.fromkeys(
                    [(filled.segment, page) for page in range(filled.page, filled.end)],
                    FREE,
                )
            )

    @rule(pages=st.integers(1, 30), keep=st.booleans())
    def take(self, pages: int, keep: bool) -> None:
        free = [page for page, owner in self.pages.items() if owner == FREE]
        if pages > len(free):
            return
        self.number += 1

        def work(space: Allocator, rows: TableRows) -> tuple[list[Extent], bool]:
            single = space.largest() >= pages
            taken = space.allocate(pages)
            if keep:
                space.record_pack(self.number.to_bytes(32, "big"), taken)
            else:
                space.make_free(taken)
            return taken, single

        taken, single = self.change(work)
        assert len(taken) == 1 or not single
        places = [
            (extent.segment, extent.page + page)
            for extent in taken
            for page in range(extent.pages)
        ]
        assert len(places) == len(set(places)) == pages
        assert all(self.pages[place] == FREE for place in places)
        if keep:
            self.pages.update(dict.fromkeys(places, self.number))
            self.held.add(self.number)

    @rule(pages=st.integers(1, 30), writer=st.integers(0, 3))
    def reserve(self, pages: int, writer: int) -> None:
        """A writer that reserves has nothing reserved: it releases that first."""
        if writer in self.reserved or pages > sum(
            owner == FREE for owner in self.pages.values()
        ):
            return

        def work(space: Allocator, rows: TableRows) -> list[Extent]:
            taken = space.allocate(pages)
            space.reserve(writer, taken)
            return taken

        taken = self.change(work)
        self.reserved[writer] = {
            (extent.segment, page)
            for extent in taken
            for page in range(extent.page, extent.end)
        }
        assert len(self.reserved[writer]) == pages
        assert all(self.pages[place] == FREE for place in self.reserved[writer])
        self.pages.update(dict.fromkeys(self.reserved[writer], RESERVED))

    @rule(writer=st.integers(0, 3), data=st.data())
    def publish_reserved(self, writer: int, data: st.DataObject) -> None:
        """Packs take the first pages of a reservation, one after the other. The rest becomes
        free."""
        if writer not in self.reserved:
            return
        sizes = data.draw(st.lists(st.integers(1, 12), max_size=4))

        def work(space: Allocator, rows: TableRows) -> list[list[Extent]]:
            rest = read_reserved(rows, writer)
            packs: list[list[Extent]] = []
            for size in sizes:
                if pages_of(rest) >= size:
                    place, rest = split(rest, size)
                    assert pages_of(place) == size
                    packs.append(place)
            for number, place in enumerate(packs):
                space.record_pack((self.number + 1 + number).to_bytes(32, "big"), place)
            space.reserve(writer, ())
            space.make_free(rest)
            return packs

        packs = self.change(work)
        self.pages.update(dict.fromkeys(self.reserved.pop(writer), FREE))
        for place in packs:
            self.number += 1
            self.held.add(self.number)
            for extent in place:
                for page in range(extent.page, extent.end):
                    assert self.pages[extent.segment, page] == FREE
                    self.pages[extent.segment, page] = self.number

    @rule(writer=st.integers(0, 3))
    def release(self, writer: int) -> None:
        self.change(lambda space, rows: space.release(writer))
        self.pages.update(dict.fromkeys(self.reserved.pop(writer, ()), FREE))

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        if not self.held:
            return
        number = data.draw(st.sampled_from(sorted(self.held)))
        name = number.to_bytes(32, "big")

        def work(space: Allocator, rows: TableRows) -> None:
            space.free_pack(name)
            free = space.free
            space.free_pack(name)
            assert space.free == free

        self.change(work)
        self.held.remove(number)
        self.pages = {
            page: FREE if owner == number else owner
            for page, owner in self.pages.items()
        }

    @invariant()
    def equals_model(self) -> None:
        if not hasattr(self, "env"):
            return
        with self.env.begin(buffers=True) as txn:
            transaction = TableRows(txn, self.db)
            space = Allocator(transaction)
            owners: dict[tuple[int, int], int] = {}
            found = [(FREE, extent) for extent in space.free_extents()]
            assert sorted(extent for _, extent in found) == sorted(space.free_sizes())
            assert (
                len(
                    {(e.segment, e.page) for _, e in found}
                    & {(e.segment, e.end) for _, e in found}
                )
                == 0
            )
            assert set(space.writers()) == set(self.reserved)
            found += [(HOLE, extent) for extent in space.holes()]
            for writer in self.reserved:
                found += [
                    (RESERVED, extent) for extent in read_reserved(transaction, writer)
                ]
            for number in self.held:
                found += [
                    (number, extent)
                    for extent in read_extents(transaction, number.to_bytes(32, "big"))
                    or ()
                ]
            for owner, extent in found:
                for page in range(extent.page, extent.end):
                    assert owners.setdefault((extent.segment, page), owner) == owner
            assert owners == self.pages
            assert space.total == sum(owner != HOLE for owner in self.pages.values())
            assert space.free == sum(owner == FREE for owner in self.pages.values())
            assert space.reserved == sum(map(len, self.reserved.values()))

    def teardown(self) -> None:
        if hasattr(self, "env"):
            self.env.close()
            self.directory.cleanup()


def test_allocator_random_operations_match_model() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    limits = settings(
        max_examples=40,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=checks,
    )
    run_state_machine_as_test(AllocatorMachine, settings=limits)


@pytest.fixture
def placement() -> str:
    return "extents"


READER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True)
txn = env.begin()
print("began", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def reader(path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start a process that holds a snapshot until it is killed."""
    running = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", READER, str(path)]
        running.append(
            forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        assert stdout_of(running[-1]).readline() == b"began\n"
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def fill(backend: LmdbBackend, namespace: bytes, first: int = 0) -> list[bytes]:
    """Commit packs of 256 KiB until one is evicted. Return the ids of all packs."""
    written: list[bytes] = []
    while True:
        pack = sample_pack(
            namespace, first + len(written), blocks=4, block_bytes=1 << 16
        )
        written.append(pack.pack_id)
        if backend.commit(namespace, CommitBatch([pack])).evicted:
            return written


def test_commit_stopped_reader_pins_catalogue_raises_full_and_keeps_packs(
    open_store: Opener,
    identity: Identity,
    reader: Callable[[], subprocess.Popen[bytes]],
) -> None:
    """Evicted extents are reused at once. Pages of the catalogue that the reader sees are not: at
    last none is free."""
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    fill(backend, namespace)
    process = reader()
    refused: list[str] = []
    for seed in range(1000, 1400):
        try:
            backend.commit(
                namespace,
                CommitBatch(
                    [sample_pack(namespace, seed, blocks=4, block_bytes=1 << 16)]
                ),
            )
        except StoreFullError as error:
            refused.append(str(error))
        assert backend.stats().disk_bytes <= 16 << 20
        if len(refused) > 10:
            break
    assert find_faults(backend) == []
    assert refused
    assert all(f"process {process.pid} reads" in line for line in refused)
    assert check_totals(backend).packs > 40
    process.kill()
    process.communicate()
    fresh = sample_pack(namespace, 2000, blocks=4, block_bytes=1 << 16)
    backend.commit(namespace, CommitBatch([fresh]))
    assert read_pack(backend, namespace, fresh.table) == payload_of(fresh)


def test_read_deleted_segment_misses_and_commit_recreates_it(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([pack]))
    backend.close()
    (path / "segments" / "00000000.seg").unlink()
    with closing(open_store("", read_only=True)) as reader:
        assert read_pack(reader, namespace, pack.table) is None
    again = open_store()
    assert read_pack(again, namespace, pack.table) is None
    other = sample_pack(namespace, 2)
    again.commit(namespace, CommitBatch([other]))
    assert read_pack(again, namespace, other.table) == payload_of(other)
    assert read_pack(again, namespace, pack.table) != payload_of(pack)
    assert find_faults(again) == []


def test_read_truncated_segment_misses(
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
) -> None:
    pack = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([pack]))
    with open(path / "segments" / "00000000.seg", "r+b") as file:
        file.truncate(4096)
    assert read_pack(backend, namespace, pack.table) is None
    assert len(find_faults(backend)) == 1


def test_commit_segment_longer_than_recorded_truncates_it(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    before = backend.stats().disk_bytes
    backend.close()
    for name, length in (("00000000.seg", 4 << 20), ("00000007.seg", 1 << 20)):
        with open(path / "segments" / name, "ab") as file:
            file.write(bytes(length))
    again = open_store()
    assert again.stats().disk_bytes > before + (4 << 20)
    again.commit(namespace, CommitBatch(touches=[bytes(16)]))
    assert again.stats().disk_bytes <= before + (1 << 18)
    assert find_faults(again) == []


def test_read_pack_in_several_segments_returns_stored_bytes(
    open_store: Opener,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persistkv_lmdb.payloads.allocator.SEGMENT_BYTES", 1 << 20)
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    ids = fill(backend, namespace)
    backend.commit(namespace, CommitBatch(deletions=ids[::2]))
    large = sample_pack(namespace, 5000, blocks=50, block_bytes=70_001)
    backend.commit(namespace, CommitBatch([large]))
    with backend.environment.transaction() as transaction:
        extents = read_extents(transaction, namespace + large.pack_id)
        assert extents is not None
        assert len({extent.segment for extent in extents}) > 1
    payload = payload_of(large)
    assert read_pack(backend, namespace, large.table) == payload
    for offset, length in (
        (0, 1),
        (4095, 300_000),
        (len(payload) - 5, 5),
        (1 << 20, 2 << 20),
    ):
        buffers = [
            memoryview(bytearray(length // 3)),
            memoryview(bytearray(length - length // 3)),
        ]
        assert backend.read(namespace, [ReadSpan(large.pack_id, offset, buffers)]) == [
            True
        ]
        assert b"".join(buffers) == payload[offset : offset + length]
    assert find_faults(backend) == []


def test_read_damaged_extent_row_misses(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    packs = [sample_pack(namespace, seed) for seed in range(3)]
    backend.commit(namespace, CommitBatch(packs))
    backend.close()
    rows = [b"short", b"\xff" * 12, b""]
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        extents = env.open_db(b"extents", txn=txn)
        for pack, row in zip(packs, rows, strict=True):
            txn.put(namespace + pack.pack_id, row, db=extents)
    backend = open_store()
    assert [read_pack(backend, namespace, pack.table) for pack in packs] == [None] * 3
    assert len(find_faults(backend)) > 1


def segment_bytes(path: Path) -> int:
    return sum(
        512 * file.stat().st_blocks for file in (path / "segments").glob("*.seg")
    )


def test_commit_after_aborted_transaction_truncates_grown_segments(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    """Without the truncation, the catalogue could be granted space that the segment files still
    occupy."""
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    before = segment_bytes(path)
    with (
        suppress(ZeroDivisionError),
        backend.environment.transaction(write=True) as transaction,
    ):
        backend.environment.prepare_payloads(transaction).allocate(
            (16 << 20) // PAGE_BYTES
        )
        raise ZeroDivisionError
    assert segment_bytes(path) >= before + (16 << 20)
    backend.commit(namespace, CommitBatch(touches=[sample_pack(namespace, 1).pack_id]))
    assert segment_bytes(path) == before


GROW_AND_BE_KILLED = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv_lmdb import LmdbBackend
backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
with backend.environment.transaction(write=True) as transaction:
    payloads = backend.environment.prepare_payloads(transaction)
    payloads.allocate((16 << 20) // 4096)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_commit_after_killed_writer_truncates_grown_segments(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    before = segment_bytes(path)
    forked.run([sys.executable, "-c", GROW_AND_BE_KILLED, f"lmdb://{path}"])
    assert segment_bytes(path) >= before + (16 << 20)
    backend.commit(namespace, CommitBatch(touches=[sample_pack(namespace, 1).pack_id]))
    assert segment_bytes(path) == before
    assert find_faults(backend) == []


def test_commit_large_capacity_allocates_little_more_than_payload(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    """This holds for any capacity: files grow by 1/16 of their length, and a pack gets exactly its
    bytes."""
    backend = open_store("?capacity=64GiB")
    namespace = backend.open_namespace(identity).id
    for seed in range(24):
        backend.commit(
            namespace,
            CommitBatch([sample_pack(namespace, seed, blocks=16, block_bytes=1 << 16)]),
        )
        assert segment_bytes(path) < (seed + 1) * (17 << 16) + (2 << 20)
    assert find_faults(backend) == []


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "posix_fallocate"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_commit_one_failed_disk_call_keeps_stored_packs(
    backend: LmdbBackend,
    namespace: bytes,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    """A copy-on-write file system can report ENOSPC for allocated space. The driver treats it like
    a full disk."""
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    left = [True]

    def failing_once(real: Callable[P, T]) -> Callable[P, T]:
        def fail_once(*arguments: P.args, **options: P.kwargs) -> T:
            if left:
                left.clear()
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        return fail_once

    monkeypatch.setattr(os, call, failing_once(getattr(os, call)))
    pack = sample_pack(namespace, 2, blocks=20, block_bytes=1 << 20)
    if code == errno.ENOSPC:
        backend.commit(namespace, CommitBatch([pack]))
    else:
        with pytest.raises(StoreError, match="Input/output"):
            backend.commit(namespace, CommitBatch([pack]))
        assert set(tables(backend, namespace)) == {held.pack_id}
        backend.commit(namespace, CommitBatch([pack]))
    assert not left
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)
    assert read_pack(backend, namespace, held.table) == payload_of(held)
    assert find_faults(backend) == []


def test_commit_stale_cursor_leaves_totals_consistent(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    pack = sample_pack(namespace, 1)
    seen = backend.commit(namespace, CommitBatch([pack])).cursor
    # the next commit can reuse the freed pages
    backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
    assert backend.commit(
        namespace, CommitBatch([sample_pack(namespace, 2)], seen=seen)
    ).stale
    assert find_faults(backend) == []
