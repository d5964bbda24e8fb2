"""Python programs of tests, as forks of one process that has imported persistkv.

An import of persistkv takes a third of a second of CPU time, a fork a hundredth. ``Popen`` and
``run`` are those of ``subprocess``, for ``[sys.executable, "-c", code, …]`` and ``[sys.executable,
"-m", module, …]``, and the programs are children of the caller. For programs whose imports are
tested, or that need options of the interpreter, there is ``subprocess``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypedDict, Unpack

_IMPORTED = (
    "persistkv.storage.store.blocking",
    "persistkv.testing.conformance",
    "persistkv.testing.samples",
    "persistkv_dir",
    "persistkv_lmdb",
    "persistkv_tools.cli",
)
_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE = 1 << 17
_LIBC = ctypes.CDLL(None)


class Options(TypedDict, total=False):
    """Options of ``Popen`` that have an effect."""

    stdin: int | IO[bytes] | IO[str] | None
    stdout: int | IO[bytes] | IO[str] | None
    stderr: int | IO[bytes] | IO[str] | None
    text: bool
    bufsize: int
    cwd: str | Path | None
    env: dict[str, str] | None


def run(
    command: Sequence[str],
    *,
    input: str | bytes | None = None,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Unpack[Options],
) -> subprocess.CompletedProcess[Any]:
    """Run a program as ``subprocess.run`` does."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(command, **options) as program:
        try:
            output, errors = program.communicate(input, timeout=timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(command, program.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


class Popen(subprocess.Popen[Any]):
    """A program, with the interface of ``subprocess.Popen``. These options have an effect: the
    standard streams with their buffers and encodings, ``cwd`` and ``env``."""

    def _execute_child(
        self,
        args: Sequence[str],
        executable: None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: tuple[()],
        cwd: str | Path | None,
        env: dict[str, str] | None,
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *others: object,
    ) -> None:
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        streams: list[int] = []
        for number, descriptor in enumerate((pipes[0], pipes[3], pipes[5])):
            streams.append(number if descriptor == -1 else descriptor)
        if preexec_fn or pass_fds or args[0] != sys.executable:
            raise ValueError("not a program for a fork")
        description = {
            "kind": args[1],
            "program": args[2],
            "arguments": args[3:],
            "directory": str(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "group": os.getpgrp(),
        }
        self.pid = _forker().fork(description, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Forker:
    """The process that forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        # threads of the library would be lacking in the forks
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                process_group=0,
            )
        assert self._control.recv(16) == b"ready"

    def fork(self, description: Mapping[str, object], streams: list[int]) -> int:
        """Start a program; return its PID. It is a child of this process."""
        message = json.dumps(description).encode()
        with self._lock:
            # orphans become children of this process: the program is forked twice
            _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._control, [message], streams)
                return int(self._control.recv(16))
            finally:
                _LIBC.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


_forkers: dict[int, Forker] = {}
"""The forker of this process, by PID: a fork of this process has none."""


def _forker() -> Forker:
    process = os.getpid()
    if process not in _forkers:
        _forkers[process] = Forker()
        atexit.register(_forkers[process].close)
    return _forkers[process]


def main() -> None:
    """Fork for each message on the socket; become the program in the forks."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # the installed packages, not those in the directory of this process
    del sys.path[0]
    for name in _IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the threads"
    gc.freeze()
    control.send(b"ready")
    while True:
        message, streams, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 3)
        if not message:
            return
        pid = _fork_twice()
        if pid == 0:
            break
        control.send(str(pid).encode())
        for descriptor in streams:
            os.close(descriptor)
    control.close()
    _become(streams, **json.loads(message))


def _fork_twice() -> int:
    """Fork a process that is no child of this one; return its PID, or 0 in it."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        pid = int(os.read(reading, 16))
        os.close(reading)
        os.waitpid(between, 0)
        return pid
    os.close(reading)
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    while os.getppid() == between:
        os.sched_yield()
    return 0


def _become(
    streams: list[int],
    kind: str,
    program: str,
    arguments: list[str],
    directory: str,
    environment: dict[str, str],
    group: int,
) -> None:
    """Run a program with the effect of ``python KIND PROGRAM ARGUMENTS``."""
    os.setpgid(0, group)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.stdin = os.fdopen(0, closefd=False)
    is_unbuffered = kind == "-uc"
    output = os.fdopen(1, "wb", 0 if is_unbuffered else -1, closefd=False)
    sys.stdout = io.TextIOWrapper(output, write_through=is_unbuffered)
    sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
    sys.stderr.reconfigure(line_buffering=True)
    sys.path.insert(0, "")
    sys.argv[:] = ["-c", *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    main()
