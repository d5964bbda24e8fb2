"""Messages between the engine's side and the store's side.

One message a job, whatever the number of blocks: keys and numbers travel as joined bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from persistkv.config import RowLayout
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
from persistkv.storage.keys import PackedKeys
from persistkv.storage.records import StoreCounters, StoreOptions

_ERRORS: dict[str, type[PersistKVError]] = {
    kind.__name__: kind
    for kind in (CorruptStoreError, ProcessIdInUseError, StoreError, StoreFullError, StoreUnavailableError)
}


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Anything that travels."""


# Engine to store


class Hello(_Message):
    """Open a namespace. The first message."""

    url: str
    identity: bytes
    """Canonical JSON."""
    layout: RowLayout
    options: StoreOptions


class StoreJob(_Message):
    """Take blocks out of rows."""

    job_id: int
    request: str
    keys: PackedKeys
    block_ids: bytes
    """Little-endian u32, one a key."""
    depths: bytes = b""
    """Likewise; empty where nobody can tell."""


class LoadJob(_Message):
    """Fill rows."""

    job_id: int
    keys: PackedKeys
    block_ids: bytes


class EndRequest(_Message):
    """A request that will store nothing more."""

    request: str
    manifest_id: str
    group_keys: tuple[PackedKeys, ...]
    tokens: int
    block_size: int
    ordered: bool
    labels: dict[str, str]


class Touch(_Message):
    """Blocks were used."""

    keys: PackedKeys


class Flush(_Message):
    """Write all that was taken, then answer."""

    token: int


class AskStats(_Message):
    """Answer with totals."""

    token: int


class AskRecent(_Message):
    """Answer with the contexts that somebody asked for, and those that were used last."""

    max_blocks: int
    only_asked: bool = False
    """Leave the latter out."""


class Ping(_Message):
    """Answer at once."""


# Store to engine


class Listing(_Message):
    """``Stored`` messages follow that tell anew all that the namespace holds, until ``Listed`` or ``Opened``."""


class Listed(_Message):
    """That was all. What was held before and was not told again has gone."""


class Opened(_Message):
    """The namespace is open; what it holds was told since ``Listing``."""

    namespace: bytes
    notice: str


class OpenFailed(_Message):
    """The namespace could not be opened; the store's side ends."""

    kind: str
    """Name of the error's class."""
    message: str
    details: list[Any]
    """Arguments of the error's class, where it takes more than a message."""

    @classmethod
    def of(cls, error: Exception) -> OpenFailed:
        """Return the message that carries an error."""
        details: list[Any] = []
        if isinstance(error, ConfigurationError):
            details = [error.field, str(error.value), error.expected]
        elif isinstance(error, IdentityMismatchError):
            details = [error.url, [list(map(str, difference)) for difference in error.differences]]
        return cls(type(error).__name__, str(error), details)

    def error(self) -> PersistKVError:
        """Return the error that ``of`` was given."""
        if self.kind == ConfigurationError.__name__:
            return ConfigurationError(*self.details)
        if self.kind == IdentityMismatchError.__name__:
            url, differences = self.details
            return IdentityMismatchError(url, [FieldDifference(*difference) for difference in differences])
        return _ERRORS.get(self.kind, StoreError)(self.message)


class JobDone(_Message):
    """The rows of a job are no longer used."""

    job_id: int
    failed: PackedKeys
    """Keys of a store whose bytes were not taken, or of a load whose rows were not filled."""
    num_bytes: int
    """Raw bytes that a load filled; 0 for a store."""
    seconds: float
    """How long the store's side worked on it, waiting left out."""


class Stored(_Message):
    """Keys that are durable and can be asked for."""

    keys: PackedKeys


class Removed(_Message):
    """Keys that are not there any more."""

    keys: PackedKeys


class Persisted(_Message):
    """A request's end was dealt with."""

    request: str
    whole: bool
    """Whether all of its context is durable."""


class Flushed(_Message):
    """The answer to ``Flush``."""

    token: int


class HostStats(_Message):
    """The answer to ``AskStats``."""

    token: int
    counters: StoreCounters
    held_blocks: int
    staged_bytes: int
    disk_bytes: int
    capacity: int | None
    cpu_seconds: float
    """User and system time of the process that the store runs in."""
    rss_bytes: int
    """Peak resident memory of that process, shared rows included."""
    requests: dict[str, int] = {}
    """As ``Backend.requests``."""
    breaker: str | None = None
    """See ``Backend.breaker_state``."""


class Recent(_Message):
    """The answer to ``AskRecent``."""

    contexts: tuple[PackedKeys, ...]
    """See ``persistkv.storage.prewarm``; none where the medium failed."""


class Pong(_Message):
    """The answer to ``Ping``: the loop of the store's side is alive."""

    longest_s: float
    """For how long the oldest call of the backend has been running; 0 where none is."""


class Notice(_Message):
    """A line for the engine's log."""

    level: int
    text: str


ToStore = Hello | StoreJob | LoadJob | EndRequest | Touch | Flush | AskStats | AskRecent | Ping
ToEngine = (
    Listing
    | Listed
    | Opened
    | OpenFailed
    | JobDone
    | Stored
    | Removed
    | Persisted
    | Flushed
    | HostStats
    | Recent
    | Pong
    | Notice
)
