from __future__ import annotations

import pytest

from persistkv.base import GPULoadStoreSpec, OffloadingHandler, TransferResult, TransferSpec
from persistkv.connector.common import ConnectorMetadata, TransferJob
from persistkv.connector.worker import OffloadingConnectorWorker
from persistkv.cpu.common import CPULoadStoreSpec


class Handler(OffloadingHandler):
    """Moves nothing; ends what it is told to."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.waited: set[int] = set()
        self.accepts = True
        self.shutdowns = 0

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if self.accepts:
            self.started.append(job_id)
        return self.accepts

    def get_finished(self) -> list[TransferResult]:
        finished = [TransferResult(job_id, True) for job_id in self.started if job_id in self.waited]
        self.started = [job_id for job_id in self.started if job_id not in self.waited]
        return finished

    def wait(self, job_ids: set[int]) -> None:
        self.waited |= job_ids

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.fixture
def handlers():
    return Handler(), Handler()


@pytest.fixture
def worker(handlers):
    to_device, from_device = handlers
    return OffloadingConnectorWorker(
        [(CPULoadStoreSpec, GPULoadStoreSpec, to_device), (GPULoadStoreSpec, CPULoadStoreSpec, from_device)]
    )


CPU, GPU = CPULoadStoreSpec([0]), GPULoadStoreSpec([0], [1], [0])
METADATA = ConnectorMetadata(loads=[TransferJob(1, (CPU, GPU))], stores=[TransferJob(2, (GPU, CPU))])


def test_gives_each_transfer_to_its_direction(worker, handlers):
    worker.start(METADATA)
    assert [handler.started for handler in handlers] == [[1], [2]]


def test_waits_for_those_asked_and_reports_each_once(worker, handlers):
    worker.start(METADATA)
    worker.wait([2, 99])
    assert [handler.waited for handler in handlers] == [set(), {2}]
    assert [result.job_id for result in worker.get_finished()] == [2]
    worker.wait_all()
    assert [result.job_id for result in worker.get_finished()] == [1]
    assert worker.get_finished() == []


def test_reports_what_could_not_be_started(worker, handlers):
    handlers[0].accepts = False
    worker.start(METADATA)
    assert worker.get_finished() == [TransferResult(1, success=False)]


def test_names_an_unknown_direction(worker):
    with pytest.raises(KeyError, match="GPU"):
        worker.start(ConnectorMetadata(loads=[TransferJob(3, (GPU, GPU))]))


def test_shuts_down_every_handler(worker, handlers):
    worker.shutdown()
    assert [handler.shutdowns for handler in handlers] == [1, 1]
