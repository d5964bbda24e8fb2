"""The interface of a device strategy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum

from persistkv.base import GPULoadStoreSpec, OffloadingHandler, TransferSpec
from persistkv.cpu.layout import KVMemory, PageCopies, plan_copies
from persistkv.cpu.manager import CPULoadStoreSpec


class Direction(Enum):
    """Direction of a transfer: from the engine's pages to the primary tier's rows (store), or back
    (load)."""

    STORE = "store"
    LOAD = "load"


class CopyEngine(OffloadingHandler):
    """Transfers in one direction on a device, in order of submission. Called from one thread.
    ``shutdown`` releases the memory; after it, jobs are refused, and nothing is reported.
    """

    def __init__(self, memory: KVMemory, direction: Direction) -> None:
        self.memory = memory
        self.direction = direction

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Plan the copies between the pages of the engine and the rows, and submit them."""
        # ``shutdown`` has released the rows
        if not self.memory.rows:
            return False
        source, target = spec
        # a store copies from the GPU, a load to it
        gpu, cpu = source, target
        if self.direction is Direction.LOAD:
            gpu, cpu = target, source
        if not (
            isinstance(gpu, GPULoadStoreSpec) and isinstance(cpu, CPULoadStoreSpec)
        ):
            media = f"{source.medium()} to {target.medium()}"
            raise ValueError(f"a transfer from {media} is no {self.direction.value}")
        copies = plan_copies(gpu, cpu, self.memory)
        return self.submit(job_id, copies)

    @abstractmethod
    def submit(self, job_id: int, copies: Sequence[PageCopies]) -> bool:
        """Start the copies of a job. They see all work enqueued before on the caller's current
        stream.

        :returns: False if the job could not be started. Then it copies no further byte and is not
            reported, and the content of its destination is undefined.
        """

    def shutdown(self) -> None:
        """Release the memory. Subclasses wait for their copies first."""
        self.memory = KVMemory((), (), 1)
