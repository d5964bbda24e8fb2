"""Commands on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path

from tests import forked

TESTED_CODE = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
"""Environment with which commands in other processes import the same code as this process."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


def on_terminal(
    width: int,
    *arguments: str,
    cwd: Path,
    answer: str = "",
    environment: dict[str, str] | None = None,
) -> tuple[str, int]:
    """Run ``persistkv`` on a terminal of ``width`` columns; return its output, escapes included,
    and its exit code.

    :param answer: input that is typed before the command asks.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    basic = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cwd),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        **TESTED_CODE,
    }
    command = [sys.executable, "-m", "persistkv_tools", *arguments]
    process = forked.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=cwd,
        env=basic | (environment or {}),
    )
    os.close(slave)
    os.write(master, answer.encode())
    shown = bytearray()
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            data = os.read(master, 65_536)
        except OSError:  # EIO: on Linux, the other end is closed
            break
        if not data:
            break
        shown += data
    code = process.wait(60)
    os.close(master)
    return shown.decode().replace("\r\n", "\n"), code
