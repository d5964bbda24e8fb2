"""The abstractions of KV offloading: keys, request context, policies, load and store specs,
managers, handlers, specs.

Names are those of vLLM. torch is imported for type checkers only, not at run time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType

import msgspec
import numpy as np
import numpy.typing as npt

from persistkv.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

OffloadKey = NewType("OffloadKey", bytes)
"""Key of a block: hash of its tokens and of all tokens before them, then the KV cache group's
index, 4 bytes big-endian. Equal keys mean equal tokens; the models may differ. In the tiers, equal
keys also mean the same tenant (``persistkv.tenants``)."""

REQUEST_PARAMETER = "persistkv"
"""Key of the options of one request in its ``kv_transfer_params``."""
GROUP_INDEX_BYTES = 4
_SHOWN = 40  # maximum number of characters of a label's name that an error shows
# maximum number of characters of a label's name and value together, because every list of requests
# and every commit carries them
MOST_LABEL_CHARACTERS = 4096


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Return the key of one block of one KV cache group.

    :param block_hash: hash of the block's tokens and of all tokens before them, as the engine
        computes it; any length.
    :raises OverflowError: if the index is negative or does not fit 4 bytes.
    """
    return OffloadKey(block_hash + group_idx.to_bytes(GROUP_INDEX_BYTES, "big"))


def get_offload_block_hash(key: bytes) -> bytes:
    """Return the hash of the key's block, as it was given to ``make_offload_key``."""
    return key[:-GROUP_INDEX_BYTES]


def get_offload_group_idx(key: bytes) -> int:
    """Return the index of the key's KV cache group."""
    return int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")


Priority = Literal["low", "normal"]
"""Priority of stored content: ``low`` is evicted before ``normal``."""

TtlSeconds = Annotated[float, msgspec.Meta(gt=0)]


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """How long a store keeps the context of a request; the default is to keep it as long as there
    is room."""

    pin: bool = False
    """True: the context is never evicted, and expires only by its own ``ttl_s``, until it is
    unpinned."""
    ttl_s: TtlSeconds | None = None
    """Seconds, above 0, from the last use of the context's last blocks until the context expires;
    None: no ttl of its own. The store's ttl applies, too, unless the context is pinned."""
    priority: Priority = "normal"
    """Priority of the context's blocks; a block that several stored contexts share has the highest
    of their priorities."""


def check_labels(labels: Mapping[str, str]) -> None:
    """Check the labels of a request.

    :raises ConfigurationError: a name or value is not text, or the two of one label have more than
        4,096 characters together.
    """
    for name, value in labels.items():
        try:
            # ``encode`` fails for a value that is no text, and for lone surrogates, which UTF-8
            # cannot encode
            name.encode()
            value.encode()
        except (AttributeError, UnicodeEncodeError):
            expected = 'names and values that are text, such as {"user": "anna"}'
            raise ConfigurationError("labels", labels, expected) from None
        length = len(name) + len(value)
        if length > MOST_LABEL_CHARACTERS:
            expected = (
                f"at most {MOST_LABEL_CHARACTERS:,} characters for name and value, not "
                f"{length:,}"
            )
            raise ConfigurationError("labels", f"{name[:_SHOWN]}…", expected)


class RequestDescription:
    """The whole token sequence of a request: the block keys of each group in order, number of
    tokens, labels.

    The engine extends it as blocks fill. Not thread-safe.

    :param num_groups: KV cache groups of the engine.
    :param labels: name-value pairs that are stored with the request's manifest; None: no labels.
    :raises ConfigurationError: see ``check_labels``.
    """

    def __init__(
        self,
        num_groups: int = 1,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.group_keys: tuple[list[OffloadKey], ...] = tuple(
            [] for _ in range(num_groups)
        )
        """For each KV cache group, the keys of its blocks from the first token on."""
        self.num_tokens = 0
        """Number of tokens of the request, including those of an unfinished block; set by the
        engine."""
        self.labels: dict[str, str] = dict(labels or {})
        """Name-value pairs that are stored with the request's manifest and shown by tools."""
        self.retention = Retention()
        """How long the stored context is kept; set by the engine."""
        check_labels(self.labels)
        self._depths: dict[OffloadKey, int] = {}
        """By key, the number of blocks of the same group that precede the block in the request."""

    def extend(self, group_idx: int, keys: Iterable[OffloadKey]) -> None:
        """Append the keys of the next blocks of one KV cache group.

        :raises IndexError: there is no such group; nothing was appended.
        """
        known = self.group_keys[group_idx]
        for key in keys:
            # a key that occurs twice keeps its first depth
            self._depths.setdefault(key, len(known))
            known.append(key)

    def depth(self, key: OffloadKey) -> int | None:
        """Return how many blocks of the same group precede this block in the request; None if the
        key is not in it."""
        return self._depths.get(key)


@dataclass(frozen=True)
class ReqContext:
    """Identity and properties of the request for which a manager or tier is called."""

    req_id: str
    """Request id; unique among the requests that exist at the same time in one engine."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """Parameters that the caller of the engine attached to the request; None: there are none."""
    description: RequestDescription | None = None
    """Block keys of the request in order. None: the engine does not provide them; order and depth
    are unknown."""
    store: bool = True
    """True: the request's blocks are passed to tiers for storing. False: they are only looked up
    and loaded."""
    tenant: str | None = None
    """Valid name of the tenant whose request it is; None: the request names none. The keys of its
    blocks are those of this tenant already (``persistkv.tenants.tenant_key``)."""


class StoredContext(NamedTuple):
    """Blocks of a stored request."""

    tenant: str
    """Name of the tenant whose request it was."""
    keys: list[OffloadKey]
    """This tenant's keys of the blocks (``persistkv.tenants.tenant_key``), in the order of the
    context."""


class OffloadPolicy(StrEnum):
    """Which blocks of a request a tier receives to store."""

    BLOCK_LEVEL = "block_level"
    """Only the newly computed blocks of the request."""
    REQUEST_LEVEL = "request_level"
    """Every block of the request, including prefix hits."""


@dataclass(frozen=True)
class RequestOffloadingContext:
    """Result of ``on_new_request``: which blocks of the request the manager or tier receives to
    store."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


class LoadStoreSpec(ABC):
    """Source or destination of a transfer: blocks on the GPU, or in the primary tier."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium that holds the blocks, e.g. ``GPU`` or ``CPU``."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Source or destination of a transfer that is given as a list of block numbers."""

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self.block_ids: npt.NDArray[np.int64] = np.array(block_ids, np.int64)
        """Numbers of GPU blocks or of rows, depending on the subclass, in the order of the
        transfer; a copy."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()!r})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the engine's KV cache on the GPU that one transfer copies, for all KV cache groups
    together.

    :param block_ids: the blocks of group 0, then those of group 1, and so on.
    :param group_sizes: for each KV cache group, its number of entries in ``block_ids``.
    :param block_indices: for each KV cache group, the index of its first block within the request.
        If an offloaded block contains several GPU blocks, the index determines how many of them to
        skip at the start.
    :raises ValueError: the lengths of the three parameters do not agree.
    """

    def __init__(
        self,
        block_ids: Sequence[int] | npt.NDArray[np.int64],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
    ) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(block_ids):
            raise ValueError(
                f"group_sizes {list(group_sizes)} add up to {sum(group_sizes)}, not to "
                f"{len(block_ids)} blocks"
            )
        if len(block_indices) != len(group_sizes):
            raise ValueError(
                f"block_indices has {len(block_indices)} entries, group_sizes {len(group_sizes)}"
            )
        self.group_sizes: tuple[int, ...] = tuple(group_sizes)
        """For each KV cache group, its number of entries in ``block_ids``."""
        self.block_indices: tuple[int, ...] = tuple(block_indices)
        """For each KV cache group, the index of its first block within the request."""

    @staticmethod
    def medium() -> str:
        return "GPU"

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.block_ids.tolist()!r}, group_sizes={self.group_sizes!r}, "
            f"block_indices={self.block_indices!r})"
        )


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""Source and destination of a transfer."""


@dataclass(frozen=True)
class PrepareStoreOutput:
    """Result of ``OffloadingManager.prepare_store``: the blocks to write and their destinations."""

    keys_to_store: list[OffloadKey]
    """Keys to write, in the order of the call. Keys that are held or that the manager does not
    store are left out."""
    store_spec: LoadStoreSpec
    """Destinations of ``keys_to_store``, in the same order."""
    evicted_keys: list[OffloadKey]
    """Keys of the blocks that were evicted to make room; they are misses now."""


@dataclass(frozen=True)
class OffloadingEvent:
    """Blocks that were stored on a medium or removed from it."""

    keys: list[OffloadKey]
    medium: str
    """A secondary tier's type name, or the primary tier's name as returned by
    ``LoadStoreSpec.medium``."""
    removed: bool
    """True: the blocks were removed and are misses there; False: they can be looked up there."""
    lost: bool = False
    """True: earlier events of this medium were lost, so blocks other than ``keys`` may have been
    stored or removed, too."""


@dataclass(frozen=True)
class HeadSharding:
    """Positions of a worker's KV heads in a page: its bytes have the shape (num_parts, num_heads,
    bytes of a head).

    An engine that states it certifies that worker ``rank`` holds the model's heads from ``rank *
    num_heads`` on, that no other worker holds them, and that the bytes of a head do not depend on
    the number of workers.
    """

    num_parts: int
    """Parts of the page, each with all heads of the worker: 2 if all keys come before all values
    and heads before tokens; twice the tokens of a block if tokens come before heads."""
    num_heads: int
    """KV heads of the worker."""


@dataclass(frozen=True)
class CanonicalKVCacheTensor:
    """One KV cache tensor as a byte matrix: row i holds the bytes of GPU block i (its page)."""

    tensor: torch.Tensor
    """int8, shape (num_gpu_blocks, page_size_bytes or more); each row is contiguous."""
    page_size_bytes: int
    """Bytes of one GPU block in this tensor, from the start of its row."""
    heads: HeadSharding | None = None
    """Positions of the heads in a page; needed if ``WorkerGeometry.head_sharded`` is set."""


@dataclass(frozen=True)
class CanonicalKVCacheRef:
    """The part of a KV cache tensor that one KV cache group uses."""

    tensor_idx: int
    """Index into ``CanonicalKVCaches.tensors``."""
    page_size_bytes: int
    """Bytes that this group uses at the start of each page; the rest of the page is padding."""


@dataclass(frozen=True)
class CanonicalKVCaches:
    """All KV cache tensors of one worker, and the tensors that each KV cache group uses."""

    tensors: list[CanonicalKVCacheTensor]
    """Each tensor once, even if several groups use it."""
    group_data_refs: list[list[CanonicalKVCacheRef]]
    """For each KV cache group, the tensors that it uses and how many bytes of their pages."""


@dataclass
class TransferResult:
    """Result of one transfer."""

    job_id: int
    success: bool
    """False: the content of the destination is undefined."""
    num_bytes: int = 0
    """Number of bytes copied; 0 if the transfer failed."""
    seconds: float = 0.0
    """Duration of the copies in seconds, measured on the device or on the copying thread; 0 if it
    is unknown."""


class OffloadingManager(ABC):
    """The scheduler's side of offloading: tracks which blocks are held and where, and evicts
    blocks.

    Called from the scheduler's thread only. Except for ``shutdown``, no call blocks on I/O, the
    network, or a lock that is held during I/O.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True if the block can be loaded now, False if it is a miss, and None if it is
        being written or promoted: retry in a later step.
        """

    def lookup_prefix(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> list[bool | None]:
        """Return the results of ``lookup`` for the keys before the first miss: True or None for
        each of them."""
        answers: list[bool | None] = []
        for key in keys:
            answer = self.lookup(key, req_context)
            if answer is False:
                break
            answers.append(answer)
        return answers

    def is_held(self, key: OffloadKey) -> bool:
        """Return whether the block has a place that ``prepare_store`` need not allocate, readable
        or not. Unlike ``lookup``, this has no effects. A manager that cannot tell returns False.
        """
        return False

    @abstractmethod
    def prepare_load(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> LoadStoreSpec:
        """Protect blocks from eviction until ``complete_load``, and return their locations, in the
        order of ``keys``.

        :raises KeyError: a block is not held or not readable yet; no block was protected.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """Mark blocks as recently used; later keys are evicted before earlier ones. Ignore keys
        that are not held."""

    def complete_load(  # noqa: B027
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """End a load, also one that failed: its blocks may be evicted again if no other load uses
        them. Must be called once for each ``prepare_load``.

        :raises KeyError: a block is not being loaded; nothing changed.
        """

    @abstractmethod
    def prepare_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> PrepareStoreOutput | None:
        """Allocate room for the blocks that are not held; evict other blocks if necessary.

        :returns: the blocks to write, whose end ``complete_store`` must report, and their
            destinations. None: eviction cannot free enough room; nothing changed.
        """

    def complete_store(  # noqa: B027
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """Report that the write of blocks has ended. If it succeeded, they become readable; if not,
        they are dropped. Blocks that are already readable are ignored.

        :raises KeyError: a block is not held; nothing changed.
        """

    def take_events(self) -> Iterable[OffloadingEvent]:
        """End the engine's step, and return the events since the last call; none if events are
        disabled. A manager with secondary tiers processes their results and submits promotions in
        this call. Must be called once per step, also if events are disabled.
        """
        return ()

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Announce a request; return which of its blocks the caller must offer to
        ``prepare_store``.

        An unknown request is announced by its first lookup or store. Announcing a request again
        replaces its context and keeps the rest of its state. Each announced request must be ended
        with ``on_request_finished``.
        """

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """End a request: no lookup or ``prepare_store`` may follow; ``complete_store`` may, for
        stores in flight."""

    def reset_cache(self, weights_changed: bool = True) -> None:
        """Forget all blocks without waiting. Memory that a transfer uses becomes free when the
        transfer ends.

        :param weights_changed: True: blocks in the secondary tiers are invalid, too. False: they
            remain valid.
        :raises NotImplementedError: the manager does not support it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot reset its cache")

    def shutdown(self) -> None:  # noqa: B027
        """Release the manager's resources. May wait for jobs of secondary tiers. Idempotent."""


class OffloadingHandler(ABC):
    """The worker's side of offloading: copies bytes asynchronously."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a transfer. The caller must not change source or destination until ``get_finished``
        has reported it.

        :param job_id: unique among the transfers in flight.
        :returns: False if the transfer could not be started. Then it is not reported, nothing is
            copied after the call, and the content of the destination is undefined; the same holds
            for a call that raises.
        :raises ValueError: source and destination do not match each other, or the handler's
            direction.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call, each once. Does not wait."""

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None:
        """Block until these transfers have ended; ids that are not in flight are ignored. The next
        ``get_finished`` still reports them.
        """

    def shutdown(self) -> None:  # noqa: B027
        """Wait for the transfers in flight and release all resources; idempotent."""


@dataclass
class OffloadingSpec(ABC):
    """Builds the scheduler's manager and the worker's handlers of offloading from one
    configuration."""

    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Options set by the user, checked at construction."""

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager, the same object at each call. If the call raises, all resources are
        released."""

    @abstractmethod
    def get_handlers(
        self,
        kv_caches: CanonicalKVCaches,
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield (source spec type, destination spec type, handler) for each direction of
        transfer."""
