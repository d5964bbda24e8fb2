"""Index objects, snapshots, and the objects of format and identity. docs/format.md specifies every byte.

An index object is a sequence of entries, each of one commit: a sealed head (msgpack after a version and a checksum),
then the bodies that it references (pack tables and heads of manifests), each sealed separately. Damage to a body
affects only that body, and damage to a head only that entry. Nothing is trusted: lengths are checked against the data,
and unreadable parts raise ``CorruptPackError`` naming the field, or are skipped.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.backend import Namespace
from persistkv.storage.extensions import Policy
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import ID_BYTES
from persistkv.storage.identity import Identity

VERSION = 1
_MAGIC = b"PKVS3IX1"
_FORMAT_MAGIC = b"PKVS3FM1"
_LENGTHS = struct.Struct("<IQ")
_SEAL = struct.Struct("<BQ")
_FORMAT = struct.Struct("<8sI")
_CREATED = struct.Struct("<d")
_TABLE_LENGTH = struct.Struct("<Q")
_TRAILER_BYTES = 24  # of a pack; its first field is the length of the table
MAX_LOG_BYTES = 1 << 30  # 1 GiB: larger index objects and segments are not read

T = TypeVar("T")


class Stamp(NamedTuple):
    """Logical time of a change. Of two changes to the same pack, manifest or pin, the one with the greater stamp wins,
    in whichever order they are merged."""

    moment: int
    """Greater by one than any moment that the writer had merged."""
    writer: bytes


class PackRow(msgspec.Struct, frozen=True, array_like=True):
    """Addition of a pack."""

    pack_id: bytes
    generation: int
    offset: int
    """Offset in the entry's bodies of the pack's tags (if any), which its table follows."""
    length: int


class GoneRow(msgspec.Struct, frozen=True, array_like=True):
    """Removal of a pack."""

    pack_id: bytes
    generation: int
    """The removed generation: the pack is next written under a higher one."""


class ManifestRow(msgspec.Struct, frozen=True, array_like=True):
    """Addition of a manifest."""

    id: str
    ordered: bool
    packs: bytes
    """Concatenated ids of the packs that it references."""
    offset: int
    """Offset of the head in the entry's bodies."""
    length: int
    keys_writer: bytes
    keys_number: int
    """With ``keys_writer``: the name of the object that holds the keys."""
    keys_offset: int
    keys_length: int


class Head(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Changes made by one commit."""

    namespace: bytes
    writer: bytes
    moment: int
    time: float
    """Seconds since the epoch, by the writer's clock, never decreasing."""
    packs: tuple[PackRow, ...] = ()
    gone: tuple[GoneRow, ...] = ()
    uses: bytes = b""
    """Concatenated ids of the packs that were used; those of ``packs`` are not repeated."""
    manifests: tuple[ManifestRow, ...] = ()
    manifests_gone: tuple[str, ...] = ()
    pins: tuple[tuple[str, bool], ...] = ()

    @property
    def stamp(self) -> Stamp:
        """Stamp of all changes of the entry."""
        return Stamp(self.moment, self.writer)


class Entry(NamedTuple):
    """A head with its bodies."""

    head: Head
    bodies: bytes


class EntryBuilder:
    """Collects the rows and bodies of one entry."""

    def __init__(self) -> None:
        self.packs: list[PackRow] = []
        self.gone: list[GoneRow] = []
        self.uses: list[bytes] = []
        self.manifests: list[ManifestRow] = []
        self.manifests_gone: list[str] = []
        self.pins: list[tuple[str, bool]] = []
        self._bodies = bytearray()

    def add_pack(self, pack_id: bytes, generation: int, body: bytes) -> None:
        """:param body: tags and table."""
        self.packs.append(PackRow(pack_id, generation, len(self._bodies), len(body)))
        self._bodies += body

    def add_manifest(
        self, name: str, ordered: bool, packs: bytes, head: bytes, keys: tuple[bytes, int, int, int]
    ) -> None:
        """:param keys: location of the keys, the last fields of ``ManifestRow``."""
        self.manifests.append(ManifestRow(name, ordered, packs, len(self._bodies), len(head), *keys))
        self._bodies += head

    def entry(self, namespace: bytes, stamp: Stamp, time: float) -> Entry:
        """Return the entry."""
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


class Root(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Root of a snapshot, which contains all index objects up to a point."""

    namespace: bytes
    number: int
    covered: tuple[tuple[bytes, int], ...]
    """(writer, number): the last covered index object of each listed writer; earlier ones of the writer are covered."""
    segments: tuple[str, ...]
    """Names of the objects that hold the entries."""
    whole_segments: int
    """Number of segments, from the first, that were written together, without entries that were superseded then."""


def encode_entries(entries: Sequence[Entry]) -> list[bytes]:
    """Return the buffers of an index object or a segment."""
    pieces = [_MAGIC]
    for head, bodies in entries:
        sealed = _seal(msgspec.msgpack.encode(head))
        pieces += [_LENGTHS.pack(len(sealed), len(bodies)), sealed, bodies]
    return pieces


def parse_entries(data: Buffer, namespace: bytes) -> Iterator[Entry]:
    """Yield the readable entries. Unreadable ones are skipped, and the error of the first one is raised at the end.

    :raises CorruptPackError: it is no index object, or a part is unreadable.
    """
    view = memoryview(data)
    if view[: len(_MAGIC)] != _MAGIC:
        raise CorruptPackError("index magic", f"{bytes(view[: len(_MAGIC)])!r} instead of {_MAGIC!r}")
    at, problem = len(_MAGIC), None
    while at < len(view):
        if len(view) - at < _LENGTHS.size:
            raise CorruptPackError("index entry", f"{len(view) - at} bytes are left over")
        head_length, body_length = _LENGTHS.unpack_from(view, at)
        at += _LENGTHS.size
        if head_length + body_length > len(view) - at:
            raise CorruptPackError("index entry", f"{head_length} and {body_length} bytes do not fit {len(view) - at}")
        try:
            head = _open(view[at : at + head_length], Head)
            _check_head(head, namespace, body_length)
        except CorruptPackError as error:
            problem = problem or error
        else:
            yield Entry(head, bytes(view[at + head_length : at + head_length + body_length]))
        at += head_length + body_length
    if problem is not None:
        raise problem


def _check_head(head: Head, namespace: bytes, body_length: int) -> None:
    if head.namespace != namespace:
        raise CorruptPackError("index namespace", f"{head.namespace.hex()} instead of {namespace.hex()}")
    packs = [row.pack_id for row in head.packs] + [row.pack_id for row in head.gone]
    writers = [head.writer, *(row.keys_writer for row in head.manifests)]
    if any(len(name) != ID_BYTES for name in (*packs, *writers)):
        raise CorruptPackError("index ids", f"they are not all of {ID_BYTES} bytes")
    if len(head.uses) % ID_BYTES or any(len(row.packs) % ID_BYTES for row in head.manifests):
        raise CorruptPackError("index ids", f"joined ones are no multiple of {ID_BYTES} bytes")
    numbers = [head.moment, *(n for row in head.manifests for n in (row.keys_number, row.keys_offset))]
    generations = [row.generation for row in head.packs] + [row.generation for row in head.gone]
    lengths = [row.keys_length for row in head.manifests]
    for found, bound in ((numbers, 1 << 48), (generations, 1 << 32), (lengths, MAX_LOG_BYTES)):
        if not all(0 <= number < bound for number in found):
            raise CorruptPackError("index numbers", f"one is not below {bound}")
    places = [(row.offset, row.length) for row in head.packs] + [(row.offset, row.length) for row in head.manifests]
    for offset, length in places:
        if offset < 0 or length < 0 or offset + length > body_length:
            raise CorruptPackError("index body", f"{length} bytes at {offset} do not lie in {body_length}")
    if not math.isfinite(head.time):
        raise CorruptPackError("index time", f"{head.time} is none")


def split_ids(joined: bytes) -> tuple[bytes, ...]:
    """Split concatenated ids."""
    return tuple(joined[start : start + ID_BYTES] for start in range(0, len(joined), ID_BYTES))


def tags_before(body: bytes) -> bytes:
    """Return the tags in the body of a pack's row, which precede its table. The table must have been parsed before."""
    (length,) = _TABLE_LENGTH.unpack_from(body, len(body) - _TRAILER_BYTES)
    return body[: len(body) - _TRAILER_BYTES - length]


def encode_root(root: Root) -> bytes:
    """Return the object of a snapshot's root."""
    return _seal(msgspec.msgpack.encode(root))


def parse_root_object(data: Buffer, namespace: bytes, number: int | None) -> Root:
    """Parse the object of a snapshot's root.

    :param number: expected number; None: any.
    :raises CorruptPackError: it is unreadable, or has another namespace or number.
    """
    root = _open(data, Root)
    if root.namespace != namespace or number not in (None, root.number):
        raise CorruptPackError("root", f"number {root.number} of {root.namespace.hex()} lies in place of {number}")
    if any("/" in name or not name.isascii() for name in root.segments):
        raise CorruptPackError("root segments", "a name that is none of a segment")
    return root


def _seal(body: bytes) -> bytes:
    return _SEAL.pack(VERSION, xxhash.xxh3_64_intdigest(body)) + body


def _open(data: Buffer, kind: type[T]) -> T:
    view = memoryview(data)
    if len(view) < _SEAL.size:
        raise CorruptPackError("index head", f"{len(view)} bytes are too few")
    version, checksum = _SEAL.unpack_from(view)
    if version != VERSION:
        raise CorruptPackError("index version", f"{version}; this release reads {VERSION}")
    body = view[_SEAL.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise CorruptPackError("index checksum", "does not match")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPackError("index head", str(error)) from None


class _PolicyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy in the format object, as JSON after magic and version."""

    capacity: int | None = None
    ttl_s: float | None = None


def encode_format(policy: Policy) -> bytes:
    """Return the object that identifies a store and records its policy."""
    record = _PolicyRecord(policy.capacity, policy.ttl_s)
    return _FORMAT.pack(_FORMAT_MAGIC, VERSION) + msgspec.json.encode(record)


def decode_format(data: bytes | bytearray, where: str) -> Policy:
    """Return the policy of a store that this release can read and write.

    :raises CorruptStoreError: the object is something else, or has another format.
    """
    if len(data) < _FORMAT.size or data[: len(_FORMAT_MAGIC)] != _FORMAT_MAGIC:
        raise CorruptStoreError(f"{where} holds no persistkv store")
    _, version = _FORMAT.unpack_from(data)
    if version != VERSION:
        raise CorruptStoreError(f"{where}: format {version}; this release reads {VERSION}")
    try:
        record = msgspec.json.decode(data[_FORMAT.size :], type=_PolicyRecord)
    except msgspec.DecodeError as error:
        raise CorruptStoreError(f"{where}: unreadable policy: {error}") from None
    return Policy(record.capacity, record.ttl_s)


def encode_namespace(namespace: Namespace) -> bytes:
    """Return the identity object of a namespace."""
    return _CREATED.pack(namespace.created) + namespace.identity.encode()


def parse_namespace(data: bytes | bytearray, name: bytes) -> Namespace | None:
    """Parse the identity object of a namespace; return None if it is invalid or of another namespace."""
    if len(data) < _CREATED.size:
        return None
    try:
        identity = Identity.decode(bytes(data[_CREATED.size :]))
        found = Namespace(identity, *_CREATED.unpack_from(data))
        return found if identity.digest == name else None
    except (ValueError, RecursionError):
        return None
