"""Manifests that a store writes: at the end of a request, and shorter ones after damage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, takewhile, zip_longest
from typing import NamedTuple

from persistkv.base import Retention
from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite
from persistkv.storage.format.manifest import (
    ManifestKeys,
    RequestManifest,
    context_digest,
)
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.records import RequestEnd

SHORTENED_AT_ONCE = 64  # maximum number of manifests that one commit shortens


def make_manifest(
    end: RequestEnd,
    pack_of: Mapping[bytes, bytes],
    block_bytes: Sequence[int],
    created: float | None = None,
) -> tuple[ManifestWrite | None, bool]:
    """Return a manifest of the longest durable prefix of each group, and whether it covers the
    whole context. The manifest is None if no group has a durable prefix.

    :param pack_of: for each durable key, the id of a pack that holds it.
    :param block_bytes: raw bytes of one block, for each group.
    :param created: time of creation in seconds since the epoch; None: now.
    """
    kept: list[list[bytes]] = []
    for group_keys in end.group_keys:
        prefix = takewhile(pack_of.__contains__, group_keys)
        kept.append(list(prefix))
    counts = tuple(map(len, kept))
    whole = counts == tuple(map(len, end.group_keys))
    if not any(counts):
        return None, whole
    tokens = end.tokens
    # a prefix has as many tokens as the group that covers the fewest
    if not whole:
        tokens = min(tokens, min(counts) * end.block_size)
    raw_bytes = 0
    for count, size in zip(counts, block_bytes, strict=True):
        raw_bytes += count * size
    keys: ManifestKeys = tuple(map(PackedKeys.of, kept))
    manifest = RequestManifest(
        id=end.manifest_id,
        created=time.time() if created is None else created,
        tokens=tokens,
        group_blocks=counts,
        raw_bytes=raw_bytes,
        ordered=end.ordered,
        labels=end.labels,
        context=context_digest(keys),
        ttl_s=end.retention.ttl_s,
        priority=end.retention.priority,
        restored_tokens=end.restored_tokens,
        tenant=end.tenant,
    )
    packs = _packs_in_order(kept, pack_of)
    return ManifestWrite(manifest, keys, packs), whole


def _packs_in_order(
    group_keys: Sequence[Sequence[bytes]],
    pack_of: Mapping[bytes, bytes],
) -> list[bytes]:
    """Return the ids of the packs that hold the keys of a context, from its beginning on."""
    packs: dict[bytes, None] = {}  # an ordered set
    # the first blocks of all groups, then the second ones, and so on
    by_depth = chain.from_iterable(zip_longest(*group_keys))
    for key in by_depth:
        if key is not None:  # None pads a group that has fewer blocks
            packs[pack_of[key]] = None
    return list(packs)


class NamedRequest(NamedTuple):
    """A stored request whose manifest names certain packs."""

    manifest: RequestManifest
    """Head of the manifest."""
    keys: ManifestKeys
    """For each KV cache group, the keys that the manifest lists."""
    pinned: bool
    """Whether the manifest is pinned."""


def read_requests(
    backend: Backend,
    namespace: bytes,
    heads: Sequence[RequestManifest],
) -> list[NamedRequest]:
    """Read the keys and pins of these requests; leave out requests whose keys are missing or
    damaged.

    :param heads: their manifests.
    """
    names = [head.id for head in heads]
    keys_of_each = backend.manifest_keys(namespace, names)
    uses = backend.catalogue(namespace).uses(names)
    requests: list[NamedRequest] = []
    for head, keys, use in zip(heads, keys_of_each, uses, strict=True):
        if keys is not None:
            is_pinned = use is not None and use.pinned
            requests.append(NamedRequest(head, keys, is_pinned))
    return requests


def keys_of_requests(requests: Iterable[NamedRequest]) -> list[bytes]:
    """Return the keys of requests, each once."""
    keys: dict[bytes, None] = {}
    for request in requests:
        for group in request.keys:
            keys.update(dict.fromkeys(group.unpack()))
    return list(keys)


def shortening_batch(
    requests: Iterable[NamedRequest],
    pack_of: Mapping[bytes, bytes],
    block_bytes: Sequence[int],
    seen: bytes | None,
) -> CommitBatch:
    """Return the commit that shortens the manifests of requests to their durable prefixes, and
    keeps times of creation and pins. A request of which no block is left is not part of the commit:
    it is deleted with the bad pack.

    The block size is estimated: tokens of the present manifest divided by its blocks. The tokens of
    an incomplete last block count, but not the block, so the estimate is too high for few blocks.

    :param pack_of: for each durable key, the id of a pack that holds it; it lacks the keys of bad
        packs.
    :param seen: ``CommitBatch.seen``.
    """
    shorter: list[ManifestWrite] = []
    pins: list[tuple[str, bool]] = []
    for manifest, keys, pinned in requests:
        # at least 1, because the number of tokens is divided by it
        most_blocks = max([1, *manifest.group_blocks])
        # the request end that would write this manifest; its block size is an estimate
        end = RequestEnd(
            request=manifest.id,
            manifest_id=manifest.id,
            group_keys=tuple(group.unpack() for group in keys),
            tokens=manifest.tokens,
            block_size=manifest.tokens // most_blocks,
            ordered=manifest.ordered,
            labels=manifest.labels,
            retention=Retention(ttl_s=manifest.ttl_s, priority=manifest.priority),
            tenant=manifest.tenant,
        )
        write, _ = make_manifest(end, pack_of, block_bytes, created=manifest.created)
        if write is None:
            continue
        shorter.append(write)
        if pinned:
            pins.append((manifest.id, True))
    return CommitBatch(manifests=shorter, pins=pins, seen=seen)
