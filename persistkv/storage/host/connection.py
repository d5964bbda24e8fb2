"""What carries messages between the engine's side and the store's side.

Neither side ever waits for the other: what the socket does not take stays in an outbox. Each side looks whether its own
is ``congested`` before it tells what need not be told now; the engine's side bounds what is in flight beside that.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from persistkv.errors import HostError
from persistkv.storage.host.protocol import ToEngine, ToStore

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 256 << 10  # 256 KiB: the answers to many jobs, or some thousand keys of a catalogue
_MESSAGES_A_STEP = 64
_MOST_POSTED = 1_000  # messages from other threads that wait for the owner's; older ones are let go of
MAX_MESSAGE_BYTES = 1 << 30  # 1 GiB; a larger length can only be garbage
CONGESTED_BYTES = 1 << 20  # 1 MiB in an outbox, beside what the socket itself holds
_CONGESTED_MESSAGES = 256


class Connection(ABC):
    """One end, as its owner sees it."""

    @abstractmethod
    def send(self, message: ToStore | ToEngine) -> None:
        """Hand a message over. Never waits; nothing is sent once the connection has ended."""

    @abstractmethod
    def receive(self) -> list[Any]:
        """What has arrived, or some of it. Never waits.

        :raises HostError: what arrives makes no sense; the connection has ended then.
        """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the other side is gone; what it sent before was received."""

    @property
    @abstractmethod
    def congested(self) -> bool:
        """Whether much was sent that the other side has not taken."""

    @abstractmethod
    def close(self) -> None:
        """End it; idempotent."""


class ServedConnection(Connection):
    """An end that the store's side sleeps on."""

    @abstractmethod
    def wake(self) -> None:
        """End the owner's sleep, or its next one. From any thread."""

    @abstractmethod
    def post(self, message: ToEngine) -> None:
        """Have the owner send a message when it wakes. From any thread."""

    @abstractmethod
    def wait(self, seconds: float | None, engine_pidfd: int | None) -> bool:
        """Sleep until something arrives, or it is woken, or so long; None: without an end.

        :param engine_pidfd: readable once the engine is dead.
        :returns: whether the engine is dead.
        """

    @abstractmethod
    def receive_rest(self) -> list[Any]:
        """All that has arrived: the other side will send nothing more."""


_WAKE = object()
"""In a queue: nothing but a reason to wake."""


class QueueConnection(ServedConnection):
    """One end of two queues within a process.

    A look for messages makes no system call. Where it does, and a scheduler looks each millisecond, the thread behind
    the other end may never run: the GIL is let go and taken back before that thread is awake, and each time its wait
    for the GIL begins anew (seen: 20 s for a job of 60 ms).
    """

    def __init__(self, inbox: SimpleQueue[Any], outbox: SimpleQueue[Any]) -> None:
        """Use ``pair``."""
        self._inbox = inbox
        self._outbox = outbox
        self._waited_for: list[Any] = []
        self._ended = False

    @classmethod
    def pair(cls) -> tuple[QueueConnection, QueueConnection]:
        """Both ends."""
        there: SimpleQueue[Any] = SimpleQueue()
        back: SimpleQueue[Any] = SimpleQueue()
        return cls(back, there), cls(there, back)

    @property
    def ended(self) -> bool:
        return self._ended

    def send(self, message: ToStore | ToEngine) -> None:
        if not self._ended:
            self._outbox.put(message)

    @property
    def congested(self) -> bool:
        return self._outbox.qsize() > _CONGESTED_MESSAGES

    def wake(self) -> None:
        self._inbox.put(_WAKE)

    def post(self, message: ToEngine) -> None:
        self.send(message)

    def receive(self) -> list[Any]:
        """At most some dozens at a time, so that a step stays short."""
        messages, self._waited_for = self._waited_for, []
        while not self._ended and len(messages) < _MESSAGES_A_STEP:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                break
            self._take(message, messages)
        return messages

    def receive_rest(self) -> list[Any]:
        messages = self.receive()
        while more := self.receive():
            messages += more
        return messages

    def wait(self, seconds: float | None, engine_pidfd: int | None) -> bool:
        if not self._waited_for and not self._ended:
            with suppress(Empty):
                self._take(self._inbox.get(timeout=seconds), self._waited_for)
        return False

    def _take(self, message: Any, messages: list[Any]) -> None:
        if message is None:
            self._ended = True
        elif message is not _WAKE:
            messages.append(message)

    def close(self) -> None:
        if not self._ended:
            self._outbox.put(None)
        self._ended = True


class SocketConnection(ServedConnection):
    """Length-prefixed msgpack over one end of a stream socket pair."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """:param receives: the union of message types that may arrive."""
        sock.setblocking(False)
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        self._arriving = bytearray(_RECEIVE_BYTES)
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._posted: deque[ToEngine] = deque(maxlen=_MOST_POSTED)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = False

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def ended(self) -> bool:
        return self._ended

    def send(self, message: ToStore | ToEngine) -> None:
        if self._ended:
            return
        body = self._encoder.encode(message)
        self._outbox.append(memoryview(_LENGTH.pack(len(body)) + body))
        self._outbox_bytes += _LENGTH.size + len(body)
        self.push()

    @property
    def congested(self) -> bool:
        return self._outbox_bytes > CONGESTED_BYTES

    def wake(self) -> None:
        with suppress(OSError):  # closed: nobody sleeps here any more
            os.eventfd_write(self._bell, 1)

    def post(self, message: ToEngine) -> None:
        self._posted.append(message)
        self.wake()

    def push(self) -> None:
        """Send what the socket takes."""
        try:
            while self._outbox:
                sent = self._socket.send(self._outbox[0])
                self._outbox_bytes -= sent
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()  # the other side is gone; ``receive`` finds that out, after what it sent last
            self._outbox_bytes = 0

    def receive(self) -> list[Any]:
        """At most 256 KiB at a time, so that a step stays short while a whole catalogue arrives."""
        if self._outbox:
            self.push()
        return self._decoded() if self._pull() else []

    def receive_rest(self) -> list[Any]:
        while self._pull():
            pass
        return self._decoded()

    def wait(self, seconds: float | None, engine_pidfd: int | None) -> bool:
        poller = select.poll()
        poller.register(self, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        poller.register(self._bell, select.POLLIN)
        if engine_pidfd is not None:
            poller.register(engine_pidfd, select.POLLIN)
        ready = poller.poll(None if seconds is None else seconds * 1000)
        if any(fd == self._bell for fd, _ in ready):
            os.eventfd_read(self._bell)
        while self._posted and not self.congested:
            self.send(self._posted.popleft())
        return any(fd == engine_pidfd for fd, _ in ready)

    def _pull(self) -> bool:
        """Take bytes from the socket; False where there are none, as in most steps of an engine: into memory that
        stays, since ``recv`` would have as much allocated for each look.
        """
        if self._ended:
            return False
        try:
            size = self._socket.recv_into(self._arriving)
        except BlockingIOError:
            return False
        except OSError:
            size = 0
        with memoryview(self._arriving) as arrived:
            self._inbox += arrived[:size]
        self._ended = not size
        return size > 0

    def _decoded(self) -> list[Any]:
        messages: list[Any] = []
        start = 0
        with memoryview(self._inbox) as view:
            while len(view) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_MESSAGE_BYTES:
                    self._ended = True
                    raise HostError(f"a message of {length} bytes was announced")
                end = start + _LENGTH.size + length
                if end > len(view):
                    break
                try:
                    messages.append(self._decoder.decode(view[start + _LENGTH.size : end]))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    self._ended = True
                    raise HostError(f"a message does not read: {error}") from None
                start = end
        del self._inbox[:start]
        return messages

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._ended = True
        bell, self._bell = self._bell, -1
        os.close(bell)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)  # a child that we forked holds a copy, which ``close`` leaves open
        self._socket.close()
