"""What the engine's side of a hosted store tells its caller."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from persistkv.errors import (
    ConfigurationError,
    CorruptStoreError,
    FieldDifference,
    IdentityMismatchError,
    PersistKVError,
    ProcessIdInUseError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv.storage.host import protocol

_GLANCE_S = 5.0


class JobOutcome(NamedTuple):
    """How a job ended; its rows are no longer used."""

    job_id: int
    failed: list[bytes]
    """Keys whose bytes were not taken (store) or not filled (load)."""
    refused: bool
    """None of the keys were served: the job never reached the store, or was lost with it."""
    num_bytes: int
    """Raw bytes of the others."""
    seconds: float
    """From submission to this answer."""


class ClientCounters(msgspec.Struct):
    """What happened on the engine's side since it was opened."""

    store_jobs: int = 0
    load_jobs: int = 0
    refused_jobs: int = 0
    """Jobs refused because the queue was full or nothing was open."""
    refused_bytes: int = 0
    refused_ends: int = 0
    """Ends of requests that were not sent, for the same reasons: their manifests are not written."""
    lost_jobs: int = 0
    """Jobs that were in flight when the store's side died."""
    restarts: int = 0


class StoreStats(msgspec.Struct, frozen=True):
    """Both sides at one moment."""

    state: str
    client: ClientCounters
    host: protocol.HostStats | None
    """None where the store's side did not answer in time."""
    queued_bytes: int = 0
    """Raw bytes of store jobs in flight, as of a glance."""


class Glance:
    """The last totals of the store's side, asked for now and then by an engine that does not wait for them."""

    TOKEN = 0
    """Of such a question; those that somebody waits for are counted from 1."""

    def __init__(self) -> None:
        self.totals: protocol.HostStats | None = None
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether to ask anew; it is not due again for some seconds."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _GLANCE_S
        return True

    def take(self, answer: protocol.HostStats | protocol.Flushed) -> None:
        """Keep an answer that is of use here."""
        if isinstance(answer, protocol.HostStats):
            self.totals = answer


_ERRORS: dict[str, type[PersistKVError]] = {
    kind.__name__: kind
    for kind in (CorruptStoreError, ProcessIdInUseError, StoreError, StoreFullError, StoreUnavailableError)
}


def open_error(failed: protocol.OpenFailed) -> PersistKVError:
    """The error that the store's side met, raised again here."""
    if failed.kind == ConfigurationError.__name__:
        return ConfigurationError(*failed.details)
    if failed.kind == IdentityMismatchError.__name__:
        url, differences = failed.details
        return IdentityMismatchError(url, [FieldDifference(*difference) for difference in differences])
    return _ERRORS.get(failed.kind, StoreError)(failed.message)
