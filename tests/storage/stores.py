"""Helpers for the tests of stores: request ends, manifests, rows and faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.records import RequestEnd
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing import FaultyBackend


class StoreSettings(TypedDict, total=False):
    """Arguments of ``StoreOptions``."""

    codec: str
    staging_bytes: int
    max_age_s: float
    durability: str
    io_threads: int
    refresh_s: float
    strict_identity: bool
    adopt: Literal["canary", "never"]
    events: bool


def end(
    request: str,
    *chains: list[bytes],
    tokens: int | None = None,
    **more: object,
) -> RequestEnd:
    count = 16 * len(chains[0]) if tokens is None else tokens
    ended = RequestEnd(request, f"manifest-{request}", chains, count, 16)
    return msgspec.structs.replace(ended, **more)


def manifests(store: BlockingStore) -> list[RequestManifest]:
    return sorted(
        store.view.backend.catalogue(store.namespace).manifests(),
        key=lambda manifest: manifest.id,
    )


def refill(store: BlockingStore) -> npt.NDArray[np.uint8]:
    """Zero the rows; return a copy of their previous content."""
    before = store.rows.array.copy()
    store.rows.array[:] = 0
    return before


def inject_faults(store: BlockingStore) -> FaultyBackend[Backend]:
    """Wrap the store's backend so that its calls can fail."""
    backend = FaultyBackend.of(store.view.backend)
    store.view.backend = backend
    return backend


def flip_reads(backend: FaultyBackend[Backend], pack_id: bytes | None = None) -> None:
    """Flip a bit in the result of each read; with ``pack_id``, only in reads of this pack."""

    def flip(
        filled: list[bool],
        namespace: bytes,
        spans: Sequence[ReadSpan],
    ) -> list[bool]:
        for span in [span for span in spans if pack_id in (None, span.pack_id)][:1]:
            span.buffers[0][11] ^= 1
        return filled

    backend.after("read", flip)


def is_due(store: BlockingStore) -> bool:
    """Return whether packs or manifests of ended requests are to be written now."""
    return store.store.queue.seconds_to_due() == 0.0
