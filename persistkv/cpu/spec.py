"""Builds the primary tier from one configuration dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import msgspec

from persistkv.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
)
from persistkv.config import convert_options, parse_size
from persistkv.cpu.gpu_worker import CpuGpuOffloadingHandlers
from persistkv.cpu.layout import cell_bytes
from persistkv.cpu.manager import CPULoadStoreSpec, CPUPrimaryTierOffloadingManager
from persistkv.cpu.policies import CACHE_POLICIES
from persistkv.cpu.reuse_manager import MAX_TRACKER_SIZE, FilterReusedOffloadingManager
from persistkv.cpu.shared_offload_region import SharedOffloadRegion, row_stride_bytes
from persistkv.errors import ConfigurationError
from persistkv.isolation import Isolation


class CPUOffloadingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the primary tier."""

    cpu_bytes_to_use: int | str
    """Size of the primary tier for all workers together, in bytes or as text such as ``100GiB``;
    rounded down to whole rows."""
    block_size: int | None = None
    """Tokens in an offloaded block, a multiple of the GPU block size. None: the GPU block size."""
    eviction_policy: str = "lru"
    """``lru``, ``arc``, or the name of an installed policy."""
    enable_events: bool = False
    """Whether the manager's ``take_events`` returns the stored and removed blocks."""
    store_threshold: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Lookups before a block is stored; 0 stores every block. See
    ``FilterReusedOffloadingManager``."""
    max_tracker_size: Annotated[int, msgspec.Meta(ge=1)] = MAX_TRACKER_SIZE
    """Maximum number of blocks whose lookups are counted for ``store_threshold``; the least
    recently counted are forgotten."""


@dataclass(frozen=True, kw_only=True)
class WorkerGeometry:
    """Geometry of an engine and of one of its processes, known before KV caches are allocated."""

    instance_id: str
    """Id of the engine: the same in all of its processes, and unique on the machine."""
    gpu_block_size: int
    """Tokens in a GPU block."""
    gpu_block_bytes: int
    """Bytes of a GPU block of the widest KV cache group in the KV tensors of one worker, including
    padding."""
    rank: int | None = 0
    """Number of this worker; None if the process is only the scheduler."""
    num_workers: int = 1
    head_sharded: bool = False
    """Whether rows have the same bytes for all numbers of workers, so that blocks are shared across
    them. Then each KV tensor must state its heads, which certifies this (``HeadSharding``)."""

    def __post_init__(self) -> None:
        numbers = {
            "gpu_block_size": self.gpu_block_size,
            "gpu_block_bytes": self.gpu_block_bytes,
            "num_workers": self.num_workers,
        }
        for name, value in numbers.items():
            if value <= 0:
                raise ConfigurationError(name, value, "a positive number")


@dataclass(kw_only=True)
class CPUOffloadingSpec(OffloadingSpec):
    """Builds the primary tier: manager, shared memory region and handlers, each created on first
    use.

    :raises ConfigurationError: at construction, naming the invalid field of ``extra_config``.
    """

    options_type: ClassVar[type[CPUOffloadingOptions]] = CPUOffloadingOptions
    """Type of ``options``; a subclass with more options overrides it."""

    geometry: WorkerGeometry
    options: CPUOffloadingOptions = field(init=False)
    block_size_factor: int = field(init=False)
    """GPU blocks in one offloaded block."""
    num_blocks: int = field(init=False)
    """Rows of the primary tier."""

    def __post_init__(self) -> None:
        options = convert_options(
            self.options_type, self.extra_config, where="offloading"
        )
        self.options = options
        gpu_block_size = self.geometry.gpu_block_size
        block_size = options.block_size
        if block_size is None:
            block_size = gpu_block_size
        if block_size <= 0 or block_size % gpu_block_size:
            expected = f"a positive multiple of {gpu_block_size}, the GPU's block size"
            raise ConfigurationError("block_size", block_size, expected)
        self.block_size_factor = block_size // gpu_block_size
        # this raises if there is no such policy, before memory is allocated
        CACHE_POLICIES.get(options.eviction_policy)
        size = parse_size(options.cpu_bytes_to_use, name="cpu_bytes_to_use")
        self.num_blocks = size // self.row_stride
        if not self.num_blocks:
            raise ConfigurationError(
                "cpu_bytes_to_use",
                size,
                f"{self.row_stride} bytes or more, one offloaded block",
            )
        self._region: SharedOffloadRegion | None = None
        self._manager: OffloadingManager | None = None
        self._handlers: CpuGpuOffloadingHandlers | None = None

    @property
    def cpu_page_size(self) -> int:
        """Bytes of one worker's cell in a row."""
        return self.geometry.gpu_block_bytes * self.block_size_factor

    @property
    def row_stride(self) -> int:
        """Bytes of a row."""
        return row_stride_bytes(self.geometry.num_workers, self.cpu_page_size)

    def get_region(self) -> SharedOffloadRegion:
        """Return the primary tier's memory, the same object at each call. Raises as
        ``SharedOffloadRegion`` does."""
        if self._region is None:
            geometry = self.geometry
            try:
                self._region = SharedOffloadRegion(
                    geometry.instance_id,
                    num_blocks=self.num_blocks,
                    rank=geometry.rank,
                    num_workers=geometry.num_workers,
                    cpu_page_size=self.cpu_page_size,
                )
            except ConfigurationError as error:
                if error.field != "total_size_bytes":
                    raise
                # name the option that sets this size
                raise ConfigurationError(
                    "cpu_bytes_to_use", error.value, error.expected
                ) from error
        return self._region

    def get_manager(self) -> OffloadingManager:
        """Return the manager, the same object at each call; behind the filter of
        ``store_threshold`` if that option is set."""
        if self._manager is None:
            self._manager = self.make_manager()
            if self.options.store_threshold:
                self._manager = FilterReusedOffloadingManager(
                    self._manager,
                    self.options.store_threshold,
                    self.options.max_tracker_size,
                )
        return self._manager

    def make_manager(self) -> OffloadingManager:
        """Return a new manager without the filter of ``store_threshold``, for ``get_manager``.
        Subclasses add tiers."""
        return CPUPrimaryTierOffloadingManager(
            self.get_region(),
            self.options.eviction_policy,
            self.options.enable_events,
        )

    def get_handlers(
        self,
        kv_caches: CanonicalKVCaches,
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the worker's handlers, the same at each call.

        :raises ConfigurationError: if the caches are not of the size given in the geometry.
        """
        if self._handlers is None:
            cell = cell_bytes(kv_caches, self.block_size_factor)
            if cell != self.cpu_page_size:
                expected = f"{cell // self.block_size_factor}, as the KV caches have"
                raise ConfigurationError(
                    "gpu_block_bytes", self.geometry.gpu_block_bytes, expected
                )
            self._handlers = CpuGpuOffloadingHandlers(
                kv_caches,
                self.block_size_factor,
                self.get_region(),
                head_sharded=self.geometry.head_sharded,
            )
        # (source, destination, handler)
        store = GPULoadStoreSpec, CPULoadStoreSpec, self._handlers.gpu_to_cpu_handler
        load = CPULoadStoreSpec, GPULoadStoreSpec, self._handlers.cpu_to_gpu_handler
        return iter((store, load))

    def shutdown(self) -> None:
        """Shut down the handlers, the manager and the region; idempotent. An exception of one of
        the first two is logged and does not stop the rest.
        """
        if self._handlers is not None:
            self._handlers.shutdown()  # logs exceptions itself
        if self._manager is not None:
            isolation = Isolation("offloading manager")
            with isolation.guard("shutdown", "its resources may not be released"):
                self._manager.shutdown()
        if self._region is not None:
            self._region.cleanup()
