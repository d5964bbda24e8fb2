"""What a store is opened with, what it counts, and what passes between it and its owner."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from persistkv.config import parse_duration
from persistkv.errors import ConfigurationError

_BYTES_OBJECT = 48  # of a bytes object beside its content, and of its place in a list


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a namespace is used; not part of its identity."""

    codec: str = "raw"
    """What new packs are written with; packs of any codec are read."""
    staging_bytes: int = 256 << 20  # 256 MiB
    """Bound on all memory of the host beyond its index; see ``persistkv.storage.memory``."""
    max_age_s: float = 2.0
    """Seconds that a small job waits for company at most."""
    durability: str = "commit"
    """See ``parse_durability``."""
    io_threads: int = 2
    """Reads that run at once. Frames are encoded on the same threads."""
    refresh_s: float = 1.0
    """Seconds between looks for what other processes stored."""
    strict_identity: bool = False
    """Refuse to open where the store holds other identities only."""


class StoreCounters(msgspec.Struct):
    """What happened since the store was opened."""

    stored_blocks: int = 0
    """Blocks of packs that became durable."""
    stored_raw_bytes: int = 0
    """Before the codec."""
    stored_bytes: int = 0
    """Payload at rest, padding included."""
    held_blocks: int = 0
    """Blocks that were offered and that the store held already, or had in flight."""
    dropped_blocks: int = 0
    """Blocks that a failed commit cost: they are absent, and will be computed again."""
    dropped_bytes: int = 0
    """Their raw bytes."""
    loaded_blocks: int = 0
    """Blocks read into rows, verified."""
    loaded_bytes: int = 0
    """Their raw bytes."""
    missed_blocks: int = 0
    """Blocks that were asked for and not there."""
    verification_failures: int = 0
    """Frames that did not verify."""
    evicted_blocks: int = 0
    """Blocks that a commit of this store evicted from its namespace, deleted ones included."""
    commits: int = 0
    """Transactions that ended well."""


@dataclass
class News:
    """What came and went since it was last taken."""

    stored: list[bytes] = field(default_factory=list)
    """Keys that became durable, by whomever."""
    removed: list[bytes] = field(default_factory=list)
    """Keys that are not there any more, whoever evicted or deleted them."""
    persisted: list[tuple[str, bool]] = field(default_factory=list)
    """Requests whose end was dealt with, and whether the whole of their context is durable."""


@dataclass(frozen=True)
class RequestEnd:
    """A request that will store nothing more."""

    request: str
    """The engine's id of it."""
    manifest_id: str
    """Unique over restarts."""
    group_keys: tuple[list[bytes], ...]
    """The whole context in order, prefix hits included."""
    tokens: int
    """Of the whole context; 0 where the engine did not tell."""
    block_size: int
    """Tokens of one block."""
    ordered: bool = True
    """False: the keys stand in the order of arrival."""
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Memory that its keys take, roughly."""
        return sum(len(keys) * (len(keys[0]) + _BYTES_OBJECT) for keys in self.group_keys if keys)


def parse_durability(text: str) -> float | None:
    """When what was taken becomes durable.

    ``commit`` (None): a pack is written as soon as it is worth it. Jobs of 4 MiB and more are on disk when they end;
    smaller ones when their request ends, and ``max_age_s`` after they were taken at the latest.

    ``interval:5s`` (5.0): what was taken waits for company until the oldest of it is so old, and is then written
    together: one transaction, one sync, which costs little however many requests end. A crash of the host loses what
    was taken since then and nothing else: transactions are delayed, never left unsynced. A request counts as persisted,
    and its blocks are found, once it is on disk, as ever. Where memory for what waits is used up, or ``flush`` asks for
    it, it is written earlier.

    :raises ConfigurationError: it is neither.
    """
    if text == "commit":
        return None
    kind, _, interval = text.partition(":")
    try:
        if kind == "interval":
            return parse_duration(interval, name="durability")
    except ConfigurationError:
        pass
    raise ConfigurationError("durability", text, "commit, or interval:5s for any positive duration")
