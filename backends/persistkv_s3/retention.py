"""Retention: eviction by ttl and capacity, and removal of orphans. One engine at a time does it.

1. Time is divided into periods. The engine that creates the lease object of a period does the round of that period. A
   lease is never released or renewed; it ends with its period. Concurrent rounds (clocks differ) are harmless.
2. Eviction is a normal commit that removes packs from the index. Their objects stay until they are old orphans, so that
   reads in progress complete.
3. An orphan is an object that the index does not reference and that is older than ``grace`` by the server's clock. The
   index is fetched again before orphans are deleted, and nothing is deleted if a part of it is unreadable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from persistkv.storage.backend import CommitBatch
from persistkv.storage.extensions import Policy
from persistkv.storage.format.pack import UNKNOWN_DEPTH
from persistkv_s3.client.bucket import Bucket
from persistkv_s3.client.transport import ObjectExistsError, ObjectInfo
from persistkv_s3.log.layout import LEASES, parse_pack
from persistkv_s3.log.state import LogState
from persistkv_s3.session import NamespaceSession

logger = logging.getLogger(__name__)


class Round(NamedTuple):
    """Result of one round."""

    evicted: int
    """Packs."""
    orphans: int
    """Deleted objects."""


class _Candidate(NamedTuple):
    """Pack or manifest that may be evicted; the smallest is evicted first."""

    time: float
    moment: int
    depth_left: int
    is_manifest: bool
    namespace: bytes
    name: bytes
    size: int


class Retention:
    """Retention of one store, by one handle; used from the thread that commits."""

    def __init__(self, bucket: Bucket, prefix: str, period_s: float, grace_s: float) -> None:
        """:param grace_s: age in seconds at which an object that the index does not reference is an orphan."""
        self._bucket = bucket
        self._leases = prefix + LEASES
        self._grace_s = grace_s
        self._period_s = period_s
        self._period: int | None = None

    def is_due(self) -> bool:
        """Return whether a period has started whose lease this handle has not tried to take."""
        now = self._now()
        if self._period is None:  # the first round is in the next period, so that opening is not delayed
            self._period = now
        return now > self._period

    def _now(self) -> int:
        return int(self._bucket.now() / self._period_s)

    def run_if_first(self, sessions: Mapping[bytes, NamespaceSession], policy: Callable[[], Policy]) -> Round | None:
        """Do the round of this period; return None if another engine does it.

        :param policy: reads the store's recorded policy.
        :raises StoreError: it was not completed; the next round continues.
        """
        self._period = self._now()
        lease = f"{self._leases}{self._period:012x}"
        try:
            self._bucket.put(lease, [b"taken"])
        except ObjectExistsError:
            return None
        now = self._bucket.head(lease).modified
        self._bucket.delete([info.key for info in self._bucket.list(self._leases) if info.key < lease])
        return self.run(sessions, policy(), now)

    def run(self, sessions: Mapping[bytes, NamespaceSession], policy: Policy, now: float) -> Round:
        """Evict, then remove orphans.

        :param now: time by the server's clock.
        """
        for session in sessions.values():
            session.follower.refresh()
        evicted = self._evict(sessions, policy, now)
        orphans = sum(self._remove_orphans(session, now) for session in sessions.values())
        if evicted or orphans:
            logger.info("%d packs were evicted, %d orphans removed", evicted, orphans)
        return Round(evicted, orphans)

    def _evict(self, sessions: Mapping[bytes, NamespaceSession], policy: Policy, now: float) -> int:
        packs: dict[bytes, list[bytes]] = {}
        manifests: dict[bytes, list[str]] = {}
        for victim in _victims({name: session.state for name, session in sessions.items()}, policy, now):
            if victim.is_manifest:
                manifests.setdefault(victim.namespace, []).append(victim.name.decode())
            else:
                packs.setdefault(victim.namespace, []).append(victim.name)
        evicted = 0
        for name in packs.keys() | manifests.keys():
            batch = CommitBatch(deletions=packs.get(name, ()))
            evicted += len(sessions[name].commit(batch, 0, dropped=manifests.get(name, ())).evicted)
        return evicted

    def _remove_orphans(self, session: NamespaceSession, now: float) -> int:
        """Remove the orphans of one namespace; return the number of deleted objects."""
        names = session.names
        prefixes = (names.packs_prefix, names.keys_prefix, names.segments_prefix)
        lying = (info for prefix in prefixes for info in self._bucket.list(prefix))
        old = (info for info in lying if info.modified <= now - self._grace_s)
        found = list(_unnamed(old, session))  # few, even of a million objects
        session.follower.refresh_from_bucket()
        if session.state.damaged:
            logger.warning("%s: a part of the index does not read, so no orphans are removed", names.base)
            return 0
        orphans = [info.key for info in _unnamed(found, session)]
        self._bucket.delete(orphans)
        return len(orphans)


def _victims(states: Mapping[bytes, LogState], policy: Policy, now: float) -> Iterator[_Candidate]:
    expired = -1.0 if policy.ttl_s is None else now - policy.ttl_s
    total = sum(state.stored_bytes for state in states.values())
    for candidate in sorted(c for name, state in states.items() for c in _candidates(name, state)):
        over = policy.capacity is not None and total > policy.capacity
        if not over and candidate.time >= expired:
            return
        total -= candidate.size
        yield candidate


def _candidates(namespace: bytes, state: LogState) -> Iterator[_Candidate]:
    pinned = state.pinned_packs
    for pack_id, pack in state.packs.items():
        if pack_id not in pinned:
            used, depth = pack.used, UNKNOWN_DEPTH - pack.depth
            yield _Candidate(used.time, used.moment, depth, False, namespace, pack_id, pack.stored_bytes)
    for name, manifest in state.manifests.items():
        if not state.pinned(name):
            used = manifest.used
            yield _Candidate(
                used.time, used.moment, UNKNOWN_DEPTH, True, namespace, name.encode(), manifest.stored_bytes
            )


def _unnamed(found: Iterable[ObjectInfo], session: NamespaceSession) -> Iterator[ObjectInfo]:
    root, names = session.follower.root, session.names
    named = {names.segment(name) for name in (() if root is None else root.segments)}
    named |= {names.manifest_keys(manifest.keys) for manifest in session.state.manifests.values()}
    for info in found:
        pack = parse_pack(info.key)
        if pack is None:
            if info.key not in named:
                yield info
            continue
        held = session.state.packs.get(pack[0])
        if held is None or held.generation != pack[1]:
            yield info
