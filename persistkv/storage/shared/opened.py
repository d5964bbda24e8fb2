"""Namespaces that one handle has opened: for its engine, and abandoned ones."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.index.totals import TotalsBoard
from persistkv.storage.shared.namespace import SharedNamespace
from persistkv.storage.shared.options import SharedOptions
from persistkv.storage.shared.policy import RecordedPolicy
from persistkv.storage.shared.replica import ReplicaFolder

# Three hours: time for which a handle cares for a namespace without an engine. Blobs of evicted
# packs are deleted after one hour, and each hour a sweep may be due.
_CARE_S = 3 * 3600.0
_CARE_CHANCE = 0.25  # probability that a handle takes a namespace when it finds it
# maximum number of namespaces without engines that one handle cares for at a time
_MOST_ABANDONED = 4


class _Abandoned(NamedTuple):
    """A namespace without an engine that the handle cares for. It is open, so that ``step`` evicts,
    deletes and sweeps."""

    namespace: SharedNamespace
    until: float
    """Monotonic time at which it is closed (``_CARE_S``)."""


class OpenedNamespaces:
    """Namespaces that one handle has opened.

    One thread at a time may call ``open`` and ``begin_anew``, another one ``care_for_abandoned``.

    :param place: name of the store, for its replicas on this machine.
    :param is_writable: whether the handle commits and merges.
    """

    def __init__(
        self,
        medium: Medium,
        policy: RecordedPolicy,
        options: SharedOptions,
        place: str,
        *,
        is_writable: bool,
    ) -> None:
        self._medium = medium
        self._policy = policy
        self._options = options
        self._place = place
        self._is_writable = is_writable
        self._cache = options.cache_directory()
        """Directory of the replicas of all stores; None: a temporary one."""
        self._board = TotalsBoard(medium)
        """Totals of all namespaces, by which limits and abandoned namespaces are found."""
        self._opened: dict[bytes, SharedNamespace] = {}
        """Namespaces that the engine uses, by id."""
        self._abandoned: dict[bytes, _Abandoned] = {}
        """Other namespaces that this handle cares for, by id."""

    def __iter__(self) -> Iterator[SharedNamespace]:
        """Iterate over the namespaces that are open now."""
        # iterate over copies, because another thread may open a namespace meanwhile
        yield from list(self._opened.values())
        for abandoned in list(self._abandoned.values()):
            yield abandoned.namespace

    def find(self, namespace_id: bytes) -> SharedNamespace | None:
        """Return the namespace with this id if it was opened for the engine; None: it was not."""
        return self._opened.get(namespace_id)

    def open(self, namespace_id: bytes) -> SharedNamespace:
        """Open a namespace for the engine. Its index is not read yet.

        :raises StoreError: the replica cannot be opened, or the medium has not answered yet.
        """
        opened = self._make(namespace_id)
        self._opened[namespace_id] = opened
        return opened

    def refresh(self) -> None:
        """Read everything that is durable now into the namespaces of the engine.

        :raises StoreError: the medium failed.
        """
        for namespace in list(self._opened.values()):
            namespace.refresh()

    def begin_anew(self) -> list[bytes]:
        """Replace the replicas of the engine's namespaces by empty ones: they belong to a store
        that was deleted. Return the ids of these namespaces.
        """
        for namespace_id, opened in list(self._opened.items()):
            opened.discard()
            self._opened[namespace_id] = self._make(namespace_id)
        return list(self._opened)

    def care_for_abandoned(self) -> None:
        """Open a namespace that no engine uses, if it has content to evict, and close those whose
        three hours are over (``_CARE_S``). ``step`` of an open one evicts, deletes and sweeps.
        """
        clock = self._medium.clock
        now = clock.monotonic()
        self._release_abandoned(now)
        found = self._board.abandoned(self._policy.current())
        if found is None or found in self._opened or found in self._abandoned:
            return
        # take it by chance: a thousand engines may find it at once, and few should open it
        takes_it = clock.random.random() < _CARE_CHANCE
        if takes_it and len(self._abandoned) < _MOST_ABANDONED:
            namespace = self._make(found)
            self._abandoned[found] = _Abandoned(namespace, now + _CARE_S)

    def _release_abandoned(self, now: float) -> None:
        """Close the abandoned namespaces whose time is over, or that the engine of this handle uses
        now; make the remaining ones publish their totals."""
        for namespace_id, abandoned in list(self._abandoned.items()):
            is_used = namespace_id in self._opened
            if is_used or now > abandoned.until:
                del self._abandoned[namespace_id]
                abandoned.namespace.close()
            else:
                # Publish new totals, so that other namespaces use the space that evictions have
                # freed here.
                abandoned.namespace.plan_exchange()

    def close(self) -> None:
        """Publish waiting uses, and release the replicas. Failures are only logged."""
        for namespace in self:
            namespace.close()

    def _make(self, namespace_id: bytes) -> SharedNamespace:
        """Return a namespace that is not open yet, with a folder for its replica."""
        medium = self._medium
        # include the random name of the store: one that is created again at the same place must not
        # use the replica of the deleted store
        store = self._place.encode() + self._policy.store_name()
        store_digest = blake2b(store, digest_size=16).hexdigest()
        index_name = f"{namespace_id.hex()}-{medium.keys.keyring_id}"
        folder = ReplicaFolder(
            self._cache,
            [store_digest, index_name],
            medium.seal,
            medium.records.forgotten,
        )
        return SharedNamespace(
            medium,
            namespace_id,
            folder,
            self._options,
            self._board,
            is_writable=self._is_writable,
        )
