"""Pack objects: one conditional PUT, which the first writer wins.

A pack's object is what ``docs/format.md`` calls a pack: payload, table, trailer; with a key its tags stand between the
first two. Its name is the pack's id and a
generation: a pack that was deleted is written again under a higher one, so that bytes never change under a reader,
and an object that is damaged is never taken for a good one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.codec import Buffer
from persistkv.storage.pack import PackTable
from persistkv.storage.pack_writer import NewPack
from persistkv_s3.authentication import Authenticator
from persistkv_s3.bucket import Bucket
from persistkv_s3.errors import ObjectExistsError, ObjectMissingError, S3Error
from persistkv_s3.names import Names

_TAIL_BYTES = 64 << 10  # 64 KiB: another writer may have cut the same keys into more frames, which makes a longer table
_GENERATIONS = 4
"""Names that are tried for one pack: each that is taken by something unreadable costs one."""


class Room:
    """Memory that encoded packs share on their way up; one is always let in. What is raw is sent from where it lies."""

    def __init__(self, num_bytes: int) -> None:
        self._free = self._all = num_bytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, writer: NewPack) -> Iterator[None]:
        """Wait until there is enough for a pack, and keep it for the length of the block."""
        length = min(writer.raw_length, self._all) if writer.encodes else 0
        with self._changed:
            self._changed.wait_for(lambda: length <= self._free)
            self._free -= length
        try:
            yield
        finally:
            with self._changed:
                self._free += length
                self._changed.notify_all()


class Uploaded(NamedTuple):
    """A pack that lies in the bucket."""

    writer: NewPack
    table: PackTable
    """Of what lies there, which may be another writer's."""
    tags: bytes
    """Likewise."""
    generation: int
    reused: bool
    """Another writer, or an earlier attempt, had put it there."""


class PackObjects:
    """The packs of one namespace."""

    def __init__(self, bucket: Bucket, names: Names, authenticator: Authenticator) -> None:
        self._bucket = bucket
        self._names = names
        self._authenticator = authenticator

    def upload(self, writer: NewPack, first_generation: int) -> Uploaded:
        """Put a pack where it belongs, or find that it lies there. What its stream raises comes through.

        :raises S3Error: it may lie there or not; nothing names it.
        """
        pieces, tags = self._pieces(writer)
        for generation in range(first_generation, first_generation + _GENERATIONS):
            try:
                self._bucket.put(self._names.pack(writer.pack_id, generation), pieces)
            except ObjectExistsError:
                held = self._held(writer.table, generation)
                if held is not None:
                    return Uploaded(writer, *held, generation, reused=True)
            else:
                return Uploaded(writer, writer.table, tags, generation, reused=False)
        raise S3Error(f"{self._names.pack(writer.pack_id, generation)}: what lies there does not read as the pack")

    def upload_again(self, pack: Uploaded) -> None:
        """Put a pack that went away where it was; nothing where somebody was faster."""
        with suppress(ObjectExistsError):
            self._bucket.put(self._names.pack(pack.writer.pack_id, pack.generation), self._pieces(pack.writer)[0])

    def _pieces(self, writer: NewPack) -> tuple[list[Buffer], bytes]:
        """The whole object, where its bytes lie, and its tags (see ``authentication``)."""
        payload: list[Buffer] = list(writer.stream())
        tags = self._authenticator.pack_tags(writer.table, payload)
        return [*payload, tags, writer.table.encode()], tags

    def _held(self, ours: PackTable, generation: int) -> tuple[PackTable, bytes] | None:
        """Table and tags of the object that lies there; None where it is not this pack, damaged, or of a stranger."""
        key, tags_length = self._names.pack(ours.pack_id, generation), self._authenticator.tags_length
        try:
            tail = self._bucket.tail(key, max(tags_length(ours) + len(ours.encode()), _TAIL_BYTES))
            table = PackTable.parse(tail)
            size = self._bucket.head(key).size
        except (CorruptPackError, ObjectMissingError):  # it may have been pruned in this moment
            return None
        end = len(tail) - len(table.encode())
        tags = bytes(tail[max(0, end - tags_length(table)) : end])
        whole = table.payload_length + len(tags) + len(tail) - end
        same = (table.namespace, table.pack_id, table.keys) == (ours.namespace, ours.pack_id, ours.keys)
        return (table, tags) if same and size == whole and self._authenticator.is_ours(table, tags) else None

    def exists(self, pack_id: bytes, generation: int) -> bool:
        """Whether the object is there."""
        try:
            self._bucket.head(self._names.pack(pack_id, generation))
        except ObjectMissingError:
            return False
        return True
