"""Reads whose pieces are used as they come: the same bytes as in one call, nothing in flight once they return."""

import errno
import mmap
import os
import random
from types import SimpleNamespace

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.pack import FRAME_BYTES
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import arriving
from persistkv_lmdb.kernel_aio import Ended, Queue
from persistkv_lmdb.payload import read_extents
from tests.backends.lmdb.aio_queues import Watched, needs_aio, use

PIECE = FRAME_BYTES
COUNT = 20
CALLS = [range(first, min(first + 4, COUNT)) for first in range(0, COUNT, 4)]  # pieces of each
BAD = {3: -errno.EIO, 1: 4096}  # what is said of some calls
BAD_PIECES = {piece for call in BAD for piece in CALLS[call]}
PAGE = 4096


@pytest.fixture
def placement():
    return "extents"


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


class AtOnce(Watched):
    """Tells of all that it has to do at once, as a virtio disk may."""

    def wait(self):
        ended = super().wait()
        while self.in_flight:
            ended += super().wait()
        return ended


@pytest.mark.parametrize("disk", [Watched, AtOnce])
def test_few_reads_at_a_time_and_the_next_before_what_came_is_looked_at(backend, identity, monkeypatch, disk):
    queues = use(monkeypatch, disk)
    stored = Stored(backend, identity)
    assert stored.read()
    needs_aio(queues)
    (queue,) = queues
    queue.begun.clear()
    seen = []
    assert stored.read(arrived=lambda number: seen.append((queue.in_flight, len(queue.begun))))
    assert len(seen) == COUNT
    assert seen[0][1] <= 4, "two, and the two after them"
    assert {in_flight for in_flight, begun in seen if begun < len(CALLS)} == {2}
    assert max(in_flight for in_flight, _ in seen) == 2


@pytest.mark.parametrize(("pieces", "calls"), [(4, []), (5, [4 * PIECE, PIECE]), (8, [4 * PIECE, 4 * PIECE])])
def test_what_is_one_call_is_read_as_ever_and_two_as_they_come(stored, queues, pieces, calls):
    room = stored.buffers()[: 4 * pieces]
    assert stored.read()
    needs_aio(queues)
    queues[0].begun.clear()
    stored.room[:] = bytes(len(stored.room))
    assert stored.read(room)
    assert [read.length for read in queues[0].begun] == calls
    assert b"".join(room) == stored.payload[: PIECE * pieces]


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
    """Has room for one read."""

    def begin(self, read):
        if self.in_flight == 1:
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
    assert len(queues[0].begun) == len(CALLS)
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


def test_a_store_that_is_opened_again_is_ready_to_read(open_store, identity, queues, monkeypatch):
    first = open_store()
    stored = Stored(first, identity)
    assert stored.read()
    needs_aio(queues)
    first.close()
    queues.clear()
    stored.room[:] = bytes(len(stored.room))
    stored.backend = open_store()
    assert not queues  # who never reads has none: to give it back takes a while
    for _ in range(2):
        stored.backend.open_namespace(identity)
    assert len(queues) == 1

    def opens(*arguments, **named):
        raise AssertionError("the first read opens a file")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opens)
        assert stored.read()
    assert len(queues) == 1
    assert stored.room == stored.payload


@pytest.mark.parametrize("fault", ["a file cannot be opened", "a file is lost"])
def test_what_cannot_be_made_ready_is_opened_when_it_is_needed(open_store, identity, queues, monkeypatch, path, fault):
    first = open_store()
    stored = Stored(first, identity)
    first.close()
    queues.clear()
    real, asked = os.open, []

    def refused(name, *arguments, **named):
        if str(name).endswith(".seg"):
            asked.append(name)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(name, *arguments, **named)

    if fault == "a file is lost":
        (path / "segments" / "00000000.seg").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        stored.backend = open_store()
        stored.backend.open_namespace(identity)
    assert not queues
    assert bool(asked) is (fault == "a file cannot be opened")
    assert stored.read() is (fault == "a file cannot be opened")


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
