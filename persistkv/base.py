"""The abstractions of KV offloading: keys, request context, policies, load and store specs, managers, handlers, specs.

Words are those of vLLM. torch is named here for checkers only; importing this module imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from typing import TYPE_CHECKING, Any, NewType

import numpy as np
import numpy.typing as npt

from persistkv.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

OffloadKey = NewType("OffloadKey", bytes)
"""Block hash, then the KV cache group's index, 4 bytes big-endian. Equal keys mean equal tokens, never equal model."""

GROUP_INDEX_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """The key of one block of one KV cache group; the hash may have any length.

    :raises OverflowError: where the index is negative or does not fit 4 bytes.
    """
    return OffloadKey(block_hash + group_idx.to_bytes(GROUP_INDEX_BYTES, "big"))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The block hash that the key was made of."""
    return key[:-GROUP_INDEX_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The KV cache group that the key belongs to."""
    return int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")


def get_offload_group_indices(keys: Sequence[bytes]) -> list[int]:
    """The groups of many keys, which are of few, mostly of one: several times as fast as one by one."""
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
        """Tokens of the whole context, those of an unfinished block included; the engine sets it."""
        self.labels: dict[str, str] = dict(labels or {})
        """Stored with the context and shown by tools."""
        _check_labels(self.labels)
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
        """How many blocks of its group come before this one; None where the key is not of this request."""
        return self._depths.get(key)


def _check_labels(labels: Mapping[str, str]) -> None:
    for part in (*labels, *labels.values()):
        try:
            part.encode()
        except (AttributeError, UnicodeEncodeError):
            raise ConfigurationError("labels", labels, "names and values that are text") from None


@dataclass(frozen=True)
class ReqContext:
    """The request that a call is made for."""

    req_id: str
    """Unique among the requests that live at one time in one engine."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """Parameters that the caller of the engine attached to the request."""
    description: RequestDescription | None = None
    """The request's keys in order; None where the engine does not provide them: order and depth are then unknown."""
    store: bool = True
    """False: blocks are looked up and loaded for the request, and none of them is handed to a tier for it."""


class OffloadPolicy(str, Enum):
    """Which blocks of a request a tier receives."""

    BLOCK_LEVEL = "block_level"
    """Newly computed blocks."""
    REQUEST_LEVEL = "request_level"
    """Every block of the request, prefix hits included."""


@dataclass(frozen=True)
class RequestOffloadingContext:
    """A manager's answer to a new request."""

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
    """What ``prepare_store`` allocated."""

    keys_to_store: list[OffloadKey]
    """Keys to write, in the order of the call; keys that are held, or that the manager does not store, are left out."""
    store_spec: LoadStoreSpec
    """Where to write them, in the same order."""
    evicted_keys: list[OffloadKey]
    """Keys that were evicted to make room."""


@dataclass(frozen=True)
class OffloadingEvent:
    """Blocks that came to a medium or left it."""

    keys: list[OffloadKey]
    medium: str
    """A tier's type name, or what ``LoadStoreSpec.medium`` calls the primary tier."""
    removed: bool
    """True: they left, and are misses there; False: they can be looked up there."""


@dataclass(frozen=True)
class CanonicalKVCacheTensor:
    """One KV cache tensor, seen as pages of bytes."""

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
    """The engine's KV caches in the one form that workers understand."""

    tensors: list[CanonicalKVCacheTensor]
    """Each tensor once, also where several groups use it."""
    group_data_refs: list[list[CanonicalKVCacheRef]]
    """For each KV cache group, its parts of the tensors."""


@dataclass
class TransferResult:
    """How one transfer ended."""

    job_id: int
    success: bool
    """False: what the destination holds is undefined."""
    num_bytes: int = 0
    """Bytes copied."""
    seconds: float = 0.0
    """From its start to its end on the device, or on the thread that copied."""


class OffloadingManager(ABC):
    """The scheduler's side of offloading: which blocks are held, where, and what may be evicted.

    Called from one thread, the scheduler's; no call blocks on I/O, the network, or a lock that is held over I/O.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Whether the block is held and ready to be read; None: it is on its way, ask again in a later step."""

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Protect blocks from eviction and return their places, in the order of ``keys``.

        :raises KeyError: a block is not ready; nothing is protected.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """Mark blocks as used: the first of a prefix outlives the last. Keys that are not held are passed over."""

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """End the protection that ``prepare_load`` gave.

        :raises KeyError: where a block is not being read; nothing changed then.
        """

    @abstractmethod
    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Allocate room for those blocks that are not held.

        :returns: what to write and where, or None where there is no room even after eviction; nothing changed then.
        """

    def complete_store(  # noqa: B027
        self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """End the write of blocks: they are readable now, or forgotten where the write failed.

        Blocks that are already readable are ignored.

        :raises KeyError: a block is not held; nothing changed.
        """

    def take_events(self) -> Iterable[OffloadingEvent]:
        """End the step and return the events since the last call. Must be called once per step."""
        return ()

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Announce a request and return which of its blocks to offer to ``prepare_store``.

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
        """Release what the manager holds; idempotent."""


class OffloadingHandler(ABC):
    """The worker's side: moves bytes, asynchronously."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a transfer. Source and destination must not change until ``get_finished`` has reported it.

        :param job_id: unique among the transfers in flight.
        :returns: False if it could not be started; it is not reported then, and copies nothing. The same holds for a
            call that raises.
        :raises ValueError: the specs do not fit each other, or this direction.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """The transfers that ended since the last call, each once. Does not wait."""

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None:
        """Block until these transfers have ended; they are still reported by ``get_finished``."""

    def shutdown(self) -> None:  # noqa: B027
        """Wait for what runs and release it; idempotent."""


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
        """The worker's side: (source spec, destination spec, handler), one entry a direction."""
