"""What somebody reads who has the user's key, and all objects and versions of a shared store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.format.keys import DataKey, StoreKey, WrappedKey, decode_keys
from persistkv.storage.format.seal import KeySeal
from persistkv.storage.shared.format import (
    NO_NAMESPACE,
    decode_delta,
    open_object,
    record_name,
)
from persistkv.testing.samples import open_payload


class Version(NamedTuple):
    """A version of an object."""

    name: str
    data: bytes


class Reader:
    """Opens all that a key opens.

    :param keys: versions of objects that may hold wrapped keys.
    :param requests: ids of requests, whose keys it opens.
    """

    def __init__(
        self,
        key: StoreKey,
        keys: Collection[Version],
        namespace: bytes,
        requests: Collection[str] = (),
    ) -> None:
        wrapped: list[WrappedKey] = []
        for version in keys:
            if version.name.startswith("keyrings/"):
                wrapped += decode_keys(version.data).wrapped
        keyring = key.unwrap_all(wrapped)
        records = KeySeal(lambda: keyring)
        of_tenants: list[DataKey] = []
        for version in keys:
            if "/tenants/" in version.name:
                key_id = bytes.fromhex(version.name.rsplit("/", 1)[1])
                of_tenants.append(records.opened_key(key_id, version.data))
        everything = keyring.extended(of_tenants)
        self._seal = KeySeal(lambda: everything)
        self._namespace = namespace
        self._requests = requests

    def found(self, versions: Iterable[Version], texts: set[bytes]) -> int:
        """Return how many of these plaintexts it reads in versions of objects."""
        found: set[bytes] = set()
        for version in versions:
            for content in (version.data, *self._opened(version)):
                found.update(text for text in texts - found if text in content)
        return len(found)

    def _opened(self, version: Version) -> Iterator[bytes]:
        """Yield what opens in a version of an object: table and payload of a pack, an object of the
        index and what it contains, keys of requests."""
        seal = self._seal
        with suppress(CorruptPackError):
            table = seal.decode_table(version.data)
            yield table.encode()
            payload = bytearray(version.data[: table.payload_length])
            open_payload(seal, table, memoryview(payload))
            yield bytes(payload)
        for namespace in (self._namespace, NO_NAMESPACE):
            with suppress(CorruptPackError):
                body = open_object(version.name, version.data, seal, namespace)
                yield body
                for record in decode_delta(body).sealed:
                    name = record_name(namespace, f"content of {version.name}")
                    with suppress(CorruptPackError):
                        yield seal.opened(name, record)
        for request in self._requests:
            name = record_name(self._namespace, f"keys of {request}")
            with suppress(CorruptPackError):
                yield seal.opened(name, version.data)
