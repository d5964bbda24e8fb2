"""Limits of a namespace's content, and eviction until the content is within them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from persistkv.storage.catalogue.order import TimedOrder
from persistkv.storage.catalogue.rows import Chain, TableRows, Use
from persistkv.storage.catalogue.transaction import CatalogTransaction
from persistkv.storage.format.pack import ID_BYTES
from persistkv.storage.shared.replica.rows import blob_row, names_of, read_bytes


class Bound(NamedTuple):
    """How much of some content a namespace keeps."""

    limit: int
    """Maximum bytes in all namespaces."""
    num_bytes: int
    """Maximum bytes in this namespace; content above it is evicted, least recently used first."""
    horizon: float = -math.inf
    """Content that was last used before this time is evicted."""
    share: int = 0
    """Bytes of the free space that are part of ``num_bytes``."""


class Limits(NamedTuple):
    """Limits that a merge enforces."""

    ttl_s: float | None = None
    """Content expires this many seconds after its last use; None: only requests with a ttl of their
    own expire."""
    whole: Bound | None = None
    """Bound of all content of this namespace; None: the store has no capacity."""
    tenants: Mapping[bytes, Bound] = MappingProxyType({})
    """Bound of each tenant with a quota in this namespace, by the digest of its name."""


Candidates: TypeAlias = Iterator[tuple[bytes, Use | Chain]]


def evict(
    transaction: CatalogTransaction,
    rows: TableRows,
    order: TimedOrder,
    limits: Limits,
    at_most: int,
) -> None:
    """Evict content that exceeds the limits: first content above quotas, then content above the
    capacity.

    :param order: eviction order of the transaction.
    :param at_most: maximum number of packs and requests to evict, from each tenant and for the
        capacity.
    """
    # The transaction asks after each eviction whether the goal is met. Begin with the tenants,
    # because evicting their excess makes room in the capacity, too.
    for tenant, bound in sorted(limits.tenants.items()):
        goal = _Goal(
            bound=bound,
            num_bytes=partial(_bytes_of, transaction, tenant),
            candidates=partial(order.oldest_of, tenant),
        )
        transaction.evict_of(tenant, goal.is_met, at_most)
    if limits.whole is not None:
        goal = _Goal(
            bound=limits.whole,
            num_bytes=_WholeBytes(rows, transaction),
            candidates=order.oldest,
        )
        transaction.evict(goal.is_met, at_most)


class _Goal(NamedTuple):
    """Goal of an eviction: few enough bytes, and nothing that was last used before the horizon."""

    bound: Bound
    """The bytes and the horizon to reach."""
    num_bytes: Callable[[], int]
    """Returns the bytes after the removals so far."""
    candidates: Callable[[], Candidates]
    """Returns the remaining content in eviction order, from its beginning."""

    def is_met(self) -> bool:
        """Return whether the removals so far reach the goal."""
        if self.num_bytes() > self.bound.num_bytes:
            return False
        next_candidate = next(self.candidates(), None)
        if next_candidate is None:
            return True
        # The first candidate decides: the next were used later, or have a higher priority.
        _, row = next_candidate
        return row.time >= self.bound.horizon


def _bytes_of(transaction: CatalogTransaction, tenant: bytes) -> int:
    """Return the bytes of a tenant's packs; ``tenant``: digest of its name."""
    totals = transaction.quotas.of_digest(tenant)
    return 0 if totals is None else totals.stored_bytes


class _WholeBytes:
    """Callable that returns the bytes which the namespace takes on the medium, less those of the
    packs that a transaction has removed so far. Removed requests are not subtracted."""

    def __init__(self, rows: TableRows, transaction: CatalogTransaction) -> None:
        self._rows = rows
        self._removed = transaction.removed
        """List to which the transaction appends."""
        self._num_bytes = read_bytes(rows)
        """Bytes after the removals that were counted (``_counted``)."""
        self._counted = 0
        """Number of the removed packs whose bytes are subtracted already."""

    def __call__(self) -> int:
        """Return the bytes after the removals so far."""
        rows = self._rows
        # subtract only the packs that were removed since the last call, because this runs often
        newly_removed = self._removed[self._counted :]
        for pack_name in newly_removed:
            # a name is the namespace and the pack id
            pack_id = pack_name[ID_BYTES:]
            for blob_name in names_of(rows, pack_id):
                self._num_bytes -= blob_row(rows, blob_name).counted
        self._counted = len(self._removed)
        return self._num_bytes
