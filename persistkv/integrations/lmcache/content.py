"""Content of the open stores of an adapter, as LMCache lists and counts it."""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage

from persistkv.errors import PersistKVError
from persistkv.integrations.lmcache.keys import decode_key
from persistkv.integrations.lmcache.stores import LayoutStores, Place
from persistkv.integrations.lmcache.tenants import salt_of_tenant

logger = logging.getLogger(__name__)

_USAGE_S = 5.0  # time limit in seconds of the query of one namespace


class _Listed(NamedTuple):
    """An entry of the list of keys, in the order of its pages."""

    key: bytes
    """Key in the block store, see ``encode_key``."""
    model_name: str
    num_bytes: int
    """Bytes of the object."""

    def cursor(self) -> str:
        """Return the position after this entry as text, which sorts as the entries do."""
        return f"{self.key.hex()}-{self.model_name}"

    def to_entry(self) -> Any:
        """Return LMCache's ``KeyEntry``."""
        key = decode_key(self.model_name, self.key)
        return KeyEntry(key.to_encoded_object_key(), self.num_bytes)


class Content:
    """Lists of keys, and usage. Thread-safe."""

    def __init__(self, stores: LayoutStores, list_timeout_s: float) -> None:
        """:param list_timeout_s: time limit for the list of one store, in seconds."""
        self._stores = stores
        self._list_timeout_s = list_timeout_s
        self._last_usage: dict[Place, Mapping[str, int]] = {}
        """For each store, the bytes of each salt in its last answer."""

    def page(
        self,
        model_name: str | None,
        page_size: int,
        cursor: str | None,
    ) -> Any:
        """Return a page of the stored keys as LMCache's ``KeyListPage``, in ascending order.

        :param model_name: list only keys of this model; None: of all models.
        :param page_size: maximum number of keys.
        :param cursor: position after which the page begins; None: the beginning.
        :raises ValueError: ``page_size`` is not positive.
        :raises PersistKVError: a store does not answer.
        """
        if page_size <= 0:
            raise ValueError(f"page_size {page_size} is not positive")
        # Stores list their keys in no order, so each page is cut from the sorted list of all keys.
        entries = list(self._list(model_name))
        entries.sort(key=_Listed.cursor)
        start = 0
        if cursor is not None:
            # continue after the last key of the previous page, even if that key is gone
            start = bisect.bisect_right(entries, cursor, key=_Listed.cursor)
        stop = start + page_size
        page = entries[start:stop]
        next_cursor = None
        if stop < len(entries):
            next_cursor = page[-1].cursor()
        listed = map(_Listed.to_entry, page)
        return KeyListPage(tuple(listed), next_cursor)

    def _list(self, model_name: str | None) -> Iterable[_Listed]:
        """Yield the entries of all open stores, or of those of one model, in no order."""
        if model_name is None:
            listed_stores = self._stores.items()
        else:
            listed_stores = self._stores.items_of(model_name)
        for place, store in listed_stores:
            blocks = store.stored_blocks(timeout_s=self._list_timeout_s)
            for block in blocks:
                yield _Listed(block.key, place.model_name, block.num_bytes)

    def usage(self) -> Any:
        """Return LMCache's ``AdapterUsage``: for each salt, the bytes on the medium as of the last
        commit of any process. For a store that does not answer in time, the bytes that it answered
        last count."""
        bytes_by_salt: Counter[str] = Counter()
        for place, store in self._stores.items():
            try:
                usage = store.usage(timeout_s=_USAGE_S)
                of_store = {}
                for tenant, num_bytes in usage.tenants.items():
                    salt = salt_of_tenant(tenant)
                    of_store[salt] = num_bytes
                self._last_usage[place] = of_store
            except PersistKVError as error:
                logger.warning("the usage of a namespace may have changed: %s", error)
            last_usage = self._last_usage.get(place, {})
            # ``Counter.update`` adds, so a salt in several stores has the sum of its bytes
            bytes_by_salt.update(last_usage)
        return AdapterUsage(
            total_bytes_used=bytes_by_salt.total(),
            # 0 means no capacity: the store bounds itself, and LMCache's own eviction stays off
            total_capacity_bytes=0,
            bytes_by_cache_salt=MappingProxyType(bytes_by_salt),
        )
