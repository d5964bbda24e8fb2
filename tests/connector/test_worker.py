from __future__ import annotations

import pytest

from persistkv.base import (
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)
from persistkv.connector.common import ConnectorMetadata, TransferJob
from persistkv.connector.worker import OffloadingConnectorWorker
from persistkv.cpu.manager import CPULoadStoreSpec


class Handler(OffloadingHandler):
    """Handler that copies nothing, finishes transfers passed to ``wait``, and raises in calls named
    in ``failing``."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.started: list[int] = []
        self.waited: set[int] = set()
        self.accepts = True
        self.shutdowns = 0

    def check(self, call: str) -> None:
        if call in self.failing:
            raise RuntimeError(call)

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self.check("transfer_async")
        if self.accepts:
            self.started.append(job_id)
        return self.accepts

    def get_finished(self) -> list[TransferResult]:
        self.check("get_finished")
        finished = [
            TransferResult(job_id, True)
            for job_id in self.started
            if job_id in self.waited
        ]
        self.started = [job_id for job_id in self.started if job_id not in self.waited]
        return finished

    def wait(self, job_ids: set[int]) -> None:
        self.waited |= job_ids
        self.check("wait")

    def shutdown(self) -> None:
        self.shutdowns += 1
        self.check("shutdown")


@pytest.fixture
def handlers() -> tuple[Handler, Handler]:
    return Handler(), Handler()


@pytest.fixture
def worker(handlers: tuple[Handler, Handler]) -> OffloadingConnectorWorker:
    to_device, from_device = handlers
    return OffloadingConnectorWorker(
        [
            (CPULoadStoreSpec, GPULoadStoreSpec, to_device),
            (GPULoadStoreSpec, CPULoadStoreSpec, from_device),
        ]
    )


CPU, GPU = CPULoadStoreSpec([0]), GPULoadStoreSpec([0], [1], [0])
METADATA = ConnectorMetadata(
    loads=[TransferJob(1, (CPU, GPU))], stores=[TransferJob(2, (GPU, CPU))]
)


def test_start_load_and_store_reach_their_handlers(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
) -> None:
    worker.start(METADATA)
    assert [handler.started for handler in handlers] == [[1], [2]]


def test_wait_one_of_two_jobs_reports_only_it_and_once(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
) -> None:
    worker.start(METADATA)
    worker.wait([2, 99])
    assert [handler.waited for handler in handlers] == [set(), {2}]
    assert [result.job_id for result in worker.get_finished()] == [2]
    worker.wait_all()
    assert [result.job_id for result in worker.get_finished()] == [1]
    assert worker.get_finished() == []


def test_start_handler_rejects_job_reports_failure(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
) -> None:
    handlers[0].accepts = False
    worker.start(METADATA)
    assert worker.get_finished() == [TransferResult(1, success=False)]


def test_start_unknown_direction_starts_nothing(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
) -> None:
    with pytest.raises(KeyError, match="GPU"):
        worker.start(
            ConnectorMetadata(
                METADATA.loads, [TransferJob(3, (GPU, GPU)), *METADATA.stores]
            )
        )
    assert [handler.started for handler in handlers] == [[], []]


@pytest.mark.parametrize("failing", [0, 1])
def test_start_handler_raises_other_jobs_start_and_are_reported(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
    failing: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    handlers[failing].failing.add("transfer_async")
    worker.start(METADATA)
    worker.wait_all()
    results = {result.job_id: result.success for result in worker.get_finished()}
    assert results == {1: failing != 0, 2: failing != 1}
    assert "raised in transfer_async: the transfer failed" in caplog.text
    assert worker.get_finished() == []


@pytest.mark.parametrize("failing", [0, 1])
def test_get_finished_handler_raises_others_are_reported_and_its_own_fail(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
    failing: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker.start(METADATA)
    worker.wait_all()
    handlers[failing].waited.clear()
    handlers[failing].failing.add("get_finished")
    results = {result.job_id: result.success for result in worker.get_finished()}
    assert results == {1: failing != 0, 2: failing != 1}
    assert handlers[failing].waited == {failing + 1}, (
        "no failed transfer is still copying"
    )
    assert "raised in get_finished: its transfers failed" in caplog.text
    handlers[failing].failing.clear()
    assert worker.get_finished() == [], "each transfer is reported once"


@pytest.mark.parametrize("failing", [0, 1])
def test_wait_handler_raises_other_handler_is_waited_for(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
    failing: int,
) -> None:
    worker.start(METADATA)
    handlers[failing].failing.add("wait")
    worker.wait_all()
    assert [handler.waited for handler in handlers] == [{1}, {2}]


@pytest.mark.parametrize("failing", [0, 1])
def test_shutdown_handler_raises_other_handler_is_shut_down(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
    failing: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    handlers[failing].failing.add("shutdown")
    worker.shutdown()
    assert [handler.shutdowns for handler in handlers] == [1, 1]
    assert "raised in shutdown" in caplog.text


def test_shutdown_every_handler_is_shut_down_once(
    worker: OffloadingConnectorWorker,
    handlers: tuple[Handler, Handler],
) -> None:
    worker.shutdown()
    assert [handler.shutdowns for handler in handlers] == [1, 1]
