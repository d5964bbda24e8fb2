#!/usr/bin/env python3
"""A loopback TCP proxy that breaks an S3 connection on command.

    faultproxy.py LISTEN_PORT UPSTREAM_PORT

Control: send one line to LISTEN_PORT + 1; the reply is the number of connections since the last
line.

    ok               forward everything
    hang             accept, never forward
    hang_reply       forward the request, never the reply (the server may have committed)
    lose_reply       forward the request, reset when the reply starts; lose_reply1: only once
    rst              reset at accept
    rst_after N      reset after N bytes of reply
    delay S          wait S seconds before each chunk is forwarded
    rate B           at most B bytes per second
    s503 N           answer the next N connections with 503 SlowDown
    deny             answer with 403 AccessDenied
    readonly         answer requests that would change the bucket with 403 AccessDenied
    forbid REGEX     answer requests whose first line matches with 403 AccessDenied
    date SECONDS     shift the Date of each reply
    conns            change nothing, count only
"""

import asyncio
import contextlib
import re
import socket
import struct
import sys
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime

SLOW_DOWN = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your '
    b"request rate.</Message></Error>"
)


def reset(writer: Writer) -> None:
    with contextlib.suppress(Exception):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )
        writer.transport.abort()


def with_date(data: bytes, seconds: float) -> bytes:
    """Return the beginning of a reply with a shifted ``Date``; other bytes unchanged. The length
    stays."""
    head, separator, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return data

    def shifted(found: re.Match[bytes]) -> bytes:
        date = parsedate_to_datetime(found[2].decode()) + timedelta(seconds=seconds)
        return found[1] + format_datetime(date, usegmt=True).encode()

    return re.sub(rb"(?mi)^(Date: )([^\r\n]+)", shifted, head) + separator + body


ACCESS_DENIED = (
    b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access '
    b"Denied</Message></Error>"
)


class FaultProxy:
    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.mode: list[str] = ["ok"]
        self.slow_downs = 0
        self.connections = 0
        self.exists_already = False
        self.live: set[asyncio.Task[object] | None] = set()

    def is_refused(self, data: bytes) -> bool:
        """Return whether these bytes begin a request that the mode refuses."""
        name, *args = self.mode
        is_change = data.startswith((b"PUT ", b"POST ", b"DELETE "))
        if name == "readonly":
            return is_change
        line = data[:2000].split(b"\r\n")[0]
        is_request = is_change or data.startswith((b"GET ", b"HEAD "))
        return (
            name == "forbid"
            and is_request
            and re.search(args[0].encode(), line) is not None
        )

    async def refuse(self, data: bytes, reader: Reader, writer: Writer) -> bool:
        """Answer a request with a refusal, if the mode refuses it. Return whether it was
        refused."""
        if not self.is_refused(data):
            return False
        await self.drain_body(data, reader)
        writer.write(
            b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n" % len(ACCESS_DENIED) + ACCESS_DENIED
        )
        await writer.drain()
        writer.close()
        return True

    async def drain_body(self, data: bytes, reader: Reader) -> None:
        """Read the rest of a request: closing the connection before would reset it, and the answer
        would be lost."""
        head, _, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?mi)^content-length: (\d+)", head)
        # then the client waits for the answer
        if length is None or b"100-continue" in head.lower():
            return
        rest = int(length[1]) - len(body)
        if rest > 0:
            await reader.readexactly(rest)

    async def pump(
        self,
        reader: Reader,
        writer: Writer,
        is_request: bool,
        client_writer: Writer,
    ) -> None:
        sent = 0
        while data := await reader.read(65536):
            name, *args = self.mode
            is_continue = (
                not is_request and data.startswith(b"HTTP/1.1 100") and len(data) < 40
            )
            if is_continue:  # forward 100 Continue, otherwise no body is ever sent
                writer.write(data)
                await writer.drain()
                continue
            if is_request and await self.refuse(data, reader, client_writer):
                return
            if name == "hang" or (name == "hang_reply" and not is_request):
                await asyncio.sleep(3600)
            if name.startswith("lose_reply") and not is_request:
                if name == "lose_reply1":
                    self.mode = ["ok"]
                reset(client_writer)
                return
            if name == "rst_after" and not is_request:
                sent += len(data)
                if sent > int(args[0]):
                    writer.write(data[: max(0, len(data) - (sent - int(args[0])))])
                    await writer.drain()
                    await asyncio.sleep(0.05)
                    reset(client_writer)
                    return
            if name == "date" and not is_request:
                data = with_date(data, float(args[0]))
            if name == "delay":
                await asyncio.sleep(float(args[0]))
            if name == "rate":
                await asyncio.sleep(len(data) / float(args[0]))
            writer.write(data)
            await writer.drain()
        writer.close()

    async def answer(
        self,
        reader: Reader,
        writer: Writer,
        status: bytes,
        body: bytes,
    ) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"100-continue" in head:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        lengths = [
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.startswith(b"content-length:")
        ]
        if lengths:
            await reader.readexactly(lengths[0])
        writer.write(
            b"HTTP/1.1 %b\r\nContent-Type: application/xml\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n" % (status, len(body)) + body
        )
        await writer.drain()
        writer.close()

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        self.live.add(asyncio.current_task())
        try:
            if self.mode[0] == "rst":
                reset(writer)
                return
            if self.mode[0] == "deny":
                await self.answer(reader, writer, b"403 Forbidden", ACCESS_DENIED)
                return
            if self.slow_downs > 0:
                self.slow_downs -= 1
                await self.answer(reader, writer, b"503 Slow Down", SLOW_DOWN)
                return
            up_reader, up_writer = await asyncio.open_connection(
                "127.0.0.1", self.upstream_port
            )
            pumps = [
                asyncio.create_task(self.pump(reader, up_writer, True, writer)),
                asyncio.create_task(self.pump(up_reader, writer, False, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                up_writer.close()
                if not writer.is_closing():
                    writer.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            reset(writer)
        finally:
            self.live.discard(asyncio.current_task())

    async def control(self, reader: Reader, writer: Writer) -> None:
        words = (await reader.readline()).decode().split() or ["conns"]
        if words[0] == "s503":
            self.mode, self.slow_downs = ["ok"], int(words[1])
        elif words[0] != "conns":
            self.mode, self.slow_downs = words, 0
        # drop kept-alive connections, so that the new mode applies to fresh ones
        if words[0] != "conns":
            for task in filter(None, list(self.live)):
                task.cancel()
        writer.write(b"%d\n" % self.connections)
        self.connections = 0
        await writer.drain()
        writer.close()


async def main() -> None:
    listen_port, upstream_port = int(sys.argv[1]), int(sys.argv[2])
    proxy = FaultProxy(upstream_port)
    servers = (
        await asyncio.start_server(proxy.serve, "127.0.0.1", listen_port),
        await asyncio.start_server(proxy.control, "127.0.0.1", listen_port + 1),
    )
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main())
