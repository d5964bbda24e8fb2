"""Messages in pieces, malformed messages, and connections that end early."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from persistkv.errors import HostError
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host.connection import SocketConnection, ThreadConnection
from persistkv.storage.host.protocol import Flush, JobDone, Table, ToEngine, ToStore
from persistkv.storage.host.server.event_loop import serve
from persistkv.storage.records import StoreReport

MakePair = Callable[[], tuple[SocketConnection, SocketConnection]]


def pair() -> tuple[SocketConnection, SocketConnection]:
    ours, theirs = socket.socketpair()
    return SocketConnection(ours, ToEngine), SocketConnection(theirs, ToStore)


@pytest.mark.parametrize("make", [pair, ThreadConnection.pair])
def test_connection_large_and_small_messages_arrive_in_order(make: MakePair) -> None:
    engine, store = make()
    keys = PackedKeys.of([number.to_bytes(36, "little") for number in range(100_000)])
    sent: list[ToEngine] = [
        JobDone(1, PackedKeys(), 5),
        StoreReport(
            stored=keys.unpack(),
            removed=[b"a", b"bcd"],
            lost=True,
            collisions={b"a": True, b"bcd": False},
        ),
        StoreReport(persisted=[("r", True), ("s", False)]),
        JobDone(2, keys, 0),
    ]
    for message in sent:
        store.send(message)
    received: list[object] = []
    while len(received) < len(sent):
        store.push()
        received += engine.receive()
    assert received == sent
    store.close()
    assert engine.receive_rest() == []
    assert engine.ended
    engine.send(Flush(1))  # the connection has ended: dropped
    engine.close()


@pytest.mark.parametrize("make", [pair, ThreadConnection.pair])
@pytest.mark.parametrize("next_call", ["send", "receive"])
def test_connection_queued_message_leaves_with_next_call(
    make: MakePair,
    next_call: str,
) -> None:
    engine, store = make()
    engine.queue(Flush(1))
    assert store.receive() == []
    expected = [Flush(1)]
    if next_call == "send":
        engine.send(Flush(2))
        expected.append(Flush(2))
    else:
        engine.receive()
    assert store.receive() == expected
    store.close()
    engine.close()


@pytest.mark.parametrize("make", [pair, ThreadConnection.pair])
def test_connection_descriptor_arrives_with_its_message(make: MakePair) -> None:
    engine, store = make()
    keys = [number.to_bytes(36, "little") for number in range(100_000)]
    reader, writer = os.pipe()
    sent: list[StoreReport | Table] = [
        StoreReport(stored=keys),
        Table(3, os.dup(writer)),
        StoreReport(removed=keys),
        Table(4, writer),
    ]
    for message in sent:
        store.send(message)
    received: list[object] = []
    while len(received) < len(sent):
        store.push()
        received += engine.receive()
    tables = [message for message in received if isinstance(message, Table)]
    assert [table.slots for table in tables] == [3, 4]
    for table in tables:
        assert os.write(table.fd, b"x") == 1
        table.discard()
    assert os.read(reader, 10) == b"xx"
    assert os.read(reader, 10) == b"", "all other copies are closed"
    os.close(reader)
    store.close()
    engine.close()


@pytest.mark.parametrize("make", [pair, ThreadConnection.pair])
def test_connection_unreceived_descriptor_is_closed(make: MakePair) -> None:
    engine, store = make()
    reader, writer = os.pipe()
    store.send(Table(3, os.dup(writer)))
    store.close()
    engine.close()
    store.send(Table(4, writer))
    assert os.read(reader, 10) == b""
    os.close(reader)


@pytest.mark.parametrize("make", [pair, ThreadConnection.pair])
def test_connection_failed_send_ends_both_ends_after_last_message(
    make: MakePair,
) -> None:
    """Messages queued behind the failed one are lost, so each side must learn that it gets no
    answers."""
    engine, store = make()
    engine.send(Flush(1))
    keys = PackedKeys.of([number.to_bytes(36, "little") for number in range(100_000)])
    store.send(JobDone(1, keys, 0))  # more than the socket accepts at once
    store.send(Table(3))  # a descriptor that cannot be sent
    store.send(JobDone(2, PackedKeys(), 0))
    deadline = time.monotonic() + 30
    while not engine.ended:
        assert time.monotonic() < deadline, (
            "the engine waits for an answer that was dropped"
        )
        engine.receive()
        store.push()
    received = store.receive()
    while not store.ended:
        assert time.monotonic() < deadline
        received += store.receive()
    assert received == [Flush(1)]
    store.send(JobDone(3, PackedKeys(), 0))
    assert store.outbox_bytes == 0
    store.close()
    engine.close()


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1 << 31),
        b"\x02\0\0\0\x92\x01",
    ],
)
def test_connection_malformed_message_raises_and_ends(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    engine = SocketConnection(ours, ToEngine)
    theirs.sendall(garbage)
    with pytest.raises(HostError):
        engine.receive()
    assert engine.ended
    engine.close()
    theirs.close()


def test_serve_malformed_message_logs_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(
        target=serve,
        args=(SocketConnection(theirs, ToStore), memoryview(bytearray(4096))),
    )
    thread.start()
    ours.sendall(struct.pack("<I", 1) + b"\xc1")
    thread.join(10)
    assert not thread.is_alive()
    assert "malformed message" in caplog.text
    ours.close()
