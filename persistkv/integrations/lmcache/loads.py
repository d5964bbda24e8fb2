"""Whether LMCache loads the objects that a lookup has found, or its engine computes them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from persistkv.integrations.lmcache.keys import ObjectKeys, ObjectLayout
from persistkv.integrations.lmcache.parts import Part
from persistkv.integrations.lmcache.stores import LayoutStores
from persistkv.integrations.prefix_loads import PrefixLoads


class _Found(NamedTuple):
    """A key that a lookup may find."""

    part: Part
    number: int
    """Index of the key in the part."""


class _Load(NamedTuple):
    """A load task in progress."""

    began: float
    sizes: Sequence[int]
    """Bytes of each object."""


class ObjectLoads:
    """Decides about the hits of lookups, and learns from loads. Thread-safe."""

    def __init__(
        self, stores: LayoutStores, prefill_tokens_per_s: float | None
    ) -> None:
        """:param prefill_tokens_per_s: see ``LMCacheOptions``."""
        self._stores = stores
        self._loads = PrefixLoads(prefill_tokens_per_s)
        self._running: dict[int, _Load] = {}

    def hits(
        self, keys: ObjectKeys, parts: Collection[Part], results: Sequence[bool]
    ) -> list[bool]:
        """Return which keys of a lookup are hits: those that are held, or none if computing them is
        expected to be faster.

        :param results: for each key, whether a store holds it.
        """
        found = _found(parts, results)
        num_bytes = 0
        for held in found.values():
            num_bytes += held.part.place.layout.num_bytes
        chunks = {keys[position].chunk_hash for position in found}
        num_tokens = 0
        if found:
            first = next(iter(found.values()))
            num_tokens = len(chunks) * _tokens_of(first.part.place.layout)
        if not num_tokens or self._loads.is_worth(num_bytes, 0, num_tokens):
            return list(results)
        store = self._stores.get(first.part.place)
        if store is not None:
            key = first.part.keys[first.number]
            self._loads.probe(store, key, first.part.place.layout.num_bytes)
        return [False] * len(results)

    def begin(self, task: int, sizes: Sequence[int]) -> None:
        """A load task begins; ``sizes`` are the bytes of its objects."""
        self._running[task] = _Load(time.monotonic(), sizes)

    def end(self, task: int, results: Sequence[bool]) -> None:
        """A load task has ended.

        :param results: for each object, whether it was loaded.
        """
        load = self._running.pop(task)
        num_bytes = 0
        for size, is_loaded in zip(load.sizes, results, strict=True):
            num_bytes += size if is_loaded else 0
        self._loads.add_load(num_bytes, time.monotonic() - load.began)

    @property
    def num_declined(self) -> int:
        """Lookups whose hits were not reported."""
        return self._loads.num_declined

    def close(self) -> None:
        self._loads.close()


def _found(parts: Collection[Part], results: Sequence[bool]) -> dict[int, _Found]:
    """Return the held keys of a lookup by their position."""
    found: dict[int, _Found] = {}
    for part in parts:
        for number, position in enumerate(part.positions):
            # LMCache may not tell the layout: then several stores may hold the key
            if results[position]:
                found.setdefault(position, _Found(part, number))
    return found


def _tokens_of(layout: ObjectLayout) -> int:
    """Return the tokens of an object: the last but one length of its arrays, whose last one is the
    numbers of a token; 0 if it has no such length."""
    shape = layout.shapes[0] if layout.shapes else ()
    return shape[-2] if len(shape) > 1 else 0
