"""Tasks of LMCache: calls to one or several block stores with one completion descriptor."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

from persistkv.integrations.lmcache.parts import Part
from persistkv.storage.blocks import BlockStore, Completion, CompletionQueue


class _Task:
    """A task in progress."""

    def __init__(self, num_keys: int, num_parts: int) -> None:
        self.results = [False] * num_keys
        """For each key of the task, whether its call has succeeded."""
        self.num_parts = num_parts
        """Parts that have not ended."""

    def end_part(
        self,
        positions: Sequence[int],
        results: Sequence[bool],
    ) -> None:
        """Add the results of a part that has ended.

        :param positions: for each result, the position of its key in the task.
        """
        self.num_parts -= 1
        for position, result in zip(positions, results, strict=True):
            self.results[position] |= result


class _Call(NamedTuple):
    """A call that has not ended."""

    task: int
    """Number of the task."""
    positions: Sequence[int]
    """Position of each of its keys in the task."""


class TaskQueue:
    """Tasks of one kind. Thread-safe.

    A task consists of parts, each with some of its keys. Its results are those of the parts,
    joined by "or".
    """

    def __init__(self) -> None:
        self._completions = CompletionQueue()
        """Results of ended calls. Its descriptor is that of this queue."""
        self._lock = threading.Lock()
        self._tasks: dict[int, _Task] = {}
        """Tasks in progress, by number."""
        self._calls: dict[int, _Call] = {}
        """Calls in progress, by their numbers in ``_completions``."""
        self._done: dict[int, list[bool]] = {}
        """Results of tasks that have ended, by number, until they are taken."""
        self._numbers = itertools.count()
        """Counts the tasks: each has a number."""

    def fileno(self) -> int:
        """Return the eventfd that is readable when parts of tasks have ended."""
        return self._completions.fileno()

    def begin(self, num_keys: int, num_parts: int) -> int:
        """Begin a task; return its number. ``start_part`` or ``fail_part`` must follow for each
        part. A task without parts is done."""
        # A task without parts gets an empty part. The end of this part, which follows at once,
        # makes the descriptor readable for LMCache, like that of any other part.
        is_empty = not num_parts
        if is_empty:
            num_parts = 1
        task = _Task(num_keys, num_parts)
        with self._lock:
            number = next(self._numbers)
            self._tasks[number] = task
        if is_empty:
            self.fail_part(number)
        return number

    def start_part(
        self,
        task: int,
        part: Part,
        store: BlockStore,
    ) -> None:
        """Start a part of a task.

        :raises ValueError, PersistKVError: it was not started.
        """
        # hold the lock until the call is recorded, because it may end before ``submit`` returns
        with self._lock:
            number = part.submit(store, self._completions)
            self._calls[number] = _Call(task, part.positions)

    def fail_part(self, task: int) -> None:
        """End a part of a task without success."""
        # Record a call of no keys that has ended already, so that LMCache is woken as after any
        # other part. This part adds no result: a key is False unless another part has it.
        number = self._completions.new_number()
        call = _Call(task, positions=[])
        ended = Completion(number, results=[])
        with self._lock:
            self._calls[number] = call
            self._completions.add(ended)

    def take_done(self) -> dict[int, list[bool]]:
        """Remove and return the results of all tasks that are done."""
        with self._lock:
            self._collect()
            done = self._done
            self._done = {}
        return done

    def take_one(self, task: int) -> list[bool] | None:
        """Remove and return the results of a task; None if it is not done."""
        with self._lock:
            self._collect()
            return self._done.pop(task, None)

    def _collect(self) -> None:
        """Add the results of ended calls to their tasks. Each part of a task is one call, so the
        task is done when no part is left."""
        # LMCache polls the event descriptor, and clears it. Do not clear it here: then LMCache
        # would miss the end of a part that it has not seen yet.
        for ended in self._completions.take(clear=False):
            call = self._calls.pop(ended.job_id)
            task = self._tasks[call.task]
            task.end_part(call.positions, ended.results)
            if task.num_parts == 0:
                self._done[call.task] = task.results
                del self._tasks[call.task]

    def close(self) -> None:
        """Close the descriptor."""
        self._completions.close()
