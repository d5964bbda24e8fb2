"""What a store is opened with, what it counts, and what passes between it and its owner."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a namespace is used; not part of its identity."""

    codec: str = "raw"
    """What new packs are written with; packs of any codec are read."""
    staging_bytes: int = 256 << 20  # 256 MiB
    """Bound on the copies of small jobs that wait to be written."""
    max_age_s: float = 2.0
    """Seconds that a small job waits for company at most."""
    refresh_s: float = 1.0
    """Seconds between looks for what other processes stored."""
    strict_identity: bool = False
    """Refuse to open where the store holds other identities only."""


class StoreCounters(msgspec.Struct):
    """What happened since the store was opened."""

    stored_blocks: int = 0
    stored_raw_bytes: int = 0
    """Before the codec."""
    stored_bytes: int = 0
    """Payload at rest, padding included."""
    held_blocks: int = 0
    """Blocks that were offered and that the store held already, or had in flight."""
    dropped_blocks: int = 0
    dropped_bytes: int = 0
    """Raw bytes of blocks that a failed commit cost."""
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    """Raw bytes of blocks read into rows."""
    missed_blocks: int = 0
    """Blocks that were asked for and not there."""
    verification_failures: int = 0
    """Frames that did not verify."""
    evicted_blocks: int = 0
    """Blocks that a commit of this store evicted from its namespace, deleted ones included."""
    commits: int = 0


@dataclass
class News:
    """What came and went since it was last taken."""

    stored: list[bytes] = field(default_factory=list)
    """Keys that became durable, by whomever."""
    removed: list[bytes] = field(default_factory=list)
    persisted: list[tuple[str, bool]] = field(default_factory=list)
    """Requests whose end was dealt with, and whether the whole of their context is durable."""


@dataclass(frozen=True)
class RequestEnd:
    """A request that will store nothing more."""

    request: str
    manifest_id: str
    group_keys: tuple[list[bytes], ...]
    """The whole context in order, prefix hits included."""
    tokens: int
    block_size: int
    """Tokens of one block."""
    ordered: bool = True
    labels: dict[str, str] = field(default_factory=dict)
