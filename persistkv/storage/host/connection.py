"""Transport of messages between the engine and the host.

Neither side ever waits for the other: bytes that the socket does not accept stay in an outbox. Each
side sends messages that can wait only while its outbox has at most ``CONGESTED_BYTES``. The engine
also bounds its jobs in flight.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from persistkv.errors import HostError
from persistkv.storage.host.protocol import Table, ToEngine, ToStore, table_of

_LENGTH = struct.Struct("<I")  # precedes each message: number of bytes of its body
_FD_BYTES = 4
# space for four descriptors; at most one is on its way, because a host sends the next table after
# ``Mapped``
_FD_SPACE = socket.CMSG_SPACE(4 * _FD_BYTES)
# 256 KiB: room for the answers to many jobs, or for some thousand keys of events
_RECEIVE_BYTES = 256 << 10
MAX_MESSAGE_BYTES = 1 << 30  # 1 GiB; a larger length is certainly malformed
CONGESTED_BYTES = 1 << 20  # 1 MiB in an outbox, not counting the socket's own buffer


def discard(message: Any) -> None:
    """Close the file descriptor of a message that is not delivered, if it carries one."""
    table = table_of(message)
    if table is not None:
        table.discard()


class _Outgoing(NamedTuple):
    """A message in the outbox."""

    data: memoryview
    """The encoded bytes that are not sent yet."""
    table: Table | None
    """The table whose descriptor must be sent with ``data``; None: no descriptor is left to
    send."""


class Connection:
    """One end of a message connection between the engine and the host. An object of this base class
    has no other end: it drops sent messages, and receives none."""

    ended = True
    """True: this end was closed, or the other side has closed and all its messages were
    received."""
    outbox_bytes = 0
    """Bytes of sent messages that the socket has not accepted yet."""

    def send(self, message: ToStore | ToEngine) -> None:
        """Send or queue a message. Never waits; drops the message after the connection has
        ended."""

    def queue(self, message: ToStore | ToEngine) -> None:
        """Queue a message until the next ``send`` or ``receive``, without a system call."""

    def receive(self) -> list[Any]:
        """Return messages that have arrived. Never waits. A call reads 256 KiB at most, so that a
        step of the engine or of the host's loop stays short.

        :raises HostError: the input is malformed; the connection has ended.
        """
        return []

    def close(self) -> None:
        """Close this end; idempotent."""


class SocketConnection(Connection):
    """One end of a connection over a socket: length-prefixed msgpack messages on a stream socket.
    Not thread-safe."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """:param receives: the union of message types that may arrive."""
        sock.setblocking(False)
        self.ended = False
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        # one buffer for all calls: ``recv`` would allocate one in each step of an engine
        self._arriving = bytearray(_RECEIVE_BYTES)
        self._inbox = bytearray()
        """Received bytes that are not decoded yet; between calls, part of one message at most."""
        self._outbox: deque[_Outgoing] = deque()
        """Messages that are not sent yet, or not all of their bytes."""
        self._fds: deque[int] = deque()
        """Received descriptors, in the order of the tables that they belong to."""
        self.outbox_bytes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ToStore | ToEngine) -> None:
        self.queue(message)
        self.push()

    def queue(self, message: ToStore | ToEngine) -> None:
        """Append a message to the outbox, without a system call; drop it after the end."""
        if self.ended:
            discard(message)
            return
        body = self._encoder.encode(message)
        data = _LENGTH.pack(len(body)) + body
        # a lookup table is kept with the bytes, because ``push`` sends its descriptor with them
        outgoing = _Outgoing(memoryview(data), table_of(message))
        self._outbox.append(outgoing)
        self.outbox_bytes += len(data)

    def push(self) -> None:
        """Send as many bytes of the outbox as the socket accepts. If sending fails, the connection
        ends; nothing is raised."""
        try:
            while self._outbox:
                data, table = self._outbox[0]
                if table is None:
                    sent = self._socket.send(data)
                else:
                    sent = socket.send_fds(self._socket, [data], [table.fd])
                    # the kernel has a copy of the descriptor: bytes that are left are sent without
                    # it
                    table.discard()
                self.outbox_bytes -= sent
                if sent == len(data):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = _Outgoing(data[sent:], None)
        except BlockingIOError:
            return
        except OSError:
            self._end_after_arrived()

    def _end_after_arrived(self) -> None:
        """End a connection on which a call to send has failed. The shutdown also ends the peer's
        side, which would wait for the dropped messages otherwise. ``receive`` first returns the
        messages that have arrived, then sets ``ended``.
        """
        self._drop_outbox()
        with suppress(OSError):  # the socket is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def _drop_outbox(self) -> None:
        """Drop the messages that are not sent, and close the descriptors of their tables."""
        for outgoing in self._outbox:
            if outgoing.table is not None:
                outgoing.table.discard()
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

    def _pull(self) -> bool:
        """Read bytes from the socket into the inbox; return False if there are none or the
        connection has ended."""
        if self.ended:
            return False
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into(
                [self._arriving], _FD_SPACE, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:
            # treat a broken connection like a closed one, which has no bytes
            size = 0
            ancillary = []
        self._keep_fds(ancillary)
        with memoryview(self._arriving) as arrived:
            self._inbox += arrived[:size]
        self.ended = not size
        return size > 0

    def _keep_fds(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        """Keep the descriptors that have arrived as ancillary data of the bytes."""
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                num_fds = len(data) // _FD_BYTES
                fds = array("i", data[: num_fds * _FD_BYTES])
                self._fds.extend(fds)

    def _decoded(self) -> list[Any]:
        """Remove the whole messages from the inbox, and return them decoded."""
        messages: list[Any] = []
        start = 0
        with memoryview(self._inbox) as view:
            while len(view) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_MESSAGE_BYTES:
                    self.ended = True
                    raise HostError(f"a message of {length} bytes was announced")
                body_at = start + _LENGTH.size
                end = body_at + length
                if end > len(view):
                    break
                # ``with`` releases the view even if a traceback keeps it: a bytearray with a view
                # cannot shrink
                with view[body_at:end] as body:
                    message = self._decode(body)
                messages.append(message)
                start = end
        del self._inbox[:start]
        return messages

    def _decode(self, body: memoryview) -> Any:
        """Return the message with this body, and with its descriptor if it has one.

        :raises HostError: it is malformed; the connection has ended.
        """
        try:
            message = self._decoder.decode(body)
            table = table_of(message)
            if table is not None:
                table.fd = self._fds.popleft()
        except IndexError:
            self.ended = True
            raise HostError("a lookup table came without its descriptor") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.ended = True
            raise HostError(f"a message does not read: {error}") from None
        return message

    def close(self) -> None:
        """Close this end, and the descriptors that were not sent or not taken; idempotent."""
        is_closed = self._socket.fileno() < 0
        if is_closed:
            return
        self.ended = True
        self._drop_outbox()
        while self._fds:
            os.close(self._fds.popleft())
        with suppress(OSError):
            # a forked child may hold a copy of the socket, so ``close`` alone would not inform the
            # peer
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()


class ThreadConnection(SocketConnection):
    """The engine's end of a connection to a thread. To receive, it makes no system call unless the
    other end has sent bytes.

    If each poll of a scheduler made a system call, one per millisecond, the thread at the other end
    might never run: the call would release and reacquire the GIL before that thread is awake, and
    restart that thread's wait for the GIL each time (measured: 20 s for a job of 60 ms).
    """

    has_bytes = False
    """Whether the other end may have sent bytes; ``_HostThreadConnection`` sets this."""

    @classmethod
    def pair(cls) -> tuple[ThreadConnection, SocketConnection]:
        """Return the ends of the engine and of the host."""
        ours, theirs = socket.socketpair()
        engine = cls(ours, ToEngine)
        # the host's end sets ``has_bytes`` of the engine's end when it sends
        return engine, _HostThreadConnection(theirs, engine)

    def _end_after_arrived(self) -> None:
        self.has_bytes = True  # so that ``_pull`` finds the end
        super()._end_after_arrived()

    def _pull(self) -> bool:
        """Read bytes only if the other end may have sent any; return False if there are none."""
        if not self.has_bytes:
            return False
        # reset before the call, because the other end may send during it
        self.has_bytes = False
        pulled = super()._pull()
        if pulled:
            self.has_bytes = True  # there may be more bytes
        return pulled


class _HostThreadConnection(SocketConnection):
    """The host's end of a connection between threads. It sets ``has_bytes`` of the engine's end
    whenever the engine may find bytes, or the end of the connection."""

    def __init__(self, sock: socket.socket, engine: ThreadConnection) -> None:
        super().__init__(sock, ToStore)
        self._engine = engine

    def push(self) -> None:
        """Send the outbox, and have the engine's end look for bytes, also if sending fails."""
        if self._outbox:
            try:
                super().push()
            finally:
                self._engine.has_bytes = True

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._engine.has_bytes = True
