"""What a batch makes of a namespace, worked out before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from persistkv.storage.backend import CommitBatch
from persistkv.storage.manifest import encode_manifest, encode_manifest_keys
from persistkv.storage.pack import PackTable
from persistkv.storage.pack_writer import NewPack
from persistkv_s3.authentication import Authenticator
from persistkv_s3.catalogue import Catalogue, StoredPack
from persistkv_s3.layout import Entry, GoneRow, Head, ManifestRow, PackRow, Stamp
from persistkv_s3.packs import Uploaded


class Plan:
    """Deletions and what goes with them, packs that are to be uploaded, uses. The catalogue is not changed."""

    def __init__(
        self, catalogue: Catalogue, batch: CommitBatch, lost: dict[bytes, StoredPack], dropped: Sequence[str] = ()
    ) -> None:
        self._catalogue = catalogue
        self._batch = batch
        self._lost = lost
        self.gone: dict[bytes, StoredPack] = {}
        self.manifests_gone = {name for name in dropped if name in catalogue.manifests}
        named = {pack_id for write in batch.manifests for pack_id in write.packs}
        self.keep = named | {pack.pack_id for pack in batch.packs}
        """Packs that do not go with others."""
        for pack_id in batch.deletions:
            self.delete(pack_id)
        for pack_id in batch.bad:
            self.delete(pack_id, alone=True)
        self.missing = self._missing()
        """(pack, generation) of those that are not held."""
        self.pins = [(name, pinned) for name, pinned in batch.pins if self._will_hold(name)]

    def delete(self, pack_id: bytes, *, alone: bool = False) -> None:
        """With the manifests that name it, and, but ``alone``, what only they made reachable behind it."""
        doomed = [pack_id]
        while doomed:
            pack_id = doomed.pop()
            for name in self._naming(pack_id):
                self.manifests_gone.add(name)
                doomed += () if alone else self._unreachable(name, pack_id)
            held = self._catalogue.packs.get(pack_id)
            if held is not None:
                self.gone[pack_id] = held

    def _naming(self, pack_id: bytes) -> list[str]:
        return [name for name in self._catalogue.naming.get(pack_id, ()) if name not in self.manifests_gone]

    def _unreachable(self, name: str, pack_id: bytes) -> Iterable[bytes]:
        manifest = self._catalogue.manifests[name]
        behind = manifest.packs[manifest.packs.index(pack_id) + 1 :] if manifest.ordered else ()
        return [other for other in behind if not self._naming(other) and other not in self.keep]

    def _missing(self) -> list[tuple[NewPack, int]]:
        catalogue = self._catalogue
        found: dict[bytes, tuple[NewPack, int]] = {}
        for writer in self._batch.packs:
            name = writer.pack_id
            if name in found or (name in catalogue.packs and name not in self.gone):
                continue
            held = self.gone.get(name)
            found[name] = (writer, catalogue.next_generation(name) if held is None else held.generation + 1)
        return list(found.values())

    def _will_hold(self, name: str) -> bool:
        coming = any(write.manifest.id == name for write in self._batch.manifests)
        return coming or (name in self._catalogue.manifests and name not in self.manifests_gone)

    @property
    def uses(self) -> list[bytes]:
        """Packs that are held and that the batch uses."""
        batch = self._batch
        used = [*batch.touches, *(pack.pack_id for pack in batch.packs)]
        used += [pack_id for write in batch.manifests for pack_id in write.packs]
        return [name for name in dict.fromkeys(used) if name in self._catalogue.packs and name not in self.gone]

    @property
    def says_something(self) -> bool:
        """Whether there is more to write than uses."""
        return bool(self.missing or self.gone or self.manifests_gone or self._batch.manifests or self.pins)

    @property
    def evicted(self) -> list[PackTable]:
        """The packs that go."""
        return [held.table for held in self.gone.values()]

    def manifest_keys(self, namespace: bytes, authenticator: Authenticator) -> list[bytes]:
        """The keys of each of the batch's manifests, as they lie in one object, one behind the other."""
        return [
            b"".join(authenticator.signed(namespace, keys_name(write.manifest.id), [encode_manifest_keys(write.keys)]))
            for write in self._batch.manifests
        ]

    def entry(
        self,
        namespace: bytes,
        stamp: Stamp,
        now: float,
        number: int,
        packs: Sequence[Uploaded],
        manifest_keys: Sequence[bytes],
    ) -> Entry:
        """What all are told.

        :param number: of the index object; the object with the manifests' keys is named alike.
        :param manifest_keys: what that object holds.
        """
        bodies: list[bytes] = []
        length = 0

        def place(body: bytes) -> tuple[int, int]:
            nonlocal length
            bodies.append(body)
            length += len(body)
            return length - len(body), len(body)

        rows = tuple(
            PackRow(pack.writer.pack_id, pack.generation, *place(pack.tags + pack.table.encode())) for pack in packs
        )
        manifests, keys_at = [], 0
        for write, keys in zip(self._batch.manifests, manifest_keys, strict=True):
            at = place(encode_manifest(write.manifest))
            named = b"".join(dict.fromkeys(write.packs))
            row = (write.manifest.id, write.manifest.ordered, named, *at, stamp.writer, number, keys_at, len(keys))
            manifests.append(ManifestRow(*row))
            keys_at += len(keys)
        came = {row.pack_id for row in rows}
        lost = {pack_id: held for pack_id, held in self._lost.items() if pack_id not in self._catalogue.packs}
        gone = {**lost, **self.gone}
        head = Head(
            namespace=namespace,
            writer=stamp.writer,
            moment=stamp.moment,
            time=now,
            packs=rows,
            gone=tuple(GoneRow(pack_id, held.generation) for pack_id, held in gone.items() if pack_id not in came),
            uses=b"".join(self.uses),
            manifests=tuple(manifests),
            manifests_gone=tuple(sorted(self.manifests_gone - {row.id for row in manifests})),
            pins=tuple(self.pins),
        )
        return Entry(head, b"".join(bodies))


def keys_name(manifest_id: str) -> str:
    """What the keys of a manifest are signed as."""
    return f"keys of {manifest_id}"
