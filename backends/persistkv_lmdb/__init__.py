"""The LMDB driver: ``lmdb:///path?capacity=100GiB``. Options, promises and limits are in README.md beside this file."""

from persistkv_lmdb.backend import LmdbBackend
from persistkv_lmdb.options import LmdbOptions

__all__ = ["LmdbBackend", "LmdbOptions"]
