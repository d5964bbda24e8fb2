"""Names and formats of objects: index objects, snapshots, format, identities. docs/format.md specifies every byte.

An index object is a sequence of entries, each of one commit: a sealed head (msgpack after a version and a checksum),
then the bodies that it references (pack tables and heads of manifests), each sealed separately. Damage to a body
affects only that body, and damage to a head only that entry. Nothing is trusted: lengths are checked against the data,
unreadable parts raise ``CorruptPackError`` naming the field or are skipped, and unparsable names are ignored.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple, TypeVar

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

_LOG = re.compile(r"i-([0-9a-f]{32})-([0-9a-f]{12})")
_ROOT = re.compile(r"s-([0-9a-f]{12})")
_PACK = re.compile(r"([0-9a-f]{32})-([0-9a-f]{8})")
_IDENTITY = re.compile(r"[0-9a-f]{32}")

FORMAT = "persistkv"
IDENTITIES = "identities/"
STATUSES = "status/"
LEASES = "leases/"

T = TypeVar("T")

_Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_Generation = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Length = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LOG_BYTES)]


class LogName(NamedTuple):
    """Name of one commit of one writer."""

    writer: bytes
    """16 random bytes, drawn by each writing handle."""
    number: int
    """Counted from 1."""


class Names:
    """Keys of one namespace's objects.

    :param prefix: of the store; empty, or ending in a slash.
    :param key_id: of the key that authenticates the objects; empty without one. Objects elsewhere are ignored.
    """

    def __init__(self, prefix: str, namespace: bytes, key_id: str = "") -> None:
        self.base = f"{prefix}{namespace.hex()}{'-' if key_id else ''}{key_id}/"
        self.log_prefix = f"{self.base}log/"
        self.packs_prefix = f"{self.base}packs/"
        self.keys_prefix = f"{self.base}keys/"
        self.segments_prefix = f"{self.base}segments/"

    def pack(self, pack_id: bytes, generation: int) -> str:
        """Return the key of a pack. After a deletion its generation rises, so the bytes under a key never change."""
        return f"{self.packs_prefix}{pack_id.hex()}-{generation:08x}"

    def log(self, name: LogName) -> str:
        """Return the key of a commit's index object."""
        return f"{self.log_prefix}i-{name.writer.hex()}-{name.number:012x}"

    def manifest_keys(self, name: LogName) -> str:
        """Return the key of the object with the keys of a commit's manifests."""
        return f"{self.keys_prefix}{name.writer.hex()}-{name.number:012x}"

    def root(self, number: int) -> str:
        """Return the key of a snapshot's root."""
        return f"{self.log_prefix}s-{number:012x}"

    def segment(self, name: str) -> str:
        """Return the key of a snapshot's segment."""
        return f"{self.segments_prefix}{name}"


def parse_log(key: str) -> LogName | None:
    """Return the commit of an index object; None for another key."""
    match = _LOG.fullmatch(key.rpartition("/")[2])
    return None if match is None else LogName(bytes.fromhex(match[1]), int(match[2], 16))


def parse_root(key: str) -> int | None:
    """Return the number of a snapshot's root; None for another key."""
    match = _ROOT.fullmatch(key.rpartition("/")[2])
    return None if match is None else int(match[1], 16)


def parse_pack(key: str) -> tuple[bytes, int] | None:
    """Return pack id and generation of a pack object; None for another key."""
    match = _PACK.fullmatch(key.rpartition("/")[2])
    return None if match is None else (bytes.fromhex(match[1]), int(match[2], 16))


def parse_identity(key: str) -> bytes | None:
    """Return the namespace id of an identity object; None for another key."""
    name = key.rpartition("/")[2]
    return bytes.fromhex(name) if _IDENTITY.fullmatch(name) else None


class Stamp(NamedTuple):
    """Logical time of a change. Of two changes to the same pack, manifest or pin, the one with the greater stamp wins,
    in whichever order they are merged."""

    moment: int
    """Greater by one than any moment that the writer had merged."""
    writer: bytes


class PackRow(msgspec.Struct, frozen=True, array_like=True):
    """Addition of a pack."""

    pack_id: _Id
    generation: _Generation
    offset: _Length
    """Offset in the entry's bodies of the pack's tags (if any), which its table follows."""
    length: _Length


class GoneRow(msgspec.Struct, frozen=True, array_like=True):
    """Removal of a pack."""

    pack_id: _Id
    generation: _Generation
    """The removed generation: the pack is next written under a higher one."""


class ManifestRow(msgspec.Struct, frozen=True, array_like=True):
    """Addition of a manifest."""

    id: str
    ordered: bool
    packs: bytes
    """Concatenated ids of the packs that it references."""
    offset: _Length
    """Offset of the head in the entry's bodies."""
    length: _Length
    keys_writer: _Id
    keys_number: _Number
    """With ``keys_writer``: the name of the object that holds the keys."""
    keys_offset: _Number
    keys_length: _Length


class Head(msgspec.Struct, array_like=True, kw_only=True):
    """Changes made by one commit."""

    namespace: bytes
    writer: _Id
    moment: _Number
    time: float
    """Seconds since the epoch, by the server's clock."""
    packs: list[PackRow] = []
    gone: list[GoneRow] = []
    uses: bytes = b""
    """Concatenated ids of the packs that were used; those of ``packs`` are not repeated."""
    manifests: list[ManifestRow] = []
    manifests_gone: list[str] = []
    pins: list[tuple[str, bool]] = []

    @property
    def stamp(self) -> Stamp:
        """Stamp of all changes of the entry."""
        return Stamp(self.moment, self.writer)


class Entry(NamedTuple):
    """A head with its bodies."""

    head: Head
    bodies: bytearray

    @classmethod
    def of(cls, namespace: bytes, stamp: Stamp, time: float) -> Entry:
        """Return an entry without changes."""
        return cls(Head(namespace=namespace, writer=stamp.writer, moment=stamp.moment, time=time), bytearray())

    def body(self, row: PackRow | ManifestRow) -> bytes:
        """Return the body of a row."""
        return bytes(memoryview(self.bodies)[row.offset : row.offset + row.length])

    def add_pack(self, pack_id: bytes, generation: int, body: bytes) -> None:
        """:param body: tags and table."""
        self.head.packs.append(PackRow(pack_id, generation, len(self.bodies), len(body)))
        self.bodies.extend(body)

    def add_manifest(self, row: ManifestRow, head: bytes) -> None:
        """Add a manifest; offset and length of its row are filled in."""
        self.head.manifests.append(msgspec.structs.replace(row, offset=len(self.bodies), length=len(head)))
        self.bodies.extend(head)


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


def encode_entries(entries: Sequence[Entry]) -> list[Buffer]:
    """Return the buffers of an index object or a segment."""
    pieces: list[Buffer] = [_MAGIC]
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
            yield Entry(head, bytearray(view[at + head_length : at + head_length + body_length]))
        at += head_length + body_length
    if problem is not None:
        raise problem


def _check_head(head: Head, namespace: bytes, body_length: int) -> None:
    """Check what the types of the fields do not imply."""
    if head.namespace != namespace:
        raise CorruptPackError("index namespace", f"{head.namespace.hex()} instead of {namespace.hex()}")
    if any(len(joined) % ID_BYTES for joined in (head.uses, *(row.packs for row in head.manifests))):
        raise CorruptPackError("index ids", f"joined ones are no multiple of {ID_BYTES} bytes")
    places = [(row.offset, row.length) for row in head.packs] + [(row.offset, row.length) for row in head.manifests]
    for offset, length in places:
        if offset + length > body_length:
            raise CorruptPackError("index body", f"{length} bytes at {offset} do not fit {body_length}")
    if not math.isfinite(head.time):
        raise CorruptPackError("index time", f"{head.time} is not finite")


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
        raise CorruptPackError("root", f"number {root.number} of {root.namespace.hex()} in place of {number}")
    if any("/" in name or not name.isascii() for name in root.segments):
        raise CorruptPackError("root segments", "not the name of a segment")
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
