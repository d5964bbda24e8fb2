"""Parts of LMCache's tasks: the keys of a task that are in one block store, with the call for
them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from persistkv.integrations.lmcache.keys import (
    MemoryObjects,
    ObjectKeys,
    ObjectLayout,
    encode_key,
)
from persistkv.integrations.lmcache.stores import LayoutStores, Place
from persistkv.integrations.lmcache.tenants import SaltRules
from persistkv.storage.blocks import BlockStore, CompletionQueue


class Part(ABC):
    """Keys of a task that are in one store."""

    def __init__(self, place: Place) -> None:
        self.place = place
        """Model and layout of the keys' objects, which determine the store."""
        self.positions: list[int] = []
        """Position of each key in the task."""
        self.keys: list[bytes] = []
        """The keys, as the store has them."""
        self.memory: list[memoryview] = []
        """Memory of each key's object; none for a lookup."""
        self.salts: set[str] = set()
        """LMCache's ``cache_salt`` of each key."""

    def add(self, position: int, key: Any) -> None:
        """Add the ``ObjectKey`` of LMCache that is at this position in the task."""
        self.positions.append(position)
        encoded = encode_key(key)
        self.keys.append(encoded)
        self.salts.add(key.cache_salt)

    @abstractmethod
    def submit(self, store: BlockStore, queue: CompletionQueue) -> int:
        """Start the call; return its number in the queue. Raises as the methods of ``store``."""


class PutPart(Part):
    """Objects to store."""

    def submit(self, store: BlockStore, queue: CompletionQueue) -> int:
        labels = {"lmcache_model": self.place.model_name}
        # a label applies to all keys of the call: add the salt only if they share it
        if len(self.salts) == 1:
            (shared_salt,) = self.salts
            if shared_salt:
                labels["cache_salt"] = shared_salt
        return store.submit_put(queue, self.keys, self.memory, labels=labels)


class FindPart(Part):
    """Keys to look up."""

    def submit(self, store: BlockStore, queue: CompletionQueue) -> int:
        # record a use of the blocks, so that the store evicts them after others
        return store.submit_contains(queue, self.keys, touch=True)


class GetPart(Part):
    """Objects to load."""

    def submit(self, store: BlockStore, queue: CompletionQueue) -> int:
        return store.submit_get(queue, self.keys, self.memory)


P = TypeVar("P", bound=Part)


def _part_at(
    place: Place,
    parts: dict[Place, P],
    kind: type[P],
) -> P:
    """Return the part of a place; create it if there is none."""
    if place not in parts:
        parts[place] = kind(place)
    return parts[place]


def parts_of_objects(
    kind: type[P],
    keys: ObjectKeys,
    objects: MemoryObjects,
    rules: SaltRules,
) -> Collection[P]:
    """Return a part for each model and layout of objects. Keys that ``rules`` refuses are in no
    part, so they fail.

    :param kind: class of the parts, ``PutPart`` or ``GetPart``.
    """
    parts: dict[Place, P] = {}
    for position, key in enumerate(keys):
        if not rules.accepts(key):
            continue
        memory = objects[position]
        layout = ObjectLayout.of_object(memory)
        place = Place(key.model_name, layout)
        part = _part_at(place, parts, kind)
        part.add(position, key)
        part.memory.append(memory.byte_array)
    return parts.values()


def parts_of_lookup(
    keys: ObjectKeys,
    descriptions: Mapping[int, Any],
    stores: LayoutStores,
    rules: SaltRules,
) -> Collection[FindPart]:
    """Return a part for each store that may hold some of the keys. Keys that ``rules`` refuses are
    in no part, so they are misses.

    :param descriptions: for each object group, LMCache's ``MemoryLayoutDesc``.
    """
    layouts = _layouts(descriptions)
    parts: dict[Place, FindPart] = {}
    for position, key in enumerate(keys):
        if not rules.accepts(key):
            continue
        layout = layouts.get(key.object_group_id)
        if layout is not None:
            places = [Place(key.model_name, layout)]
        else:
            # LMCache has given no layout, so any open store of the model may hold the key. A later
            # load has memory, which shows the layout.
            places = [place for place, _ in stores.items_of(key.model_name)]
        for place in places:
            part = _part_at(place, parts, FindPart)
            part.add(position, key)
    return parts.values()


def _layouts(descriptions: Mapping[int, Any]) -> dict[int, ObjectLayout]:
    """Return the layout of each object group whose description has shapes."""
    layouts: dict[int, ObjectLayout] = {}
    for group, description in descriptions.items():
        layout = ObjectLayout.of_description(description)
        if layout is not None:
            layouts[group] = layout
    return layouts
