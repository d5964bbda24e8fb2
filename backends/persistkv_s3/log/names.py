"""Names of objects under a store's prefix.

Listings are untrusted: names that cannot be parsed are ignored.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LOG = re.compile(r"i-([0-9a-f]{32})-([0-9a-f]{12})")
_ROOT = re.compile(r"s-([0-9a-f]{12})")
_PACK = re.compile(r"([0-9a-f]{32})-([0-9a-f]{8})")
_IDENTITY = re.compile(r"[0-9a-f]{32}")

FORMAT = "persistkv"
IDENTITIES = "identities/"
STATUSES = "status/"


class LogName(NamedTuple):
    """Name of one commit of one writer."""

    writer: bytes
    """16 random bytes, drawn by each writing handle."""
    number: int
    """Counted from 1."""


class Names:
    """Keys of one namespace's objects.

    :param prefix: of the store; empty, or ending in a slash.
    :param key_id: of the key that authenticates the objects; empty without one. Objects elsewhere are ignored.
    """

    def __init__(self, prefix: str, namespace: bytes, key_id: str = "") -> None:
        self.base = f"{prefix}{namespace.hex()}{'-' if key_id else ''}{key_id}/"
        self.log_prefix = f"{self.base}log/"
        self.packs_prefix = f"{self.base}packs/"
        self.keys_prefix = f"{self.base}keys/"
        self.segments_prefix = f"{self.base}segments/"

    def pack(self, pack_id: bytes, generation: int) -> str:
        """Return the key of a pack. After a deletion its generation rises, so the bytes under a key never change."""
        return f"{self.packs_prefix}{pack_id.hex()}-{generation:08x}"

    def log(self, name: LogName) -> str:
        """Return the key of a commit's index object."""
        return f"{self.log_prefix}i-{name.writer.hex()}-{name.number:012x}"

    def manifest_keys(self, name: LogName) -> str:
        """Return the key of the object with the keys of a commit's manifests."""
        return f"{self.keys_prefix}{name.writer.hex()}-{name.number:012x}"

    def root(self, number: int) -> str:
        """Return the key of a snapshot's root."""
        return f"{self.log_prefix}s-{number:012x}"

    def segment(self, name: str) -> str:
        """Return the key of a snapshot's segment."""
        return f"{self.segments_prefix}{name}"


def parse_log(key: str) -> LogName | None:
    """Return the commit of an index object; None for another key."""
    match = _LOG.fullmatch(key.rpartition("/")[2])
    return None if match is None else LogName(bytes.fromhex(match[1]), int(match[2], 16))


def parse_root(key: str) -> int | None:
    """Return the number of a snapshot's root; None for another key."""
    match = _ROOT.fullmatch(key.rpartition("/")[2])
    return None if match is None else int(match[1], 16)


def parse_pack(key: str) -> tuple[bytes, int] | None:
    """Return pack id and generation of a pack object; None for another key."""
    match = _PACK.fullmatch(key.rpartition("/")[2])
    return None if match is None else (bytes.fromhex(match[1]), int(match[2], 16))


def parse_identity(key: str) -> bytes | None:
    """Return the namespace id of an identity object; None for another key."""
    name = key.rpartition("/")[2]
    return bytes.fromhex(name) if _IDENTITY.fullmatch(name) else None
