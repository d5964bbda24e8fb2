"""Starts the demo's processes, reads their messages, and kills the first one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from persistkv.errors import PersistKVError
from persistkv.integrations.transformers.demo.messages import ColdReport, Failure, Message, Progress, Task, WarmReport

Report = TypeVar("Report", ColdReport, WarmReport)
_WORKER = "persistkv.integrations.transformers.demo.worker"


def run_process(
    kind: type[Report], url: str, model: str, tokens: int, codec: str, tell: Callable[[str], None], *, kill: bool
) -> Report:
    """Run one process up to its report.

    :param tell: called with lines for the user.
    :param kill: kill the process by SIGKILL as soon as it has reported.
    :raises PersistKVError: if the process failed, or was not ended by the signal.
    """
    role = "cold" if kind is ColdReport else "warm"
    task = msgspec.json.encode(Task(role, url, model, tokens, codec, time.monotonic())).decode()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([sys.executable, "-m", _WORKER, task], stdout=subprocess.PIPE, env=environment)
    try:
        report = _listen(process, kind, tell)
        if kill:
            process.send_signal(signal.SIGKILL)
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if code != (-signal.SIGKILL if kill else 0):
        raise PersistKVError(f"the {role} process ended with {code}")
    return report


def _listen(process: subprocess.Popen[bytes], kind: type[Report], tell: Callable[[str], None]) -> Report:
    for line in process.stdout or ():
        message: Message = msgspec.json.decode(line, type=Message)
        if isinstance(message, Failure):
            raise PersistKVError(message.text)
        if isinstance(message, Progress):
            tell(message.text)
        elif isinstance(message, kind):
            return message
    raise PersistKVError(f"the process ended with {process.wait()} before it reported")
