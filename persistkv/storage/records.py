"""Options and counters of an open store, and the values that it exchanges with its caller, the host
process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from persistkv.base import Retention
from persistkv.memory.budget import default_io_threads
from persistkv.storage.format.manifest import RequestManifest
from persistkv.tenants import DEFAULT_TENANT

# maximum number of stored and removed keys that wait for the engine
_MOST_EVENTS = 65_536
_END_BYTES = 512  # memory of the end of a request, without its keys and labels
_BYTES_OBJECT = 48  # overhead of a bytes object and of its reference in a list


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an open namespace; not part of its identity."""

    codec: str = "raw"
    """Codec of new packs, such as ``raw`` or ``zstd:3`` (``parse_codec``). Packs of any codec are
    read."""
    staging_bytes: int = 256 << 20  # 256 MiB
    """Bound in bytes on all memory of the host process except its index and the primary tier."""
    max_age_s: float = 2.0
    """Age in seconds at which the write of staged blocks starts: blocks of small packs (below 4
    MiB), copied to memory to be written together with others. Ignored with ``interval:``
    durability."""
    durability: str = "commit"
    """``commit``: each pack is written when it is large enough, at the end of its request, or at
    ``max_age_s``. ``interval:5s``: accepted blocks are written together when the oldest is 5 s old.
    """
    io_threads: int = msgspec.field(default_factory=default_io_threads)
    """Number of threads that read and decode frames, and encode those of new packs. A remote store
    uses 8 instead."""
    refresh_s: float = 1.0
    """Seconds between the starts of refreshes, which read the packs that other processes added or
    removed."""
    strict_identity: bool = False
    """True: refuse to open a store that holds only namespaces of other identities (an empty one is
    opened). False: add a namespace to it."""
    adopt: Literal["canary", "never"] = "canary"
    """``canary``: use the namespace of another engine release after comparisons have proven its
    blocks valid. ``never``: use only the own namespace."""
    events: bool = False
    """Whether ``StoreReport`` reports stored and removed keys."""


class StoreCounters(msgspec.Struct):
    """Counters of one open ``Store`` since it was opened. Work of other processes is not
    counted."""

    stored_blocks: int = 0
    """Blocks of the packs that this store wrote and that became durable."""
    stored_raw_bytes: int = 0
    """Bytes of ``stored_blocks`` before the codec."""
    stored_bytes: int = 0
    """Bytes of ``stored_blocks`` as stored, after the codec and with padding."""
    held_blocks: int = 0
    """Blocks of store jobs that were not written again: the store already held or had accepted
    them."""
    dropped_blocks: int = 0
    """Blocks that were dropped, because their commits failed or had not begun when the host ended,
    or because the store is open for reading only. They are misses: the engine computes them again.
    """
    dropped_bytes: int = 0
    """Raw bytes of ``dropped_blocks``."""
    quota_blocks: int = 0
    """Part of ``dropped_blocks``: those that did not fit the quota of their tenant."""
    loaded_blocks: int = 0
    """Blocks that load jobs read into rows and verified."""
    loaded_bytes: int = 0
    """Raw bytes of ``loaded_blocks``."""
    missed_blocks: int = 0
    """Blocks of load jobs that were not served: not held, damaged, or not readable."""
    verification_failures: int = 0
    """Frames read by load jobs whose bytes failed verification or decoding."""
    evicted_blocks: int = 0
    """Blocks of this namespace's packs that were evicted or expired in successful commits of this
    store. Deleted damaged packs are not counted."""
    commits: int = 0
    """Transactions of this store that succeeded, including those that wrote no pack."""


class StoreReport(msgspec.Struct, array_like=True, tag=True):
    """Changes of the store's keys and requests since the last ``take_report``. ``stored``,
    ``removed`` and ``lost`` are set only if ``StoreOptions.events`` is.
    """

    stored: list[bytes] = []
    """Keys that became durable, including those that other processes wrote and those of an adopted
    namespace."""
    removed: list[bytes] = []
    """Keys that can no longer be loaded: their packs were removed, or are damaged."""
    lost: bool = False
    """Whether ``stored`` or ``removed`` is incomplete: more than 65,536 keys changed, or another
    process removed packs that this one held when it was opened, whose keys are not known."""
    persisted: list[tuple[str, bool]] = []
    """(request id, whether its whole context is durable), for each request whose end was
    processed."""
    collisions: dict[bytes, bool] = {}
    """Key → True: the key is not held, although a held key has the same fingerprint, so the engine
    must treat it as a miss. False: it was stored since, so the engine can trust the lookup table
    again."""

    def add(
        self,
        *,
        stored: Sequence[bytes] = (),
        removed: Sequence[bytes] = (),
    ) -> None:
        """Add keys to both lists. A key that was stored and then removed is only in ``removed``."""
        gone = set(removed)
        if gone and not gone.isdisjoint(self.stored):
            self.stored = [key for key in self.stored if key not in gone]
        self.stored += stored
        self.removed += removed
        # bound the memory: from here on, the report only says that keys are missing
        if len(self.stored) + len(self.removed) > _MOST_EVENTS:
            self.lost = True
            self.stored = []
            self.removed = []


def are_encodable(texts: Iterable[object]) -> bool:
    """Return whether all texts are strings that a message can contain: a string with a lone
    surrogate is not."""
    try:
        for text in texts:
            if not isinstance(text, str):
                return False
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Filter of stored contexts, by id or by labels, and by tenant."""

    request: str | None = None
    """The id of a context, as ``persistkv ls --json`` shows it, or the beginning of the id."""
    labels: dict[str, str] = {}
    """Labels that the contexts have, with these values; ignored if ``request`` is set. Empty: all
    contexts."""
    tenant: str | None = None
    """Name of the tenant whose contexts they are; None: of any."""

    @property
    def is_encodable(self) -> bool:
        """Whether a message can contain the id and the labels, which users choose."""
        request = self.request or ""
        labels = [*self.labels, *self.labels.values()]
        return are_encodable([request, *labels])

    def includes(self, head: RequestManifest) -> bool:
        """Return whether the filter selects the context of this manifest."""
        if self.tenant is not None and self.tenant != head.tenant:
            return False
        if self.request is not None:
            return head.id.startswith(self.request)
        return self.labels.items() <= head.labels.items()


class LoadReport(msgspec.Struct, frozen=True):
    """Use of the blocks that a store held for a request. The engine sends it to the host
    process, which shows the last ones in its status."""

    request: str
    """The engine's request id."""
    reason: str
    """``loaded``; or why the engine computed them: ``too_slow``, ``too_short`` or ``deadline``; or
    ``refused``: the request neither used nor filled the store."""
    load_s: float | None
    """Seconds that the load took, also one that was abandoned; if it was not begun, those that it
    was expected to take. None: no time can be expected, because loads get no answer at present, or
    there was nothing to load."""
    compute_s: float | None
    """Seconds that the computation was expected to take; None: unknown."""
    time: float
    """Time of the decision, or of the end of the load: seconds since the epoch."""


class RequestEnd(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End of a request. The engine sends it to the host process after the request's last store
    job."""

    request: str
    manifest_id: str
    """Id of the manifest to write, unique across restarts of the engine."""
    group_keys: tuple[list[bytes], ...]
    """For each KV cache group, the keys of the whole context in order, including prefix hits."""
    tokens: int
    """Tokens of the whole context; 0 if the engine did not report them."""
    block_size: int
    """Tokens of one block, one value for all groups; used to count the tokens of a prefix of the
    context."""
    ordered: bool = True
    """Whether the keys are in the order of the context; False: in order of arrival."""
    labels: dict[str, str] = {}
    retention: Retention = Retention()
    """How long the context is kept, from the commit that writes the manifest on."""
    restored_tokens: int = 0
    """Prompt tokens that the request restored from the store."""
    tenant: str = DEFAULT_TENANT
    """Whose request it was."""

    @property
    def is_encodable(self) -> bool:
        """Whether a message can contain ids, tenant and labels, which users choose."""
        names = [self.request, self.manifest_id, self.tenant]
        labels = [*self.labels, *self.labels.values()]
        return are_encodable(names + labels)

    @property
    def num_bytes(self) -> int:
        """Approximate memory of this object in bytes."""
        num_bytes = _END_BYTES
        for keys in self.group_keys:
            if keys:
                # all keys of a group have the same length
                num_bytes += len(keys) * (len(keys[0]) + _BYTES_OBJECT)
        for name, value in self.labels.items():
            num_bytes += len(name) + len(value)
        return num_bytes
