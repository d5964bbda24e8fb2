"""Every error that persistkv raises, in one shallow tree.

Vendor exceptions (LMDB, the operating system, msgspec) are translated once, where they enter; nothing above that
boundary catches them by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class FieldDifference(NamedTuple):
    """One field in which two identities differ."""

    field: str
    """Dotted path of the field, e.g. ``config.rope_theta``."""
    ours: object
    """The value that was asked for; None where only the other side has the field."""
    theirs: object
    """The value that is stored; None where only our side has the field."""

    def __str__(self) -> str:
        return f"{self.field}: {self.ours!r} here, {self.theirs!r} stored"


class PersistKVError(Exception):
    """Root of the tree: catches everything that persistkv raises on purpose."""


class ConfigurationError(PersistKVError, ValueError):
    """A value that the caller gave is wrong; nothing was opened and nothing stored was touched."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: {value!r} is not valid; expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[str, object, str]]:
        return (ConfigurationError, (self.field, self.value, self.expected))


class UnsupportedModelError(PersistKVError):
    """The model keeps a cache that persistkv cannot hold; the message says which part."""


class RegionError(PersistKVError):
    """The shared memory of the primary tier cannot be had or is gone; the message says why."""


class IdentityMismatchError(PersistKVError):
    """``strict_identity`` was asked for and the store holds other identities only."""

    def __init__(self, url: str, differences: Sequence[FieldDifference]) -> None:
        lines = "; ".join(str(difference) for difference in differences)
        super().__init__(f"{url} holds no namespace of this identity; the nearest differs in {lines}")
        self.url = url
        self.differences = tuple(differences)


class StoreError(PersistKVError):
    """A store could not do what was asked; what was durable before is durable still."""


class StoreUnavailableError(StoreError):
    """The store cannot be opened or reached: permission, a file in the way, no such host."""


class ProcessIdInUseError(StoreUnavailableError):
    """A process in another PID namespace uses the store under this process's PID. Open it from another process."""


class StoreBusyError(StoreError):
    """Another process keeps the store from being written, longer than a commit takes. Nothing was done."""


class StoreFullError(StoreError):
    """A commit did not fit; all of it was undone."""


class CorruptStoreError(StoreError):
    """The catalogue of a store does not read as one; it was not changed."""


class CorruptPackError(StoreError):
    """A pack, a frame or a manifest does not read as one. Nothing of it is used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class HostError(PersistKVError):
    """The process or thread that runs a store cannot be used: closed, forked away from, or not answering."""


class MissingExtraError(PersistKVError):
    """A package that an optional part of persistkv needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'persistkv[{extra}]'")
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        return (MissingExtraError, (self.package, self.extra))
