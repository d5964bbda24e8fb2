"""Fault proxy in a separate process, and a search for free ports."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

SERVERS = Path(__file__).parents[2] / "servers"
_PATIENCE_S = 60


def free_ports() -> int:
    """Return a port such that it and the next port are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return int(port)


def wait_for_port(port: int) -> None:
    """Wait until a server listens on the port."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {port}")


class FaultProxy:
    """A proxy process in front of a server."""

    def __init__(self, upstream_port: int) -> None:
        self.port = free_ports()
        command = [
            sys.executable,
            str(SERVERS / "faultproxy.py"),
            str(self.port),
            str(upstream_port),
        ]
        self._process = subprocess.Popen(command)
        wait_for_port(self.port + 1)

    def set(self, mode: str) -> None:
        """Set the fault mode (see ``tests/servers/faultproxy.py``), which cuts open connections."""
        with socket.create_connection(
            ("127.0.0.1", self.port + 1), timeout=_PATIENCE_S
        ) as control:
            control.sendall(f"{mode}\n".encode())
            control.recv(64)

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.wait()
