"""Tasks of LMCache: calls to one or several block stores with one completion descriptor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from persistkv.storage.blocks import Completion, CompletionQueue

Submit = Callable[[CompletionQueue], int]
"""Starts a call, and returns its number in the queue."""


@dataclass
class _Task:
    results: list[bool]
    """For each key of the task, whether its call has succeeded."""
    num_parts: int
    """Parts that have not ended."""
    calls: dict[int, Sequence[int]] = field(default_factory=dict)


class TaskQueue:
    """Tasks of one kind. Thread-safe.

    A task consists of parts, each with some of its keys. Its results are those of the parts,
    joined by "or".
    """

    def __init__(self) -> None:
        self._completions = CompletionQueue()
        self._lock = threading.Lock()
        self._tasks: dict[int, _Task] = {}
        self._task_of: dict[int, int] = {}
        """Number of each call → task."""
        self._done: dict[int, list[bool]] = {}
        self._next = 0

    def fileno(self) -> int:
        """Return the eventfd that is readable when parts of tasks have ended."""
        return self._completions.fileno()

    def begin(self, num_keys: int, num_parts: int) -> int:
        """Begin a task; return its number. ``start`` or ``fail`` must follow for each part. A task
        without parts is done."""
        with self._lock:
            number = self._next
            self._next += 1
            self._tasks[number] = _Task([False] * num_keys, num_parts)
        if not num_parts:
            # a part without keys wakes LMCache
            self._tasks[number].num_parts = 1
            self.fail(number)
        return number

    def start(self, task: int, places: Sequence[int], submit: Submit) -> None:
        """Start a part.

        :param places: positions of its keys in the task.
        """
        # held until the call is known: it may end before ``submit`` returns
        with self._lock:
            number = submit(self._completions)
            self._task_of[number] = task
            self._tasks[task].calls[number] = places

    def fail(self, task: int) -> None:
        """End a part without success."""
        self.start(task, [], self._complete_empty)

    @staticmethod
    def _complete_empty(completions: CompletionQueue) -> int:
        number = completions.new_number()
        completions.add(Completion(number, []))
        return number

    def take(self) -> dict[int, list[bool]]:
        """Remove and return the results of all tasks that are done."""
        with self._lock:
            self._collect()
            done, self._done = self._done, {}
        return done

    def take_one(self, task: int) -> list[bool] | None:
        """Remove and return the results of a task; None if it is not done."""
        with self._lock:
            self._collect()
            return self._done.pop(task, None)

    def _collect(self) -> None:
        # LMCache clears the descriptor. Cleared here, too, it could miss the end of another task
        for completion in self._completions.take(clear=False):
            number = self._task_of.pop(completion.job_id)
            task = self._tasks[number]
            places = task.calls.pop(completion.job_id)
            for place, has_succeeded in zip(places, completion.results, strict=True):
                task.results[place] |= has_succeeded
            task.num_parts -= 1
            if not task.num_parts:
                self._done[number] = task.results
                del self._tasks[number]

    def close(self) -> None:
        """Close the descriptor."""
        self._completions.close()
