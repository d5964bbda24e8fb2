"""The abstractions of KV offloading: keys, request context, policies, load and store specs, managers, handlers, specs.

Names are those of vLLM. torch is imported for type checkers only, not at run time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, Any, NewType

import numpy as np
import numpy.typing as npt

from persistkv.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

OffloadKey = NewType("OffloadKey", bytes)
"""Block hash, then the KV cache group's index, 4 bytes big-endian. Equal keys mean equal tokens, never equal models."""

GROUP_INDEX_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Return the key of one block of one KV cache group; the hash may have any length.

    :raises OverflowError: if the index is negative or does not fit 4 bytes.
    """
    return OffloadKey(block_hash + group_idx.to_bytes(GROUP_INDEX_BYTES, "big"))


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the index of the key's KV cache group."""
    return int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")


def get_offload_group_indices(keys: Sequence[bytes]) -> list[int]:
    """Return the groups of many keys. Fast if the keys are of few groups, and fastest if they are of one."""
    first = keys[0][-GROUP_INDEX_BYTES:] if keys else b""
    if len(first) == GROUP_INDEX_BYTES and all(map(bytes.endswith, keys, repeat(first))):
        return [int.from_bytes(first, "big")] * len(keys)
    ends = [key[-GROUP_INDEX_BYTES:] for key in keys]
    group_of = {end: int.from_bytes(end, "big") for end in set(ends)}
    return [group_of[end] for end in ends]


class RequestDescription:
    """Whole context of a request: the keys of each group in order, number of tokens, labels.

    The engine extends it as blocks fill. Not thread-safe.

    :param num_groups: KV cache groups of the engine.
    :raises ConfigurationError: a label is not text.
    """

    def __init__(self, num_groups: int = 1, labels: Mapping[str, str] | None = None) -> None:
        self.group_keys: tuple[list[OffloadKey], ...] = tuple([] for _ in range(num_groups))
        """For each KV cache group, the keys of its blocks from the first token on."""
        self.num_tokens = 0
        """Tokens of the whole context, including those of an unfinished block; set by the engine."""
        self.labels: dict[str, str] = dict(labels or {})
        """Stored with the context and shown by tools."""
        self.pinned = False
        """Whether the stored context is neither evicted nor expires, until it is unpinned."""
        for part in (*self.labels, *self.labels.values()):
            try:
                part.encode()
            except (AttributeError, UnicodeEncodeError):
                raise ConfigurationError("labels", labels, "names and values that are text") from None
        self._depths: dict[OffloadKey, int] = {}

    def extend(self, group_idx: int, keys: Iterable[OffloadKey]) -> None:
        """Append the keys of a group's next blocks.

        :raises IndexError: there is no such group; nothing was appended.
        """
        chain = self.group_keys[group_idx]
        for key in keys:
            self._depths.setdefault(key, len(chain))
            chain.append(key)

    def depth(self, key: OffloadKey) -> int | None:
        """Return how many blocks of its group precede this one; None if the key is not of this request."""
        return self._depths.get(key)


@dataclass(frozen=True)
class ReqContext:
    """The request to which a call belongs."""

    req_id: str
    """Unique among the requests that exist at the same time in one engine."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """Parameters that the caller of the engine attached to the request."""
    description: RequestDescription | None = None
    """The request's keys in order; None if the engine does not provide them: then order and depth are unknown."""
    store: bool = True
    """False: blocks are looked up and loaded for the request, but no block is passed to a tier for it."""


class OffloadPolicy(str, Enum):
    """The blocks of a request that a tier receives."""

    BLOCK_LEVEL = "block_level"
    """Newly computed blocks."""
    REQUEST_LEVEL = "request_level"
    """Every block of the request, including prefix hits."""


@dataclass(frozen=True)
class RequestOffloadingContext:
    """A manager's result for a new request."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


class LoadStoreSpec(ABC):
    """One side of a transfer."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """The medium's name, e.g. ``GPU`` or ``CPU``."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """A side of a transfer that is a list of blocks.

    :param block_ids: numbers of the blocks in the order of the transfer; copied.
    """

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self.block_ids: npt.NDArray[np.int64] = np.array(block_ids, np.int64)
        """int64, shape (blocks,)."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()!r})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the engine's KV cache, all groups of one job together.

    :param block_ids: the blocks of group 0, then those of group 1, and so on.
    :param group_sizes: how many blocks each group has here; one entry per KV cache group.
    :param block_indices: logical index, within the request, of each group's first block; determines how much of a
        larger offloaded block to skip.
    :raises ValueError: the lengths of the three do not agree.
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
                f"group_sizes {list(group_sizes)} add up to {sum(group_sizes)}, not to {len(block_ids)} blocks"
            )
        if len(block_indices) != len(group_sizes):
            raise ValueError(f"block_indices has {len(block_indices)} entries, group_sizes {len(group_sizes)}")
        self.group_sizes: tuple[int, ...] = tuple(group_sizes)
        self.block_indices: tuple[int, ...] = tuple(block_indices)

    @staticmethod
    def medium() -> str:
        return "GPU"

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.block_ids.tolist()!r}, group_sizes={self.group_sizes!r}, "
            f"block_indices={self.block_indices!r})"
        )


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""(source, destination)"""


@dataclass(frozen=True)
class PrepareStoreOutput:
    """Result of ``prepare_store``."""

    keys_to_store: list[OffloadKey]
    """Keys to write, in the order of the call, without those that are held or that the manager does not store."""
    store_spec: LoadStoreSpec
    """Their destinations, in the same order."""
    evicted_keys: list[OffloadKey]
    """Keys that were evicted to make room."""


@dataclass(frozen=True)
class OffloadingEvent:
    """Blocks that were stored on a medium or removed from it."""

    keys: list[OffloadKey]
    medium: str
    """A secondary tier's type name, or the primary tier's name as returned by ``LoadStoreSpec.medium``."""
    removed: bool
    """True: the blocks were removed and are misses there; False: they can be looked up there."""
    lost: bool = False
    """Earlier events of this medium are missing: any other block may have been stored or removed."""


@dataclass(frozen=True)
class CanonicalKVCacheTensor:
    """One KV cache tensor, viewed as pages of bytes."""

    tensor: torch.Tensor
    """int8, shape (num_gpu_blocks, at least page_size_bytes), rows contiguous."""
    page_size_bytes: int
    """Bytes of one block in this tensor."""


@dataclass(frozen=True)
class CanonicalKVCacheRef:
    """A group's part of a tensor."""

    tensor_idx: int
    """Index into ``CanonicalKVCaches.tensors``."""
    page_size_bytes: int
    """Bytes that this group uses of each page; the rest is padding."""


@dataclass(frozen=True)
class CanonicalKVCaches:
    """The engine's KV caches in the form that workers require."""

    tensors: list[CanonicalKVCacheTensor]
    """Each tensor once, even if several groups use it."""
    group_data_refs: list[list[CanonicalKVCacheRef]]
    """For each KV cache group, its parts of the tensors."""


@dataclass
class TransferResult:
    """Result of one transfer."""

    job_id: int
    success: bool
    """False: the content of the destination is undefined."""
    num_bytes: int = 0
    """Bytes copied."""
    seconds: float = 0.0
    """Duration on the device, or on the thread that copied."""


class OffloadingManager(ABC):
    """The scheduler's side of offloading: tracks the held blocks and their places, and evicts blocks.

    Called from the scheduler's thread only. No call blocks on I/O, the network, or a lock that is held during I/O.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return whether the block is held and readable; None: it is not ready yet, retry in a later step."""

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return ``lookup`` of each key before the first miss."""
        return list(takewhile(lambda answer: answer is not False, (self.lookup(key, req_context) for key in keys)))

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Protect blocks from eviction and return their places, in the order of ``keys``.

        :raises KeyError: a block is not ready; nothing is protected.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """Mark blocks as used: the first of a prefix is evicted after the last. Keys that are not held are ignored."""

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """End the protection by ``prepare_load``.

        :raises KeyError: if a block is not being read; nothing changed then.
        """

    @abstractmethod
    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Allocate room for the blocks that are not held.

        :returns: the blocks to write and their places; None, with no effect, if there is no room even after eviction.
        """

    def complete_store(  # noqa: B027
        self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """End the write of blocks: they are readable now, or forgotten if the write failed.

        Blocks that are already readable are ignored.

        :raises KeyError: a block is not held; nothing changed.
        """

    def take_events(self) -> Iterable[OffloadingEvent]:
        """End the step and return the events since the last call. Must be called once per step."""
        return ()

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Announce a request and return the policy by which its blocks are offered to ``prepare_store``.

        An unknown request is announced by its first lookup or store. Announcing a request again replaces its context
        and keeps the rest of its state. Each announced request must be ended with ``on_request_finished``.
        """

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """End a request: no lookups and no ``prepare_store`` follow. Its stores in flight may still complete."""

    def reset_cache(self, weights_changed: bool = True) -> None:
        """Forget all blocks without waiting. Rows in use become free as their transfers end.

        :param weights_changed: False: blocks in the tiers behind the primary one remain valid.
        :raises NotImplementedError: the manager does not support it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot reset its cache")

    def shutdown(self) -> None:  # noqa: B027
        """Release the manager's resources; idempotent."""


class OffloadingHandler(ABC):
    """The worker's side of offloading: copies bytes asynchronously."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a transfer. The caller must not change source or destination until ``get_finished`` has reported it.

        :param job_id: unique among the transfers in flight.
        :returns: False if the transfer could not be started. Then it is not reported and copies nothing; the same holds
            for a call that raises.
        :raises ValueError: the specs do not fit each other, or this direction.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call, each once. Does not wait."""

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None:
        """Block until these transfers have ended; they are still reported by ``get_finished``."""

    def shutdown(self) -> None:  # noqa: B027
        """Wait for the transfers in flight and release all resources; idempotent."""


@dataclass
class OffloadingSpec(ABC):
    """Builds the two sides of offloading from one configuration."""

    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the user, checked at construction."""

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's side; the same object at each call. If it raises, all resources are released."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the worker's side: (source spec, destination spec, handler), one entry per direction."""
