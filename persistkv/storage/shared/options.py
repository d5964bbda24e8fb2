"""Options of a shared store that do not depend on its medium."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from persistkv.config import convert_options, parse_duration, parse_size
from persistkv.storage.key_options import KeyOptions
from persistkv.storage.mounts import existing_parent, remote_type
from persistkv.storage.policy import Policy

logger = logging.getLogger(__name__)

_DURATIONS = ("refresh", "ttl", "status")


class SharedOptions(KeyOptions, frozen=True):
    """Options of an opened store. docs/shared.md describes them. Durations (``…_s``) are in
    seconds, the capacity is in bytes.
    """

    read_only: bool = False
    refresh_s: float = msgspec.field(default=1.0, name="refresh")
    """Seconds between two searches for commits of other engines. 0: the store is also searched at
    every commit and every query of changes, requests or totals."""
    capacity: int | None = None
    """Capacity of a new store; None: unlimited. A store that exists keeps its recorded policy."""
    ttl_s: float | None = msgspec.field(default=None, name="ttl")
    """Seconds from the last use of content to its expiry, in a new store; None: it does not
    expire."""
    status_s: float | None = msgspec.field(default=None, name="status")
    """Seconds between status rows of an engine; None: engines publish no status."""
    cache: str | bool | None = None
    """Directory of the replicas of the index; False: a temporary directory; None:
    ``~/.cache/persistkv``."""

    @property
    def always_refreshes(self) -> bool:
        """Whether the store is searched at every commit and query: the option ``refresh`` is 0."""
        return self.refresh_s == 0

    @property
    def policy(self) -> Policy:
        """Capacity and ttl of a new store."""
        return Policy(self.capacity, self.ttl_s)

    def cache_directory(self) -> Path | None:
        """Return the directory of the replicas; None: use a temporary one. One that other hosts may
        write is not used, because replicas are LMDB environments: this is logged.
        """
        directory = self._wanted_cache()
        if directory is None:
            return None
        try:
            kind = remote_type(existing_parent(directory))
        except OSError:  # opening the replica raises an error that tells more
            return directory
        if kind is None:
            return directory
        text = (
            "%s is on a network file system (%s), where LMDB does not work: the index of the "
            "shared store is read into "
            "a temporary directory at each start; name a local directory with the option cache=PATH"
        )
        logger.warning(text, directory, kind)
        return None

    def _wanted_cache(self) -> Path | None:
        """Return the directory of replicas that the options ask for; None: replicas are
        temporary."""
        if self.cache is False:
            return None
        if isinstance(self.cache, str):
            return Path(self.cache).absolute()
        try:
            parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # RuntimeError means that the user has no home directory
            return None
        return Path(parent).absolute() / "persistkv" / "shared"


SHARED_NAMES = frozenset(
    field.encode_name for field in msgspec.structs.fields(SharedOptions)
)
"""Names of the options in a URL."""


def parse_shared(
    options: Mapping[str, str],
    where: str,
) -> tuple[SharedOptions, dict[str, str]]:
    """Return the options of the store, and the remaining options, which are those of its medium.

    :param where: scheme of the URL, for errors.
    :raises ConfigurationError: a value is invalid.
    """
    values: dict[str, str | int | float] = {}
    rest: dict[str, str] = {}
    for name, value in options.items():
        if name not in SHARED_NAMES:
            rest[name] = value
        # convert 0 here, because ``parse_duration`` refuses it
        elif name == "refresh" and value == "0s":
            values[name] = 0.0
        elif name == "capacity":
            values[name] = parse_size(value, name=f"{where} option capacity")
        elif name in _DURATIONS:
            values[name] = parse_duration(value, name=f"{where} option {name}")
        else:
            values[name] = value
    return convert_options(SharedOptions, values, where=where), rest
