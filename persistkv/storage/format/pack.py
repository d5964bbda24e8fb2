"""Packs: the unit of durable writing. An immutable sequence of frames, then a checksummed table of
their keys.

docs/format.md has the layout in bytes; ``pack_writer`` writes packs, ``seal`` verifies frames.
Invariants of this file:

1. A pack alone (frames, table, trailer) is enough to recover its blocks. The frames are its
   payload. All blocks are of one tenant.
2. A frame's tag covers its stored bytes, its keys and the namespace: the stored bytes of another
   frame do not verify (``seal``).
3. Parsing trusts no input: each count and length is checked against the available bytes before it
   is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, starmap
from typing import NamedTuple

import msgspec
import xxhash

from persistkv.config import MAX_BLOCK_BYTES, PAGE_BYTES
from persistkv.errors import CorruptPackError
from persistkv.rounding import round_up
from persistkv.storage.format.codec import Buffer, RawCodec, stored_codec
from persistkv.storage.format.keys import KEY_ID_BYTES, SALT_BYTES
from persistkv.tenants import DEFAULT_TENANT, is_tenant

MAX_KEY_BYTES = 0xFFFF

PACK_VERSION = 1
ID_BYTES = 16
# 1 MiB: maximum raw bytes of a frame; a larger block is a frame of its own
FRAME_BYTES = 1 << 20
UNKNOWN_DEPTH = 0xFFFFFFFF

# values of ``data_key`` and ``salt`` if a pack is sealed without a key
PLAIN_KEY = bytes(KEY_ID_BYTES)
NO_SALT = bytes(SALT_BYTES)

_HEADER = struct.Struct("<HHIIHHQQ16s16s8s16s")  # the fields of ``_Header``
_FRAME = struct.Struct("<IIIIQQ16s")  # the fields of ``Frame``
_DEPTH = 3  # index of ``Frame.depth`` among them
_TRAILER = struct.Struct("<QQ8s")  # length of the table, its checksum, magic number
# use constants, because attributes of ``Struct`` cost 6 % of the parsing of a table
_HEADER_BYTES = _HEADER.size
_FRAME_ENTRY_BYTES = _FRAME.size
TRAILER_BYTES = _TRAILER.size
_MAGIC = b"PKVPACK1"
SEALED_TABLE = b"PKVSEAL1"
"""Magic number in the trailer of a table that is sealed with a key."""


class _Header(msgspec.Struct, frozen=True, gc=False):
    """Beginning of an encoded table; fields without a description are those of ``PackTable``. It is
    a Struct, because a named tuple takes twice the time, and an opening store parses hundreds of
    thousands of tables."""

    version: int
    key_length: int
    """``PackedKeys.key_length``."""
    frame_count: int
    block_count: int
    codec_length: int
    """Bytes of the codec's text form, which follows the header."""
    tenant_length: int
    """Bytes of the tenant's name, which follows the codec."""
    payload_length: int
    raw_length: int
    namespace: bytes
    pack_id: bytes
    data_key: bytes
    salt: bytes


class PackedKeys(msgspec.Struct, frozen=True, array_like=True):
    """An ordered sequence of keys, joined. If their lengths differ, ``lengths`` has one for each
    key, and ``key_length`` is 0.

    Methods that return keys, or need single ones, raise CorruptPackError if the lengths are
    malformed or do not fit the data. ``len`` trusts the lengths.
    """

    data: bytes = b""
    """All keys, concatenated."""
    key_length: int = 0
    """Bytes of each key; 0 if the keys differ in length."""
    lengths: bytes = b""
    """Length of each key as little-endian u16; empty if all keys have the same length."""

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> PackedKeys:
        """Return the packed form of ``keys``.

        :raises ValueError: a key is empty or longer than 65,535 bytes.
        """
        if not keys:
            return cls()
        lengths = set(map(len, keys))
        shortest = min(lengths)
        longest = max(lengths)
        if shortest == 0 or longest > MAX_KEY_BYTES:
            raise ValueError(
                f"keys have {shortest} to {longest} bytes; 1 to {MAX_KEY_BYTES} are possible"
            )
        data = b"".join(keys)
        if shortest == longest:
            return cls(data, longest)
        packed_lengths = struct.pack(f"<{len(keys)}H", *map(len, keys))
        return cls(data, key_length=0, lengths=packed_lengths)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the keys with their lengths."""
        return len(self.data) + len(self.lengths)

    def __len__(self) -> int:
        if self.key_length:
            return len(self.data) // self.key_length
        return len(self.lengths) // 2

    def unpack(self) -> list[bytes]:
        """Return the keys, in order."""
        if self.key_length == 0:
            return self._unpack_uneven()
        # a negative length means that the packed form is damaged
        if self.key_length < 0 or len(self.data) % self.key_length:
            raise CorruptPackError(
                "keys",
                f"{len(self.data)} bytes are no multiple of {self.key_length}",
            )
        return _cut(self.data, self.key_length)

    def _unpack_uneven(self) -> list[bytes]:
        """Return keys of different lengths."""
        # the lengths come from a store: check each before a slice depends on it
        if len(self.lengths) % 2:
            raise CorruptPackError(
                "key lengths", f"{len(self.lengths)} bytes are no run of 16-bit numbers"
            )
        count = len(self.lengths) // 2
        lengths = struct.unpack(f"<{count}H", self.lengths)
        total = sum(lengths)
        if total != len(self.data):
            raise CorruptPackError(
                "key lengths",
                f"their sum is {total}, the keys have {len(self.data)} bytes",
            )
        if 0 in lengths:
            raise CorruptPackError("key lengths", "a key has no bytes")
        keys = []
        start = 0
        for length in lengths:
            keys.append(self.data[start : start + length])
            start += length
        return keys

    @staticmethod
    def unpack_all(many: Sequence[PackedKeys]) -> list[bytes]:
        """Return the keys of several packed sequences, one after the other; faster than ``unpack``
        for each."""
        if not many:
            return []
        # in a store, all keys usually have one length, so that one split serves for all
        common_length = many[0].key_length
        parts: list[bytes] = []
        for keys in many:
            is_common = common_length > 0 and keys.key_length == common_length
            # leave keys of several lengths to ``unpack``, and also damaged ones, because its error
            # names the field
            if not is_common or len(keys.data) % common_length:
                unpacked = map(PackedKeys.unpack, many)
                return list(chain.from_iterable(unpacked))
            parts.append(keys.data)
        return _cut(b"".join(parts), common_length)

    @property
    def fingerprints(self) -> bytes:
        """The xxh3-64 checksum of each key as little-endian u64, concatenated. Computed at each
        access."""
        keys = self.unpack()
        checksums = map(xxhash.xxh3_64_intdigest, keys)
        return struct.pack(f"<{len(keys)}Q", *checksums)

    @property
    def distinct(self) -> bool:
        """Whether no key occurs twice."""
        keys = self.unpack()
        return len(set(keys)) == len(keys)


def _cut(data: bytes, length: int) -> list[bytes]:
    """Split data into parts of one length. NumPy does so ten times as fast as slices: 512 keys in 8
    µs."""
    import numpy as np

    # NumPy refuses an empty buffer
    if not data:
        return []
    array = np.frombuffer(data, f"V{length}")
    # items of this type become bytes
    parts: list[bytes] = array.tolist()
    return parts


class Frame(NamedTuple):
    """Consecutive blocks of one KV cache group: the unit of codec and checksum."""

    group: int
    block_count: int
    block_bytes: int
    """Raw bytes of one block."""
    depth: int
    """Position of the first block in its request: the number of blocks of the group before it;
    UNKNOWN_DEPTH if it is not known."""
    offset: int
    """Byte offset in the pack, a multiple of 4 KiB."""
    stored_length: int
    """Bytes at rest, without padding. If equal to ``raw_length``, the stored bytes are the raw
    bytes."""
    tag: bytes
    """16 bytes that verify the stored bytes (``FrameSeal``)."""

    @property
    def encoded(self) -> bool:
        """Whether the pack's codec was applied. A frame that the codec does not make shorter is
        stored raw."""
        return self.stored_length != self.raw_length

    @property
    def raw_length(self) -> int:
        """Raw bytes of all blocks."""
        return self.block_count * self.block_bytes


@dataclass(slots=True)
class PlacedFrame:
    """A frame with its place in its pack, and the keys of its blocks."""

    number: int
    """Index of the frame in the pack."""
    frame: Frame
    keys: Sequence[bytes]


def pack_frames(frames: Iterable[Frame]) -> bytes:
    """Encode frames as in a pack's table."""
    return b"".join(starmap(_FRAME.pack, frames))


def align(length: int) -> int:
    """Return a length rounded up to a multiple of 4 KiB."""
    return round_up(length, PAGE_BYTES)


def pack_id(
    namespace: bytes,
    keys: PackedKeys,
    codec: str,
    tenant: str = DEFAULT_TENANT,
) -> bytes:
    """Return a pack's id: 16 bytes, the digest of namespace, ordered keys, text form of the codec
    and tenant."""
    tenant_digest = b""
    # packs of two tenants differ, even if their keys do not
    if tenant != DEFAULT_TENANT:
        tenant_digest = blake2b(tenant.encode()).digest()
    digest = blake2b(namespace, digest_size=ID_BYTES, key=tenant_digest)
    # the codec is part of the name: packs of two codecs have different bytes
    digest.update(codec.encode() + b"\0")
    # include the lengths, so that no byte can move from one key to the next
    digest.update(keys.key_length.to_bytes(2, "little"))
    digest.update(keys.lengths)
    digest.update(keys.data)
    return digest.digest()


def _stored_tenant(tenant: str) -> bytes:
    """Return a tenant's name as tables store it: no bytes for the default one."""
    return b"" if tenant == DEFAULT_TENANT else tenant.encode()


def _tenant_of(stored: bytes) -> str:
    """Return the tenant that a table names.

    :raises CorruptPackError: it is no valid name.
    """
    if not stored:
        return DEFAULT_TENANT
    try:
        tenant = stored.decode()
    except UnicodeDecodeError:
        raise CorruptPackError("tenant", "it is not text") from None
    # the default tenant is stored as no bytes only, so that equal tables have equal bytes
    if tenant == DEFAULT_TENANT or not is_tenant(tenant):
        raise CorruptPackError("tenant", f"{tenant!r} is no name of a tenant")
    return tenant


def encoded_length(
    codec: str,
    frame_count: int,
    keys: PackedKeys,
    tenant: str = DEFAULT_TENANT,
) -> int:
    """Return the bytes of an encoded table with its trailer."""
    fixed_bytes = _HEADER_BYTES + TRAILER_BYTES
    names_bytes = len(codec.encode()) + len(_stored_tenant(tenant))
    frames_bytes = frame_count * _FRAME_ENTRY_BYTES
    return fixed_bytes + names_bytes + frames_bytes + keys.packed_bytes


def table_lengths(data: Buffer) -> tuple[int, int]:
    """Return the raw length and the payload length, in bytes, that the header of an encoded table
    claims, unverified; 0 and 0 if the header is incomplete."""
    if len(data) < _HEADER_BYTES:
        return 0, 0
    header = _Header(*_HEADER.unpack_from(data))
    return header.raw_length, header.payload_length


class TableHead(msgspec.Struct, frozen=True, gc=False):
    """Fields of an encoded table that a catalogue needs for each of its packs, unverified."""

    namespace: bytes
    pack_id: bytes
    block_count: int
    raw_length: int
    payload_length: int
    depth: int
    """The smallest ``Frame.depth``; UNKNOWN_DEPTH if there is no frame."""
    tenant: str
    """``PackTable.tenant``."""
    data_key: bytes
    """``PackTable.data_key``."""


def table_head(data: bytes) -> TableHead | None:
    """Return the head of an encoded table, unverified; None if it is malformed."""
    if len(data) < TRAILER_BYTES:
        return None
    # The checksum is not computed: a catalogue reads the heads of all packs, and a load verifies
    # the table that it uses.
    end = len(data) - TRAILER_BYTES
    length, _, magic = _TRAILER.unpack_from(data, end)
    if magic != _MAGIC or length != end or length < _HEADER_BYTES:
        return None
    header = _Header(*_HEADER.unpack_from(data))
    tenant_at = _HEADER_BYTES + header.codec_length
    frames_at = tenant_at + header.tenant_length
    frames_end = frames_at + header.frame_count * _FRAME_ENTRY_BYTES
    if header.version != PACK_VERSION or frames_end > len(data):
        return None
    try:
        tenant = _tenant_of(data[tenant_at:frames_at])
    except CorruptPackError:
        return None
    depth = _smallest_depth(data[frames_at:frames_end])
    return TableHead(
        namespace=header.namespace,
        pack_id=header.pack_id,
        block_count=header.block_count,
        raw_length=header.raw_length,
        payload_length=header.payload_length,
        depth=depth,
        tenant=tenant,
        data_key=header.data_key,
    )


def _smallest_depth(packed_frames: bytes) -> int:
    """Return the smallest depth of encoded frames; UNKNOWN_DEPTH if there is none."""
    frames = _FRAME.iter_unpack(packed_frames)
    depths = [frame[_DEPTH] for frame in frames]
    return min(depths, default=UNKNOWN_DEPTH)


class PackTable(msgspec.Struct, frozen=True):
    """Everything in a pack except its payload. A catalogue stores one per pack."""

    namespace: bytes
    """16 bytes: the digest of the identity."""
    pack_id: bytes
    """16 bytes (``Seal.new_pack_id``)."""
    codec: str
    """Text form of the codec that encoded the frames; frames that it did not make shorter are
    raw."""
    payload_length: int
    """Bytes of all frames with their padding; also the offset of the table in the pack."""
    raw_length: int
    """Bytes of all blocks before the codec."""
    packed_frames: bytes
    """Frames as encoded in the table; ``frames`` decodes them."""
    keys: PackedKeys
    """The keys of all blocks, frame after frame."""
    data_key: bytes = PLAIN_KEY
    """Id of the key that seals the frames, 8 bytes; ``PLAIN_KEY``: none does."""
    salt: bytes = NO_SALT
    """16 random bytes, from which the frames' key is derived; ``NO_SALT`` without a key."""
    tenant: str = DEFAULT_TENANT
    """Whose blocks these are."""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Frames, decoded at each access."""
        fields = _FRAME.iter_unpack(self.packed_frames)
        return tuple(map(Frame._make, fields))

    def placed_frames(self) -> Iterator[PlacedFrame]:
        """Iterate over the frames with their keys.

        :raises CorruptPackError: the lengths of the keys are malformed.
        """
        keys = self.keys.unpack()
        start = 0
        for number, frame in enumerate(self.frames):
            stop = start + frame.block_count
            yield PlacedFrame(number, frame, keys[start:stop])
            start = stop

    @property
    def frame_count(self) -> int:
        return len(self.packed_frames) // _FRAME_ENTRY_BYTES

    @property
    def depth(self) -> int:
        """The smallest ``Frame.depth``; UNKNOWN_DEPTH if there is no frame."""
        return _smallest_depth(self.packed_frames)

    def encode(self) -> bytes:
        """Return table and trailer as stored."""
        # the header has the lengths of all parts, so that a parser can check them before it reads
        # the parts
        codec = self.codec.encode()
        tenant = _stored_tenant(self.tenant)
        # list the fields in the order of ``_Header``
        header = _HEADER.pack(
            PACK_VERSION,
            self.keys.key_length,
            self.frame_count,
            len(self.keys),
            len(codec),
            len(tenant),
            self.payload_length,
            self.raw_length,
            self.namespace,
            self.pack_id,
            self.data_key,
            self.salt,
        )
        keys = self.keys.lengths + self.keys.data
        table = header + codec + tenant + self.packed_frames + keys
        return with_trailer(table)

    @classmethod
    def parse(cls, data: Buffer) -> PackTable:
        """Parse table and trailer at the end of ``data`` (a whole pack, or its last bytes).

        :raises CorruptPackError: they are malformed; the error names the field.
        """
        table = cls.parse_stored(data)
        _check_frames(table)
        if not table.keys.distinct:
            raise CorruptPackError(
                "keys", f"of {len(table.keys)} keys, some occur twice"
            )
        return table

    @classmethod
    def parse_stored(cls, data: Buffer) -> PackTable:
        """Parse a table that was valid when it was stored, such as one in a local catalogue: verify
        its checksum and lengths. Unlike ``parse``, do not check each frame and key, which would
        take as much time again.

        :raises CorruptPackError: as ``parse``.
        """
        table = without_trailer(data)
        if len(table) < _HEADER_BYTES:
            raise CorruptPackError("table length", f"{len(table)} bytes are too few")
        header = _Header(*_HEADER.unpack_from(table))
        if header.version != PACK_VERSION:
            raise CorruptPackError(
                "version", f"{header.version}; this release reads {PACK_VERSION}"
            )
        tenant_at = _HEADER_BYTES + header.codec_length
        frames_at = tenant_at + header.tenant_length
        frames_end = frames_at + header.frame_count * _FRAME_ENTRY_BYTES
        keys = _keys_in(table, frames_end, header)
        tenant = _tenant_of(table[tenant_at:frames_at])
        try:
            codec = table[_HEADER_BYTES:tenant_at].decode()
        except UnicodeDecodeError:
            raise CorruptPackError("codec name", "it is not text") from None
        return cls(
            namespace=header.namespace,
            pack_id=header.pack_id,
            codec=codec,
            payload_length=header.payload_length,
            raw_length=header.raw_length,
            packed_frames=table[frames_at:frames_end],
            keys=keys,
            data_key=header.data_key,
            salt=header.salt,
            tenant=tenant,
        )


def _keys_in(
    table: bytes,
    lengths_at: int,
    header: _Header,
) -> PackedKeys:
    """Return the keys at the end of a table.

    :param lengths_at: offset of the lengths of the keys, which the keys follow.
    :raises CorruptPackError: the table is too short for its counts, or the keys have one length,
        and not as many bytes as this length and their number imply. Keys that differ in length are
        checked when they are unpacked.
    """
    key_length = header.key_length
    block_count = header.block_count
    # the table has a 16-bit length for each key, unless all keys have the same length
    lengths_bytes = 0 if key_length else 2 * block_count
    data_at = lengths_at + lengths_bytes
    if data_at > len(table):
        counts = f"{header.frame_count} frames and {block_count} blocks"
        raise CorruptPackError("counts", f"{counts} do not fit {len(table)} bytes")
    lengths = table[lengths_at:data_at]
    data = table[data_at:]
    if key_length and len(data) != key_length * block_count:
        raise CorruptPackError(
            "keys", f"{len(data)} bytes are not {block_count} keys of {key_length}"
        )
    return PackedKeys(data, key_length, lengths)


def with_trailer(table: bytes, magic: bytes = _MAGIC) -> bytes:
    """Return a table with its trailer: length, checksum and magic number."""
    checksum = xxhash.xxh3_64_intdigest(table)
    return table + _TRAILER.pack(len(table), checksum, magic)


def without_trailer(data: Buffer, magic: bytes = _MAGIC) -> bytes:
    """Return the table at the end of ``data``, verified against its trailer, without the trailer.

    :raises CorruptPackError: checksum or length does not match, or the magic number is another one.
    """
    view = memoryview(data)
    end = len(view) - TRAILER_BYTES
    if end < 0:
        raise CorruptPackError("trailer", f"{len(view)} bytes are too few for a pack")
    length, checksum, found = _TRAILER.unpack_from(view, end)
    if found != magic:
        raise CorruptPackError("magic", f"{found!r} instead of {magic!r}")
    if length > end:
        raise CorruptPackError("table length", f"{length} exceeds {len(view)} bytes")
    table = bytes(view[end - length : end])
    if xxhash.xxh3_64_intdigest(table) != checksum:
        raise CorruptPackError("table checksum", "does not match")
    return table


def is_whole(table: Buffer) -> bool:
    """Return whether the checksum in the trailer of an encoded table is right."""
    try:
        without_trailer(table)
    except CorruptPackError:
        return False
    return True


def _check_frames(table: PackTable) -> None:
    """Raise CorruptPackError unless the frames are valid, follow each other in the payload, and add
    up to the totals of the table."""
    end = 0
    num_blocks = 0
    raw_length = 0
    # read numbers instead of ``Frame`` objects, because a reader of a shared store parses millions
    # of frames
    frames = _FRAME.iter_unpack(table.packed_frames)
    for _, count, block_bytes, _, offset, stored, _ in frames:
        _check_lengths(count, block_bytes, stored, table.codec)
        if offset != end:
            raise CorruptPackError("frame offset", f"{offset} instead of {end}")
        end = align(offset + stored)  # padding follows the stored bytes
        num_blocks += count
        raw_length += count * block_bytes
    if num_blocks != len(table.keys):
        raise CorruptPackError(
            "block count",
            f"frames hold {num_blocks}, the table names {len(table.keys)}",
        )
    if raw_length != table.raw_length:
        raise CorruptPackError(
            "raw length",
            f"frames hold {raw_length}, the table says {table.raw_length}",
        )
    if end != table.payload_length:
        raise CorruptPackError(
            "payload length",
            f"frames end at {end}, the table says {table.payload_length}",
        )


def _check_lengths(
    count: int,
    block_bytes: int,
    stored: int,
    codec: str,
) -> None:
    """Raise CorruptPackError if the lengths of a frame of ``count`` blocks are impossible."""
    raw = count * block_bytes
    # a single block may be larger than the maximum of a frame
    is_too_long = raw > FRAME_BYTES and count > 1
    if not raw or is_too_long:
        raise CorruptPackError("frame length", f"{count} blocks of {block_bytes} bytes")
    # a frame is decoded into memory of its raw length, which a damaged table must not make huge
    if block_bytes > MAX_BLOCK_BYTES:
        raise CorruptPackError(
            "block length",
            f"{block_bytes} bytes; at most {MAX_BLOCK_BYTES} are possible",
        )
    # equal lengths mean that the frame is raw; a pack whose codec is raw has no other frames
    is_encoded = stored < raw
    if stored > raw or (is_encoded and codec == RawCodec.name):
        raise CorruptPackError(
            "frame length", f"{stored} stored bytes for {raw} raw ones"
        )


def decode_frame(
    codec: str,
    frame: Frame,
    stored: Buffer,
    out: memoryview,
) -> None:
    """Decode a frame's verified bytes into ``out``, of ``frame.raw_length`` bytes: one block after
    the other.

    :raises CorruptPackError: the bytes do not decode to that length, or this release does not know
        the codec. The content of ``out`` is then undefined.
    """
    decoder = stored_codec(codec) if frame.encoded else RawCodec()
    decoder.decode_into(stored, out)
