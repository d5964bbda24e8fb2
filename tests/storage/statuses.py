"""Sample status rows of engines."""

from __future__ import annotations

import msgspec

from persistkv.storage.host.status import EngineStatus
from persistkv.storage.records import StoreCounters


def make_status(engine: str = "e1", **changes: object) -> EngineStatus:
    status = EngineStatus(
        engine=engine,
        host="here",
        pid=1,
        namespace="00" * 16,
        started=1000.0,
        time=1010.0,
        interval_s=2.0,
        counters=StoreCounters(stored_blocks=3),
        indexed_blocks=3,
        staged_bytes=0,
        waiting_jobs=0,
        writing_jobs=0,
        loading_jobs=0,
    )
    return msgspec.structs.replace(status, **changes)
