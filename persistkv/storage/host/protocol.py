"""Messages between the engine and the host.

A job is one message, regardless of its number of blocks: keys and numbers (little-endian u32) are
sent as joined bytes. Questions have a token, which the answer repeats, so that late answers to
earlier calls are recognized.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from persistkv import errors
from persistkv.base import OffloadKey, StoredContext
from persistkv.config import RowLayout
from persistkv.errors import (
    ConfigurationError,
    FieldDifference,
    IdentityMismatchError,
    PersistKVError,
)
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.records import (
    Choice,
    LoadReport,
    RequestEnd,
    StoreCounters,
    StoreOptions,
    StoreReport,
)
from persistkv.tenants import DEFAULT_TENANT

PID_BYTES = 4
"""Bytes of the host process's PID, little-endian. The host sends it, with its pidfd, before any
message."""
_ERRORS: dict[str, type[PersistKVError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PersistKVError)
}
"""The exception classes that both processes know, by name."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages. On the wire, a message is an array of its class's name and its
    fields."""


# Engine to store


class Hello(_Message):
    """Open the store and the namespace of the identity. The first message to a host."""

    url: str
    identity: bytes
    """The engine's identity as canonical JSON; see ``persistkv.storage.identity``."""
    layout: RowLayout
    options: StoreOptions
    engine_pid: int = msgspec.field(default_factory=os.getpid)
    """Id of the process that runs the model."""


class Job(_Message):
    """A store or load job; ``JobDone`` answers it."""

    job_id: int
    keys: PackedKeys
    block_ids: bytes
    """For each key, the row of the primary tier to read or to fill: u32, joined."""


class StoreJob(Job):
    """Store blocks from rows."""

    request: str
    """The engine's request id."""
    depths: bytes = b""
    """For each key, how many blocks of its group precede it in the request: u32, joined; empty if
    unknown."""
    tenant: str = DEFAULT_TENANT
    """Whose blocks these are."""


class LoadJob(Job):
    """Load blocks into rows."""

    deadline: float | None = None
    """Time at which the blocks fail whose reads have not begun, by ``time.monotonic``, a clock that
    all processes of a machine share; None: no deadline."""


class Probe(_Message):
    """Read a few blocks and discard them, to measure the medium; ``Probed`` answers it."""

    keys: PackedKeys
    begin: float
    """``time.monotonic`` time of the message."""
    deadline: float
    """``time.monotonic`` time at which the probe ends, even if a read is still in progress."""


class Loaded(_Message):
    """Another tier of the engine loads blocks, so the engine does not compute them."""

    keys: PackedKeys
    """Keys of the loaded blocks; empty: the keys are not known any more."""


class Reported(_Message):
    """Show in the status what became of the blocks of a request."""

    report: LoadReport


class Touch(_Message):
    """Mark blocks as recently used, so that other blocks are evicted first."""

    keys: PackedKeys


class Saved(_Message):
    """Statistics: tokens that a request restored from the store, and a measured prefill.
    ``storage.savings`` adds them up. No answer is sent."""

    restored_tokens: int = 0
    """Prompt tokens whose KV the store loaded for the request."""
    labels: dict[str, str] = {}
    """Labels of the request."""
    prefill_tokens: int = 0
    """Tokens of a prefill whose time was measured; 0: none was."""
    prefill_s: float = 0.0
    """Seconds of that prefill."""


class Mapped(_Message):
    """Answer to ``Table`` or ``Opened``: the engine uses the new lookup table and no longer the
    previous one. The host sends the next table only after it."""


class Flush(_Message):
    """Commit all work received before this message, then answer with ``Flushed``; also if blocks
    had to be dropped."""

    token: int


class AskStats(_Message):
    """Answer with ``HostStats``."""

    token: int
    """0: no caller waits for the answer."""


class AskRecent(_Message):
    """Answer with keys of stored requests to prewarm (``Recent``), the most recently used request
    first."""

    max_blocks: int
    """Largest number of keys in the answer."""
    choice: Choice | None = None
    """Only requests that this filter includes; None: no filter."""


class Ping(_Message):
    """Answer with ``Pong`` at once, to show that the host's loop is alive."""


class End(_Message):
    """Release the rows, answer with ``Ended``, commit accepted work, and exit. The last message to
    a host."""


# Store to engine


class Table(_Message):
    """A new lookup table, which replaces the previous one."""

    slots: int
    """Number of the table's slots, 8 bytes each."""
    fd: int = -1
    """Descriptor of the memfd that holds the table, sent with the message; the receiver closes
    it."""

    def discard(self) -> None:
        """Close the descriptor of a table that was sent or will not be delivered; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Opened(_Message):
    """The store and the namespace are open. The answer to ``Hello``."""

    table: Table
    notice: str
    """Message for the user if the namespace is new, see ``Store.notice``; may be empty."""
    prefill: tuple[int, float] = (0, 0.0)
    """Tokens and seconds of this model's measured prefills, as recorded in the store; 0 if none
    is."""
    sends_held_blocks: bool = False
    """Whether the engine must also send store jobs whose keys the lookup table contains: blocks are
    compared with those of another release, and adopted blocks are stored again."""


def table_of(message: Any) -> Table | None:
    """Return the lookup table that a message contains; None if it contains none."""
    if isinstance(message, Opened):
        return message.table
    return message if isinstance(message, Table) else None


class OpenFailed(_Message):
    """The store could not be opened. The answer to ``Hello`` instead of ``Opened``."""

    kind: str
    """Name of the error's class in ``persistkv.errors``."""
    text: str
    attributes: dict[str, Any]
    """The error's other attributes, as text; ``differences`` as a list."""

    @classmethod
    def of(cls, error: PersistKVError | ValueError) -> OpenFailed:
        """Encode an exception as a message.

        A subclass of a driver becomes its nearest class in ``persistkv.errors``. A ValueError that
        is no PersistKVError, which a value of the caller has caused, becomes a ConfigurationError.
        """
        if not isinstance(error, PersistKVError):
            error = ConfigurationError("store", None, "", str(error))
        # encode attributes as text, because msgspec may be unable to encode those that a driver
        # gives its errors
        attributes: dict[str, Any] = {}
        for name, value in vars(error).items():
            attributes[name] = None if value is None else str(value)
        if isinstance(error, IdentityMismatchError):
            attributes["differences"] = [
                list(map(str, fields)) for fields in error.differences
            ]
        return cls(_known_class(error), str(error), attributes)

    def error(self) -> PersistKVError:
        """Decode the exception that ``of`` encoded.

        :raises ValueError: there is no such class.
        """
        kind = _ERRORS.get(self.kind)
        if kind is None:
            raise ValueError(f"unknown error {self.kind}")
        # do not call the constructor, because its parameters differ between the classes
        error = kind.__new__(kind, self.text)
        vars(error).update(self.attributes)
        if isinstance(error, IdentityMismatchError):
            error.differences = tuple(
                FieldDifference(*fields) for fields in self.attributes["differences"]
            )
        return error


def _known_class(error: PersistKVError) -> str:
    """Return the name of the nearest class of an error that both processes know."""
    known = (kind for kind in type(error).__mro__ if kind in _ERRORS.values())
    nearest = next(known)  # this finds ``PersistKVError`` at the latest
    return nearest.__name__


class JobDone(_Message):
    """Result of a store or load job, whose rows the host no longer uses."""

    job_id: int
    failed: PackedKeys | None
    """Keys of a store job whose blocks were dropped, or of a load job whose rows have undefined
    content. None: all keys of the job."""
    num_bytes: int
    """Raw bytes loaded into rows; 0 for a store job."""
    is_late: bool = False
    """Whether the deadline of a load job passed before all of its blocks were read."""
    ended_at: float = msgspec.field(default_factory=time.monotonic)
    """``time.monotonic`` time of the end of the job: the engine may receive the answer much
    later."""


class Probed(_Message):
    """The answer to ``Probe``."""

    num_bytes: int
    """Raw bytes of the blocks that were read; 0: none, before the deadline."""
    seconds: float
    """From the message to the end of the reads."""


class Flushed(_Message):
    """The answer to ``Flush``: all work received before it is durable or dropped."""

    token: int


class HostStats(_Message):
    """The answer to ``AskStats``."""

    token: int
    counters: StoreCounters
    held_blocks: int
    """Number of blocks that a lookup finds; see ``EngineStatus.indexed_blocks``."""
    staged_bytes: int
    """Raw bytes of staged copies that are waiting or being written."""
    disk_bytes: int | None
    """Bytes that the store, with all its namespaces, takes on the medium; None: the medium
    failed."""
    capacity: int | None
    """Bound on ``disk_bytes``; None: unbounded, or the medium failed."""
    cpu_seconds: float
    """CPU time, since its start, of the process in which the store runs."""
    requests: dict[str, int] = {}
    """Requests sent to the medium since the store was opened, by HTTP method or other kind; empty
    if not counted."""
    breaker: str | None = None
    """State of the medium's circuit breaker: ``closed``, ``open`` or ``half-open``; None: it has
    none."""


class Recent(_Message):
    """The answer to ``AskRecent``."""

    contexts: tuple[PackedKeys, ...]
    """Empty if the medium failed."""
    tenants: tuple[str, ...]
    """For each context, the tenant to which it belongs."""

    @classmethod
    def of(cls, contexts: Sequence[StoredContext]) -> Recent:
        packed = tuple(PackedKeys.of(context.keys) for context in contexts)
        tenants = tuple(context.tenant for context in contexts)
        return cls(packed, tenants)

    def unpack(self) -> list[StoredContext]:
        """Return the contexts; raise ValueError or CorruptPackError if they are malformed."""
        found = []
        for tenant, packed in zip(self.tenants, self.contexts, strict=True):
            keys = [OffloadKey(key) for key in packed.unpack()]
            found.append(StoredContext(tenant, keys))
        return found


class Pong(_Message):
    """The answer to ``Ping``: the host's loop is alive."""

    longest_s: float
    """Seconds for which the oldest backend call has been running; 0 if there is none."""


class Ended(_Message):
    """The answer to ``End``: the host no longer reads or writes rows. Jobs without an answer were
    dropped."""


class Notice(_Message):
    """A log record of the host, for the engine's log."""

    level: int
    """Level of the module ``logging``, such as 20 for INFO."""
    text: str


ToStore = (
    Hello
    | StoreJob
    | LoadJob
    | Probe
    | Reported
    | RequestEnd
    | Loaded
    | Touch
    | Saved
    | Mapped
    | Flush
    | AskStats
    | AskRecent
    | Ping
    | End
)
ToEngine = (
    Table
    | Opened
    | OpenFailed
    | JobDone
    | Probed
    | StoreReport
    | Flushed
    | HostStats
    | Recent
    | Pong
    | Ended
    | Notice
)
