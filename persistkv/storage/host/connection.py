"""Transport of messages between the engine and the host.

Neither side ever waits for the other: bytes that the socket does not accept stay in an outbox. Each
side sends messages that can wait only while its outbox has at most ``CONGESTED_BYTES``. The engine
also bounds its jobs in flight.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec

from persistkv.errors import HostError
from persistkv.storage.host.protocol import Table, ToEngine, ToStore, table_of

_LENGTH = struct.Struct("<I")
# four descriptors; more than one waits only if the host is fast
_FD_SPACE = socket.CMSG_SPACE(16)
# 256 KiB: the answers to many jobs, or some thousand keys of events
_RECEIVE_BYTES = 256 << 10
# bound on messages of other threads that the owner has not sent; older ones are dropped
_MOST_POSTED = 1_000
MAX_MESSAGE_BYTES = 1 << 30  # 1 GiB; a larger length is certainly malformed
CONGESTED_BYTES = 1 << 20  # 1 MiB in an outbox, not counting the socket's own buffer


def discard(messages: Iterable[Any]) -> None:
    """Close the file descriptors that messages carry, because the messages are not delivered."""
    for table in filter(None, map(table_of, messages)):
        table.discard()


class Connection:
    """One end of a message connection between the engine and the host. This class: an end that
    leads nowhere."""

    ended = False
    """True: this end was closed, or the other side has closed and all its messages were
    received."""
    outbox_bytes = 0
    """Bytes of sent messages that the socket has not accepted yet."""

    def send(self, message: ToStore | ToEngine) -> None:
        """Send or queue a message. Never waits; drops the message after the connection has
        ended."""

    def receive(self) -> list[Any]:
        """Return messages that have arrived. Never waits. A call reads 256 KiB at most, so that a
        step of the engine or of the host's loop stays short.

        :raises HostError: the input is malformed; the connection has ended.
        """
        return []

    def close(self) -> None:
        """Close this end; idempotent."""
        self.ended = True


class SocketConnection(Connection):
    """One end of a connection over a socket: length-prefixed msgpack messages on a stream socket.

    Only ``wake`` and ``post`` may be called by other threads than the one that waits for messages.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """:param receives: the union of message types that may arrive."""
        sock.setblocking(False)
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        # ``recv`` would allocate one in each step of an engine
        self._arriving = bytearray(_RECEIVE_BYTES)
        self._inbox = bytearray()
        self._outbox: deque[tuple[memoryview, Table | None]] = deque()
        self._fds: deque[int] = deque()
        self.outbox_bytes = 0
        self._posted: deque[ToEngine] = deque(maxlen=_MOST_POSTED)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ToStore | ToEngine) -> None:
        if self.ended:
            discard([message])
            return
        body = self._encoder.encode(message)
        self._outbox.append(
            (memoryview(_LENGTH.pack(len(body)) + body), table_of(message))
        )
        self.outbox_bytes += _LENGTH.size + len(body)
        self.push()

    def wake(self) -> None:
        """Make the current or next ``wait`` return."""
        with suppress(OSError):  # closed: the owner no longer waits
            os.eventfd_write(self._bell, 1)

    def post(self, message: ToEngine) -> None:
        """Send a message during the next ``wait``. The oldest of more than 1,000 unsent messages
        are dropped."""
        self._posted.append(message)
        self.wake()

    def push(self) -> None:
        """Send as many bytes of the outbox as the socket accepts."""
        try:
            while self._outbox:
                data, table = self._outbox[0]
                if table is None:
                    sent = self._socket.send(data)
                else:
                    sent = socket.send_fds(self._socket, [data], [table.fd])
                    table.discard()
                self.outbox_bytes -= sent
                self._outbox[0] = data[sent:], None
                if sent == len(data):
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._end_after_arrived()

    def _end_after_arrived(self) -> None:
        """End a connection that cannot send. Its peer receives no more messages, and would wait for
        them otherwise. ``receive`` returns the messages that have arrived, then sets ``ended``.
        """
        self._drop_outbox()
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def _drop_outbox(self) -> None:
        discard(table for _, table in self._outbox)
        self._outbox.clear()
        self.outbox_bytes = 0

    def receive(self) -> list[Any]:
        if self._outbox:
            self.push()
        return self._decoded() if self._pull() else []

    def receive_rest(self) -> list[Any]:
        """Return all messages that have arrived. For use when the other side is dead and sends no
        further ones."""
        while self._pull():
            pass
        return self._decoded()

    def wait(self, seconds: float | None, engine_pidfd: int | None) -> bool:
        """Wait until a message arrives, ``wake`` is called, the engine dies, or the time limit has
        passed.

        :param seconds: time limit; None: no limit.
        :param engine_pidfd: pidfd of the engine, to detect its death; None: do not detect it.
        :returns: whether the engine is dead.
        """
        poller = select.poll()
        poller.register(self, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        poller.register(self._bell, select.POLLIN)
        if engine_pidfd is not None:
            poller.register(engine_pidfd, select.POLLIN)
        ready = poller.poll(None if seconds is None else seconds * 1000)
        if any(fd == self._bell for fd, _ in ready):
            os.eventfd_read(self._bell)
        while self._posted and self.outbox_bytes <= CONGESTED_BYTES:
            self.send(self._posted.popleft())
        return any(fd == engine_pidfd for fd, _ in ready)

    def _pull(self) -> bool:
        """Read bytes from the socket into the inbox; return False if there are none or the
        connection has ended."""
        if self.ended:
            return False
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into(
                [self._arriving], _FD_SPACE, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._fds.extend(array("i", data[: len(data) // 4 * 4]))
        except BlockingIOError:
            return False
        except OSError:
            size = 0
        with memoryview(self._arriving) as arrived:
            self._inbox += arrived[:size]
        self.ended = not size
        return size > 0

    def _decoded(self) -> list[Any]:
        messages: list[Any] = []
        start = 0
        with memoryview(self._inbox) as view:
            while len(view) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_MESSAGE_BYTES:
                    self.ended = True
                    raise HostError(f"a message of {length} bytes was announced")
                end = start + _LENGTH.size + length
                if end > len(view):
                    break
                try:
                    messages.append(
                        self._decoder.decode(view[start + _LENGTH.size : end])
                    )
                    if (table := table_of(messages[-1])) is not None:
                        table.fd = self._fds.popleft()
                except IndexError:
                    self.ended = True
                    raise HostError(
                        "a lookup table came without its descriptor"
                    ) from None
                except (
                    msgspec.DecodeError,
                    UnicodeDecodeError,
                    RecursionError,
                ) as error:
                    self.ended = True
                    raise HostError(f"a message does not read: {error}") from None
                start = end
        del self._inbox[:start]
        return messages

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self.ended = True
        self._drop_outbox()
        while self._fds:
            os.close(self._fds.popleft())
        bell, self._bell = self._bell, -1
        os.close(bell)
        with suppress(OSError):
            # a forked child may hold a copy, which ``close`` leaves open
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()


class ThreadConnection(SocketConnection):
    """One end of a connection between threads. To receive, it makes no system call unless the other
    end has sent bytes.

    If it did, and a scheduler polled each millisecond, the thread at the other end might never run:
    the poll would release and reacquire the GIL before that thread is awake, and restart that
    thread's wait for the GIL each time (measured: 20 s for a job of 60 ms).
    """

    _other: ThreadConnection
    _has_bytes = False

    @classmethod
    def pair(cls) -> tuple[ThreadConnection, ThreadConnection]:
        """Return the ends of the engine and of the host."""
        engine, host = socket.socketpair()
        ends = cls(engine, ToEngine), cls(host, ToStore)
        ends[0]._other, ends[1]._other = ends[1], ends[0]
        return ends

    def push(self) -> None:
        if self._outbox:
            try:
                super().push()
            finally:  # the bytes may have been sent before an interrupt
                self._other._has_bytes = True

    def _end_after_arrived(self) -> None:
        self._has_bytes = True  # so that ``_pull`` finds the end
        super()._end_after_arrived()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._other._has_bytes = True

    def _pull(self) -> bool:
        if not self._has_bytes:
            return False
        self._has_bytes = False  # before the call: the other end may send during it
        pulled = super()._pull()
        if pulled:
            self._has_bytes = True  # there may be more
        return pulled
