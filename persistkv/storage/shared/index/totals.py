"""Capacity and quotas of a store with several namespaces.

Each engine that merges publishes, once a minute, how many bytes of its namespace were last used
before which time. From these *totals* of all namespaces follows a *horizon*, a time: without the
content that was last used before it, the store fits its capacity. Each namespace evicts content
that is older than the horizon. Totals that are not up to date do no harm: the next ones correct
them. If totals become old, no engine uses their namespace: an engine of another namespace then
evicts its content. A namespace without content has no totals.

The quota of a tenant is shared by the namespaces in the same way: totals also contain those of each
tenant with a quota. Content above a quota is evicted first: it counts neither for the capacity nor
for its horizon.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.blobs import BlobMissingError
from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.policy import Policy
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import ArrayStruct, decode, encode
from persistkv.storage.shared.replica import Bound, Limits, Replica
from persistkv.tenants import tenant_digest

logger = logging.getLogger(__name__)

TOTALS_S = 60.0  # seconds between two totals of an engine in use
IDLE_TOTALS_S = 300.0  # seconds between two totals of an idle engine
_IN_USE_S = 2 * TOTALS_S  # maximum age of the totals of a namespace in use
_ABANDONED_S = 900.0  # 15 minutes: a namespace with older totals has no engine
_POINTS = 64  # maximum number of steps in published ages
_FREE_SHARE = 16  # 1/16: share of the capacity that is kept free for the next minute
# 1/64: share of the capacity, or of a quota. Totals are exchanged when the namespace, or the
# tenant's content in it, has grown by so much.
_GROWTH_SHARE = 64
# minimum seconds between two exchanges of a namespace that has used half of its share
_LEAST_TOTALS_S = 5.0
# number of totals that are listed per minute: S3 returns so many names for one request
_LISTED_PER_MINUTE = 1000


class Totals(ArrayStruct, frozen=True):
    """Bytes of one namespace, or of one tenant in it, by their last use."""

    num_bytes: int
    """Bytes of all content."""
    ages: Sequence[tuple[float, int]]
    """Steps of (time, bytes that were last used at this time or earlier), ascending."""
    tenants: Mapping[bytes, Totals] = {}
    """Totals of the tenants with a quota, by the digests of their names."""

    def used_until(self, time: float) -> int:
        """Return how many bytes were last used at ``time`` or earlier."""
        num_bytes = 0
        for step_time, bytes_until in self.ages:
            if step_time > time:
                break
            num_bytes = bytes_until
        return num_bytes

    def later(self, seconds: float) -> Totals:
        """Return totals in which all times of use are later by ``seconds``."""
        ages: list[tuple[float, int]] = []
        for step_time, bytes_until in self.ages:
            later_time = step_time + seconds
            ages.append((later_time, bytes_until))
        tenants: dict[bytes, Totals] = {}
        for tenant, totals in self.tenants.items():
            tenants[tenant] = totals.later(seconds)
        return Totals(self.num_bytes, ages, tenants)

    def without(self, tenant_horizons: Mapping[bytes, float]) -> Totals:
        """Return totals without the content that quotas of tenants will evict.

        :param tenant_horizons: for each tenant above its quota, by the digest of its name: the time
            before which its content is evicted.
        """
        # Infinity counts evicted content of any age. Its bytes follow from coarse steps (``ages``),
        # so the difference may be negative.
        evicted = self._evicted(tenant_horizons, time=math.inf)
        num_bytes = max(0, self.num_bytes - evicted)
        ages: list[tuple[float, int]] = []
        for step_time, bytes_until in self.ages:
            evicted_until = self._evicted(tenant_horizons, step_time)
            rest = max(0, bytes_until - evicted_until)
            ages.append((step_time, rest))
        return Totals(num_bytes, ages)

    def exceeds(
        self,
        horizon: float,
        tenant_horizons: Mapping[bytes, float],
    ) -> bool:
        """Return whether there is content to evict: it was last used before ``horizon``, or before
        the horizon of its tenant (``without``)."""
        within_quotas = self.without(tenant_horizons)
        has_excess = within_quotas.num_bytes < self.num_bytes
        return has_excess or self.used_until(horizon) > 0

    def _evicted(
        self,
        tenant_horizons: Mapping[bytes, float],
        time: float,
    ) -> int:
        """Return how many bytes were last used at ``time`` or earlier, and before the horizon of
        their tenant (``without``)."""
        num_bytes = 0
        for tenant, horizon in tenant_horizons.items():
            totals = self.tenants.get(tenant, _NOTHING)
            earlier = min(time, horizon)
            num_bytes += totals.used_until(earlier)
        return num_bytes


class PublishedTotals(NamedTuple):
    """Totals that an engine has published."""

    written: float
    """Time of their blob, on the medium's clock: seconds since the epoch."""
    totals: Totals


class TotalsBoard:
    """The totals of all namespaces of one store and key: content under another key can be neither
    read nor evicted. Only one thread at a time may use it.
    """

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._clock = medium.clock
        self._published: dict[bytes, PublishedTotals] = {}
        """Totals as they were read last, by namespace; those of the namespaces that this handle
        uses included."""
        self._own: dict[bytes, Totals] = {}
        """Totals of the namespaces that this handle uses, as it has published them last."""
        self._next_list_at = -math.inf
        """Monotonic time of the next list."""
        self._listed_time = 0.0
        """Time of the last list, on the medium's clock."""

    def exchange(self, replica: Replica, policy: Policy) -> None:
        """Write the totals of a namespace, and read those of all other namespaces. With 1,000
        namespaces or more, only some calls read, because a list takes a request for each 1,000
        names.

        :raises StoreError: the medium or the replica failed; the totals that were read before are
            kept.
        """
        totals = self._publish(replica, policy)
        now = self._clock.monotonic()
        if now >= self._next_list_at:
            self._read_all(replica.namespace, totals)
            # this is 0 if there are fewer than 1,000 namespaces, so that each call reads
            pause_minutes = len(self._published) // _LISTED_PER_MINUTE
            self._next_list_at = now + 60.0 * pause_minutes

    def _publish(self, replica: Replica, policy: Policy) -> Totals:
        """Write the totals of a namespace, and return them; if it has become empty, delete them."""
        namespace = replica.namespace
        name = self._medium.names.totals_of(namespace)
        totals = Totals(
            num_bytes=replica.disk_bytes(),
            ages=replica.ages(_POINTS),
            tenants=_tenant_totals(replica, policy),
        )
        # no totals are written for a namespace without content
        if totals.num_bytes:
            self._medium.put_sealed(name, encode(totals), namespace)
        elif self._is_published(namespace):
            self._medium.blobs.delete([name])
        self._own[namespace] = totals
        return totals

    def _is_published(self, namespace: bytes) -> bool:
        """Return whether the store may have totals of a namespace, which must then be deleted."""
        if namespace in self._published:
            return True
        own = self._own.get(namespace)
        return own is not None and own.num_bytes > 0

    def _read_all(self, own_namespace: bytes, own_totals: Totals) -> None:
        """Read the totals of all namespaces.

        :param own_namespace: namespace whose totals are known: this handle has just published them.
        """
        found: dict[bytes, PublishedTotals] = {}
        # namespaces whose totals must be read → time of the blob
        changed: dict[bytes, float] = {}
        for namespace, written in self._listed_namespaces():
            known = self._published.get(namespace)
            if namespace == own_namespace:
                found[namespace] = PublishedTotals(written, own_totals)
            elif known is not None and known.written == written:
                # the totals are unchanged since they were read
                found[namespace] = known
            else:
                changed[namespace] = written
        fetched = self._medium.maintenance.each(self._fetch, list(changed))
        for namespace, new_totals in fetched:
            found[namespace] = PublishedTotals(changed[namespace], new_totals)
        self._listed_time = self._medium.time.now()
        # totals that the list lacks still count for a while
        recent = self._recent_totals()
        self._published = recent | found

    def _recent_totals(self) -> dict[bytes, PublishedTotals]:
        """Return the totals that earlier lists have shown, and that engines have written lately.

        They count even if the present list lacks them. Either an operator has deleted them: then
        their engines write them again within a minute. Or the namespace has become empty: then its
        old totals count for a minute more.
        """
        recent: dict[bytes, PublishedTotals] = {}
        for namespace, published in self._published.items():
            # a time that is far in the future comes from a wrong clock, and is not recent
            difference_s = abs(self._listed_time - published.written)
            if difference_s <= _IN_USE_S:
                recent[namespace] = published
        return recent

    def _listed_namespaces(self) -> Iterator[tuple[bytes, float]]:
        """Iterate over the namespaces with totals in the store, and the times of their blobs."""
        names = self._medium.names
        for info in self._medium.listed(names.totals):
            namespace = names.parse_totals(info.name)
            # the namespace is None if another program has written the blob
            if namespace is not None:
                yield namespace, info.time

    def _fetch(self, namespace: bytes) -> Totals:
        """Return the totals of a namespace; empty totals if their blob is unreadable, or was
        deleted."""
        try:
            name = self._medium.names.totals_of(namespace)
            body = self._medium.sealed(name, namespace)
            return decode(_DECODER, body, "totals")
        except (CorruptPackError, BlobMissingError):
            return _NOTHING

    def limits(self, policy: Policy, namespace: bytes) -> Limits:
        """Return the limits of a namespace until the next exchange.

        The namespaces in use share the free space equally. A part of the capacity is kept free, so
        that a growing namespace evicts the oldest content of the store, and not only its own. Bytes
        that other namespaces will evict count as free only when their totals show it. Until then,
        each namespace of a store that exceeds its capacity evicts the same fraction of its content,
        whatever its age.
        """
        mine = self._own.get(namespace, _NOTHING)
        # before the first exchange of this namespace, its own totals are not known: do not subtract
        # those of the others
        others: list[Totals] = []
        if namespace in self._own:
            others = self._present_others(namespace)
        tenants = _tenant_bounds(mine, others, policy)
        whole: Bound | None = None
        if policy.capacity is not None:
            num_sharing = 1 + self._others_in_use(namespace)
            # content above a quota is evicted in any case, so it does not count for the capacity
            horizons = _tenant_horizons([mine, *others], policy)
            my_rest = mine.without(horizons)
            other_rests = [totals.without(horizons) for totals in others]
            whole = _bound(my_rest, other_rests, policy.capacity, num_sharing)
        return Limits(policy.ttl_s, whole, tenants)

    def _present_others(self, namespace: bytes) -> list[Totals]:
        """Return the totals of all namespaces but one, as they probably are now."""
        now = self._medium.time.now()
        others: list[Totals] = []
        for name, published in self._published.items():
            totals = published.totals
            if name == namespace or not totals.num_bytes:
                continue
            age_s = now - published.written
            # an engine in use publishes its totals once a minute
            is_in_use = 0 < age_s <= TOTALS_S
            if is_in_use:
                # The engine of that namespace keeps using its content, so add the age of the totals
                # to the times of use. Otherwise, each engine would take its own content for the
                # newest.
                totals = totals.later(age_s)
            others.append(totals)
        return others

    def _others_in_use(self, namespace: bytes) -> int:
        """Return how many other namespaces probably grow: their totals were new when they were
        listed. An idle or empty namespace that begins to grow publishes new totals soon.
        """
        num_in_use = 0
        for name, published in self._published.items():
            if name == namespace:
                continue
            has_content = published.totals.num_bytes > 0
            age_s = self._listed_time - published.written
            if has_content and age_s <= _IN_USE_S:
                num_in_use += 1
        return num_in_use

    def abandoned(self, policy: Policy) -> bytes | None:
        """Return a namespace that no engine uses, and that has content to evict or to expire; None:
        there is none."""
        now = self._medium.time.now()
        all_totals = [published.totals for published in self._published.values()]
        tenant_horizons = _tenant_horizons(all_totals, policy)
        horizon = _store_horizon(all_totals, tenant_horizons, policy, now)
        for name, published in self._published.items():
            # an engine of the namespace would have published newer totals
            is_abandoned = now - published.written > _ABANDONED_S
            if is_abandoned and published.totals.exceeds(horizon, tenant_horizons):
                return name
        return None


class NamespaceLimits:
    """Limits that merges of one namespace enforce, updated once a minute. One thread at a time
    may use it.

    :param policy: the expected one of the store. ``is_due`` is true as soon as it is given another.
    """

    def __init__(
        self,
        board: TotalsBoard,
        replica: Replica,
        medium: Medium,
        policy: Policy,
    ) -> None:
        self._board = board
        self._replica = replica
        self._clock = medium.clock
        self._policy = policy
        """The policy at the last refresh."""
        self.current = Limits()
        """The present limits."""
        self.due_at = math.inf
        """Monotonic time of the next ``refresh``, unless the namespace grows much before."""
        self._refreshed_at = -math.inf
        """Monotonic time of the last refresh."""
        self._known_bytes = 0
        """Bytes of the namespace at the last refresh."""
        self._known_tenants: Mapping[str, int] = {}
        """Bytes of each tenant in the namespace at the last refresh."""

    def start(self) -> None:
        """Plan the first refresh, after the index was read."""
        now = self._clock.monotonic()
        # choose a random time, so that engines that open together do not publish together
        self.due_at = now + TOTALS_S * self._clock.random.random()
        self._note_size()

    def is_due(self, policy: Policy) -> bool:
        """Return whether it is time for a refresh; a new policy and fast growth act at once."""
        is_time = self._clock.monotonic() >= self.due_at
        return is_time or policy != self._policy or self._has_grown()

    def _has_grown(self) -> bool:
        """Return whether the namespace, or the content of a tenant in it, has grown so much that a
        refresh is due.

        The bound is 1/64 of the capacity, or half of the namespace's share of the free space, which
        may be less: without a new share, the namespace would evict content although the store has
        room.
        """
        capacity = self._policy.capacity
        if capacity is not None:
            growth = self._replica.disk_bytes() - self._known_bytes
            has_grown_much = growth > capacity // _GROWTH_SHARE
            if has_grown_much or self._has_used_share(growth):
                return True
        return self._has_tenant_grown()

    def _has_tenant_grown(self) -> bool:
        """Return whether the namespace has so much more of a tenant that a refresh is due."""
        for totals in _with_quota(self._replica, self._policy):
            known_bytes = self._known_tenants.get(totals.tenant, 0)
            growth = totals.stored_bytes - known_bytes
            quota = self._policy.quotas[totals.tenant]
            if growth > quota // _GROWTH_SHARE:
                return True
        return False

    def _has_used_share(self, growth: int) -> bool:
        """Return whether the namespace has used half of its share of the free space, and the last
        refresh was at least 5 s ago.

        :param growth: bytes by which the namespace has grown since that refresh.
        """
        pause_s = self._clock.monotonic() - self._refreshed_at
        whole = self.current.whole
        # do not refresh too often, because an exchange takes several requests
        if pause_s < _LEAST_TOTALS_S or whole is None:
            return False
        # a horizon means that the store evicts old content: there is no room left to share
        has_horizon = whole.horizon > -math.inf
        if has_horizon or not whole.share:
            return False
        return growth > whole.share // 2

    def _note_size(self) -> None:
        """Remember the bytes of the namespace and of its tenants."""
        self._known_bytes = self._replica.disk_bytes()
        known = _with_quota(self._replica, self._policy)
        self._known_tenants = {one.tenant: one.stored_bytes for one in known}

    def refresh(self, policy: Policy, *, is_idle: bool) -> None:
        """Exchange totals with the other namespaces, if anything is limited. If the medium fails,
        the limits follow from the totals that were read before.
        """
        pause_s = IDLE_TOTALS_S if is_idle else TOTALS_S
        self._refreshed_at = self._clock.monotonic()
        self.due_at = self._refreshed_at + pause_s
        self._policy = policy
        self._note_size()
        namespace = self._replica.namespace
        has_limits = policy.capacity is not None or bool(policy.quotas)
        # exchange totals even if there is only a ttl: they show which namespaces have no engine of
        # their own to let their content expire
        if has_limits or policy.ttl_s is not None:
            try:
                self._board.exchange(self._replica, policy)
            except StoreError as error:
                text = "%s: the totals of the store were not exchanged (%s)"
                logger.warning(text, namespace.hex(), error)
        self.current = self._board.limits(policy, namespace)


_NOTHING = Totals(0, ())


def _with_quota(replica: Replica, policy: Policy) -> list[TenantTotals]:
    """Return the totals of the tenants in a namespace that have a quota."""
    if not policy.quotas:
        return []
    # read all tenants in one transaction, however many quotas there are
    tenants = replica.tenants()
    return [one for one in tenants if one.tenant in policy.quotas]


def _tenant_totals(replica: Replica, policy: Policy) -> dict[bytes, Totals]:
    """Return the totals to publish of the tenants in a namespace that have a quota, by the digest
    of the name."""
    found: dict[bytes, Totals] = {}
    for one in _with_quota(replica, policy):
        if not one.stored_bytes:
            continue
        digest = tenant_digest(one.tenant)
        ages = replica.tenant_ages(digest, _POINTS)
        found[digest] = Totals(one.stored_bytes, ages)
    return found


def _tenant_bounds(
    mine: Totals,
    others: Sequence[Totals],
    policy: Policy,
) -> dict[bytes, Bound]:
    """Return the bound of a namespace for each tenant with a quota, by the digest of its name."""
    bounds: dict[bytes, Bound] = {}
    for digest, quota in _quotas(policy):
        my_part = mine.tenants.get(digest, _NOTHING)
        # a quota is shared by the namespaces that hold content of its tenant
        other_parts = _parts_of(digest, others)
        num_sharing = 1 + len(other_parts)
        bounds[digest] = _bound(my_part, other_parts, quota, num_sharing)
    return bounds


def _tenant_horizons(
    all_totals: Sequence[Totals],
    policy: Policy,
) -> dict[bytes, float]:
    """Return for each tenant that exceeds its quota the time before which its content is evicted,
    by the digest of its name."""
    horizons: dict[bytes, float] = {}
    for digest, quota in _quotas(policy):
        parts = _parts_of(digest, all_totals)
        horizon = eviction_horizon(parts, quota, free=0)
        if horizon > -math.inf:
            horizons[digest] = horizon
    return horizons


def _quotas(policy: Policy) -> Iterator[tuple[bytes, int]]:
    """Iterate over the quotas, by the digests of the tenants' names."""
    for tenant, quota in policy.quotas.items():
        yield tenant_digest(tenant), quota


def _parts_of(tenant: bytes, all_totals: Sequence[Totals]) -> list[Totals]:
    """Return the totals of a tenant in the namespaces with content of it."""
    parts: list[Totals] = []
    for totals in all_totals:
        if tenant in totals.tenants:
            parts.append(totals.tenants[tenant])
    return parts


def _bound(
    mine: Totals,
    others: Sequence[Totals],
    limit: int,
    num_sharing: int,
) -> Bound:
    """Return how much of a limit one namespace may use; the whole limit without others.

    :param mine: totals of the namespace.
    :param others: totals of the other namespaces that share the limit.
    :param limit: capacity or quota in bytes.
    :param num_sharing: number of namespaces that share the free space.
    """
    if not others:
        return Bound(limit=limit, num_bytes=limit)
    everything = [mine, *others]
    horizon = _horizon_with_free_part(everything, limit)
    # bytes that the namespace holds after the eviction of all that is older than the horizon
    kept = mine.num_bytes - mine.used_until(horizon)
    used = sum(totals.num_bytes for totals in everything)
    if used > limit:
        # Other namespaces may be slow to evict content that is older than the horizon. Until they
        # have, each namespace keeps the same fraction of its content.
        fraction_bytes = mine.num_bytes * limit // used
        kept = min(kept, fraction_bytes)
    free = max(0, limit - used)
    share = free // num_sharing
    return Bound(limit=limit, num_bytes=kept + share, horizon=horizon, share=share)


def _store_horizon(
    all_totals: Sequence[Totals],
    tenant_horizons: Mapping[bytes, float],
    policy: Policy,
    now: float,
) -> float:
    """Return the time before which content of any namespace is evicted or expires; minus infinity:
    none is.

    :param tenant_horizons: for each tenant above its quota, by the digest of its name: the time
        before which its content is evicted.
    :param now: present time on the medium's clock.
    """
    horizon = -math.inf
    if policy.capacity is not None:
        # content above a quota is evicted in any case, so it does not count for the capacity
        within_quotas = [totals.without(tenant_horizons) for totals in all_totals]
        horizon = _horizon_with_free_part(within_quotas, policy.capacity)
    if policy.ttl_s is not None:
        expiry = now - policy.ttl_s
        horizon = max(horizon, expiry)
    return horizon


def _horizon_with_free_part(all_totals: Sequence[Totals], limit: int) -> float:
    """Return ``eviction_horizon`` with 1/16 of the limit free, into which the namespaces grow
    before they exchange totals again."""
    return eviction_horizon(all_totals, limit, free=limit // _FREE_SHARE)


def eviction_horizon(
    all_totals: Sequence[Totals],
    limit: int,
    free: int,
) -> float:
    """Return the time before which content is evicted, to leave ``free`` bytes of a limit free;
    minus infinity: nothing is evicted.

    :param all_totals: totals of all content to which the limit applies.
    """
    num_bytes = sum(totals.num_bytes for totals in all_totals)
    excess = num_bytes - limit + free
    if excess <= 0:
        return -math.inf
    # add up the oldest content of all namespaces, until its bytes are enough
    evicted = 0
    horizon = -math.inf
    for time, step_bytes in _steps_of_all(all_totals):
        evicted += step_bytes
        # add the least possible time, so that content that was used at this time is evicted, too
        horizon = math.nextafter(time, math.inf)
        if evicted >= excess:
            break
    return horizon


def _steps_of_all(all_totals: Sequence[Totals]) -> list[tuple[float, int]]:
    """Return the steps of all totals together, sorted by time: (time, bytes that the step adds). In
    ``Totals.ages``, the bytes of a step include those of the steps before it."""
    steps: list[tuple[float, int]] = []
    for totals in all_totals:
        bytes_before = 0
        for time, bytes_until in totals.ages:
            steps.append((time, bytes_until - bytes_before))
            bytes_before = bytes_until
    return sorted(steps)


_DECODER = msgspec.msgpack.Decoder(Totals)
