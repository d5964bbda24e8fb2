"""Contexts that share prefixes, stored as engines store them: input for tests of the commands."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from persistkv.base import make_offload_key
from persistkv.memory.rows import StagedBlocks
from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite
from persistkv.storage.format.codec import Codec, RawCodec
from persistkv.storage.format.manifest import RequestManifest, context_digest
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_pack

BLOCK_BYTES = 4096
LLAMA = Identity.of(
    {
        "weights": "checkpoint:1",
        "config": {"rope_theta": 10000.0},
        "dtype": {"model": "bfloat16"},
    }
)


def chain(words: Sequence[str], group: int = 0) -> list[bytes]:
    """Return the keys of a context: each hash covers all words up to its own, so equal prefixes
    have equal keys."""
    digest = hashlib.sha256(b"seed")
    keys: list[bytes] = []
    for word in words:
        digest.update(word.encode() + b"\n")
        keys.append(make_offload_key(digest.digest(), group))
    return keys


def begin_namespace(backend: Backend, identity: Identity) -> bytes:
    """Store a pack under an identity, so that the store lists the namespace; return its id."""
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    return namespace


class Contexts:
    """Writer of requests; as an engine does, it stores only blocks that are not stored yet."""

    def __init__(
        self,
        backend: Backend,
        identity: Identity = LLAMA,
        *,
        groups: int = 1,
        codec: Codec | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.backend = backend
        self.namespace = backend.open_namespace(identity).id
        self.packs: dict[str, bytes] = {}
        """The pack that was written for each request."""
        self._groups = groups
        self._codec = codec or RawCodec()
        self._block_bytes = block_bytes
        self._pack_of_key: dict[bytes, bytes] = {}

    def add(
        self,
        name: str,
        text: str,
        *,
        labels: dict[str, str] | None = None,
        age_s: float = 60.0,
        manifest: bool = True,
        ttl_s: float | None = None,
        restored: int = 0,
    ) -> None:
        """Store a request whose context is ``text``, one block per word.

        :param restored: tokens that the request restored from the store.
        """
        chains = [chain(text.split(), group) for group in range(self._groups)]
        packs = list(self._packs(name, chains))
        writes: list[ManifestWrite] = []
        if manifest:
            created = time.time() - age_s
            write = self._manifest(name, chains, labels or {}, created, ttl_s)
            manifest_head = structs.replace(write.manifest, restored_tokens=restored)
            writes.append(replace(write, manifest=manifest_head))
        self.backend.commit(self.namespace, CommitBatch(packs, writes))

    def _packs(self, name: str, chains: Sequence[list[bytes]]) -> list[PackWriter]:
        sections = []
        for group, keys in enumerate(chains):
            new = [key for key in keys if key not in self._pack_of_key]
            if new:
                sections.append(
                    Section(
                        group,
                        self._block_bytes,
                        new,
                        self._blocks(new),
                        keys.index(new[0]),
                    )
                )
        if not sections:
            return []
        pack = PackWriter(self.namespace, self._codec, sections)
        self.packs[name] = pack.pack_id
        self._pack_of_key.update(
            (key, pack.pack_id) for section in sections for key in section.keys
        )
        return [pack]

    def _blocks(self, keys: Sequence[bytes]) -> StagedBlocks:
        """Derive bytes from the keys; the second half of each block repeats, so that codecs can
        compress it."""
        blocks = np.empty((len(keys), self._block_bytes), dtype=np.uint8)
        for block, key in zip(blocks, keys, strict=True):
            rng = np.random.default_rng(int.from_bytes(key[:8], "big"))
            block[:] = rng.integers(0, 256, self._block_bytes, dtype=np.uint8)
            block[self._block_bytes // 2 :] = block[0]
        return StagedBlocks([blocks])

    def _manifest(
        self,
        name: str,
        chains: Sequence[list[bytes]],
        labels: dict[str, str],
        created: float,
        ttl_s: float | None,
    ) -> ManifestWrite:
        blocks, keys = tuple(map(len, chains)), tuple(map(PackedKeys.of, chains))
        manifest = RequestManifest(
            id=name,
            created=created,
            tokens=16 * blocks[0],
            group_blocks=blocks,
            raw_bytes=sum(blocks) * self._block_bytes,
            labels=labels,
            context=context_digest(keys),
            ttl_s=ttl_s,
        )
        packs = dict.fromkeys(
            self._pack_of_key[key] for keys in zip(*chains, strict=True) for key in keys
        )
        return ManifestWrite(manifest, keys, list(packs))
