"""The LMDB driver: ``lmdb:///path?capacity=100GiB``. README.md in this folder has options,
guarantees and limits."""

from persistkv_lmdb.backend import LmdbBackend, LmdbOptions

__all__ = ["LmdbBackend", "LmdbOptions"]
