"""The interface of a device strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

from persistkv.base import TransferResult
from persistkv.cpu.layout import KVMemory, PageCopies


class Direction(Enum):
    """Direction of a transfer: from the engine's pages to the primary tier's rows (store), or back (load)."""

    STORE = "store"
    LOAD = "load"


class CopyEngine(ABC):
    """Runs the copies of one direction on a device, in order of submission. Called from one thread."""

    def __init__(self, memory: KVMemory, direction: Direction) -> None:
        self.memory = memory
        self.direction = direction

    @abstractmethod
    def submit(self, job_id: int, copies: Sequence[PageCopies]) -> bool:
        """Start the copies of a job. They see everything that the model computed before this call.

        :returns: False if the job could not be started. Then it copies no further byte and is not reported, and the
            content of its destination is undefined.
        """

    @abstractmethod
    def finished(self) -> list[TransferResult]:
        """Return the results of the jobs that ended since the last call, in the order of submission. Does not wait."""

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have ended; ids that are not in flight are ignored."""

    @abstractmethod
    def drain(self) -> None:
        """Block until all submitted jobs have ended. The last call: no job may be submitted afterwards. Idempotent."""
