"""L2 adapter of LMCache's server.

| LMCache | persistkv |
|---|---|
| object of a chunk, a rank and an object group | block, in the namespace of its model and layout |
| ``ObjectKey`` | key: hash, rank, object group, salt |
| ``cache_salt`` | tenant |
| event descriptors | completion queues |
| lock of a looked-up key | lease in this process, and a recorded use, which delays eviction |

Submits and queries do not wait: a store that is not open yet is opened by a thread of the adapter.
The store evicts by its own capacity, so LMCache's eviction stays off (``max_capacity_bytes`` is 0).
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from persistkv.config import convert_options, without_options
from persistkv.errors import ConfigurationError, PersistKVError
from persistkv.integrations.lmcache.announcer import Announcer
from persistkv.integrations.lmcache.content import Content
from persistkv.integrations.lmcache.keys import (
    MemoryObjects,
    ObjectKeys,
    decode_key,
    encode_key,
)
from persistkv.integrations.lmcache.leases import Leases
from persistkv.integrations.lmcache.loads import ObjectLoads
from persistkv.integrations.lmcache.options import (
    NAME_OF_WEIGHTS,
    WHERE,
    LMCacheOptions,
)
from persistkv.integrations.lmcache.parts import (
    GetPart,
    Part,
    PutPart,
    parts_of_lookup,
    parts_of_objects,
)
from persistkv.integrations.lmcache.stores import LayoutStores, Place
from persistkv.integrations.lmcache.tasks import TaskQueue
from persistkv.integrations.lmcache.tenants import SaltRules
from persistkv.memory.pages import prefer_huge_pages
from persistkv.storage.blocks import BlockStore
from persistkv.storage.blocks.identity import weights_of
from persistkv.storage.threads import ThreadPool

logger = logging.getLogger(__name__)


class _Lookup(NamedTuple):
    """A lookup task whose result LMCache has not taken yet."""

    keys: ObjectKeys
    """Keys in the order of LMCache's call."""
    parts: Collection[Part]
    """Parts of the task: one for each store that may hold some of the keys."""


class PersistKVL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Keeps LMCache's objects in a store of persistkv.

    The constructor fingerprints the weights of the models, and opens the namespaces that the store
    holds of them, within ``delete_timeout_s``. While a store fails, lookups miss and tasks fail;
    while it is being opened, its tasks wait.

    :raises ConfigurationError: an option is missing or invalid, or a directory has no weights.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        l1_memory_desc: Any = None,
        **_: Any,
    ) -> None:
        """:param params: ``adapter_params`` of the configuration (``LMCacheOptions``).
        :param l1_memory_desc: LMCache's ``L1MemoryDesc`` of the memory that all objects are in.
        """
        super().__init__(max_capacity_bytes=0)  # 0 turns LMCache's own eviction off
        self.options = convert_options(LMCacheOptions, params, where=WHERE)
        if l1_memory_desc is not None:
            # Objects are read and written with O_DIRECT, which transfers each physically contiguous
            # part on its own. With huge pages, there are few large parts. The kernel uses huge
            # pages for memory that LMCache has not accessed yet, which is most of it.
            prefer_huge_pages(l1_memory_desc.ptr, l1_memory_desc.size)
        weights = _weights(self.options.models)
        release = version("lmcache")
        self._stores = LayoutStores(self.options, weights, release)
        """Block stores, which the opener and the tasks open when they are needed."""
        self._content = Content(self._stores, self.options.delete_timeout_s)
        self._rules = SaltRules(self.options.tenant)
        self._leases = Leases(self.options.lease_s)
        """Keys that lookups have locked: ``delete`` leaves them out."""
        self._store_tasks = TaskQueue()
        self._lookup_tasks = TaskQueue()
        self._load_tasks = TaskQueue()
        self._store_bytes: dict[int, int] = {}
        """Bytes of the objects of each store task with parts, by its number, until its result is
        taken."""
        self._looked_up: dict[int, _Lookup] = {}
        """Lookup tasks by their numbers, until their results are taken."""
        self._loads = ObjectLoads(self._stores, self.options.prefill_tokens_per_s)
        """Decides whether the keys that a lookup has found are reported as hits."""
        self._opener = ThreadPool(1, "persistkv-opener")
        """Opens stores in a thread, because an opening may hang; in one thread only, because
        ``LayoutStores`` does not allow two openings at a time."""
        self._announcer = Announcer(
            self._stores,
            partial(_announce, self._notify_keys_stored),
            partial(_announce, self._notify_keys_deleted),
            self.options.delete_timeout_s,
        )
        self._reported_models: set[str] = set()
        """Names of models without an entry in the options; each was logged once."""
        self._open_stored()
        self._announcer.start()

    def _open_stored(self) -> None:
        """Open the namespaces that the store holds of the models; return when they are open, after
        ``delete_timeout_s`` at the latest."""
        timeout_s = self.options.delete_timeout_s
        opening = self._opener.submit(self._stores.open_stored)
        try:
            opening.result(timeout_s)
        except TimeoutError:
            logger.error(
                "the store does not open within %g s: objects are neither stored nor found until "
                "it is open",
                timeout_s,
            )
        except ConfigurationError:
            self._opener.shutdown()
            self._loads.close()
            raise

    # Descriptors

    def get_store_event_fd(self) -> int:
        return self._store_tasks.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_tasks.fileno()

    def get_load_event_fd(self) -> int:
        return self._load_tasks.fileno()

    # Stores

    def submit_store_task(self, keys: ObjectKeys, objects: MemoryObjects) -> int:
        """Begin to store objects; return the number of the task."""
        tasks = self._store_tasks
        parts = parts_of_objects(PutPart, keys, objects, self._rules)
        task = tasks.begin(len(keys), len(parts))
        # a task without parts stores nothing; its result may have been taken already
        if parts:
            sizes = [memory.get_size() for memory in objects]
            self._store_bytes[task] = sum(sizes)
        for part in parts:
            self._start_part(tasks, task, part)
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return LMCache's ``L2StoreResult`` of each store task that has ended since the last
        call. A task succeeds if all its objects are durable."""
        ended = self._store_tasks.take_done()
        results: dict[int, Any] = {}
        for task, is_stored in ended.items():
            # a task without parts has no entry: it has stored nothing
            num_bytes = self._store_bytes.pop(task, 0)
            results[task] = L2StoreResult(all(is_stored), num_bytes)
        # announce the new keys now, not with the announcer's next tick
        if results:
            self._announcer.wake()
        return results

    # Lookups

    def submit_lookup_and_lock_task(
        self,
        keys: ObjectKeys,
        group_layout_descs: Mapping[int, Any],
    ) -> int:
        """Begin to look keys up; return the number of the task.

        :param group_layout_descs: for each object group, LMCache's ``MemoryLayoutDesc``.
        """
        tasks = self._lookup_tasks
        parts = parts_of_lookup(keys, group_layout_descs, self._stores, self._rules)
        task = tasks.begin(len(keys), len(parts))
        self._looked_up[task] = _Lookup(keys, parts)
        for part in parts:
            self._start_part(tasks, task, part)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return LMCache's ``Bitmap`` of the keys that are hits, and lock these; None while the
        task runs. The result is removed: LMCache takes it once."""
        results = self._lookup_tasks.take_one(task_id)
        if results is None:
            return None
        lookup = self._looked_up.pop(task_id)
        hits = self._loads.hits(lookup.keys, lookup.parts, results)
        hit_keys = list(itertools.compress(lookup.keys, hits))
        # expire leases with each lookup, because processes that are gone never release theirs
        self._leases.expire()
        self._leases.acquire(hit_keys)
        if hit_keys:
            self._notify_keys_accessed(hit_keys)
        return _bitmap(hits)

    def submit_unlock(self, keys: ObjectKeys) -> None:
        self._leases.release(keys)

    # Loads

    def submit_load_task(self, keys: ObjectKeys, objects: MemoryObjects) -> int:
        """Begin to load keys into the memory of ``objects``; return the number of the task."""
        tasks = self._load_tasks
        parts = parts_of_objects(GetPart, keys, objects, self._rules)
        task = tasks.begin(len(keys), len(parts))
        sizes = [memory.get_size() for memory in objects]
        self._loads.begin(task, sizes)
        for part in parts:
            self._start_part(tasks, task, part)
        return task

    def query_load_result(self, task_id: int) -> Any:
        """Return LMCache's ``Bitmap`` of the objects that were loaded; None while the task runs."""
        results = self._load_tasks.take_one(task_id)
        if results is None:
            return None
        self._loads.end(task_id, results)
        return _bitmap(results)

    # Calls

    def _start_part(
        self,
        tasks: TaskQueue,
        task: int,
        part: Part,
    ) -> None:
        """Start a part of a task now, or once its store is open. A part whose store may not be
        opened fails."""
        place = part.place
        store = self._stores.get(place)
        if store is not None:
            _start_part_on(store, tasks, task, part)
        elif self._stores.may_open(place):
            self._opener.submit(self._open_and_start, tasks, task, part)
        else:
            # log unknown models only: if the store has just failed to open, that was logged then
            self._report_unknown(place.model_name)
            tasks.fail_part(task)

    def _open_and_start(
        self,
        tasks: TaskQueue,
        task: int,
        part: Part,
    ) -> None:
        """Open the store of a part, and start the part; called in the opener's thread."""
        store = self._stores.open(part.place)
        if store is None:
            tasks.fail_part(task)
        else:
            _start_part_on(store, tasks, task, part)

    def _report_unknown(self, model_name: str) -> None:
        """Log, once, that a model is not in the options."""
        if model_name in self.options.models or model_name in self._reported_models:
            return
        self._reported_models.add(model_name)
        logger.error(
            "model %s is not in the adapter's option models: its objects are not stored, and not "
            "found",
            model_name,
        )

    # Deletions, lists and usage

    def delete(self, keys: ObjectKeys) -> None:
        """Delete objects, except those that are locked. Waits; failures are logged."""
        keys_by_model: dict[str, list[bytes]] = defaultdict(list)
        for key in keys:
            if not self._leases.is_locked(key):
                keys_by_model[key.model_name].append(encode_key(key))
        # ask all stores of the model, because the layout of a key is not known
        for model_name, encoded_keys in keys_by_model.items():
            for _, store in self._stores.items_of(model_name):
                self._delete_from(store, encoded_keys)
        # announce the deletions now, not with the announcer's next tick
        self._announcer.announce()

    def _delete_from(
        self,
        store: BlockStore,
        keys: Sequence[bytes],
    ) -> None:
        """Delete the keys that a store holds; log a failure."""
        try:
            store.delete(keys, timeout_s=self.options.delete_timeout_s)
        except PersistKVError as error:
            logger.warning("%d objects are not deleted: %s", len(keys), error)

    def list_l2_keys(
        self,
        model_name: str | None = None,
        page_size: int = 500,
        cursor: str | None = None,
    ) -> Any:
        return self._content.page(model_name, page_size, cursor)

    def get_usage(self) -> Any:
        return self._content.usage()

    # Announcements

    def register_listener(self, listener: Any) -> None:
        """Announce all changes to a listener, beginning with the present content."""
        register = partial(super().register_listener, listener)
        stored = partial(_announce, listener.on_l2_keys_stored)
        self._announcer.add_listener(register, stored)

    # The end

    def report_status(self) -> dict[str, Any]:
        """Return the state of the adapter for LMCache's report; counts are those since the
        start, over all open stores."""
        stores = self._stores.items()
        counters = [store.counters.store for _, store in stores]
        stored_objects = sum(one.stored_blocks for one in counters)
        loaded_objects = sum(one.loaded_blocks for one in counters)
        dropped_objects = sum(one.dropped_blocks for one in counters)
        failures = sum(one.verification_failures for one in counters)
        return {
            "is_healthy": not self._stores.any_failed(),
            "type": type(self).__name__,
            "url": without_options(self.options.url),
            "layouts": len(stores),
            "locked_keys": len(self._leases),
            "stored_objects": stored_objects,
            "loaded_objects": loaded_objects,
            "dropped_objects": dropped_objects,
            "verification_failures": failures,
            "declined_lookups": self._loads.num_declined,
            "refused_objects": self._rules.num_refused,
        }

    def close(self) -> None:
        """Commit the tasks of open stores and close the stores; waits for up to a minute for each.
        Tasks that wait for a store to open are dropped. Idempotent."""
        # Stop the announcer first, because it reads the stores. Do not wait for the opener, which
        # may hang: a store that it opens later is closed at once.
        self._announcer.stop()
        self._opener.shutdown(wait=False, cancel_futures=True)
        self._loads.close()
        self._stores.close()
        for tasks in (self._store_tasks, self._lookup_tasks, self._load_tasks):
            tasks.close()


def _weights(models: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprint or the name of each model's weights.

    :param models: ``LMCacheOptions.models``.
    :raises ConfigurationError: a directory has no weights.
    """
    weights: dict[str, str] = {}
    for name, source in models.items():
        is_name = source.startswith(NAME_OF_WEIGHTS)
        weights[name] = source if is_name else weights_of(source)
    return weights


def _announce(
    announce: Callable[[ObjectKeys, list[int]], None],
    place: Place,
    encoded: Sequence[bytes],
) -> None:
    """Pass keys of a store to a function of LMCache, with the bytes of their objects."""
    keys = [decode_key(place.model_name, key) for key in encoded]
    sizes = [place.layout.num_bytes] * len(keys)
    announce(keys, sizes)


def _start_part_on(
    store: BlockStore,
    tasks: TaskQueue,
    task: int,
    part: Part,
) -> None:
    """Start a part of a task on its open store; if the store refuses the call, the part fails."""
    try:
        tasks.start_part(task, part, store)
    except (PersistKVError, ValueError) as error:
        logger.error("a task of LMCache is refused: %s", error)
        tasks.fail_part(task)


def _bitmap(results: Sequence[bool]) -> Any:
    """Return results in LMCache's form, with a bit for each key."""
    bitmap = Bitmap(len(results))
    for position, has_succeeded in enumerate(results):
        if has_succeeded:
            bitmap.set(position)
    return bitmap
