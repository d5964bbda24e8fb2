"""Processes that answer lines of JSON: new processes, and forks of a process that has imported
vLLM."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.integrations.vllm.zygote import MAX_MESSAGE

Spawn = Callable[[int, int, int], int]
"""Function that starts a process in its own session with three descriptors (input, output, log) and
returns its id."""


class Program:
    """Process that answers lines of JSON; it need not be a child of this process.

    :param log: file to which the process appends its log.
    """

    def __init__(self, spawn: Spawn, log: Path) -> None:
        self._log = log
        its_input, our_output = os.pipe()
        our_input, its_output = os.pipe()
        its_log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.pid = spawn(its_input, its_output, its_log)
        self._fd = os.pidfd_open(self.pid)
        for descriptor in (its_input, its_output, its_log):
            os.close(descriptor)
        self._stdin, self._stdout = (
            os.fdopen(our_output, "w", buffering=1),
            os.fdopen(our_input),
        )

    @property
    def log(self) -> str:
        """The whole log file, including the output of earlier programs."""
        return self._log.read_text(errors="replace")

    def answer(self) -> Any:
        """Return the next line that the process writes, decoded.

        :raises RuntimeError: the process ended; the message has the end of its log.
        """
        line = self._stdout.readline()
        if not line:
            self.wait(60)  # the process may still write the reason to its log
            raise RuntimeError(f"the process ended:\n{self.log[-6000:]}")
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        """Write a command as a line; return the answer."""
        print(json.dumps(command), file=self._stdin)
        return self.answer()

    def end_input(self) -> None:
        """Close the input of the process."""
        self._stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process ended within the time."""
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def kill(self) -> None:
        """Send SIGKILL to the process group. Processes in other sessions survive, such as the host
        process."""
        os.killpg(self.pid, signal.SIGKILL)
        assert self.wait(60)

    def terminate(self) -> None:
        """Send SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def release(self) -> None:
        """Kill the remaining processes and close the pipes; idempotent."""
        if self._stdin.closed and self._stdout.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(60)
        with suppress(ChildProcessError):  # the program is a fork of another process
            os.waitpid(self.pid, 0)
        for file in (self._stdin, self._stdout):
            file.close()
        os.close(self._fd)


def new_process(command: Sequence[str], environment: dict[str, str]) -> Spawn:
    """Return a function that starts a command line as a new process."""

    def spawn(stdin: int, stdout: int, stderr: int) -> int:
        file_actions = [
            (os.POSIX_SPAWN_DUP2, source, number)
            for number, source in enumerate((stdin, stdout, stderr))
        ]
        return os.posix_spawnp(
            command[0],
            list(command),
            {**os.environ, **environment},
            file_actions=file_actions,
            setsid=True,
        )

    return spawn


class Zygote:
    """Process that has imported vLLM and forks programs; see ``zygote``."""

    def __init__(
        self,
        environment: dict[str, str],
        python: str = sys.executable,
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [python, "-m", "tests.integrations.vllm.zygote", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._receive()

    def _receive(self) -> bytes:
        message = self._control.recv(MAX_MESSAGE)
        if not message:
            raise RuntimeError("the process that forks ended")
        return message

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        environment: dict[str, str],
    ) -> Spawn:
        """Return a function that runs ``python -m module arguments`` as a fork, which saves the
        imports."""
        message = json.dumps(
            {"module": module, "arguments": arguments, "environment": environment}
        )

        def spawn(stdin: int, stdout: int, stderr: int) -> int:
            socket.send_fds(self._control, [message.encode()], [stdin, stdout, stderr])
            return int(self._receive())

        return spawn

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.wait(60)
