"""Capacity of a store with several namespaces.

Each engine that merges publishes, once a minute, how many bytes of its namespace were last used before which time. From
these *totals* of all namespaces follows a horizon: if everything that was last used before it were evicted, the store
would fit its capacity. Each namespace evicts what is older. Totals that are not up to date do no harm: the next ones
correct them. A namespace that no engine uses is evicted by the engine that finds its totals oldest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from persistkv.errors import CorruptPackError
from persistkv.storage.blobs import BlobMissingError
from persistkv.storage.policy import Policy
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.merge import Limits
from persistkv.storage.shared.replica import Replica

TOTALS_S, IDLE_TOTALS_S = 60.0, 300.0  # between two totals of an engine in use, and of an idle one
_ABANDONED_S = 900.0  # 15 minutes: totals that are older have no engine
_POINTS = 64
_FREE_SHARE = 16  # 1/16 of the capacity is free for the next minute


class Totals(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one namespace contains."""

    num_bytes: int
    ages: Sequence[tuple[float, int]]
    """(time, bytes that were last used at this time or earlier), ascending."""

    def used_until(self, time: float) -> int:
        """Return the bytes that were last used at a time or earlier."""
        found = 0
        for until, total in self.ages:
            if until > time:
                break
            found = total
        return found

    def newer_than(self, time: float) -> int:
        """Return the bytes that were last used after a time."""
        return self.num_bytes - self.used_until(time)


class TotalsBoard:
    """The totals of all namespaces of one store and key: content under another key can be neither read nor evicted.
    Only one thread at a time may use it.
    """

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._prefix = medium.names.totals
        self._others: dict[bytes, tuple[float, Totals]] = {}
        self._own: dict[bytes, Totals] = {}  # as they were published last

    def exchange(self, replica: Replica) -> None:
        """Write the totals of a namespace, and read those of all others.

        :raises StoreError: the medium or the replica failed; the totals before are kept.
        """
        totals = Totals(replica.disk_bytes(), replica.ages(_POINTS))
        name = self._prefix + replica.namespace.hex()
        self._medium.put_sealed(name, _ENCODER.encode(totals), replica.namespace)
        self._read()
        self._own[replica.namespace] = totals

    def _read(self) -> None:
        found: dict[bytes, tuple[float, Totals]] = {}
        for info in self._medium.listed(self._prefix):
            try:
                namespace = bytes.fromhex(info.name[len(self._prefix) :])
                known = self._others.get(namespace)
                if known is not None and known[0] == info.time:
                    found[namespace] = known
                    continue
                body = self._medium.sealed(info.name, namespace)
                found[namespace] = (info.time, _DECODER.decode(body))
            except (ValueError, CorruptPackError, BlobMissingError, msgspec.DecodeError):
                continue  # junk, or deleted meanwhile
        self._others = found

    def limits(self, policy: Policy, namespace: bytes) -> Limits:
        """Return what merges of a namespace enforce until the next exchange.

        The namespaces share the free space equally. A part of the capacity is kept free, so that a growing namespace
        evicts the oldest content of the store, and not only its own.
        """
        if policy.capacity is None:
            return Limits(None, policy.ttl_s)
        others = {name: totals for name, (_, totals) in self._others.items()}
        others.pop(namespace, None)
        mine = self._own.get(namespace)
        if mine is None or not others:
            return Limits(policy.capacity, policy.ttl_s)
        everything = [mine, *others.values()]
        horizon = _horizon(everything, policy.capacity)
        free = policy.capacity - sum(totals.newer_than(horizon) for totals in everything)
        share = max(0, free) // len(everything)
        return Limits(mine.newer_than(horizon) + share, policy.ttl_s, horizon)

    def abandoned(self, policy: Policy) -> bytes | None:
        """Return a namespace that no engine uses, and that has content to evict or to expire; None: there is none."""
        now = self._medium.time.now()
        horizon = -math.inf
        if policy.capacity is not None:
            horizon = _horizon([totals for _, totals in self._others.values()], policy.capacity)
        if policy.ttl_s is not None:
            horizon = max(horizon, now - policy.ttl_s)
        for name, (written, totals) in self._others.items():
            if now - written > _ABANDONED_S and totals.used_until(horizon):
                return name
        return None


def _horizon(all_totals: Sequence[Totals], capacity: int) -> float:
    """Return the time before which content is evicted, to leave a part of the capacity free; minus infinity: none."""
    excess = sum(totals.num_bytes for totals in all_totals) - capacity + capacity // _FREE_SHARE
    if excess <= 0:
        return -math.inf
    times = sorted({time for totals in all_totals for time, _ in totals.ages})
    for time in times:
        if sum(totals.used_until(time) for totals in all_totals) >= excess:
            return math.nextafter(time, math.inf)
    return math.nextafter(times[-1], math.inf) if times else -math.inf


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Totals)
