"""Names of objects under a store's prefix.

What a listing shows is untrusted: a name that does not read is passed over.
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
    """One commit of one writer."""

    writer: bytes
    """16 random bytes, drawn by each handle that writes."""
    number: int
    """Counted from 1."""


class Names:
    """Keys of one namespace's objects.

    :param prefix: the store's; empty, or ending in a slash.
    :param key_id: of the key that authenticates them; empty without one. What is not under it is not looked at.
    """

    def __init__(self, prefix: str, namespace: bytes, key_id: str = "") -> None:
        self.base = f"{prefix}{namespace.hex()}{'-' if key_id else ''}{key_id}/"
        self.log_prefix = f"{self.base}log/"
        self.packs_prefix = f"{self.base}packs/"
        self.keys_prefix = f"{self.base}keys/"
        self.segments_prefix = f"{self.base}segments/"

    def pack(self, pack_id: bytes, generation: int) -> str:
        """A pack. It is written under a new generation after it was deleted, so that no reader meets other bytes."""
        return f"{self.packs_prefix}{pack_id.hex()}-{generation:08x}"

    def log(self, name: LogName) -> str:
        """The index object of a commit."""
        return f"{self.log_prefix}i-{name.writer.hex()}-{name.number:012x}"

    def manifest_keys(self, name: LogName) -> str:
        """The keys of the manifests of a commit."""
        return f"{self.keys_prefix}{name.writer.hex()}-{name.number:012x}"

    def root(self, number: int) -> str:
        """A snapshot's root."""
        return f"{self.log_prefix}s-{number:012x}"

    def segment(self, name: str) -> str:
        """A part of a snapshot."""
        return f"{self.segments_prefix}{name}"


def parse_log(key: str) -> LogName | None:
    """The commit whose index object this is."""
    match = _LOG.fullmatch(key.rpartition("/")[2])
    return None if match is None else LogName(bytes.fromhex(match[1]), int(match[2], 16))


def parse_root(key: str) -> int | None:
    """The number of the snapshot whose root this is."""
    match = _ROOT.fullmatch(key.rpartition("/")[2])
    return None if match is None else int(match[1], 16)


def parse_pack(key: str) -> tuple[bytes, int] | None:
    """Pack id and generation."""
    match = _PACK.fullmatch(key.rpartition("/")[2])
    return None if match is None else (bytes.fromhex(match[1]), int(match[2], 16))


def parse_identity(key: str) -> bytes | None:
    """The id of the namespace whose identity this is."""
    name = key.rpartition("/")[2]
    return bytes.fromhex(name) if _IDENTITY.fullmatch(name) else None
