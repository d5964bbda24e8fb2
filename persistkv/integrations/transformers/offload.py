"""The offloading part of the engine's step, between two forward passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from persistkv.connector.common import LoadProgress
from persistkv.connector.scheduler import BlockTable, OffloadingConnectorScheduler
from persistkv.connector.worker import OffloadingConnectorWorker

_POLL_S = 0.0005  # far below the time of a forward pass, far above the time of a poll


class LoadedPrefix(NamedTuple):
    """The prefix that the tiers loaded for a request."""

    num_tokens: int
    num_promoted_tokens: int
    """Of these, the tokens that were promoted from a secondary tier."""
    num_bytes: int


class OffloadLoop:
    """Drives scheduler and worker. Called from one thread.

    :param on_released: called with the id of each finished request whose device blocks are no longer read.
    :param lookup_deadline_s: maximum seconds that a request waits for blocks that are not ready yet.
    """

    def __init__(
        self,
        scheduler: OffloadingConnectorScheduler,
        worker: OffloadingConnectorWorker,
        on_released: Callable[[str], None],
        lookup_deadline_s: float,
    ) -> None:
        self.scheduler = scheduler
        self._worker = worker
        self._on_released = on_released
        self._lookup_deadline_s = lookup_deadline_s
        self._live: set[str] = set()

    def begin(self, req_id: str) -> None:
        """Register a request for ``drain``."""
        self._live.add(req_id)

    def step(self, *, wait: bool = False) -> dict[str, LoadProgress]:
        """Start planned transfers, process finished ones, and end the step.

        :param wait: block until all transfers have ended.
        :returns: the loads that ended, by request.
        """
        metadata = self.scheduler.build_connector_meta()
        self._worker.start(metadata)
        if wait:
            self._worker.wait_all()
        else:
            self._worker.wait(job.job_id for job in metadata.loads)
        output = self.scheduler.update_connector_output(self._worker.get_finished())
        self.scheduler.take_events()
        for req_id in output.released:
            self._live.discard(req_id)
            self._on_released(req_id)
        return output.loads

    def match(self, req_id: str, num_computed_tokens: int) -> int:
        """Return how many tokens after the computed ones can be loaded. Waits for blocks up to the deadline."""
        deadline = time.monotonic() + self._lookup_deadline_s
        while (matched := self.scheduler.get_num_new_matched_tokens(req_id, num_computed_tokens)) is None:
            if time.monotonic() >= deadline:
                self.scheduler.give_up_waiting(req_id)
            else:
                self.step()
                time.sleep(_POLL_S)
        return matched

    def load(self, req_id: str, tables: Sequence[BlockTable], num_tokens: int) -> LoadedPrefix:
        """Load matched tokens into device blocks, and wait for the load.

        :param tables: for each group, the request's device blocks from its first token on.
        :returns: the loaded prefix; zeros if the load failed: then the content of the blocks is undefined.
        """
        if not self.scheduler.update_state_after_alloc(req_id, tables, num_tokens):
            return LoadedPrefix(0, 0, 0)
        promoted = self.scheduler.num_promoted_tokens(req_id)
        loads = self.step()
        while req_id not in loads:
            time.sleep(_POLL_S)
            loads = self.step()
        progress = loads[req_id]
        if not progress.success:
            return LoadedPrefix(0, 0, 0)
        return LoadedPrefix(progress.num_tokens, promoted, progress.num_bytes)

    def drain(self, deadline: float, req_id: str | None = None) -> bool:
        """Step until the transfers of a finished request, or of all requests, have ended.

        :param deadline: a ``time.monotonic`` time.
        :returns: False if the deadline passed before.
        """
        while self._live if req_id is None else req_id in self._live:
            if time.monotonic() >= deadline:
                return False
            self.step(wait=True)
        return True
