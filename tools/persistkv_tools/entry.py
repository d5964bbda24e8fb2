"""Entry point of ``persistkv``: a child process runs the command; its end by damaged files becomes
an error message.

A store's catalogue may be read through a memory map. If the file is truncated or damaged meanwhile,
the kernel ends the reader with SIGBUS, which cannot be handled within the process.

1. The child is forked before anything is imported that might start threads, and dies with its
   parent.
2. Signals that were sent to this process alone are passed on. Ctrl-C of a terminal reaches both;
   the child handles it.
3. If a process in another container uses the store with the child's PID, another child is forked:
   it gets another PID.
4. Commands that only read take what processor time the engines of the machine leave, imports
   included. Commands that write do not: they hold locks that engines wait for. SCHED_IDLE is not
   used: on a busy machine ``ls`` would take ten times as long, and hold a snapshot meanwhile, which
   keeps space that engines free from being reused.
5. The child ends without waiting for threads: after Ctrl-C, one may wait for a server that does not
   answer.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

# Exit codes of ``cli``, repeated here: its import before the fork might start threads.
_STORE_FAILED = 3
_RETRY = 75  # another process uses the store with the same PID
_DAMAGE = frozenset(
    {
        signal.SIGBUS,
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGFPE,
        signal.SIGILL,
    }
)
"""Signals that end a process that reads damaged files."""
_PASSED_ON = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
    }
)
"""Signals that the parent passes on to the child."""
_PID_ATTEMPTS = 8
"""Most children that are forked until the store accepts the PID of one."""
_BY_A_PROCESS = 0
"""Largest ``si_code`` of a signal from a process; that of a signal from a terminal is larger."""
_PR_SET_PDEATHSIG = 1
_READING_COMMANDS = frozenset(
    {
        "ls",
        "stat",
        "show",
        "top",
        "report",
        "verify",
        "why",
        "doctor",
        "serve-metrics",
    }
)
_REPAIR_OPTION = "--repair"
"""Option with which a reading command writes."""
_DRY_RUN_OPTION = "--dry-run"
"""Option with which a writing command only reads."""
_NICENESS = 10  # a tenth of the time of an engine on the same processor


def main() -> NoReturn:
    """Run the command line, and exit with its code, see ``cli``. If a signal ended the command, end
    by that signal; if it is one that damaged files cause, print an error and exit with code 3.
    """
    lower_priority(sys.argv[1:])
    # a caller may leave SIGCHLD ignored, and the kernel would discard the child's exit code
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # block the signals before the fork, so that an early one stays pending until ``_wait`` takes it
    blocked = {*_PASSED_ON, signal.SIGCHLD}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    parent = os.getpid()
    for attempt in range(_PID_ATTEMPTS):
        may_retry = attempt < _PID_ATTEMPTS - 1
        child = os.fork()
        if not child:
            # the child ends in this call
            _run_child(parent, previous_mask, may_retry=may_retry)
        code = _wait(child)
        # if the PID was in use, fork again: the next child has another PID
        if code != _RETRY or not may_retry:
            break
    _end(code)


def _run_child(
    parent: int,
    signal_mask: Collection[int],
    *,
    may_retry: bool,
) -> NoReturn:
    """Run the command in this child process, and exit with its code.

    :param parent: PID of the process that forked it.
    :param signal_mask: signals that are blocked while the command runs.
    :param may_retry: exit with ``_RETRY`` if another process uses the store with this PID.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # for a parent that ended before ``prctl`` was called, the kernel sends no signal
    if os.getppid() != parent:
        os._exit(_STORE_FAILED)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    _run(may_retry=may_retry)


def lower_priority(arguments: Sequence[str]) -> None:
    """Lower the priority of this process and its children if the command line only reads. Limit
    NumPy to one thread."""
    # NumPy's threads, which no command needs, take 0.1 s to start
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    command = arguments[0] if arguments else ""
    only_reads = command in _READING_COMMANDS and _REPAIR_OPTION not in arguments
    if only_reads or _DRY_RUN_OPTION in arguments:
        os.nice(_NICENESS)


def _run(*, may_retry: bool) -> NoReturn:
    """Run the command in this process, and exit with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # let Ctrl-C end the process without a traceback until ``cli`` starts the command
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from persistkv_tools.cli import main as run

    try:
        run(may_retry=may_retry)
    except SystemExit as end:
        # the interpreter prints a text that was given instead of a code, and exits with 1
        if not isinstance(end.code, int):
            raise
        # ``os._exit`` does not wait for threads, and does not flush
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)
    sys.exit()  # never reached: ``main`` of ``cli`` always raises SystemExit


def _wait(child: int) -> int:
    """Pass signals of other processes on to the child; return its exit code, or the negative number
    of its signal."""
    while True:
        found = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if found.si_signo != signal.SIGCHLD:
            # a terminal sends its signals to the child, too: passed on, they would arrive twice
            if found.si_code <= _BY_A_PROCESS:
                os.kill(child, found.si_signo)
            continue
        # SIGCHLD also comes when the child is stopped or continued; ``ended`` is 0 in this case
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _end(code: int) -> NoReturn:
    """Exit as the process that ran the command has ended.

    :param code: exit code, or the negative number of the signal that killed it.
    """
    if code >= 0:
        sys.exit(code)
    number = signal.Signals(-code)
    if number in _DAMAGE:
        sys.stderr.write(
            f"persistkv: {number.name} ended the command: the store's files are damaged, or "
            "were truncated while they were read; the next engine checks the store, renames "
            "damaged files and starts with an empty store\n"
        )
        sys.exit(_STORE_FAILED)
    # End by the same signal, so that a shell sees how the command ended. SIGKILL has no handler
    # that could be set.
    if number is not signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    # the signal had no effect, because the kernel protects PID 1 of a container from it
    sys.exit(128 + number)
