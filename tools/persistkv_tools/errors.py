"""What only the command raises."""

from __future__ import annotations

from persistkv.errors import PersistKVError


class NotFoundError(PersistKVError):
    """What the command line names is not in the store, or is not the only one of that name."""


class StoreTooSmallError(PersistKVError):
    """The capacity of a store has no room for the content to copy; nothing was written."""


class CorruptArchiveError(PersistKVError):
    """A file of ``persistkv export`` does not read as one; nothing of it was imported."""
