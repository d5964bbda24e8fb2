from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from persistkv.base import (
    GPULoadStoreSpec,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
    make_offload_key,
)
from persistkv.connector.common import ConnectorMetadata, TransferJob
from persistkv.connector.scheduler import OffloadingConnectorScheduler
from persistkv.cpu.manager import CPULoadStoreSpec, CPUOffloadingManager

MakeKeys = Callable[..., list[OffloadKey]]
Finish = Callable[..., list[TransferResult]]
Fill = Callable[..., None]


class WatchedManager(CPUOffloadingManager):
    """Primary tier that records its calls.

    ``lookup`` returns None for keys in ``late`` and False for keys in ``missing``.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL,
    ) -> None:
        super().__init__(num_blocks)
        self.request_policy = policy
        self.late: set[OffloadKey] = set()
        self.missing: set[OffloadKey] = set()
        self.looked_up: list[OffloadKey] = []
        self.touched: list[list[OffloadKey]] = []
        self.offered: list[list[OffloadKey]] = []
        self.finished: list[str] = []
        self.steps = 0

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(self.request_policy)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.looked_up.append(key)
        if key in self.missing:
            return False
        return None if key in self.late else super().lookup(key, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.touched.append(list(keys))
        super().touch(keys, req_context)

    def prepare_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> PrepareStoreOutput | None:
        self.offered.append(list(keys))
        return super().prepare_store(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.finished.append(req_context.req_id)

    def take_events(self) -> list[OffloadingEvent]:
        self.steps += 1
        return super().take_events()


def load_specs(job: TransferJob) -> tuple[CPULoadStoreSpec, GPULoadStoreSpec]:
    """Return source and destination of a load."""
    source, target = job.spec
    assert isinstance(source, CPULoadStoreSpec)
    assert isinstance(target, GPULoadStoreSpec)
    return source, target


def store_specs(job: TransferJob) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    """Return source and destination of a store."""
    source, target = job.spec
    assert isinstance(source, GPULoadStoreSpec)
    assert isinstance(target, CPULoadStoreSpec)
    return source, target


class WatchedScheduler(OffloadingConnectorScheduler):
    """Scheduler of a ``WatchedManager``."""

    manager: WatchedManager


@pytest.fixture
def make_manager() -> type[WatchedManager]:
    return WatchedManager


@pytest.fixture
def make_keys() -> MakeKeys:
    def keys(
        count: int,
        group: int = 0,
        start: int = 0,
        chain: str = "a",
    ) -> list[OffloadKey]:
        return [
            make_offload_key(f"{chain}{index:07d}".encode(), group)
            for index in range(start, start + count)
        ]

    return keys


@pytest.fixture
def finish() -> Finish:
    """Return a function that makes the results of all transfers of a step."""

    def results(
        metadata: ConnectorMetadata,
        success: bool = True,
    ) -> list[TransferResult]:
        return [
            TransferResult(job.job_id, success, 64, 0.1)
            for job in (*metadata.loads, *metadata.stores)
        ]

    return results


@pytest.fixture
def fill(finish: Finish) -> Fill:
    """Return a function that computes and stores a request's blocks in the primary tier, and
    finishes the request."""

    def run(
        scheduler: OffloadingConnectorScheduler,
        req_id: str,
        keys: list[OffloadKey],
        block_size: int,
        factor: int = 1,
    ) -> None:
        num_tokens = len(keys) * block_size * factor
        scheduler.on_new_request(req_id)
        scheduler.update_keys(req_id, 0, keys, num_tokens)
        scheduler.update_computed_tokens(
            req_id, num_tokens, [list(range(len(keys) * factor))]
        )
        scheduler.request_finished(req_id)
        scheduler.update_connector_output(finish(scheduler.build_connector_meta()))
        scheduler.take_events()

    return run
