"""Ctrl-C in tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests import forked
from tests.host_processes import descendants, host_processes


def obey_ctrl_c() -> None:
    """``preexec_fn`` that restores SIGINT: background jobs of a shell, and so the children of a
    test run, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_store(process: subprocess.Popen[str], limit_s: float = 60.0) -> None:
    """Wait until a command, one of its children, or one of its host processes has an LMDB store
    open.

    :raises TimeoutError: no store is open after ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while not any(
        "data.mdb" in _mappings(pid)
        for pid in [process.pid, *descendants(process.pid), *host_processes()]
    ):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no store is open after {limit_s} s")
        time.sleep(0.05)


def _mappings(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def interrupt(
    process: subprocess.Popen[str],
    limit_s: float = 30.0,
) -> tuple[str, float]:
    """Send SIGINT; return the rest of standard error, and the seconds until the process ended.

    :raises subprocess.TimeoutExpired: the process did not end within ``limit_s``, and was killed.
    """
    with process:
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=limit_s)[1], time.monotonic() - begin
        finally:
            process.kill()


_WAITS = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt_in(seconds):
    '''Send SIGINT to this process after a delay.'''
    def press():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()
"""


_END = """
sys.stdout.flush()
os._exit(0)
"""


def run_interrupted(script: str, *arguments: str, limit_s: float = 30.0) -> str:
    """Run a script that calls ``interrupt_in(seconds)``; return its output.

    The script exits as the commands do, without waiting for threads.

    :raises subprocess.TimeoutExpired: the script did not end within ``limit_s``, and was killed.
    """
    command = [sys.executable, "-c", _WAITS + script + _END, *arguments]
    done = forked.run(
        command, capture_output=True, text=True, timeout=limit_s, check=True
    )
    return str(done.stdout)
