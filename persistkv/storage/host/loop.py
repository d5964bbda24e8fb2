"""The store's side at the other end of a connection: one thread that sleeps until a message comes, a call of the
backend has ended, or something is due."""

from __future__ import annotations

import logging
from collections.abc import Callable

from persistkv.errors import HostError
from persistkv.storage.executor import ThreadExecutor
from persistkv.storage.host.connection import ServedConnection
from persistkv.storage.host.protocol import Notice
from persistkv.storage.host.server import StoreServer

logger = logging.getLogger(__name__)


class NoticeHandler(logging.Handler):
    """Sends log records, of any thread, to the engine, whose log they belong into."""

    def __init__(self, connection: ServedConnection) -> None:
        super().__init__(logging.INFO)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.post(Notice(record.levelno, record.getMessage()))


def serve(
    connection: ServedConnection,
    rows_buffer: memoryview,
    engine_pidfd: int | None = None,
    when_open: Callable[[], None] = lambda: None,
) -> None:
    """Run a store until the engine's side closes; then finish what it gave, release the rows, and return.

    :param engine_pidfd: readable once the engine is dead. A child that the engine forked holds a copy of its socket,
        which would keep the connection open.
    :param when_open: called once the store is open.
    """
    server = StoreServer(
        rows_buffer,
        connection.send,
        lambda threads: ThreadExecutor(threads, connection.wake),
        lambda: connection.congested,
        when_open,
    )
    del rows_buffer  # this frame can outlive its call (a traceback keeps its callers), and would keep the rows mapped
    engine_died = finish = False
    try:
        while not connection.ended and not engine_died:
            engine_died = connection.wait(server.seconds_to_work(), engine_pidfd)
            for message in connection.receive():
                server.handle(message)
            server.step()
        for message in connection.receive_rest() if engine_died else ():
            server.handle(message)
        finish = True
    except HostError:
        logger.exception("the engine's side sent garbage; ending")
        finish = True
    finally:
        try:
            server.close(finish=finish)
        finally:
            connection.close()
