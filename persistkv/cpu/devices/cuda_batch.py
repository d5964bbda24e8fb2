"""Batches of copies between pinned memory and a GPU: one driver call, or a slower fallback for older drivers."""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from persistkv.cpu.transfer import IntArray

DRIVER_LIBRARY = "libcuda.so.1"
SOURCE_IN_STREAM_ORDER = 1
"""``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``: a store must read pages after the kernels that compute them."""
PREFER_OVERLAP_WITH_COMPUTE = 1
"""``CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE``"""

# The symbol of CUDA 12.8, which later drivers keep. CUDA 13 added _v2, which does not report the failed copy.
_FUNCTION = "cuMemcpyBatchAsync"
_NO_COPY = ctypes.c_size_t(-1).value  # the index that is reported if an error does not belong to one copy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Copies between two tensors, in bytes; copies that are adjacent on both sides are merged."""

    targets: IntArray
    """Addresses."""
    sources: IntArray
    """Addresses."""
    sizes: IntArray
    """Bytes."""
    target: torch.Tensor
    """int8, two-dimensional; contains every target."""
    source: torch.Tensor
    """int8, two-dimensional; contains every source."""

    @classmethod
    def of_pages(
        cls,
        targets: IntArray,
        sources: IntArray,
        page_bytes: int,
        target: torch.Tensor,
        source: torch.Tensor,
        registrations: IntArray | None = None,
    ) -> Batch:
        """Merge copies of one size, in the order given.

        :param registrations: for each copy, the number of the registration with CUDA that holds its host memory. Copies
            of different registrations are not merged: CUDA refuses a copy that touches two. None: there is only one.
        """
        continues = (np.diff(targets) == page_bytes) & (np.diff(sources) == page_bytes)
        if registrations is not None:
            continues &= np.diff(registrations) == 0
        begins = np.flatnonzero(np.concatenate(([True], ~continues)))
        sizes = np.diff(begins, append=len(targets)) * page_bytes
        return cls(targets[begins], sources[begins], sizes, target, source)


class PageCopier(ABC):
    """Interface that runs a batch on a stream."""

    @abstractmethod
    def copy(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        """Enqueue the copies; the device and the stream are current.

        :raises RuntimeError: if CUDA refuses a copy; the copies before it may run.
        """


class MemoryLocation(ctypes.Structure):
    """``CUmemLocation``"""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``"""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", MemoryLocation),
        ("target_hint", MemoryLocation),
        ("flags", ctypes.c_uint),
    )


class DriverBatchCopier(PageCopier):
    """``cuMemcpyBatchAsync`` of the driver. Memory must be pinned.

    It is called through ctypes with arrays of addresses. cuda-bindings takes lists; their conversion takes time per
    page and holds the GIL. The driver reads the arrays during the call.

    :param library: the driver's library.
    :param flags: ``PREFER_OVERLAP_WITH_COMPUTE``, or 0.
    :raises OSError: if there is no driver.
    :raises AttributeError: if the driver is older than the function.
    """

    def __init__(self, library: str = DRIVER_LIBRARY, flags: int = 0) -> None:
        self._flags = flags
        self._function = getattr(ctypes.CDLL(library), _FUNCTION)
        pointer = ctypes.c_void_p
        count = ctypes.c_size_t
        # targets, sources, sizes, number of copies, attributes, first copy of each attribute, number of attributes,
        # failed copy, stream
        self._function.argtypes = (pointer, pointer, pointer, count, pointer, pointer, count, pointer, pointer)
        self._function.restype = ctypes.c_int

    def copy(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        attributes = CopyAttributes(source_access_order=SOURCE_IN_STREAM_ORDER, flags=self._flags)
        first_copy, failed = ctypes.c_size_t(0), ctypes.c_size_t(_NO_COPY)
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
            where = f"{len(batch.sizes)} copies"
            if failed.value < len(batch.sizes):
                where = (
                    f"copy {failed.value} of {where}, {batch.sizes[failed.value]} bytes "
                    f"from {batch.sources[failed.value]:#x} to {batch.targets[failed.value]:#x}"
                )
            raise RuntimeError(f"{_FUNCTION} failed with error {code}: {where}")


class TorchCopier(PageCopier):
    """One ``copy_`` for each copy of the batch; memory need not be pinned."""

    def copy(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        target, source = _flat(batch.target), _flat(batch.source)
        target_offsets = (batch.targets - target.data_ptr()).tolist()
        source_offsets = (batch.sources - source.data_ptr()).tolist()
        for to, start, size in zip(target_offsets, source_offsets, batch.sizes.tolist(), strict=True):
            target[to : to + size].copy_(source[start : start + size], non_blocking=True)


def choose_copier(device: torch.device, pinned: bool) -> PageCopier:
    """Return the batched copier if memory is pinned and a trial copy succeeds, else one that copies one at a time."""
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
    """:raises RuntimeError: if a copy to the device and back does not preserve the bytes."""
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
    """Return all bytes from the tensor's first to its last, including gaps between its rows."""
    length = (tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]
    return tensor.as_strided((length,), (1,))
