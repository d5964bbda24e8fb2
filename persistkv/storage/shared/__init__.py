"""A store that many engines share, on a medium with four methods (``persistkv.storage.blobs``)."""

from persistkv.storage.shared.backend import SharedBackend
from persistkv.storage.shared.clock import Clock
from persistkv.storage.shared.options import SharedOptions

__all__ = ["Clock", "SharedBackend", "SharedOptions"]
