"""Content that a history must keep: all that was acknowledged, until its end is found."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import NamedTuple
from unittest import mock

import msgspec

from persistkv.errors import CorruptPackError
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.format.pack import ID_BYTES
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.format.seal import PLAIN, Seal
from persistkv.storage.shared import Clock, format
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.forgetting.records import ForgetRecord, decode_records
from persistkv.storage.shared.format import (
    NO_NAMESPACE,
    PLAIN_NAME,
    Delta,
    Names,
    decode_content,
    decode_delta,
    open_object,
    record_name,
)
from persistkv.storage.shared.keys import KEYRINGS, StoreKeys
from persistkv.tenants import DEFAULT_TENANT
from persistkv.testing import MemoryBlobs
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.samples import payload_of, sample_pack
from tests.storage.shared.simulation import HOUR_S, World

IDENTITIES = (sample_identity(0), sample_identity(1))
NAMESPACES = tuple(identity.digest for identity in IDENTITIES)
KEYS = ("1" * 32, "2" * 32)
"""Of a store whose history has a key, and the one that replaces it."""
FORGOTTEN = "anna"
"""Tenant that some histories forget."""
_STORE_KEYS = [StoreKey(text.encode()) for text in KEYS]
NEW_KEY = _STORE_KEYS[1]
"""Key that replaces the first one."""


def names_of(namespace: bytes, *, with_key: bool) -> Names:
    """Return the names of the index of a namespace."""
    return Names(namespace, _STORE_KEYS[0].id if with_key else PLAIN_NAME)


def indexes() -> Iterator[tuple[bytes, Names]]:
    """Iterate over all namespaces with their names, without a key and with one."""
    for namespace in NAMESPACES:
        for with_key in (False, True):
            yield namespace, names_of(namespace, with_key=with_key)


def pack_of(
    number: int,
    content: int = 0,
    seal: Seal = PLAIN,
    tenant: str = DEFAULT_TENANT,
) -> PackWriter:
    """Return a pack; no two namespaces have equal packs.

    :param seal: of the store.
    """
    return sample_pack(
        NAMESPACES[number % 2],
        number,
        blocks=1 + number % 3,
        block_bytes=64,
        content=number + content,
        seal=seal,
        tenant=tenant,
    )


@cache
def payload(number: int, content: int = 0) -> bytes:
    return payload_of(pack_of(number, content))


class Span(NamedTuple):
    """Time of a call, in simulated seconds."""

    begin: float
    end: float


class Held(NamedTuple):
    """An acknowledged request."""

    digest: bytes
    packs: list[bytes]
    at: Span


class Ended(NamedTuple):
    """Content that was ended by an index object, whether that still exists or not."""

    blobs: set[bytes]
    """Names (pack id and nonce) of blobs of packs, for which there is a tombstone."""
    requests: set[bytes]
    """Digests of deleted requests."""
    keys: set[bytes]
    """Ids of the data keys that records of `forget` name as destroyed."""


class Stored(NamedTuple):
    """An acknowledged commit of a pack."""

    at: Span
    blobs: frozenset[bytes]
    """Names (pack id and nonce) of blobs that the commit wrote; empty: it found the pack in its
    catalogue."""
    data_key: bytes
    """Id of the key that seals the pack."""


class Model:
    """Acknowledged content, and the ends of its parts.

    :param ttl_s: see ``SharedOptions``.
    """

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = ttl_s
        self.payloads: defaultdict[bytes, set[bytes]] = defaultdict(set)
        """For each pack, the payloads that any engine tried to store."""
        self.stored: defaultdict[bytes, list[Stored]] = defaultdict(list)
        self.requests: dict[str, Held] = {}
        self.deleted: set[bytes] = set()
        """Packs that an engine has tried to delete."""
        self.unmarked: set[bytes] = set()
        """Names (pack id and nonce) of blobs that were deleted when no object had a tombstone for
        them. An engine that finds such a blob missing writes one later."""
        self.damaged: set[bytes] = set()
        """Packs that were damaged by an operator, or that an object named which was."""
        self.damaged_requests: set[bytes] = set()
        """Digests of requests, in the same sense."""

    def must_hold(
        self,
        now: float,
        ended: Ended,
        acknowledged: float = math.inf,
    ) -> set[bytes]:
        """Return the packs that the store must hold.

        :param acknowledged: only commits count that were acknowledged until then, in simulated
            seconds.
        """
        found: set[bytes] = set()
        for pack_id, all_commits in self.stored.items():
            commits = [
                stored
                for stored in all_commits
                if stored.at.end <= acknowledged and stored.data_key not in ended.keys
            ]
            if not commits or pack_id in self.damaged:
                continue
            newest = max(stored.at.begin for stored in commits)
            if self._ttl_s is not None and newest + self._ttl_s <= now + HOUR_S:
                continue
            if self._is_alive(pack_id, commits, ended.blobs):
                found.add(pack_id)
        return found

    def _is_alive(
        self,
        pack_id: bytes,
        commits: list[Stored],
        tombstones: set[bytes],
    ) -> bool:
        ended = any(name[:ID_BYTES] == pack_id for name in tombstones)
        if not ended:
            return True
        # A commit that wrote no blob trusts one that may have ended meanwhile.
        return any(stored.blobs - tombstones for stored in commits)

    def wrongly_deleted(self, keys: set[bytes]) -> set[bytes]:
        """Return the acknowledged packs of which a blob was deleted without a tombstone.

        :param keys: ``Ended.keys``.
        """
        found: set[bytes] = set()
        for pack_id, commits in self.stored.items():
            held = [stored for stored in commits if stored.data_key not in keys]
            blobs = frozenset().union(*(stored.blobs for stored in held))
            if blobs & self.unmarked:
                found.add(pack_id)
        return found - self.damaged

    def forgotten_requests(self, keys: set[bytes]) -> set[str]:
        """Return the requests all of whose packs are sealed with destroyed data keys.

        :param keys: ``Ended.keys``.
        """
        found: set[str] = set()
        for name, held in self.requests.items():
            of_packs: set[bytes] = set()
            for pack_id in held.packs:
                of_packs.update(stored.data_key for stored in self.stored[pack_id])
            if of_packs and of_packs <= keys:
                found.add(name)
        return found

    def must_hold_requests(self, now: float, ended: Ended) -> set[str]:
        """Return the requests that the store must hold: nothing has ended them or any blob of their
        packs."""
        packs = self.must_hold(now, ended)
        without = {name[:ID_BYTES] for name in ended.blobs} | self.deleted
        found: set[str] = set()
        for name, held in self.requests.items():
            is_young = self._ttl_s is None or held.at.begin + self._ttl_s > now + HOUR_S
            is_whole = packs.issuperset(held.packs) and without.isdisjoint(held.packs)
            if is_young and is_whole and held.digest not in ended.requests:
                found.add(name)
        return found

    def dropped_requests(self, ended: Ended) -> set[str]:
        """Return the requests that an engine has dropped, for example because their ttl passed."""
        return {
            name
            for name, held in self.requests.items()
            if held.digest in ended.requests
        }


class View(NamedTuple):
    """Content in the view of a handle."""

    packs: frozenset[bytes]
    requests: frozenset[str]


def decoded(world: World) -> Iterator[tuple[str, Delta]]:
    """Iterate over all index objects that were ever written, with their names."""
    medium = world.medium
    seals = seals_of(world)
    for name, data in [*medium.deleted.items(), *medium.contents().items()]:
        delta = decode(name, data, seals)
        if delta is not None:
            yield name, delta


def decode(name: str, data: bytes, seals: Sequence[Seal]) -> Delta | None:
    """Return the content of an index object; None: it is none.

    :param seals: of the store (``seals_of``).
    """
    for seal in seals:
        found = _decode(name, data, seal)
        if found is not None:
            return found
    return None


@lru_cache(maxsize=2048)
def _decode(name: str, data: bytes, seal: Seal) -> Delta | None:
    for namespace, names in indexes():
        if names.is_object(name):
            with suppress(CorruptPackError):
                delta = decode_delta(open_object(name, data, seal, namespace))
                return _with_content(delta, name, seal, namespace)
    return None


def _with_content(delta: Delta, name: str, seal: Seal, namespace: bytes) -> Delta:
    """Return a delta with what the data keys of tenants seal in it."""
    packs = list(delta.packs)
    manifests = list(delta.manifests)
    for record in delta.sealed:
        body = seal.opened(record_name(namespace, f"content of {name}"), record)
        content = decode_content(body)
        packs += content.packs
        manifests += content.manifests
    return msgspec.structs.replace(delta, packs=packs, manifests=manifests)


def _destroyed(world: World) -> Iterator[bytes]:
    """Yield the ids of the data keys that all records that were ever written name as destroyed."""
    medium = world.medium
    seals = seals_of(world)
    blobs = [*medium.deleted.items(), *medium.contents().items()]
    for name, data in blobs:
        if "/forgotten/" in name:
            for record in _records(name, data, seals):
                yield from record.keys


def _records(name: str, data: bytes, seals: Sequence[Seal]) -> list[ForgetRecord]:
    for seal in seals:
        with suppress(CorruptPackError):
            return decode_records(open_object(name, data, seal, NO_NAMESPACE))
    return []


def seals_of(world: World) -> Sequence[Seal]:
    """Return the seals of the store: plain, and with each key that it had, with all data keys that
    it ever had."""
    medium = world.medium
    found: dict[str, bytes] = {}
    for blobs in (medium.deleted, medium.contents()):
        for name, data in blobs.items():
            if (
                name.startswith(KEYRINGS) and not name.endswith("/replaced")
            ) or "/tenants/" in name:
                found[name] = data
    return _seals_of(tuple(sorted(found.items())))


@lru_cache(maxsize=8)
def _seals_of(blobs: Sequence[tuple[str, bytes]]) -> Sequence[Seal]:
    """Return the seals of a store.

    :param blobs: those that hold its keys: name and content.
    """
    copy = MemoryBlobs()
    copy.connections = 1
    for name, data in blobs:
        copy.put(name, [data])
    seals: list[Seal] = [PLAIN]
    for key in _STORE_KEYS:
        keys = StoreKeys(Medium(copy, key, Clock()), key)
        if keys.open(creates=False):
            seals.append(keys.seal)
    return seals


def ended_in(world: World, since: float = 0.0) -> Ended:
    """Return the content that has ended.

    :param since: only at this time or later, on the medium's clock.
    """
    ended = Ended(set(), set(), set(_destroyed(world)))
    for _, delta in decoded(world):
        ended.blobs.update(
            tombstone.name for tombstone in delta.removed if tombstone.time >= since
        )
        ended.requests.update(
            dropped.digest for dropped in delta.dropped if dropped.time >= since
        )
    return ended


def newer(name: str, namespace: bytes) -> bytes:
    """Return the bytes of an index object in a format that a later release writes."""
    with mock.patch.object(format, "FORMAT_VERSION", format.FORMAT_VERSION + 1):
        return format.seal_object(name, b"content of a later release", PLAIN, namespace)
