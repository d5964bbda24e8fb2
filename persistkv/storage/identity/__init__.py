"""Identity: all properties that must match for KV bytes to be valid. A namespace holds the content of one identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from persistkv.errors import ConfigurationError, FieldDifference
from persistkv.storage.format.pack import ID_BYTES

IDENTITY_VERSION = 1
_PATH_SIGNS = frozenset('.[]"')


class Identity(msgspec.Struct, frozen=True):
    """A tree of JSON values. Two identities are the same if and only if their canonical JSON is equal."""

    fields: dict[str, Any]
    """The properties that must match, such as
    ``{"weights": …, "config": {…}, "dtype": …, "groups": […], "block_size": 16}``."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Identity:
        """Return the identity with a copy of these fields.

        :raises ConfigurationError: the fields are not JSON values.
        """
        try:
            return cls(json.loads(_canonical(fields)))
        except (TypeError, ValueError) as error:
            raise ConfigurationError("identity", type(fields).__name__, f"JSON values ({error})") from None

    def encode(self) -> bytes:
        """Return the canonical JSON: sorted names, no spaces, UTF-8."""
        return _canonical(self.fields)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Identity:
        """Return the identity that was encoded as this JSON.

        :raises ValueError: the bytes are not a JSON object.
        """
        return cls(msgspec.json.decode(bytes(data), type=dict[str, Any]))

    @property
    def digest(self) -> bytes:
        """Id of the namespace, 16 bytes."""
        head = f"persistkv identity {IDENTITY_VERSION}\n".encode()
        return hashlib.sha256(head + self.encode()).digest()[:ID_BYTES]

    def diff(self, other: Identity) -> list[FieldDifference]:
        """Return the fields in which ``other`` (theirs) differs from this identity (ours), named by dotted path."""
        ours, theirs = dict(_flatten(self.fields)), dict(_flatten(other.fields))
        return [
            FieldDifference(name, ours.get(name), theirs.get(name))
            for name in sorted(ours.keys() | theirs.keys())
            if (name in ours, _canonical(ours.get(name))) != (name in theirs, _canonical(theirs.get(name)))
        ]

    def nearest(self, others: Iterable[Identity]) -> list[FieldDifference]:
        """Return the differences from the identity in ``others`` with the fewest; empty if there are no others."""
        return min((self.diff(other) for other in others), key=len, default=[])


def _canonical(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            part = name if name and not _PATH_SIGNS & set(name) else json.dumps(name)
            yield from _flatten(item, f"{path}.{part}" if path else part)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _flatten(item, f"{path}[{index}]")
    else:
        yield path, value
