"""Many copies between pinned memory and a GPU in one call, and the slower way where the driver has no such call."""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from persistkv.cpu.transfer import IntArray

_LIBRARY = "libcuda.so.1"
_FUNCTION = "cuMemcpyBatchAsync"  # CUDA 12.8
_SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Copies between two tensors, in bytes; those that continue each other on both sides are one."""

    targets: IntArray
    """Addresses."""
    sources: IntArray
    """Addresses."""
    sizes: IntArray
    """Bytes."""
    target: torch.Tensor
    """int8, two-dimensional; every target lies within it."""
    source: torch.Tensor
    """int8, two-dimensional; every source lies within it."""

    @classmethod
    def of_pages(
        cls, targets: IntArray, sources: IntArray, page_bytes: int, target: torch.Tensor, source: torch.Tensor
    ) -> Batch:
        """Merge copies of one size, in the order given."""
        continues = (np.diff(targets) == page_bytes) & (np.diff(sources) == page_bytes)
        begins = np.flatnonzero(np.concatenate(([True], ~continues)))
        sizes = np.diff(begins, append=len(targets)) * page_bytes
        return cls(targets[begins], sources[begins], sizes, target, source)


class PageCopier(ABC):
    """A way to run a batch on a stream."""

    @abstractmethod
    def copy(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        """Enqueue the copies; the device and the stream are current.

        :raises RuntimeError: where CUDA refuses; copies before the refused one may run.
        """


class _MemoryLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes"""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _MemoryLocation),
        ("target_hint", _MemoryLocation),
        ("flags", ctypes.c_uint),
    )


class DriverBatchCopier(PageCopier):
    """``cuMemcpyBatchAsync`` of the driver. Memory must be pinned.

    Called through ctypes, with the addresses as arrays: cuda-bindings takes lists, whose conversion costs by the page
    and under the GIL.

    :raises OSError: where there is no driver.
    :raises AttributeError: where the driver is older than the function.
    """

    def __init__(self) -> None:
        self._function = getattr(ctypes.CDLL(_LIBRARY), _FUNCTION)
        pointer = ctypes.c_void_p
        count = ctypes.c_size_t
        # targets, sources, sizes, their count, attributes, first copy of each, their count, failed copy, stream
        self._function.argtypes = (pointer, pointer, pointer, count, pointer, pointer, count, pointer, pointer)
        self._function.restype = ctypes.c_int

    def copy(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        attributes = _CopyAttributes(source_access_order=_SOURCE_IN_STREAM_ORDER)
        first_copy, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._function(
            batch.targets.ctypes.data,
            batch.sources.ctypes.data,
            batch.sizes.ctypes.data,
            len(batch.sizes),
            ctypes.byref(attributes),
            ctypes.byref(first_copy),
            1,
            ctypes.byref(failed),
            stream.cuda_stream,
        )
        if code:
            raise RuntimeError(f"{_FUNCTION} failed with error {code} at copy {failed.value} of {len(batch.sizes)}")


class TorchCopier(PageCopier):
    """One ``copy_`` for each copy of the batch; memory need not be pinned."""

    def copy(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        target, source = _flat(batch.target), _flat(batch.source)
        target_offsets = (batch.targets - target.data_ptr()).tolist()
        source_offsets = (batch.sources - source.data_ptr()).tolist()
        for to, start, size in zip(target_offsets, source_offsets, batch.sizes.tolist(), strict=True):
            target[to : to + size].copy_(source[start : start + size], non_blocking=True)


def choose_copier(device: torch.device, pinned: bool) -> PageCopier:
    """The batched way where memory is pinned and a trial copy arrives, else one copy at a time."""
    if not pinned:
        return TorchCopier()
    try:
        copier = DriverBatchCopier()
        _try(copier, device)
    except (OSError, AttributeError, RuntimeError) as error:
        logger.info("no batched copies, one at a time instead: %s", error)
        return TorchCopier()
    return copier


def _try(copier: PageCopier, device: torch.device) -> None:
    """:raises RuntimeError: where a copy to the device and back does not bring the bytes back."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    sent = torch.arange(64, dtype=torch.int8).view(1, 64).pin_memory()
    received = torch.zeros(1, 64, dtype=torch.int8).pin_memory()
    with torch.cuda.device(device), torch.cuda.stream(stream):
        on_device = torch.zeros(1, 64, dtype=torch.int8, device=device)
        for target, source in ((on_device, sent), (received, on_device)):
            ends = [np.array([tensor.data_ptr()], np.int64) for tensor in (target, source)]
            copier.copy(Batch.of_pages(ends[0], ends[1], 64, target, source), stream)
        stream.synchronize()
    if not torch.equal(sent, received):
        raise RuntimeError(f"{_FUNCTION} lost bytes")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes from the tensor's first to its last, with those between its rows."""
    length = (tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]
    return tensor.as_strided((length,), (1,))
