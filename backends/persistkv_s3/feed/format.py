"""Names and formats of the objects of the feed. docs/format.md specifies them.

Each object is one sealed record: version, xxh3-64 of the rest, msgpack. With a key, an HMAC follows, which also covers
the object's name. Nothing is trusted: sizes are checked against a limit before a download, unreadable records raise
``CorruptPackError`` with the record's name, and unparsable names are ignored.

Names of objects in records are relative to the namespace's prefix. Times are seconds since the epoch by the server's
clock.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import xxhash

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.extensions import Policy
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import ID_BYTES

VERSION = 1
NONCE_BYTES = 8
TERM_BYTES = 12
"""Bytes of a term: epoch (u32 big-endian), then a nonce of the leader that was elected."""
WRITER_BYTES = 16
MAX_INBOX_BYTES = 64 << 20  # 64 MiB: 1,000,000 keys with their tags
MAX_FEED_BYTES = 192 << 20  # 192 MiB: the leader merges up to half of it, plus one inbox object
MAX_SEGMENT_BYTES = 256 << 20  # 256 MiB
MAX_SNAPSHOT_BYTES = 1 << 20  # 1 MiB
NO_NAMESPACE = bytes(16)
"""Namespace id in the authentication tags of objects that belong to the whole store."""
_HEAD_MAGIC = b"PKVS3HD1"
_SEAL = struct.Struct("<BQ")
_TABLE_LENGTH = struct.Struct("<Q")
_TRAILER_BYTES = 24  # of a pack; its first field is the length of the table

_INBOX = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{12})")
_PACK = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})")
_FEED = re.compile(r"([0-9a-f]{12})-([0-9a-f]{24})")
_IDENTITY = re.compile(r"[0-9a-f]{32}")

T = TypeVar("T")

_Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Term = Annotated[bytes, msgspec.Meta(min_length=TERM_BYTES, max_length=TERM_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
LATEST = 1 << 40
"""Latest time in a record."""
_Time = Annotated[float, msgspec.Meta(ge=0, le=LATEST)]
_Name = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9/-]{1,128}\Z")]


class InboxName(NamedTuple):
    """Identifies one commit in the inbox, from which the leader merges commits into the feed."""

    namespace: bytes
    writer: bytes
    """16 random bytes that each session with a namespace draws, and draws again after a failed commit."""
    number: int
    """Number of the commit: each writer counts from 1, without gaps."""


class Names:
    """Constructs the S3 keys of a store, and of the objects of one namespace below its prefix ``base``.

    :param prefix: prefix of the store; empty, or ending in a slash.
    :param key_id: id of the authentication key; empty: no key. Objects under other ids are ignored.
    """

    def __init__(self, prefix: str, namespace: bytes = NO_NAMESPACE, key_id: str = "") -> None:
        self._prefix, self._key_id = prefix, key_id
        self.namespace = namespace
        suffix = f"-{key_id}" if key_id else ""
        self.base = f"{prefix}{namespace.hex()}{suffix}/"
        self.head = f"{prefix}persistkv{suffix}"
        self.inbox_prefix = f"{prefix}inbox{suffix}/"
        self.identities_prefix = f"{prefix}identities{suffix}/"
        self.notes_prefix = f"{prefix}notes{suffix}/"
        self.statuses_prefix = f"{prefix}status/"
        self.probe = f"{prefix}probe-"

    def inbox(self, name: InboxName) -> str:
        return f"{self.inbox_prefix}{name.namespace.hex()}-{name.writer.hex()}-{name.number:012x}"

    def identity(self, namespace: bytes) -> str:
        return f"{self.identities_prefix}{namespace.hex()}"

    def note(self, namespace: bytes, name: str) -> str:
        return f"{self.notes_prefix}{namespace.hex()}-{name}"

    def of(self, namespace: bytes) -> Names:
        return Names(self._prefix, namespace, self._key_id)

    def pack(self, pack_id: bytes, nonce: bytes) -> str:
        return self.base + pack_name(pack_id, nonce)


def pack_name(pack_id: bytes, nonce: bytes) -> str:
    """Return the name of a pack's object. Each upload draws a new nonce, so no name is used twice."""
    return f"packs/{pack_id.hex()}-{nonce.hex()}"


def feed_name(position: int, term: bytes) -> str:
    """Return the name of the feed object that the leader elected in ``term`` writes at ``position``, from 1."""
    return f"feed/{position:012x}-{term.hex()}"


def commit_name(writer: bytes, number: int) -> str:
    """Return the name that the authentication tag of a commit in the inbox covers."""
    return f"inbox {writer.hex()}-{number}"


# Each of these functions parses an S3 key; it returns None for keys of other objects.


def parse_inbox(key: str) -> InboxName | None:
    match = _INBOX.fullmatch(key.rpartition("/")[2])
    return None if match is None else InboxName(bytes.fromhex(match[1]), bytes.fromhex(match[2]), int(match[3], 16))


def parse_pack(key: str) -> tuple[bytes, bytes] | None:
    """Return (pack id, nonce)."""
    match = _PACK.fullmatch(key.rpartition("/")[2])
    return None if match is None else (bytes.fromhex(match[1]), bytes.fromhex(match[2]))


def parse_feed(key: str) -> tuple[int, bytes] | None:
    """Return (position, term)."""
    match = _FEED.fullmatch(key.rpartition("/")[2])
    return None if match is None else (int(match[1], 16), bytes.fromhex(match[2]))


def parse_identity(key: str) -> bytes | None:
    """Return the namespace's id."""
    name = key.rpartition("/")[2]
    return bytes.fromhex(name) if _IDENTITY.fullmatch(name) else None


class PackRow(msgspec.Struct, frozen=True, array_like=True):
    """A pack that a commit adds."""

    pack_id: _Id
    nonce: _Nonce
    body: bytes
    """Authentication tags (if the store has a key), then the pack's table."""


class ManifestRow(msgspec.Struct, frozen=True, array_like=True):
    """A manifest that a commit adds. Its keys are in the object ``keys``: ``length`` bytes from ``offset`` on."""

    head: bytes
    """The encoded ``RequestManifest``."""
    packs: bytes
    """Concatenated ids of the packs that the manifest refers to."""
    keys: _Name
    offset: _Number
    length: _Number


class Entry(msgspec.Struct, array_like=True, kw_only=True):
    """Effects of one commit, applied in the order of the fields."""

    writer: _Id
    number: _Number
    time: _Time
    """Time at which the commit's uploads began."""
    gone: list[tuple[_Id, _Nonce]] = []
    """(pack id, nonce) of removed packs. If a pack has another nonce, it is kept. Manifests that refer to a removed
    pack are removed, too."""
    manifests_gone: list[_Id] = []
    """Digests of the ids of manifests that are removed without their packs."""
    uses: list[bytes] = []
    """Uses of packs, oldest first: each item has the concatenated ids of packs that were used together. The last
    item has the packs that this commit touches, stores or names in its manifests."""
    packs: list[PackRow] = []
    manifests: list[ManifestRow] = []
    pins: list[tuple[str, bool]] = []
    """(manifest id, True to pin or False to unpin)."""


class Feed(msgspec.Struct, array_like=True, kw_only=True):
    """A feed object: the commits that the feed contains at one position, in order. Positions count from 1."""

    generation: _Nonce
    """Random id of the namespace's feed, drawn with its first feed object."""
    position: _Number
    term: _Term
    previous: bytes
    """Term of the feed object at the previous position; empty at position 1."""
    time: _Time
    """Time of all uses and removals in this feed object: that of the merge, never less than in the previous one."""
    merged: dict[bytes, int]
    """For each writer with commits in this feed object, the number of the last one. Rejected commits count."""
    entries: list[Entry] = []
    retired: list[_Name] = []
    """Objects that no reader needs after this feed object."""
    collected: _Time = 0.0
    """Objects that were retired or removed up to this time have been deleted; 0: this feed object reports none."""


class Snapshot(msgspec.Struct, array_like=True, kw_only=True):
    """State of a namespace at a position of the feed: the table rows (``Dump`` records) in the segments ``base``, then
    the feed objects in the segments ``tails``. A segment is an object of several records.
    """

    generation: _Nonce
    position: _Number
    term: _Term
    time: _Time
    base: list[_Name] = []
    base_bytes: int = 0
    tails: list[_Name] = []
    tail_bytes: int = 0


class Dump(msgspec.Struct, array_like=True):
    """Rows of a local catalogue: (key, value) by name of the table."""

    tables: dict[str, list[tuple[bytes, bytes]]]


class NamespaceHead(msgspec.Struct, array_like=True, kw_only=True):
    """Part of the head for one namespace."""

    generation: _Nonce
    position: _Number = 0
    """Position of the last published feed object; 0: none."""
    spans: list[tuple[_Number, _Number, _Term]] = []
    """The latest feed objects, ascending: (first position, last position, their term)."""
    snapshot: str = ""
    """The newest snapshot; empty: none."""
    snapshot_position: _Number = 0
    num_bytes: int = 0
    """Total bytes of the namespace's packs, pack tables and manifests in the bucket."""
    oldest: _Time = 0.0
    """Time of the least recent use of a pack or manifest that may be evicted; 0: nothing may be evicted."""
    swept: _Time = 0.0
    """Start of the last complete sweep (deletion of objects that nothing refers to). Until there was one: time at which
    a leader first published the namespace."""
    expires: _Time = LATEST
    """Earliest time at which a manifest expires by its own ttl, unless it is used again; ``LATEST``: none has one."""

    def term_of(self, position: int) -> bytes | None:
        """Return the term of the feed object at a position; None if ``spans`` does not contain the position."""
        return next((term for first, last, term in self.spans if first <= position <= last), None)

    def append(self, position: int, term: bytes) -> None:
        """Add the feed object at the next position."""
        self.position = position
        if self.spans and self.spans[-1][1:] == (position - 1, term):
            self.spans = [*self.spans[:-1], (self.spans[-1][0], position, term)]
        else:
            self.spans = [*self.spans, (position, position, term)]


class Head(msgspec.Struct, array_like=True, kw_only=True):
    """Head of a store: the object whose conditional writes publish feeds and fence former leaders."""

    store: bytes = b""
    """Random bytes, drawn when the head was created or rebuilt: local catalogues from before are loaded again."""
    epoch: _Number = 0
    """Number of the latest election of a leader, counted from 1; 0: none."""
    leader: bytes = b""
    """Term of the leader; empty: no leader."""
    beat: _Number = 0
    """Counts writes, so that no two versions have the same ETag."""
    capacity: int | None = None
    ttl_s: float | None = None
    unquoted: bool = False
    """Whether the server accepts ``If-Match`` only with ETags without quotes."""
    namespaces: dict[bytes, NamespaceHead] = {}

    @property
    def policy(self) -> Policy:
        return Policy(self.capacity, self.ttl_s)


# Made at import: msgspec 0.22 crashes if two threads are the first to decode a type.
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Entry, Feed, Snapshot, Dump, Head)
}


def seal(record: msgspec.Struct) -> bytes:
    """Encode a record as an object, without the authentication tag."""
    body = msgspec.msgpack.encode(record)
    return _SEAL.pack(VERSION, xxhash.xxh3_64_intdigest(body)) + body


def unseal(data: Buffer, kind: type[T]) -> T:
    """Verify and decode a record of type ``kind``; raise ``CorruptPackError`` if it is invalid."""
    view, name = memoryview(data), kind.__name__
    if len(view) < _SEAL.size:
        raise CorruptPackError(name, f"{len(view)} bytes are too few")
    version, checksum = _SEAL.unpack_from(view)
    if version != VERSION:
        raise CorruptPackError(name, f"version {version}; this release reads {VERSION}")
    body = view[_SEAL.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise CorruptPackError(name, "the checksum does not match")
    try:
        record: T = _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPackError(name, str(error)) from None
    for entry in [record] if isinstance(record, Entry) else record.entries if isinstance(record, Feed) else []:
        if any(len(joined) % ID_BYTES for joined in (*entry.uses, *(row.packs for row in entry.manifests))):
            raise CorruptPackError("ids", f"joined ones are no multiple of {ID_BYTES} bytes")
    return record


def belongs(record: object, name: str) -> bool:
    """Return whether a feed object or commit is the one with this name; True for other records."""
    if isinstance(record, Feed):
        return name == feed_name(record.position, record.term)
    return not isinstance(record, Entry) or name == commit_name(record.writer, record.number)


_LENGTH = struct.Struct("<Q")


def frame_records(records: Sequence[Buffer]) -> list[Buffer]:
    """Return the content of a segment (see ``Snapshot``): before each sealed record its length as u64 little-endian."""
    return [piece for record in records for piece in (_LENGTH.pack(len(memoryview(record))), record)]


def split_records(data: Buffer) -> Iterator[memoryview]:
    """Yield the sealed records of a segment; raise ``CorruptPackError`` if one is longer than the rest of it."""
    rest = memoryview(data)
    while rest:
        length = _LENGTH.unpack_from(rest)[0] if len(rest) >= _LENGTH.size else len(rest)
        if length > len(rest) - _LENGTH.size:
            raise CorruptPackError("segment", f"a record of {length} bytes in {len(rest)}")
        yield rest[_LENGTH.size : _LENGTH.size + length]
        rest = rest[_LENGTH.size + length :]


def split_ids(joined: Buffer) -> list[bytes]:
    """Split concatenated ids of ``ID_BYTES`` each."""
    return [bytes(joined[start : start + ID_BYTES]) for start in range(0, len(joined), ID_BYTES)]


def tags_before(body: bytes) -> bytes:
    """Return the authentication tags in ``PackRow.body``. Its table must be valid."""
    (length,) = _TABLE_LENGTH.unpack_from(body, len(body) - _TRAILER_BYTES)
    return body[: len(body) - _TRAILER_BYTES - length]


def encode_head(head: Head) -> bytes:
    """Encode the head, without its authentication tag."""
    return _HEAD_MAGIC + seal(head)


def decode_head(data: Buffer, where: str) -> Head:
    """Decode the head, without its authentication tag; raise ``CorruptPackError`` if it is damaged.

    :param where: the store, for messages.
    :raises CorruptStoreError: the object is not a head, or has a format that this release cannot read.
    """
    view = memoryview(data)
    if view[: len(_HEAD_MAGIC)] != _HEAD_MAGIC:
        raise CorruptStoreError(f"{where} holds no persistkv store")
    rest = view[len(_HEAD_MAGIC) :]
    if len(rest) and rest[0] != VERSION:
        raise CorruptStoreError(f"{where}: format {rest[0]}; this release reads {VERSION}")
    return unseal(rest, Head)
