"""All that a catalogue holds as few entries: what a snapshot is written anew from, and what the next start has."""

from __future__ import annotations

from persistkv_s3.log.catalogue import Catalogue
from persistkv_s3.log.layout import Entry, GoneRow, Head, ManifestRow, PackRow, Stamp

_REMEMBER_S = 7 * 86_400.0
"""How long it is remembered that something went: a handle that sleeps for longer may meet a pack again, as a miss."""


def dump(namespace: bytes, catalogue: Catalogue) -> list[Entry]:
    """All that is held, as few entries as there are stamps. In the thread that merges."""
    newest = catalogue.time
    heads: dict[tuple[Stamp, float], _Part] = {}

    def part(stamp: Stamp, time: float) -> _Part:
        return heads.setdefault((stamp, time), _Part())

    for pack_id, pack in list(catalogue.packs.items()):  # readers may lose some meanwhile
        part(pack.stamp, pack.time).add_pack(pack_id, pack.generation, pack.tags + pack.table.encode())
        if pack.used.moment != pack.stamp.moment:
            part(Stamp(pack.used.moment, pack.stamp.writer), pack.used.time).uses.append(pack_id)
    for name, manifest in catalogue.manifests.items():
        packs = b"".join(manifest.packs)
        keys = (*manifest.keys, manifest.keys_offset, manifest.keys_length)
        part(manifest.stamp, manifest.used.time).add_manifest(name, manifest.ordered, packs, manifest.head, keys)
    for pack_id, gone in list(catalogue.gone.items()):
        if gone.time > newest - _REMEMBER_S:
            part(gone.stamp, gone.time).gone.append(GoneRow(pack_id, gone.generation))
    for name, gone in catalogue.manifests_gone.items():
        if gone.time > newest - _REMEMBER_S and name not in catalogue.manifests:
            part(gone.stamp, gone.time).manifests_gone.append(name)
    for name, (stamp, pinned) in catalogue.pins().items():
        part(stamp, newest).pins.append((name, pinned))
    return [found.entry(namespace, stamp, time) for (stamp, time), found in sorted(heads.items(), key=_place)]


def _place(item: tuple[tuple[Stamp, float], _Part]) -> tuple[Stamp, float]:
    return item[0]


class _Part:
    """An entry in the making."""

    def __init__(self) -> None:
        self.packs: list[PackRow] = []
        self.gone: list[GoneRow] = []
        self.uses: list[bytes] = []
        self.manifests: list[ManifestRow] = []
        self.manifests_gone: list[str] = []
        self.pins: list[tuple[str, bool]] = []
        self._bodies = bytearray()

    def add_pack(self, pack_id: bytes, generation: int, body: bytes) -> None:
        self.packs.append(PackRow(pack_id, generation, len(self._bodies), len(body)))
        self._bodies += body

    def add_manifest(
        self, name: str, ordered: bool, packs: bytes, head: bytes, keys: tuple[bytes, int, int, int]
    ) -> None:
        self.manifests.append(ManifestRow(name, ordered, packs, len(self._bodies), len(head), *keys))
        self._bodies += head

    def entry(self, namespace: bytes, stamp: Stamp, time: float) -> Entry:
        head = Head(
            namespace=namespace,
            writer=stamp.writer,
            moment=stamp.moment,
            time=time,
            packs=tuple(self.packs),
            gone=tuple(self.gone),
            uses=b"".join(self.uses),
            manifests=tuple(self.manifests),
            manifests_gone=tuple(self.manifests_gone),
            pins=tuple(self.pins),
        )
        return Entry(head, bytes(self._bodies))
