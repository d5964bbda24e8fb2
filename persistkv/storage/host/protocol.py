"""Messages between the engine and the host.

A job is one message, regardless of its number of blocks: keys and numbers are sent as joined bytes.
"""

from __future__ import annotations

import os
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
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.records import Choice, RequestEnd, StoreCounters, StoreOptions

_ERRORS: dict[str, type[PersistKVError]] = {
    kind.__name__: kind
    for kind in (CorruptStoreError, ProcessIdInUseError, StoreError, StoreFullError, StoreUnavailableError)
}


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages."""


# Engine to store


class Hello(_Message):
    """Open a namespace. The first message."""

    url: str
    identity: bytes
    """Canonical JSON."""
    layout: RowLayout
    options: StoreOptions
    engine_pid: int = msgspec.field(default_factory=os.getpid)
    """Id of the process that runs the model."""


class StoreJob(_Message):
    """Store the blocks in these rows."""

    job_id: int
    request: str
    keys: PackedKeys
    block_ids: bytes
    """For each key, its row as little-endian u32."""
    depths: bytes = b""
    """For each key, the blocks of its group before it, as little-endian u32; empty if unknown."""


class LoadJob(_Message):
    """Load blocks into rows."""

    job_id: int
    keys: PackedKeys
    block_ids: bytes


class Touch(_Message):
    """Uses of blocks."""

    keys: PackedKeys


class Mapped(_Message):
    """The answer to ``Table``: the previous table is no longer used."""


class Flush(_Message):
    """Commit all accepted work, then answer."""

    token: int


class AskStats(_Message):
    """Answer with totals."""

    token: int


class AskRecent(_Message):
    """Answer with the contexts requested for prewarming and the most recently used ones."""

    max_blocks: int
    only_asked: bool = False
    """Leave out the most recently used ones."""
    choice: Choice | None = None
    """Answer with the contexts of this choice only."""


class Ping(_Message):
    """Answer at once."""


class End(_Message):
    """Release the rows, answer, commit accepted work, and exit. The last message."""


# Store to engine


class Table(_Message):
    """The lookup table to use from now on, in place of the last one."""

    slots: int
    fd: int = -1
    """Descriptor of its memfd, sent with the message; the receiver closes it."""

    def discard(self) -> None:
        """Close the descriptor of a message that is not delivered."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Opened(_Message):
    """The namespace is open."""

    table: Table
    namespace: bytes
    notice: str


def table_of(message: Any) -> Table | None:
    """Return the lookup table that a message brings, if it does."""
    if isinstance(message, Opened):
        return message.table
    return message if isinstance(message, Table) else None


class OpenFailed(_Message):
    """The namespace could not be opened; the host ends."""

    kind: str
    """Name of the error's class."""
    message: str
    details: list[Any]
    """Arguments of the error's class, if it takes more than a message."""

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
    """Keys of a store job whose blocks were dropped, or of a load job whose rows were not filled."""
    num_bytes: int
    """Raw bytes loaded into rows; 0 for a store job."""
    seconds: float
    """Time from its start in the host to its end; time in the queue is not included."""


class Events(_Message):
    """Keys that were stored and removed, for engines that subscribe with ``StoreOptions.events``."""

    stored: PackedKeys
    removed: PackedKeys
    lost: bool
    """As in ``News``."""


class Collided(_Message):
    """Keys that are not held although the lookup table has their fingerprint, or that were stored since."""

    keys: PackedKeys
    collided: bool


class Persisted(_Message):
    """The end of a request was processed."""

    request: str
    whole: bool
    """Whether its whole context is durable."""


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
    requests: dict[str, int] = {}
    """As ``Backend.requests``."""
    breaker: str | None = None
    """See ``Backend.breaker_state``."""


class Recent(_Message):
    """The answer to ``AskRecent``."""

    contexts: tuple[PackedKeys, ...]
    """See ``persistkv.storage.host.prewarm``; empty if the medium failed."""


class Pong(_Message):
    """The answer to ``Ping``: the host's loop is alive."""

    longest_s: float
    """Seconds for which the oldest backend call has been running; 0 if there is none."""


class Ended(_Message):
    """The answer to ``End``: no row is read or written from now on. Jobs without an answer were dropped."""


class Notice(_Message):
    """A line for the engine's log."""

    level: int
    text: str


ToStore = Hello | StoreJob | LoadJob | RequestEnd | Touch | Mapped | Flush | AskStats | AskRecent | Ping | End
ToEngine = (
    Table
    | Opened
    | OpenFailed
    | JobDone
    | Events
    | Collided
    | Persisted
    | Flushed
    | HostStats
    | Recent
    | Pong
    | Ended
    | Notice
)
