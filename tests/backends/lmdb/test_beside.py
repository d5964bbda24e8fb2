"""Writes that run beside a transaction: they have ended when it does, however it does."""

import os
import sys
import threading
from contextlib import suppress
from functools import partial

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalog import CatalogTransaction
from persistkv.testing.samples import sample_pack
from persistkv_lmdb.beside import Beside
from persistkv_lmdb.check import find_faults
from persistkv_lmdb.room import Amount, Room

SECONDS = 30.0  # of patience


@pytest.fixture
def beside():
    made = Beside("test", 2)
    yield made
    made.close()


def test_settle_waits_for_all_and_raises_the_first(beside):
    may_end = threading.Event()
    ended = []

    def fail(name):
        ended.append(name)
        raise OSError(name)

    def wait():
        assert may_end.wait(SECONDS)
        ended.append("waited")

    beside.begin(wait)
    beside.begin(lambda: fail("first"))
    beside.begin(lambda: fail("second"))
    beside.begin(may_end.set)
    with pytest.raises(OSError, match="first"):
        beside.settle()
    assert sorted(ended) == ["first", "second", "waited"]
    beside.settle()


def test_a_failure_keeps_nothing_of_what_its_call_was_given(beside):
    """It may be rows, which could not be unmapped then."""

    def fail(rows):
        raise OSError(len(rows))

    memory = bytearray(8)
    beside.begin(partial(fail, memoryview(memory)))
    with suppress(OSError):
        beside.settle()
    memory.extend(b"BufferError, were it held")


def test_call_has_begun_where_a_thread_is_idle(beside):
    begun, may_end = [], threading.Event()
    for number in range(2):
        beside.begin(lambda number=number: (begun.append(number), may_end.wait(SECONDS)))
    assert len(beside._calls) == 2
    assert all(call.begun.is_set() for call in beside._calls)
    beside.begin(lambda: begun.append(2))  # no thread is idle: this one waits for its turn, and not we
    may_end.set()
    beside.settle()
    assert sorted(begun) == [0, 1, 2]


def interrupted_at(step, function, call):
    """Run ``call``, and interrupt it before so many steps (bytecodes) of a function; tells whether it was."""
    left = step

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code is not function.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def settled(beside):
    """Whether a wait ends."""
    waiting = threading.Thread(target=beside.settle, daemon=True)
    waiting.start()
    waiting.join(SECONDS)
    return not waiting.is_alive()


def test_interrupt_in_begin_leaves_nothing_that_is_waited_for_in_vain():
    step, interrupted, ran = 0, True, []
    while interrupted:
        step += 1
        ran = []
        made = Beside("test", 1)
        made.begin(partial(ran.append, "before"))
        interrupted = interrupted_at(
            step, Beside.begin, lambda ran=ran, made=made: made.begin(lambda: ran.append("it"))
        )
        assert settled(made), f"a wait does not end after an interrupt at step {step}"
        known = list(ran)
        assert known in (["before"], ["before", "it"])
        made.begin(partial(ran.append, "behind"))
        made.settle()
        made.close()
        assert ran == [*known, "behind"], "what was waited for runs later, or again"
    assert step > 20
    assert ran == ["before", "it", "behind"]


def test_interrupt_in_settle_leaves_a_wait_that_ends():
    step, interrupted = 0, True
    while interrupted:
        step += 1
        made = Beside("test", 2)
        ran = []
        for number in range(4):
            made.begin(partial(ran.append, number))
        interrupted = interrupted_at(step, Beside.settle, made.settle)
        assert settled(made), f"a wait does not end after an interrupt at step {step}"
        assert sorted(ran) == [0, 1, 2, 3]
        made.close()
    assert step > 20


def test_commit_without_room_leaves_no_write_on_its_way(backend, namespace, placement, monkeypatch):
    """It is asked for room while the disk is at work; the transactions that make some begin behind that."""
    if placement == "inline":
        pytest.skip("LMDB writes its own")
    may_write, writes, running, summed_up, refused, begun = threading.Event(), threading.Event(), [], [], [], []
    pwritev, sum_up, used, begin = os.pwritev, CatalogTransaction.finish, Room.used, Room.__init__

    def slow(*arguments):
        running.append(True)
        writes.set()
        assert may_write.wait(SECONDS)
        written = pwritev(*arguments)
        running.pop()
        return written

    def note_sum(self):
        sum_up(self)
        summed_up.append(True)

    def too_much_once(self):
        if not summed_up or refused:
            return used(self)
        assert writes.wait(SECONDS)
        refused.append(len(running))
        threading.Timer(0.1, may_write.set).start()
        return Amount(1 << 60, 1 << 60)

    def note_begin(self, *arguments, **options):
        begun.append(len(running))
        begin(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", slow)
        patch.setattr(CatalogTransaction, "finish", note_sum)
        patch.setattr(Room, "used", too_much_once)
        patch.setattr(Room, "__init__", note_begin)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1, blocks=3, block_bytes=1 << 20)]))
    assert refused == [1], "asked while the disk is at work"
    assert len(begun) > 1
    assert not any(begun), "a transaction began before the writes of the one before had ended"
    assert find_faults(backend._environment) == []


def test_undone_transaction_leaves_no_write_on_its_way(backend, namespace, placement, monkeypatch):
    """Its extents may be taken by the next one, and its blocks are in rows that are free once the commit has failed."""
    if placement == "inline":
        pytest.skip("LMDB writes its own")
    may_write, running, writes = threading.Event(), [], []
    pwritev = os.pwritev

    def slow(*arguments):
        running.append(True)
        assert may_write.wait(SECONDS)
        writes.append(pwritev(*arguments))
        running.pop()
        return writes[-1]

    def fail(self):
        threading.Timer(0.1, may_write.set).start()
        raise StoreError("undone")

    pack = sample_pack(namespace, 1, blocks=3, block_bytes=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", slow)
        patch.setattr(CatalogTransaction, "finish", fail)
        with pytest.raises(StoreError, match="undone"):
            backend.commit(namespace, CommitBatch([pack]))
        assert writes
        assert not running
    backend.commit(namespace, CommitBatch([pack]))
    assert find_faults(backend._environment) == []
