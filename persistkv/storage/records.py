"""Options and counters of an open store, and the values that it exchanges with its caller, the host process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from persistkv.base import Retention
from persistkv.storage.format.manifest import RequestManifest

_MOST_EVENTS = 65_536  # stored and removed keys that wait for the engine
_END_BYTES = 512  # memory of the end of a request, without its keys and labels
_BYTES_OBJECT = 48  # overhead of a bytes object and of its reference in a list


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an open namespace; not part of its identity."""

    codec: str = "raw"
    """Codec of new packs; packs of any codec are read."""
    staging_bytes: int = 256 << 20  # 256 MiB
    """Bound on all memory of the host process except its index; see ``persistkv.memory.budget``."""
    max_age_s: float = 2.0
    """Longest time, in seconds, that a small pack waits in memory to be written together with others."""
    durability: str = "commit"
    """See ``persistkv.config.parse_durability``."""
    io_threads: int = 2
    """Number of concurrent reads. Frames are encoded on the same threads."""
    refresh_s: float = 1.0
    """Seconds between refreshes, which read the changes of other processes."""
    strict_identity: bool = False
    """Refuse to open a store that holds only other identities."""
    adopt: Literal["canary", "never"] = "canary"
    """``canary``: use the namespace of another engine release after comparisons have proven its blocks valid.
    ``never``: use only the own namespace."""
    events: bool = False
    """Report stored and removed keys in ``News``."""


class StoreCounters(msgspec.Struct):
    """Counters since the store was opened."""

    stored_blocks: int = 0
    """Blocks of packs that became durable."""
    stored_raw_bytes: int = 0
    """Bytes of ``stored_blocks`` before the codec."""
    stored_bytes: int = 0
    """Bytes of ``stored_blocks`` as stored, after the codec and with padding."""
    held_blocks: int = 0
    """Blocks of store jobs that were not written again: the store already held or had accepted them."""
    dropped_blocks: int = 0
    """Blocks dropped because their commits failed or did not begin: the engine will compute them again."""
    dropped_bytes: int = 0
    """Raw bytes of ``dropped_blocks``."""
    loaded_blocks: int = 0
    """Blocks read into rows, verified."""
    loaded_bytes: int = 0
    """Raw bytes of ``loaded_blocks``."""
    missed_blocks: int = 0
    """Blocks of load jobs that were not served."""
    verification_failures: int = 0
    """Frames that failed verification."""
    evicted_blocks: int = 0
    """Blocks of packs that commits of this process evicted or deleted from the namespace."""
    commits: int = 0
    """Transactions that succeeded."""


class News(msgspec.Struct, array_like=True, tag=True):
    """Changes since the last ``take_news``, as the host process sends them to the engine.

    ``stored``, ``removed`` and ``lost`` are set only if ``StoreOptions.events`` is.
    """

    stored: list[bytes] = []
    """Keys that became durable, including those that other processes wrote."""
    removed: list[bytes] = []
    """Keys that are no longer held."""
    lost: bool = False
    """Whether ``stored`` or ``removed`` is incomplete: there were too many keys, or another process removed packs."""
    persisted: list[tuple[str, bool]] = []
    """(request id, whether its whole context is durable), for each request whose end was processed."""
    collided: dict[bytes, bool] = {}
    """Key → True: the key is not held, although a held key has the same fingerprint, so the engine must treat it as a
    miss. False: it was stored since, so the engine can trust the lookup table again."""

    def add(self, *, stored: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        """Record keys. A key that was stored and then removed is only in ``removed``.

        If there are too many keys, both lists are cleared and ``lost`` is set.
        """
        gone = set(removed)
        if gone and not gone.isdisjoint(self.stored):
            self.stored = [key for key in self.stored if key not in gone]
        self.stored += stored
        self.removed += removed
        if len(self.stored) + len(self.removed) > _MOST_EVENTS:
            self.lost, self.stored, self.removed = True, [], []


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Filter of stored contexts, by id or by labels."""

    request: str | None = None
    """The id of a context, as ``persistkv ls --json`` shows it, or the beginning of the id."""
    labels: dict[str, str] = {}
    """Labels that the contexts have, with these values; ignored if ``request`` is set. Empty: all contexts."""

    def includes(self, head: RequestManifest) -> bool:
        """Return whether the filter includes the context of this manifest."""
        if self.request is not None:
            return head.id.startswith(self.request)
        return self.labels.items() <= head.labels.items()


class RequestEnd(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End of a request. The engine sends it to the host process after the request's last store job."""

    request: str
    """The engine's request id."""
    manifest_id: str
    """Id of the manifest to write, unique across restarts of the engine."""
    group_keys: tuple[list[bytes], ...]
    """For each group, the keys of the whole context in order, including prefix hits."""
    tokens: int
    """Tokens of the whole context; 0 if the engine did not report them."""
    block_size: int
    """Tokens of one block, one value for all groups; used to count the tokens of a prefix of the context."""
    ordered: bool = True
    """Whether the keys are in the order of the context; False: in order of arrival."""
    labels: dict[str, str] = {}
    """Name-value pairs to store in the manifest; ``Choice`` selects by them."""
    retention: Retention = Retention()
    """How long the context is kept, from the commit that writes the manifest on."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory of this object in bytes."""
        keys = sum(len(keys) * (len(keys[0]) + _BYTES_OBJECT) for keys in self.group_keys if keys)
        return _END_BYTES + keys + sum(len(name) + len(value) for name, value in self.labels.items())
