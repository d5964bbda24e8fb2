"""Tiers that remember what they were told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from persistkv.base import OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.example import ExampleSecondaryTier


class RecordingTier(ExampleSecondaryTier):
    """Remembers what it was told; asks for every block of a request; fails the loads of ``rotten`` keys."""

    policy = OffloadPolicy.REQUEST_LEVEL

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stores: list[JobMetadata] = []
        self.loads: list[JobMetadata] = []
        self.told: list[tuple[str, str]] = []
        self.touched: list[OffloadKey] = []
        self.rotten: set[OffloadKey] = set()
        self.polls = 0
        self.silent = False

    def submit_store(self, job: JobMetadata) -> None:
        self.stores.append(job)
        super().submit_store(job)

    def submit_load(self, job: JobMetadata) -> None:
        self.loads.append(job)
        for key in self.rotten.intersection(job.keys):
            del self.blocks[key]
        super().submit_load(job)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.rotten or super().lookup(key, req_context)

    def get_finished_jobs(self) -> Any:
        self.polls += 1
        return [] if self.silent else super().get_finished_jobs()

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.touched += keys

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.told.append(("new", req_context.req_id))
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.told.append(("finished", req_context.req_id))


class BlockLevelTier(RecordingTier):
    policy = OffloadPolicy.BLOCK_LEVEL
