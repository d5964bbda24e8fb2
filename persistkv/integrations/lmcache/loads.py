"""Whether LMCache loads the objects that a lookup has found, or its engine computes them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from persistkv.integrations.lmcache.keys import ObjectKeys, ObjectLayout
from persistkv.integrations.lmcache.parts import Part
from persistkv.integrations.lmcache.stores import LayoutStores
from persistkv.integrations.prefix_loads import PrefixLoads


class _Found(NamedTuple):
    """A key that a lookup has found, with a part of the lookup that has asked for it."""

    part: Part
    """Part that has the key. If several have it, its store need not be the one that holds it."""
    key_index: int
    """Index of the key in the part."""

    @property
    def layout(self) -> ObjectLayout:
        """Layout of the key's object."""
        return self.part.place.layout


class _LoadTask(NamedTuple):
    """A load task whose result LMCache has not taken yet."""

    number: int
    """Number of the load in ``PrefixLoads``."""
    sizes: Sequence[int]
    """Bytes of each object."""


class ObjectLoads:
    """Decides about the hits of lookups, and learns from loads. Thread-safe."""

    def __init__(
        self,
        stores: LayoutStores,
        prefill_tokens_per_s: float | None,
    ) -> None:
        """:param prefill_tokens_per_s: see ``LMCacheOptions``."""
        self._stores = stores
        self._loads = PrefixLoads(prefill_tokens_per_s)
        self._tasks: dict[int, _LoadTask] = {}
        """By the number of LMCache's task."""

    def hits(
        self,
        keys: ObjectKeys,
        parts: Collection[Part],
        results: Sequence[bool],
    ) -> list[bool]:
        """Return which keys of a lookup are hits: those that are held, or none if computing them is
        expected to be faster.

        :param results: for each key, whether a store holds it.
        """
        found = _found(parts, results)
        if not found:
            return list(results)
        # Each rank and each object group has an object of a chunk. The bytes of all of them are
        # loaded, but the chunk's tokens are computed once.
        chunk_hashes = set()
        num_bytes = 0
        for position, held in found.items():
            chunk_hashes.add(keys[position].chunk_hash)
            num_bytes += held.layout.num_bytes
        # take the layout of any object, because each object has the tokens of one chunk
        any_held = next(iter(found.values()))
        num_tokens = len(chunk_hashes) * _tokens_of(any_held.layout)
        # without a known number of tokens, nothing can be compared: load the objects
        if not num_tokens or self._loads.is_worth_loading(num_bytes, num_tokens):
            return list(results)
        self._probe_if_due(any_held)
        return [False] * len(results)

    def _probe_if_due(self, held: _Found) -> None:
        """Read an object of a declined lookup, if a probe is due, to notice when the store is fast
        again."""
        store = self._stores.get(held.part.place)
        if store is not None:
            key = held.part.keys[held.key_index]
            self._loads.probe_if_due(store, key, held.layout.num_bytes)

    def begin(
        self,
        task: int,
        sizes: Sequence[int],
    ) -> None:
        """Note that a load task begins; ``sizes`` are the bytes of its objects."""
        num_bytes = sum(sizes)
        number = self._loads.begin_load(num_bytes)
        self._tasks[task] = _LoadTask(number, sizes)

    def end(
        self,
        task: int,
        results: Sequence[bool],
    ) -> None:
        """Note that a load task has ended, and learn from its time.

        :param results: for each object, whether it was loaded.
        """
        load = self._tasks.pop(task)
        loaded_sizes = itertools.compress(load.sizes, results)
        loaded_bytes = sum(loaded_sizes)
        self._loads.end_load(load.number, loaded_bytes)

    @property
    def num_declined(self) -> int:
        """Lookups whose hits were not reported."""
        return self._loads.num_declined

    def close(self) -> None:
        self._loads.close()


def _found(
    parts: Collection[Part],
    results: Sequence[bool],
) -> dict[int, _Found]:
    """Return the held keys of a lookup, by their positions in it."""
    found: dict[int, _Found] = {}
    for part in parts:
        for index, position in enumerate(part.positions):
            # A key without a known layout is in the parts of several stores, and the result does
            # not tell which store holds it: the first one counts.
            if results[position]:
                found.setdefault(position, _Found(part, index))
    return found


def _tokens_of(layout: ObjectLayout) -> int:
    """Return the number of tokens in an object; 0 if its shape does not show it. The last dimension
    of its arrays has the numbers of a token, the last but one the tokens."""
    if not layout.shapes:
        return 0
    shape = layout.shapes[0]
    return shape[-2] if len(shape) > 1 else 0
