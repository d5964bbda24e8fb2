"""L2 adapter of LMCache's server.

| LMCache | persistkv |
|---|---|
| object of a chunk, a rank and an object group | block, in the namespace of its model and layout |
| ``ObjectKey`` | key: hash, rank, object group, salt |
| ``cache_salt`` | tenant, for ``get_usage`` |
| event descriptors | completion queues |
| lock of a looked-up key | lease in this process, and a use for the order of eviction |

Submits and queries do not wait: a store that is not open yet is opened by a thread of the adapter.
The capacity of the store bounds it, so LMCache's own eviction stays off (``max_capacity_bytes`` is
0).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface

from persistkv.errors import PersistKVError
from persistkv.integrations.lmcache.announcer import Announcer
from persistkv.integrations.lmcache.keys import (
    ObjectLayout,
    PlainKey,
    encode_key,
)
from persistkv.integrations.lmcache.leases import Leases
from persistkv.integrations.lmcache.options import NAME_OF_WEIGHTS, lmcache_options
from persistkv.integrations.lmcache.stores import LayoutStores, Place
from persistkv.integrations.lmcache.tasks import TaskQueue
from persistkv.storage.blocks import BlockStore
from persistkv.storage.blocks.identity import weights_of
from persistkv.storage.threads import ThreadPool

logger = logging.getLogger(__name__)

_USAGE_S = 5.0  # time limit of the query of one namespace


class PersistKVL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Keeps LMCache's objects in a store of persistkv.

    The constructor fingerprints the weights of the models, and opens what the store holds of them.
    A store that fails costs misses, and tasks that fail.

    :raises ConfigurationError: an option is missing or invalid, or a directory has no weights.
    """

    def __init__(self, params: Mapping[str, Any], **_: Any) -> None:
        """:param params: ``adapter_params`` of the configuration (``LMCacheOptions``)."""
        super().__init__(max_capacity_bytes=0)
        self.options = lmcache_options(params)
        weights = {}
        for name, source in self.options.models.items():
            if source.startswith(NAME_OF_WEIGHTS):
                weights[name] = source
            else:
                weights[name] = weights_of(source)
        self._weights = weights
        self._stores = LayoutStores(self.options, weights, version("lmcache"))
        self._leases = Leases(self.options.lease_s)
        self._store_tasks = TaskQueue()
        self._lookup_tasks = TaskQueue()
        self._load_tasks = TaskQueue()
        self._sizes: dict[int, int] = {}
        """Bytes of each store task."""
        self._looked_up: dict[int, Sequence[Any]] = {}
        """Keys of each lookup task."""
        self._opener = ThreadPool(1, "persistkv-opener")
        self._announcer = Announcer(self._stores, self._announce)
        self._unknown: set[str] = set()
        self._usage: dict[Place, Mapping[str, int]] = {}
        """Bytes of each salt at the last call of ``get_usage``."""
        self._stores.open_stored()
        self._announcer.start()

    # Descriptors

    def get_store_event_fd(self) -> int:
        return self._store_tasks.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_tasks.fileno()

    def get_load_event_fd(self) -> int:
        return self._load_tasks.fileno()

    # Stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        parts = _by_layout(keys, objects)
        task = self._store_tasks.begin(len(keys), len(parts))
        self._sizes[task] = sum(memory.get_size() for memory in objects)
        for place, positions in parts.items():
            some_keys = [encode_key(keys[position]) for position in positions]
            memory = [objects[position].byte_array for position in positions]
            labels = {"lmcache_model": place.model_name}
            if salt := keys[positions[0]].cache_salt:
                labels["cache_salt"] = salt

            def submit(
                store: BlockStore,
                queue: Any,
                some_keys: list[bytes] = some_keys,
                memory: list[Any] = memory,
                labels: dict[str, str] = labels,
            ) -> int:
                return store.submit_put(queue, some_keys, memory, labels=labels)

            self._start(self._store_tasks, task, place, positions, submit)
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        done = {}
        for task, results in self._store_tasks.take().items():
            # a task without keys may end before its size is known
            size = self._sizes.pop(task, 0)
            done[task] = L2StoreResult(all(results), size)
        if done:
            self._announcer.wake()
        return done

    # Lookups

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        parts = self._places_of(keys, group_layout_descs)
        task = self._lookup_tasks.begin(len(keys), len(parts))
        self._looked_up[task] = keys
        for place, positions in parts.items():
            some_keys = [encode_key(keys[position]) for position in positions]

            def submit(
                store: BlockStore, queue: Any, some_keys: list[bytes] = some_keys
            ) -> int:
                # the use keeps the blocks until they are loaded
                return store.submit_contains(queue, some_keys, touch=True)

            self._start(self._lookup_tasks, task, place, positions, submit)
        return task

    def _places_of(
        self, keys: Sequence[Any], descriptions: Mapping[int, Any]
    ) -> dict[Place, list[int]]:
        """Return, for each store that may hold some of the keys, their positions."""
        layouts: dict[int, ObjectLayout] = {}
        for group, description in descriptions.items():
            layout = ObjectLayout.of_description(description)
            if layout is not None:
                layouts[group] = layout
        places: dict[Place, list[int]] = {}
        for position, key in enumerate(keys):
            layout = layouts.get(key.object_group_id)
            candidates = [Place(key.model_name, layout)] if layout is not None else []
            if layout is None:
                # LMCache does not tell: a load checks the layout of its memory
                candidates = self._stores.places_of(key.model_name)
            for place in candidates:
                places.setdefault(place, []).append(position)
        return places

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        results = self._lookup_tasks.take_one(task_id)
        if results is None:
            return None
        self._leases.expire()
        keys = self._looked_up.pop(task_id)
        found = [key for key, is_held in zip(keys, results, strict=True) if is_held]
        self._leases.acquire(found)
        if found:
            self._notify_keys_accessed(found)
        return _bitmap(results)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._leases.release(keys)

    # Loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        parts = _by_layout(keys, objects)
        task = self._load_tasks.begin(len(keys), len(parts))
        for place, positions in parts.items():
            some_keys = [encode_key(keys[position]) for position in positions]
            memory = [objects[position].byte_array for position in positions]

            def submit(
                store: BlockStore,
                queue: Any,
                some_keys: list[bytes] = some_keys,
                memory: list[Any] = memory,
            ) -> int:
                return store.submit_get(queue, some_keys, memory)

            self._start(self._load_tasks, task, place, positions, submit)
        return task

    def query_load_result(self, task_id: int) -> Any:
        results = self._load_tasks.take_one(task_id)
        return None if results is None else _bitmap(results)

    # Calls

    def _start(
        self,
        tasks: TaskQueue,
        task: int,
        place: Place,
        positions: Sequence[int],
        submit: Callable[[BlockStore, Any], int],
    ) -> None:
        """Start a part of a task on the store of its place; if the store is not open, when it
        is."""

        def start_on(store: BlockStore | None) -> None:
            if store is None:
                tasks.fail(task)
                return
            try:
                tasks.start(task, positions, lambda queue: submit(store, queue))
            except (PersistKVError, ValueError) as error:
                logger.error("a task of LMCache is refused: %s", error)
                tasks.fail(task)

        store = self._stores.get(place)
        if store is None and self._stores.may_open(place):
            self._opener.submit(lambda: start_on(self._stores.open(place)))
            return
        if place.model_name not in self._weights:
            self._report_unknown(place.model_name)
        start_on(store)

    def _report_unknown(self, model_name: str) -> None:
        if model_name not in self._unknown:
            self._unknown.add(model_name)
            logger.error(
                "model %s is not in the adapter's option models: its objects are not stored, and "
                "not found",
                model_name,
            )

    # Deletions, lists and usage

    def delete(self, keys: list[Any]) -> None:
        """Delete objects, except those that are locked. Waits; failures are logged."""
        free = [key for key in keys if not self._leases.is_locked(key)]
        for model_name in {key.model_name for key in free}:
            some = [encode_key(key) for key in free if key.model_name == model_name]
            for store in self._stores.of_model(model_name):
                try:
                    store.delete(some, timeout_s=self.options.delete_timeout_s)
                except PersistKVError as error:
                    logger.warning(
                        "objects of %s are not deleted: %s", model_name, error
                    )
        self._announcer.announce()

    def list_l2_keys(
        self,
        model_name: str | None = None,
        page_size: int = 500,
        cursor: str | None = None,
    ) -> Any:
        if page_size <= 0:
            raise ValueError(f"page_size {page_size} is not positive")
        entries: list[_Listed] = []
        for place, store in self._stores.items():
            if model_name not in (None, place.model_name):
                continue
            for block in store.stored_blocks(timeout_s=self.options.delete_timeout_s):
                entries.append(_Listed(block.key, place.model_name, block.num_bytes))
        entries.sort(key=_Listed.cursor)
        start = 0
        if cursor is not None:
            # ascending keys: a page begins after the last key of the page before, even if that key
            # is gone
            start = bisect.bisect_right(entries, cursor, key=_Listed.cursor)
        page = entries[start : start + page_size]
        listed = []
        for entry in page:
            key = _object_key(entry.model_name, entry.key).to_encoded_object_key()
            listed.append(KeyEntry(key, entry.num_bytes))
        is_last = start + page_size >= len(entries)
        return KeyListPage(tuple(listed), None if is_last else page[-1].cursor())

    def get_usage(self) -> Any:
        """Return the bytes on the medium of each salt, exact as of the last commit of any process;
        those of the last call if the store does not answer in time."""
        by_salt: dict[str, int] = {}
        for place, store in self._stores.items():
            try:
                self._usage[place] = store.usage(timeout_s=_USAGE_S).tenants
            except PersistKVError as error:
                logger.warning("the usage of a namespace may have changed: %s", error)
            for salt, num_bytes in self._usage.get(place, {}).items():
                by_salt[salt] = by_salt.get(salt, 0) + num_bytes
        return AdapterUsage(
            total_bytes_used=sum(by_salt.values()),
            total_capacity_bytes=0,
            bytes_by_cache_salt=MappingProxyType(by_salt),
        )

    # Announcements

    def register_listener(self, listener: Any) -> None:
        """Announce all changes to a listener, beginning with the present content."""
        super().register_listener(listener)

        def announce(place: Place, stored: Sequence[bytes]) -> None:
            keys = _object_keys(place, stored)
            listener.on_l2_keys_stored(keys, [place.layout.num_bytes] * len(keys))

        self._announcer.announce_stored(announce)

    def _announce(
        self, place: Place, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> None:
        """Tell LMCache which keys were stored and removed."""
        num_bytes = place.layout.num_bytes
        if stored:
            keys = _object_keys(place, stored)
            self._notify_keys_stored(keys, [num_bytes] * len(keys))
        if removed:
            keys = _object_keys(place, removed)
            self._notify_keys_deleted(keys, [num_bytes] * len(keys))

    # The end

    def report_status(self) -> dict[str, Any]:
        stores = self._stores.items()
        counters = [store.counters.store for _, store in stores]
        stored_objects = sum(one.stored_blocks for one in counters)
        loaded_objects = sum(one.loaded_blocks for one in counters)
        dropped_objects = sum(one.dropped_blocks for one in counters)
        failures = sum(one.verification_failures for one in counters)
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "url": self.options.url.partition("?")[0],
            "layouts": len(stores),
            "locked_keys": len(self._leases),
            "stored_objects": stored_objects,
            "loaded_objects": loaded_objects,
            "dropped_objects": dropped_objects,
            "verification_failures": failures,
        }

    def close(self) -> None:
        """Commit all accepted tasks and close the stores; waits for up to a minute for each."""
        self._announcer.stop()
        self._opener.shutdown()
        self._stores.close()
        for tasks in (self._store_tasks, self._lookup_tasks, self._load_tasks):
            tasks.close()


class _Listed(NamedTuple):
    """An entry of the list of keys, in the order of its pages."""

    key: bytes
    model_name: str
    num_bytes: int

    def cursor(self) -> str:
        """Return the position after this entry: the order of cursors is that of the entries."""
        return f"{self.key.hex()}-{self.model_name}"


def _by_layout(keys: Sequence[Any], objects: Sequence[Any]) -> dict[Place, list[int]]:
    """Return the positions of the objects of each model and layout."""
    places: dict[Place, list[int]] = {}
    for position, (key, memory) in enumerate(zip(keys, objects, strict=True)):
        place = Place(key.model_name, ObjectLayout.of_object(memory))
        places.setdefault(place, []).append(position)
    return places


def _bitmap(results: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(results))
    for place, has_succeeded in enumerate(results):
        if has_succeeded:
            bitmap.set(place)
    return bitmap


def _object_keys(place: Place, keys: Iterable[bytes]) -> list[Any]:
    return [_object_key(place.model_name, key) for key in keys]


def _object_key(model_name: str, key: bytes) -> Any:
    plain = PlainKey.decode(key)
    return ObjectKey(
        chunk_hash=plain.chunk_hash,
        model_name=model_name,
        kv_rank=plain.kv_rank,
        object_group_id=plain.object_group_id,
        cache_salt=plain.cache_salt,
    )
