"""The ``file://`` driver: a store in a directory that many machines mount. README.md in this folder
has its guarantees and limits.
"""

from persistkv_dir.backend import DirBackend
from persistkv_dir.blobs import DirBlobs

__all__ = ["DirBackend", "DirBlobs"]
