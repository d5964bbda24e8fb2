"""What the end of a request writes, and the loss of a pack: the manifest of what is durable of its context."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from persistkv.storage.backend import ManifestWrite
from persistkv.storage.index import Index
from persistkv.storage.keys import PackedKeys
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.pack_writer import PackWriter
from persistkv.storage.records import RequestEnd


class ManifestMaker:
    """Makes the manifests of one transaction.

    :param block_bytes: of a block of each group.
    :param writers: the packs that become durable with it.
    """

    def __init__(self, index: Index, block_bytes: Sequence[int], writers: Sequence[PackWriter]) -> None:
        self._index = index
        self._block_bytes = block_bytes
        self._coming: Mapping[bytes, bytes] = {
            key: writer.pack_id for writer in writers for segment in writer.segments for key in segment.keys
        }

    def make(self, end: RequestEnd) -> tuple[ManifestWrite | None, bool]:
        """The manifest of each group's longest durable prefix, None where there is none; and whether it is whole."""
        kept = [self._prefix(keys) for keys in end.group_keys]
        whole = list(map(len, kept)) == list(map(len, end.group_keys))
        if not any(kept):
            return None, whole
        keys: ManifestKeys = tuple(PackedKeys.of(chain) for chain in kept)
        manifest = RequestManifest(
            id=end.manifest_id,
            created=time.time(),
            tokens=end.tokens if whole else min(end.tokens, min(map(len, kept)) * end.block_size),
            group_blocks=tuple(map(len, kept)),
            raw_bytes=sum(len(chain) * size for chain, size in zip(kept, self._block_bytes, strict=True)),
            ordered=end.ordered,
            labels=end.labels,
        )
        return ManifestWrite(manifest, keys, self._packs_of(kept)), whole

    def shorten(self, manifest: RequestManifest, keys: ManifestKeys) -> ManifestWrite | None:
        """A manifest as ``make`` would write it now, of the same age; None where nothing is left of it.

        How many tokens a block has is guessed from the manifest: for a request of a few blocks that may be too many.
        """
        block_size = manifest.tokens // max([1, *manifest.group_blocks])
        chains = tuple(chain.unpack() for chain in keys)
        end = RequestEnd(
            manifest.id, manifest.id, chains, manifest.tokens, block_size, manifest.ordered, manifest.labels
        )
        write, _ = self.make(end)
        if write is None:
            return None
        return replace(write, manifest=msgspec.structs.replace(write.manifest, created=manifest.created))

    def _prefix(self, keys: list[bytes]) -> list[bytes]:
        for position, key in enumerate(keys):
            if key not in self._index and key not in self._coming:
                return keys[:position]
        return keys

    def _packs_of(self, chains: Sequence[Sequence[bytes]]) -> list[bytes]:
        """The packs that hold the keys of all groups, by the depth of the first one in each."""
        packs: dict[bytes, int] = {}
        for chain in chains:
            for depth, key in enumerate(chain):
                found = self._index.pack_of(key)
                pack_id = self._coming[key] if found is None else found.pack_id
                packs[pack_id] = min(depth, packs.get(pack_id, depth))
        return sorted(packs, key=packs.__getitem__)
