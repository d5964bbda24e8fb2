"""The snapshots that readers hold, in all processes: what they see is not written over."""

from __future__ import annotations

import time

import lmdb

_POLL_S = 0.002


class Snapshots:
    """What LMDB's table of readers says."""

    def __init__(self) -> None:
        self._stuck = 0
        """A snapshot that was waited for in vain, and all before it."""

    def oldest(self, env: lmdb.Environment, newest: int) -> int:
        """The transaction that the oldest snapshot sees last.

        :param newest: the last one that was committed, for where there is no reader.
        """
        found = _oldest(env, newest)
        if found < newest:
            env.reader_check()  # forgets the readers of processes that died
            found = _oldest(env, newest)
        return found

    def wait(self, env: lmdb.Environment, number: int, timeout_s: float) -> bool:
        """Wait until all snapshots see transaction ``number``; False: in vain. The same reader is waited for once."""
        deadline = time.monotonic() + timeout_s
        while (oldest := self.oldest(env, number)) < number:
            if oldest <= self._stuck or time.monotonic() > deadline:
                self._stuck = max(self._stuck, oldest)
                return False
            time.sleep(_POLL_S)
        return True


def _oldest(env: lmdb.Environment, newest: int) -> int:
    """The table's lines are process, thread and transaction; ``-`` where a reader is idle."""
    numbers = [line.split()[-1] for line in env.readers().splitlines()[1:]]
    return min([newest, *(int(number) for number in numbers if number.isdecimal())])
