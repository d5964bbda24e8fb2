"""The worker's side of the connector: starts what the scheduler planned and reports how it ended."""

from __future__ import annotations

from collections.abc import Iterable

from persistkv.base import LoadStoreSpec, OffloadingHandler, TransferResult
from persistkv.connector.common import ConnectorMetadata, TransferJob

HandlerEntry = tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]
"""(source spec, destination spec, handler), as ``OffloadingSpec.get_handlers`` gives them."""


class OffloadingConnectorWorker:
    """Hands each transfer to the handler of its direction. Called from one thread.

    :param handlers: one entry a direction; the worker owns them from here on.
    """

    def __init__(self, handlers: Iterable[HandlerEntry]) -> None:
        self._handlers = {(source.medium(), target.medium()): handler for source, target, handler in handlers}
        self._owners: dict[int, OffloadingHandler] = {}
        self._not_started: list[TransferResult] = []

    def start(self, metadata: ConnectorMetadata) -> None:
        """Start the step's transfers, loads first: somebody waits for them. Does not wait for their end.

        :raises KeyError: where no handler knows a direction; transfers before it were started.
        """
        for job in (*metadata.loads, *metadata.stores):
            self._start(job)

    def _start(self, job: TransferJob) -> None:
        source, target = job.spec
        handler = self._handlers[source.medium(), target.medium()]
        if handler.transfer_async(job.job_id, job.spec):
            self._owners[job.job_id] = handler
        else:
            self._not_started.append(TransferResult(job.job_id, success=False))

    def get_finished(self) -> list[TransferResult]:
        """The transfers that ended since the last call, each once, those that could not be started included."""
        finished, self._not_started = self._not_started, []
        for handler in set(self._handlers.values()):
            finished += handler.get_finished()
        for result in finished:
            self._owners.pop(result.job_id, None)
        return finished

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these transfers have ended; ids that are not in flight are passed over."""
        by_handler: dict[OffloadingHandler, set[int]] = {}
        for job_id in job_ids:
            if job_id in self._owners:
                by_handler.setdefault(self._owners[job_id], set()).add(job_id)
        for handler, ids in by_handler.items():
            handler.wait(ids)

    def wait_all(self) -> None:
        """Block until nothing is in flight."""
        self.wait(list(self._owners))

    def shutdown(self) -> None:
        """Wait for what runs and let go of the handlers, and with them of the rows' memory; idempotent."""
        handlers = set(self._handlers.values())
        self._handlers.clear()
        for handler in handlers:
            handler.shutdown()
