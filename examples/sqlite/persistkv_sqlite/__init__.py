"""A persistkv store in one SQLite file: the worked example of docs/extending.md."""

from persistkv_sqlite.backend import SqliteBackend

__all__ = ["SqliteBackend"]
