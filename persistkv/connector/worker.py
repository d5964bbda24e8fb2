"""The worker's side of the connector: starts the transfers that the scheduler planned and reports
their ends."""

from __future__ import annotations

from collections.abc import Iterable

from persistkv.base import LoadStoreSpec, OffloadingHandler, TransferResult
from persistkv.connector.common import ConnectorMetadata
from persistkv.isolation import Isolation

HandlerEntry = tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]
"""(source spec, destination spec, handler), as ``OffloadingSpec.get_handlers`` yields them."""


class OffloadingConnectorWorker:
    """Passes each transfer to the handler of its direction. Called from one thread.

    A handler that raises affects no other transfer: this is logged, and its transfers are reported
    as failed.

    :param handlers: (source spec type, destination spec type, handler) per direction; owned by the
        worker.
    """

    def __init__(self, handlers: Iterable[HandlerEntry]) -> None:
        self._handlers: dict[tuple[str, str], OffloadingHandler] = {}
        """By direction: medium of the source, medium of the destination."""
        self._isolations: dict[OffloadingHandler, Isolation] = {}
        """By handler, the guard that logs its exceptions; every call of the handler uses it."""
        for source, target, handler in handlers:
            direction = (source.medium(), target.medium())
            self._handlers[direction] = handler
            name = f"transfer handler {source.medium()} to {target.medium()}"
            self._isolations[handler] = Isolation(name)
        self._owners: dict[int, OffloadingHandler] = {}
        """By job id: the handler of each transfer in flight."""
        self._not_started: list[TransferResult] = []
        """Results of transfers that could not be started."""

    def start(self, metadata: ConnectorMetadata) -> None:
        """Start the transfers of one step, loads first because requests wait for them.
        ``get_finished`` reports a transfer that does not start as failed.

        :raises KeyError: a transfer's direction has no handler; no transfer was started.
        """
        jobs = (*metadata.loads, *metadata.stores)
        # find all handlers before the first transfer starts: after a KeyError, none must have begun
        handlers = []
        for job in jobs:
            source, target = job.spec
            direction = (source.medium(), target.medium())
            handlers.append(self._handlers[direction])
        for job, handler in zip(jobs, handlers, strict=True):
            started = self._isolations[handler].attempt(
                "transfer_async",
                handler.transfer_async,
                job.job_id,
                job.spec,
                default=False,
                consequence="the transfer failed",
            )
            if started:
                self._owners[job.job_id] = handler
            else:
                self._not_started.append(TransferResult(job.job_id, success=False))

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call, each once, including those that did
        not start.

        If a handler raises, wait for the ends of its transfers in flight, and report them as
        failed.
        """
        finished = self._not_started
        self._not_started = []
        for handler, isolation in self._isolations.items():
            results: list[TransferResult] = []
            with isolation.guard("get_finished", "its transfers failed") as guarded:
                results.extend(handler.get_finished())
            if guarded.raised:
                results += self._fail_transfers(handler)
            for result in results:
                owner = self._owners.pop(result.job_id, None)
                # Each transfer is reported once: a handler may have returned its result before it
                # raised, and then the failure that was made up here is dropped.
                if owner is not None:
                    finished.append(result)
        return finished

    def _fail_transfers(self, handler: OffloadingHandler) -> list[TransferResult]:
        """Wait for the ends of a handler's transfers in flight, and return them as failed.

        Until they have ended, the handler may write to blocks that the engine would use again.
        """
        in_flight = self._transfers_of(handler)
        self.wait(in_flight)
        return [TransferResult(job_id, success=False) for job_id in in_flight]

    def _transfers_of(self, handler: OffloadingHandler) -> set[int]:
        """Return the ids of a handler's transfers in flight."""
        return {job_id for job_id, owner in self._owners.items() if owner is handler}

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these transfers have ended; ids that are not in flight are ignored."""
        wanted = set(job_ids)
        for handler, isolation in self._isolations.items():
            ids = self._transfers_of(handler) & wanted
            if ids:
                with isolation.guard("wait", "its transfers may not have ended"):
                    handler.wait(ids)

    def wait_all(self) -> None:
        """Block until no transfer is in flight."""
        self.wait(list(self._owners))

    def shutdown(self) -> None:
        """Wait for the transfers in flight and release the handlers, and with them the rows'
        memory; idempotent."""
        # The handlers hold views of the rows, which would keep the region mapped.
        isolations = self._isolations
        self._isolations = {}
        self._handlers.clear()
        for handler, isolation in isolations.items():
            with isolation.guard("shutdown", "its resources may not be released"):
                handler.shutdown()
