"""Proxy in front of an object store that counts the HTTP requests on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from asyncio import StreamReader, StreamWriter
from collections import Counter

_VERBS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_PIECE_BYTES = 256 << 10


class Requests:
    """Parser of one connection's byte stream that counts requests and skips their bodies.

    :param counts: number of requests by verb; updated in place.
    :param bucket: put before the path of each request: for clients that name the bucket in the
        host's name only.
    """

    def __init__(self, counts: Counter[str], bucket: str = "") -> None:
        self._counts = counts
        self._prefix = f" /{bucket}".encode() if bucket else b" "
        self._head = b""
        self._body_left = 0
        self._may_be_left_out = False

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes; return those to pass on. The head of a request is passed on as a
        whole."""
        pieces: list[bytes] = []
        while data:
            if self._may_be_left_out and data.startswith(_VERBS):
                self._body_left = 0  # the server answered before the body was sent
            self._may_be_left_out = False
            if self._body_left:
                length = min(self._body_left, len(data))
                pieces.append(data[:length])
                self._body_left -= length
                data = data[length:]
                continue
            head, end, rest = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                self._head = head
                break
            self._count(head)
            verb, _, target = head.partition(b" ")
            pieces += [verb, self._prefix, target, end]
            self._head = b""
            data = rest
        return b"".join(pieces)

    def _count(self, head: bytes) -> None:
        self._counts[head.split(b" ", 1)[0].decode("ascii", "replace")] += 1
        length = _LENGTH.search(head)
        self._body_left = int(length[1]) if length else 0
        self._may_be_left_out = b"100-continue" in head.lower()


class CountingProxy:
    """Proxy on a local port, in a thread of its own until ``close``.

    :param bucket: see ``Requests``.
    """

    def __init__(self, upstream_port: int, bucket: str = "") -> None:
        self._upstream_port = upstream_port
        self._bucket = bucket
        self._counts: Counter[str] = Counter()
        self._taken = 0
        # the event loop has only weak references to tasks
        self._live: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        )
        self._server = starting.result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def take(self) -> int:
        """Return the number of requests since the last call."""
        total = self._counts.total()
        found, self._taken = total - self._taken, total
        return found

    def by_verb(self) -> dict[str, int]:
        """Return the number of requests of each verb since the start."""
        return dict(self._counts)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._live.add(task)
        task.add_done_callback(self._live.discard)

    async def _connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection(
                "127.0.0.1", self._upstream_port
            )
            answers = asyncio.create_task(self._pass_on(up_reader, writer))
            requests = Requests(self._counts, self._bucket)
            while data := await reader.read(_PIECE_BYTES):
                up_writer.write(requests.feed(data))
                await up_writer.drain()
            up_writer.close()
            await answers

    async def _pass_on(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._live:
            task.cancel()
        await asyncio.gather(*self._live, return_exceptions=True)

    def close(self) -> None:
        """Stop the proxy and close its connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
