"""``persistkv show``: one context, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from persistkv.storage.backend import Backend
from persistkv.storage.memory import no_collections
from persistkv.storage.pack import Frame, PackTable
from persistkv_tools.catalogue import keys_of
from persistkv_tools.selection import FoundRequest, NotFoundError, RequestView

_SHARERS = 5
_SHORT = 12


class KeyView(msgspec.Struct, frozen=True):
    """One block."""

    depth: int
    key: str
    """The first digits of its hash, hexadecimal."""
    pack: str | None
    """The pack that holds it; None: no pack does."""
    offset: int | None
    """First byte of its frame in the pack's payload."""


class GroupView(msgspec.Struct, frozen=True):
    """The blocks of one KV cache group."""

    group: int
    blocks: int
    missing: int
    """Blocks that no pack holds."""
    raw_bytes: int
    stored_bytes: int
    """Their share of their frames, padding left out."""
    keys: list[KeyView]
    """The first ones."""


class PackView(msgspec.Struct, frozen=True):
    """One pack that holds blocks of the request."""

    id: str
    blocks: int
    """Blocks of this request in it."""
    pack_blocks: int
    """All blocks in it."""
    raw_bytes: int
    """Of the whole pack."""
    stored_bytes: int
    codecs: str
    shared_with: int
    """Other requests that name blocks of this request in it."""
    sharers: list[str]
    """Some of them."""


class ContextView(msgspec.Struct, frozen=True):
    """One request's whole context."""

    url: str
    request: RequestView
    groups: list[GroupView]
    packs: list[PackView]
    """The ones nearest to the begin of the context first."""
    shared_blocks: int
    """Blocks that some other request names too, in the same packs where the driver tells who names a pack."""


class _Place(NamedTuple):
    """Where a block lies."""

    pack: PackTable
    frame: Frame


def show_context(
    url: str, backend: Backend, found: FoundRequest, names: Iterable[str], *, key_limit: int
) -> ContextView:
    """The view of one request.

    :param names: of all requests of the namespace; looked through where the driver does not tell who names a pack.
    :param key_limit: keys to name of each group.
    :raises NotFoundError: the request went meanwhile, or its keys do not read.
    """
    namespace, manifest = found.namespace.id, found.manifest
    keys = backend.manifest_keys(namespace, manifest.id)
    if keys is None:
        raise NotFoundError(f"the keys of {manifest.id} are gone or do not read; persistkv verify tells which")
    chains = [group.unpack() for group in keys]
    named = backend.named_packs(namespace, manifest.id)
    if named is not None:  # else the driver cannot tell, and all are looked through
        names = [head.id for head in backend.manifests_naming(namespace, [table.pack_id for table in named])]
    places = _places(backend, namespace, named or [], chains)
    sharers = _sharers(backend, namespace, (name for name in names if name != manifest.id), chains)
    shared = [key for keys_of_group in chains for key in keys_of_group if key in sharers]
    return ContextView(
        url,
        RequestView.of(namespace, manifest, backend.uses(namespace, [manifest.id])[0]),
        [_group(number, chain, places, key_limit) for number, chain in enumerate(chains)],
        _packs(chains, places, sharers),
        len(shared),
    )


def _places(
    backend: Backend, namespace: bytes, named: Iterable[PackTable], chains: Sequence[list[bytes]]
) -> dict[bytes, _Place]:
    """Where the blocks of a request lie. All tables are looked through for those that are in no pack that it names."""
    wanted = {key for chain in chains for key in chain}
    places: dict[bytes, _Place] = {}
    for table in named:
        _note_places(table, wanted, places)
    if len(places) < len(wanted):
        with no_collections():  # of many objects that are made to stay
            tables = backend.changes(namespace, None).added
        for table in tables:
            _note_places(table, wanted, places)
    return places


def _note_places(table: PackTable, wanted: set[bytes], places: dict[bytes, _Place]) -> None:
    keys = table.keys.unpack()
    if wanted.isdisjoint(keys):
        return
    ends = accumulate(frame.block_count for frame in table.frames)
    for frame, end in zip(table.frames, ends, strict=True):
        for key in keys[end - frame.block_count : end]:
            if key in wanted:
                places.setdefault(key, _Place(table, frame))


def _sharers(
    backend: Backend, namespace: bytes, others: Iterable[str], chains: Sequence[list[bytes]]
) -> dict[bytes, list[str]]:
    """For each key of the request that others name too, who."""
    wanted = [frozenset(chain) for chain in chains]
    found: dict[bytes, list[str]] = {}
    for other, groups in keys_of(backend, namespace, others):
        for among, group in zip(wanted, groups or (), strict=False):
            keys = group.unpack()
            if not among.isdisjoint(keys):  # most share nothing, and are passed over in half the time
                for key in dict.fromkeys(key for key in keys if key in among):
                    found.setdefault(key, []).append(other)
    return found


def _group(number: int, chain: list[bytes], places: dict[bytes, _Place], key_limit: int) -> GroupView:
    held = [places[key].frame for key in chain if key in places]
    return GroupView(
        number,
        len(chain),
        len(chain) - len(held),
        sum(frame.block_bytes for frame in held),
        sum(frame.stored_length // frame.block_count for frame in held),
        [_key(depth, key, places.get(key)) for depth, key in enumerate(chain[:key_limit])],
    )


def _key(depth: int, key: bytes, place: _Place | None) -> KeyView:
    pack, offset = (None, None) if place is None else (place.pack.pack_id.hex(), place.frame.offset)
    return KeyView(depth, key.hex()[:_SHORT], pack, offset)


def _packs(
    chains: Sequence[list[bytes]], places: dict[bytes, _Place], sharers: dict[bytes, list[str]]
) -> list[PackView]:
    blocks = Counter(place.pack.pack_id for place in places.values())
    others: dict[bytes, set[str]] = {}
    for key, names in sharers.items():
        if key in places:
            others.setdefault(places[key].pack.pack_id, set()).update(names)
    depths: dict[bytes, int] = {}
    for chain in chains:
        for depth, key in enumerate(chain):
            if key in places:
                pack_id = places[key].pack.pack_id
                depths[pack_id] = min(depth, depths.get(pack_id, depth))
    tables = {place.pack.pack_id: place.pack for place in places.values()}
    return [
        _pack(tables[pack_id], blocks[pack_id], sorted(others.get(pack_id, ())))
        for pack_id in sorted(depths, key=depths.__getitem__)
    ]


def _pack(table: PackTable, blocks: int, sharers: list[str]) -> PackView:
    return PackView(
        table.pack_id.hex(),
        blocks,
        len(table.keys),
        table.raw_length,
        table.payload_length,
        table.codecs,
        len(sharers),
        sharers[:_SHARERS],
    )
