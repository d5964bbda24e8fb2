"""The host's end of the connection, for the tasks of its event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import Any

from persistkv.storage.host.connection import CONGESTED_BYTES, SocketConnection
from persistkv.storage.host.protocol import Notice, ToEngine

# maximum number of messages of other threads that are not sent yet; older ones are dropped
_MOST_POSTED = 1_000


class Channel:
    """Sends and receives messages. Only ``post`` may be called by other threads."""

    def __init__(self, connection: SocketConnection, engine_pidfd: int | None) -> None:
        """Attach a connection to the running event loop.

        :param engine_pidfd: pidfd of the engine. Needed because a child that the engine forked can
            keep the connection open after the engine's death. None: the store runs in the engine's
            process.
        """
        self._connection = connection
        self._engine_pidfd = engine_pidfd
        self._loop = asyncio.get_running_loop()
        self._arrived: list[Any] = []
        """Messages that ``receive`` has not returned yet."""
        self._error: Exception | None = None
        """Error of the connection, which ``receive`` raises."""
        self._has_arrived = asyncio.Event()
        """Set when there are messages or an error, or when the connection or the engine has ended;
        ``receive`` clears it."""
        self._posted: deque[ToEngine] = deque(maxlen=_MOST_POSTED)
        """Messages of ``post`` that are not sent yet."""
        self._engine_died = False
        self._loop.add_reader(connection.fileno(), self._receive)
        if engine_pidfd is not None:
            self._loop.add_reader(engine_pidfd, self._note_death)

    @property
    def ended(self) -> bool:
        """Whether ``receive`` has returned all messages, and no further one arrives."""
        is_at_end = self._engine_died or self._connection.ended
        return is_at_end and not self._has_arrived.is_set()

    @property
    def is_congested(self) -> bool:
        """Whether the engine is slow to receive: messages that can wait must not be sent."""
        return self._connection.outbox_bytes > CONGESTED_BYTES

    def send(self, message: ToEngine) -> None:
        """Send or queue a message. Never waits; drops the message after the end."""
        self._connection.send(message)
        # If bytes are left, the loop calls ``_push`` when the socket accepts bytes again. This is
        # rare, because the socket takes hundreds of answers.
        if self._connection.outbox_bytes:
            self._loop.add_writer(self._connection.fileno(), self._push)

    def post(self, message: ToEngine) -> None:
        """Have the event loop send a message, from any thread. The oldest of more than 1,000 unsent
        messages are dropped."""
        self._posted.append(message)
        # RuntimeError means that the loop has ended
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send_posted)

    async def receive(self) -> list[Any]:
        """Wait for messages or the end, and return messages that have arrived. After the death of
        the engine, return all that it has sent.

        :raises HostError: the input is malformed; the connection has ended.
        """
        await self._has_arrived.wait()
        self._has_arrived.clear()
        if self._error is not None:
            raise self._error
        arrived = self._arrived
        self._arrived = []
        # receive the rest: what the engine sent before its death is accepted work
        if self._engine_died:
            arrived += self._connection.receive_rest()
        return arrived

    def _receive(self) -> None:
        """Read messages from the connection. The event loop calls this while its socket is
        readable."""
        # read here and not in ``receive``: until the bytes are read, the loop would call this again
        try:
            self._arrived += self._connection.receive()
        except Exception as error:
            # keep the error for ``receive``, because the event loop would only log it
            self._error = error
        self._has_arrived.set()

    def stop_receiving(self) -> None:
        """Receive no further messages; they can still be sent. Idempotent.

        The pidfd of a dead engine and an ended connection are always readable: the event loop would
        not sleep any more.
        """
        if self._engine_pidfd is not None:
            self._loop.remove_reader(self._engine_pidfd)
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection.fileno())

    def close(self) -> None:
        """Detach from the event loop and close the connection."""
        self.stop_receiving()
        if self._connection.fileno() >= 0:
            self._loop.remove_writer(self._connection.fileno())
        self._connection.close()

    def _note_death(self) -> None:
        """Wake ``receive``: the engine's pidfd has become readable, so the engine is dead."""
        self._engine_died = True
        self._has_arrived.set()

    def _push(self) -> None:
        """Send queued messages. The event loop calls this when the socket accepts bytes again."""
        self._connection.push()
        self._send_posted()
        if not self._connection.outbox_bytes:
            self._loop.remove_writer(self._connection.fileno())

    def _send_posted(self) -> None:
        """Send messages of other threads while the engine receives them. Messages that are left
        wait for the next ``_push`` or ``post``."""
        while self._posted and not self.is_congested:
            message = self._posted.popleft()
            self.send(message)


class NoticeHandler(logging.Handler):
    """Log handler that sends the records of all threads to the engine, which logs them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        notice = Notice(record.levelno, record.getMessage())
        self._channel.post(notice)
