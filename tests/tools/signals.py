"""Ctrl-C in tests."""

from __future__ import annotations

import signal


def obey_ctrl_c() -> None:
    """For ``preexec_fn``: a shell's background jobs, and so what a test run started there starts, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
