"""The open block stores of an adapter: one for each model and layout of objects."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from persistkv.errors import PersistKVError, StoreError
from persistkv.integrations.lmcache.keys import ObjectLayout
from persistkv.integrations.lmcache.options import LMCacheOptions
from persistkv.integrations.lmcache.tenants import tenant_of
from persistkv.storage import open_backend
from persistkv.storage.blocks import BlockIdentity, BlockStore

logger = logging.getLogger(__name__)

_RETRY_S = 30.0
"""Seconds until a store that did not open is tried again."""
_MOST_LAYOUTS = 64
"""Maximum number of open layouts, because each has threads of its own. Compressed objects reach it,
if each has another size."""
_ENGINE = "lmcache"
_RANK = "in keys"
"""Rank in the identity, the same for all workers: they share a namespace, because each key contains
the rank of its object."""


class Place(NamedTuple):
    """Model and layout of objects. Each place has a block store of its own, whether or not it is
    open."""

    model_name: str
    layout: ObjectLayout


class LayoutStores:
    """Opens block stores when they are needed. Thread-safe, except that one thread at a time may
    call ``open`` and ``open_stored``, which block."""

    def __init__(
        self,
        options: LMCacheOptions,
        weights: Mapping[str, str],
        release: str,
    ) -> None:
        """:param weights: for each model name, the fingerprint or name of its weights.
        :param release: release of LMCache.
        """
        self._options = options
        self._weights = weights
        self._release = release
        self._open_stores: dict[Place, BlockStore] = {}
        """Open stores. Read without the lock: each reader makes one call, or copies it first."""
        self._failed_at: dict[Place, float] = {}
        """Monotonic time of the last attempt to open each store that does not open."""
        self._lock = threading.Lock()
        self._is_closed = False

    def get(self, place: Place) -> BlockStore | None:
        """Return an open store; None if it is not open."""
        return self._open_stores.get(place)

    def items(self) -> list[tuple[Place, BlockStore]]:
        """Return all open stores."""
        return list(self._open_stores.copy().items())

    def items_of(self, model_name: str) -> list[tuple[Place, BlockStore]]:
        """Return the open stores of a model."""
        found = []
        for place, store in self.items():
            if place.model_name == model_name:
                found.append((place, store))
        return found

    def may_open(self, place: Place) -> bool:
        """Return whether a store may be opened now: its model is known, and it has not just
        failed."""
        if place.model_name not in self._weights:
            return False
        failed_at = self._failed_at.get(place)
        return failed_at is None or time.monotonic() - failed_at > _RETRY_S

    def any_failed(self) -> bool:
        """Return whether a store does not open."""
        return bool(self._failed_at)

    def open(self, place: Place) -> BlockStore | None:
        """Return the store, and open it first if it is not open; None if it does not open, which is
        logged."""
        found = self._open_stores.get(place)
        if found is not None:
            return found
        if self._is_closed or not self.may_open(place):
            return None
        try:
            store = self._open_new(place)
        except PersistKVError as error:
            self._failed_at[place] = time.monotonic()
            logger.error(
                "the store of %s does not open (%s): its objects are not stored, and not "
                "found; it is tried again after %g s",
                place.model_name,
                error,
                _RETRY_S,
            )
            return None
        if self._add(place, store):
            return store
        # the adapter was closed while the store was being opened
        store.close()
        return None

    def _open_new(self, place: Place) -> BlockStore:
        """Open a store, which may hang.

        :raises PersistKVError: it does not open, or too many layouts are open.
        """
        if len(self._open_stores) >= _MOST_LAYOUTS:
            raise StoreError(f"there are {_MOST_LAYOUTS} open layouts already")
        identity = self._identity(place)
        num_bytes = place.layout.num_bytes
        return self._options.open(identity, num_bytes, tenant_of, events=True)

    def _add(self, place: Place, store: BlockStore) -> bool:
        """Keep an open store; return False if ``close`` was called meanwhile."""
        # take the lock only now that the store is open: ``close`` must not wait for a medium that
        # hangs
        with self._lock:
            if self._is_closed:
                return False
            self._open_stores[place] = store
            self._failed_at.pop(place, None)
            return True

    def _identity(self, place: Place) -> BlockIdentity:
        """Return the identity of the objects of one model and layout."""
        layout = place.layout
        return BlockIdentity(
            model_name=place.model_name,
            weights=self._weights[place.model_name],
            engine=_ENGINE,
            release=self._release,
            dtype=" ".join(layout.dtypes),
            shapes=(_joined(layout.shapes),),  # one KV cache group
            layout="object",
            rank=_RANK,
            # these fields are those that ``_place_of`` reads back
            more={
                "model": place.model_name,
                # the engine behind LMCache
                "engine": self._options.engine,
                "object_shapes": [list(shape) for shape in layout.shapes],
                "dtypes": list(layout.dtypes),
            },
        )

    def open_stored(self) -> None:
        """Open the namespaces that the store holds of the adapter's models, so that usage and lists
        are complete after a restart. Failures of the store are logged.

        :raises ConfigurationError: the URL is invalid.
        """
        try:
            with closing(open_backend(self._options.url)) as backend:
                identities = [found.identity for found in backend.namespaces()]
        except StoreError as error:
            logger.error("the store cannot be read yet: %s", error)
            return
        for identity in identities:
            decoded = BlockIdentity.decode(identity)
            # None: this namespace is not that of a block store
            if decoded is None:
                continue
            block_identity, group_bytes = decoded
            place = self._place_of(block_identity, group_bytes)
            if place is not None:
                self.open(place)

    def _place_of(
        self,
        identity: BlockIdentity,
        group_bytes: Sequence[int],
    ) -> Place | None:
        """Return the place of a namespace; None if it is not this adapter's.

        :param group_bytes: bytes of a block of each KV cache group.
        """
        more = identity.more
        if identity.engine != _ENGINE or more.get("model") not in self._weights:
            return None
        listed_shapes = more.get("object_shapes", [])
        shapes = tuple(tuple(shape) for shape in listed_shapes)
        dtypes = tuple(more.get("dtypes", []))
        # the adapter's namespaces have one KV cache group, whose blocks are the objects
        object_bytes = group_bytes[0]
        layout = ObjectLayout(shapes, dtypes, object_bytes)
        place = Place(more["model"], layout)
        # namespaces of other weights, releases or engines have another identity than this place
        if self._identity(place) != identity:
            return None
        return place

    def close(self) -> None:
        """Close all open stores. A store that is being opened is closed by the thread that opens
        it."""
        with self._lock:
            self._is_closed = True
            for store in self._open_stores.values():
                store.close()
            self._open_stores.clear()


def _joined(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shapes of an object's arrays as one: each with its length before it."""
    joined: list[int] = []
    for shape in shapes:
        joined.append(len(shape))
        joined += shape
    return tuple(joined)
