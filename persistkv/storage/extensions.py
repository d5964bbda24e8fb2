"""Optional capabilities of drivers: interfaces in addition to ``Backend``. Callers test them with ``isinstance``.

As in ``Backend``, a failure of the medium raises a ``StoreError``, never an exception of the vendor. Any thread may
call ``scan`` and ``read_frames``, concurrently with any other call. Only one thread at a time may call the
other methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from persistkv.config import StoreUrl
from persistkv.storage.stats import FreeSpace, Rebuilt


@runtime_checkable
class SupportsFreeSpace(Protocol):
    """A store that keeps free space and can return it to the medium."""

    def free_space(self) -> FreeSpace:
        """Return the free space within the store."""

    def release_free(self) -> None:
        """Return the free space of separate payload files to the medium, as far as it supports that.

        Other processes may use the store meanwhile, and take space from the medium again. The content does not change.

        :raises StoreError: the store is open read-only, or the medium failed; what was returned stays returned.
        """


@runtime_checkable
class SupportsRebuild(Protocol):
    """A driver that can build a new catalogue from the payloads of a store whose catalogue is lost or damaged."""

    @classmethod
    def rebuild(cls, url: StoreUrl, progress: Callable[[int, int], None]) -> Rebuilt | None:
        """Find the packs of a store by their traces in its payload files, and build a new catalogue of them.

        Each listed pack was verified. Requests are lost: their blocks are found by key. If this call fails or is
        killed, nothing is lost, and it can be repeated.

        :param progress: called with the bytes of the payload files that were read, and with all of them.
        :returns: None: the catalogue is not damaged, and nothing was changed.
        :raises ConfigurationError: an option is invalid.
        :raises StoreBusyError: another process has the store open for writing.
        :raises StoreUnavailableError: there is no store, or its payloads are not in files of their own.
        :raises StoreError: the medium failed; the store is unchanged.
        """


class PlainMedium(ABC):
    """Direct access to a medium through the vendor's plain client, without a store: baseline of ``persistkv bench``."""

    @abstractmethod
    def write(self, buffers: Sequence[memoryview]) -> None:
        """Write the buffers' bytes in order, durably, apart from the store's data. ``close`` deletes these bytes."""

    @abstractmethod
    def read(self, buffers: Sequence[memoryview]) -> None:
        """Read the bytes of the last ``write`` into buffers of the same lengths."""

    @abstractmethod
    def close(self) -> None:
        """Delete the written data and release the medium; idempotent."""


@runtime_checkable
class SupportsPlainMedium(Protocol):
    """A driver that can access its medium without a store."""

    @classmethod
    def plain_medium(cls, url: StoreUrl) -> PlainMedium:
        """Return the medium at this URL for plain reads and writes, separate from the store.

        :raises ConfigurationError: an option is invalid.
        """
