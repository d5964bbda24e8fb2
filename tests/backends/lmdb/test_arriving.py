"""Reads whose pieces are used as they come: the same bytes as in one call, nothing in flight once they return."""

import errno
import mmap
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import StoreError
from persistkv.storage import reading
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.executor import ThreadExecutor
from persistkv.storage.pack import FRAME_BYTES
from persistkv.storage.records import StoreOptions
from persistkv.storage.rows import Rows
from persistkv.storage.store import Store
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import arriving
from persistkv_lmdb.kernel_aio import Ended, Queue, Read
from persistkv_lmdb.payload import read_extents

PIECE = FRAME_BYTES
COUNT = 20
CALLS = [range(1), *(range(first, min(first + 4, COUNT)) for first in range(1, COUNT, 4))]  # pieces of each
BAD = {3: -errno.EIO, 1: 4096}  # what is said of some calls
BAD_PIECES = {piece for call in BAD for piece in CALLS[call]}
PAGE = 4096


@pytest.fixture
def placement():
    return "extents"


class Watched(Queue):
    """Remembers the queues there were, and what was begun."""

    def __init__(self):
        super().__init__()
        self.begun: list[Read] = []
        self.closed = False
        self.opened.append(self)  # see ``use``

    def begin(self, read):
        super().begin(read)
        self.begun.append(read)

    def close(self):
        super().close()
        self.closed = True


def use(monkeypatch, queue_type):
    """Have stores use these queues; the list of those that there will be."""
    monkeypatch.setattr(queue_type, "opened", opened := [], raising=False)
    monkeypatch.setattr(arriving, "Queue", queue_type)
    return opened


@pytest.fixture
def queues(monkeypatch):
    return use(monkeypatch, Watched)


class Stored:
    """A pack of 20 frames of 1 MiB in a store, and room to read it into."""

    def __init__(self, backend, identity, seed=1):
        self.backend = backend
        self.namespace = backend.open_namespace(identity).id
        self.pack = sample_pack(self.namespace, seed, blocks=4 * COUNT, block_bytes=PIECE // 4)
        self.payload = payload_of(self.pack)
        self.came = []
        backend.commit(self.namespace, CommitBatch([self.pack]))
        self.room = memoryview(mmap.mmap(-1, len(self.payload)))

    def buffers(self, order=None):
        """Quarters of pieces, where ``order`` says."""
        size = PIECE // 4
        return [self.room[number * size : (number + 1) * size] for number in order or range(4 * COUNT)]

    def read(self, buffers=None, arrived=None):
        buffers = buffers or self.buffers()
        pieces = [4] * (len(buffers) // 4)
        return self.backend.read(
            self.namespace, [ReadSpan(self.pack.pack_id, 0, buffers, pieces, arrived or self.came.append)]
        )[0]

    def piece(self, number):
        return self.payload[number * PIECE : (number + 1) * PIECE]


def extents_of(stored):
    """Of the one pack that is stored."""
    with stored.backend._environment.transaction() as transaction:
        return [read_extents(transaction, stored.namespace + stored.pack.pack_id)]


def needs_aio(queues):
    if not any(queue.begun for queue in queues):
        pytest.skip("no asynchronous I/O past the page cache here")


@pytest.fixture
def stored(open_store, identity, queues):
    return Stored(open_store("?capacity=128MiB"), identity)


def test_each_piece_arrives_once_with_its_bytes(stored, queues):
    order = random.Random(1).sample(range(4 * COUNT), 4 * COUNT)
    buffers = stored.buffers(order)

    def arrived(number):
        assert b"".join(buffers[4 * number : 4 * number + 4]) == stored.piece(number)
        stored.came.append(number)

    assert stored.read(buffers, arrived)
    needs_aio(queues)
    assert sorted(stored.came) == list(range(COUNT))
    assert b"".join(buffers) == stored.payload
    assert [read.length for read in queues[0].begun] == [PIECE * len(pieces) for pieces in CALLS]
    assert len(queues) == 1
    assert queues[0].in_flight == 0


class Told(Watched):
    """Writes down what happens, in order."""

    def __init__(self):
        super().__init__()
        self.log = []

    def begin(self, read):
        super().begin(read)
        self.log.append("begin")

    def wait(self):
        ended = super().wait()
        self.log.append("wait")
        return ended


def test_the_last_read_is_handed_over_once_something_came(backend, identity, monkeypatch):
    """Before that is looked at: the disk is not to wait for it."""
    queues = use(monkeypatch, Told)
    stored = Stored(backend, identity)
    assert stored.read()
    needs_aio(queues)
    log = queues[0].log
    log.clear()
    assert stored.read(arrived=lambda number: log.append("arrived"))
    assert log[: len(CALLS) + 1] == ["begin"] * (len(CALLS) - 1) + ["wait", "begin"]
    assert log.count("arrived") == COUNT


def test_few_reads_are_handed_over_at_once(backend, identity, monkeypatch):
    queues = use(monkeypatch, Told)
    stored = Stored(backend, identity)
    pieces = CALLS[2][-1] + 1
    room = stored.buffers()[: 4 * pieces]
    assert stored.read(room)
    needs_aio(queues)
    assert queues[0].log[:4] == ["begin"] * 3 + ["wait"]
    assert b"".join(room) == stored.payload[: PIECE * pieces]


def test_more_reads_than_may_be_in_flight(backend, identity, monkeypatch):
    class Shallow(Watched):
        def begin(self, read):
            assert self.in_flight < 2
            super().begin(read)

    monkeypatch.setattr(arriving, "DEPTH", 2)
    read_whole_by(Shallow, monkeypatch, backend, identity)


def test_a_queue_is_used_again(stored, queues):
    for _ in range(3):
        assert stored.read()
    needs_aio(queues)
    assert len(queues) == 1
    assert not queues[0].closed
    stored.backend.close()
    assert queues[0].closed


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOSYS, errno.EPERM])
def test_where_the_kernel_refuses_reads_are_as_ever(open_store, identity, monkeypatch, code):
    asked = []

    class Refused(Queue):
        def _call(self, *arguments):
            asked.append(arguments)
            raise OSError(code, os.strerror(code))

    use(monkeypatch, Refused)
    stored = Stored(open_store("?capacity=128MiB"), identity)
    for _ in range(2):
        assert stored.read()
        assert stored.room == stored.payload
        stored.room[:] = bytes(len(stored.room))
    assert stored.came == []
    assert len(asked) <= 1  # it is asked once


@pytest.mark.parametrize(("code", "passes"), [(errno.EAGAIN, True), (errno.ENOSYS, False)])
def test_kernel_whose_aio_others_had_taken_up_is_asked_again(open_store, identity, monkeypatch, code, passes):
    now, refuses, asked = 1000.0, True, 0

    class Refused(Queue):
        def __init__(self):
            nonlocal asked
            asked += 1
            if refuses:
                raise OSError(code, os.strerror(code))
            super().__init__()

    monkeypatch.setattr(arriving, "Queue", Refused)
    monkeypatch.setattr(arriving, "time", SimpleNamespace(monotonic=lambda: now))
    stored = Stored(open_store("?capacity=128MiB"), identity)
    if stored.read() and not asked:
        pytest.skip("this file system takes no reads past the page cache")
    for _ in range(2):
        now += 25.0
        assert stored.read()
    assert asked == 1, "not with each read"
    now += 25.0
    refuses = False
    assert stored.read()
    assert stored.room == stored.payload
    assert asked == 1 + passes
    assert bool(stored.came) == passes


def test_buffers_that_are_not_aligned(stored, queues):
    room = memoryview(mmap.mmap(-1, len(stored.payload) + PAGE))[8:-PAGE]
    buffers = [room[start : start + PIECE // 4] for start in range(0, COUNT * PIECE, PIECE // 4)]
    assert stored.read([*buffers[:-1], room[(4 * COUNT - 1) * PIECE // 4 :][: PIECE // 4]])
    assert b"".join(buffers[:-1]) == stored.payload[: -PIECE // 4]
    assert all(queue.in_flight == 0 for queue in queues)


class Grudging(Watched):
    """Has room for two reads."""

    def begin(self, read):
        if self.in_flight == 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        super().begin(read)


def read_whole_by(queue_type, monkeypatch, backend, identity):
    """In which order the pieces of a pack come; all of them do."""
    queues = use(monkeypatch, queue_type)
    stored = Stored(backend, identity)
    assert stored.read()
    assert stored.room == stored.payload
    needs_aio(queues)
    assert sorted(stored.came) == list(range(COUNT))
    return stored.came


def test_a_kernel_that_takes_few_at_a_time(backend, identity, monkeypatch):
    read_whole_by(Grudging, monkeypatch, backend, identity)


class Failing(Watched):
    """Says of one call that it failed, and of one that it was short."""

    def wait(self):
        return [Ended(number, BAD.get(number, result)) for number, result in super().wait()]


def test_what_did_not_come_is_read_again(backend, identity, monkeypatch):
    came = read_whole_by(Failing, monkeypatch, backend, identity)
    assert set(came[-len(BAD_PIECES) :]) == BAD_PIECES


def test_a_disk_that_fails(open_store, identity, monkeypatch):
    queues = use(monkeypatch, Failing)
    stored = Stored(open_store("?capacity=128MiB"), identity)
    assert stored.read()
    needs_aio(queues)
    stored.came.clear()
    stored.room[:] = bytes(len(stored.room))

    def preadv(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
        stored.read()
    assert sorted(stored.came) == [number for number in range(COUNT) if number not in BAD_PIECES]
    assert queues[0].in_flight == 0
    for number in stored.came:
        assert stored.room[number * PIECE : (number + 1) * PIECE] == stored.piece(number)


def test_a_file_that_ends_within(stored, path, queues):
    with open(path / "segments" / "00000000.seg", "r+b") as file:
        file.truncate(7 * PIECE + 3 * PAGE)
    assert not stored.read()
    needs_aio(queues)
    assert sorted(stored.came) == list(range(7))
    assert stored.room[: 7 * PIECE] == stored.payload[: 7 * PIECE]


def test_extents_that_are_too_short_for_what_is_wanted(stored, queues):
    assert stored.read()
    needs_aio(queues)
    stored.came.clear()
    (extents,) = extents_of(stored)
    short = [extents[0]._replace(pages=extents[0].pages // 2)]
    pieces = [4] * COUNT
    files = stored.backend._environment.files
    assert not files.read(short, 0, stored.buffers(), pieces=pieces, arrived=stored.came.append)
    assert stored.came == []


def test_nothing_is_in_flight_once_it_raises(stored, queues):
    """Whatever was begun has ended: its bytes are there, and none comes later."""

    class Interrupted(Exception):
        pass

    def arrived(number):
        raise Interrupted

    if not stored.read():
        pytest.fail("it does not read")
    needs_aio(queues)
    stored.room[:] = bytes(len(stored.room))
    before = len(queues[0].begun)
    with pytest.raises(Interrupted):
        stored.read(arrived=arrived)
    assert queues[0].closed
    for read in queues[0].begun[before:]:
        begin = CALLS[read.number][0] * PIECE
        assert stored.room[begin : begin + read.length] == stored.payload[begin : begin + read.length]
    assert stored.read()
    assert len(queues) == 2


BLOCK = 64 << 10
BLOCKS = 256


def rows_of(seed):
    memory = memoryview(mmap.mmap(-1, 2 * BLOCKS * BLOCK))
    np.frombuffer(memory, np.uint8)[: BLOCKS * BLOCK] = np.random.default_rng(seed).integers(
        0, 256, BLOCKS * BLOCK, dtype=np.uint8
    )
    return Rows(memory, RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),)))


def names(first, count):
    return [number.to_bytes(32, "big") + bytes(4) for number in range(first, first + count)]


@pytest.fixture
def open_whole(open_store, identity):
    """A store on the driver, with rows: the first half is stored from, the second loaded to."""
    opened = []

    def open_whole(seed=1, **options):
        executor = ThreadExecutor(2, lambda: None)
        backend = open_store("?capacity=256MiB")
        store = Store(backend, identity, rows_of(seed), StoreOptions(**options), url="lmdb:", executor=executor)
        opened.append(store)
        return store

    yield open_whole
    for store in opened:
        store.close()
        store.medium.executor.close()


def loaded(store, wanted):
    """What the rows hold of the blocks asked for, by number; None: a miss."""
    order = random.Random(len(wanted)).sample(range(BLOCKS, 2 * BLOCKS), len(wanted))
    store.rows.array[BLOCKS:] = 0
    failed = set(store.read([names(number, 1)[0] for number in wanted], order))
    return [
        None if names(number, 1)[0] in failed else store.rows.array[row].tobytes()
        for number, row in zip(wanted, order, strict=True)
    ]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_random_jobs_are_the_same_in_both_ways(open_whole, monkeypatch, queues, codec):
    store = open_whole(codec=codec)
    store.rows.array[:BLOCKS, BLOCK // 4 :] = 7  # for codecs to have work
    for first in (0, BLOCKS // 2):
        store.put(f"r{first}", names(first, BLOCKS // 2), range(first, first + BLOCKS // 2), None)
    store.flush()
    held = [row.tobytes() for row in store.rows.array[:BLOCKS]]
    rng = random.Random(3)
    for _ in range(6):
        first = rng.randrange(BLOCKS // 3)
        wanted = range(first, rng.randrange(first + BLOCKS // 2, BLOCKS))
        if rng.random() < 0.5:
            wanted = rng.sample(wanted, len(wanted) * 3 // 4)
        assert loaded(store, wanted) == [held[number] for number in wanted]
    if codec == "raw":
        needs_aio(queues)
    monkeypatch.setattr(store.medium.backend._environment.files._arriving, "_refused", True)
    monkeypatch.setattr(store.medium.backend._environment.files._arriving, "_free", [])
    assert loaded(store, range(BLOCKS)) == held


def test_a_bad_frame_costs_no_other(open_whole, queues, path):
    """Two packs in one job, one with a flipped byte: the rest of its frames, and all of the other's, are served."""
    store = open_whole()
    half = BLOCKS // 2
    for first in (0, half):
        store.put(f"r{first}", names(first, half), range(first, first + half), range(half))
        store.flush()
    held = [row.tobytes() for row in store.rows.array[:BLOCKS]]
    with open(path / "segments" / "00000000.seg", "r+b") as file:
        file.seek(3 * FRAME_BYTES + 5)
        byte = file.read(1)
        file.seek(3 * FRAME_BYTES + 5)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = loaded(store, range(BLOCKS))
    needs_aio(queues)
    bad = [number for number in range(BLOCKS) if found[number] is None]
    assert len(bad) == FRAME_BYTES // BLOCK
    assert [found[number] for number in range(BLOCKS) if number not in bad] == [
        held[number] for number in range(BLOCKS) if number not in bad
    ]
    assert store.counters.verification_failures == 1


def test_a_frame_that_cannot_be_finished_is_no_fault_of_the_store(open_whole, queues, monkeypatch):
    store = open_whole()
    store.put("r", names(0, BLOCKS), range(BLOCKS), range(BLOCKS))
    store.flush()
    held = [row.tobytes() for row in store.rows.array[:BLOCKS]]
    verify, calls = reading._verify_pieces, []

    def runs_out_of_memory_once(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise MemoryError
        verify(*arguments)

    monkeypatch.setattr(reading, "_verify_pieces", runs_out_of_memory_once)
    found = loaded(store, range(BLOCKS))
    needs_aio(queues)
    assert found.count(None) == FRAME_BYTES // BLOCK
    assert all(one in (None, other) for one, other in zip(found, held, strict=True))
    assert store.counters.verification_failures == 0
    calls.clear()
    monkeypatch.setattr(reading, "_verify_pieces", verify)
    assert loaded(store, range(BLOCKS)) == held


def test_rows_are_free_once_the_calls_have_ended(open_whole, queues):
    """Of a job whose outcome nobody waits for: closing does, and nothing writes its rows later."""
    store = open_whole()
    store.put("r", names(0, BLOCKS), range(BLOCKS), None)
    store.flush()
    store.medium.executor.close()  # of the writer; its threads are not needed any more
    ending = store.medium.executor = ThreadExecutor(2, lambda: None)
    store.begin_read(names(0, BLOCKS), range(BLOCKS, 2 * BLOCKS), lambda outcome: None)
    ending.close()
    needs_aio(queues)
    assert all(queue.in_flight == 0 for queue in queues)
    assert np.array_equal(store.rows.array[BLOCKS:], store.rows.array[:BLOCKS])
    store.medium.executor = ThreadExecutor(2, lambda: None)
