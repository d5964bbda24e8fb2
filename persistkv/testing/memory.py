"""A store in memory, for tests: a shared store whose medium is in the memory of this process."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError
from persistkv.storage.backend import Capabilities
from persistkv.storage.blobs import Blobs
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.testing.blobs import MemoryBlobs

# the replica of the index is in a temporary directory
_OPTIONS = SharedOptions(cache=False)


class MemoryBackend(SharedBackend):
    """Handle of a shared store in memory. Each handle opens a store of its own, which ends with the
    process.

    Its options are those of every shared store; the replica of the index is always in a temporary
    directory.

    :param blobs: the medium, such as ``FaultyBlobs``, or ``MemoryBlobs.handle`` of another store;
        None: a new one.
    :param place: name of the store in messages.
    """

    capabilities = Capabilities(shared=False)

    def __init__(
        self,
        blobs: Blobs | None = None,
        options: SharedOptions = _OPTIONS,
        place: str = "memory://",
        *,
        read_only: bool = False,
    ) -> None:
        self.blobs = MemoryBlobs() if blobs is None else blobs
        """The medium."""
        super().__init__(self.blobs, options, place, read_only=read_only)

    @classmethod
    def open_blobs(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
        *,
        read_only: bool,
    ) -> Blobs:
        """Return a new, empty medium. It has no options, so any option is an error."""
        if options:
            raise ConfigurationError(
                "memory options", " ".join(options), "those of shared stores"
            )
        return MemoryBlobs()

    @classmethod
    def split_options(cls, url: StoreUrl) -> tuple[SharedOptions, dict[str, str]]:
        options, rest = super().split_options(url)
        return msgspec.structs.replace(options, cache=False), rest
