"""Seals of packs and records: a checksum, or encryption and authentication with keys.

A *plain* seal is an xxh3-128 checksum: it finds damage, and hides nothing. A *key's* seal is
AES-256-GCM. docs/format.md specifies both, docs/security.md their protection.

1. No pair of AES key and nonce is ever used twice. Each stream of a pack, and each record, draws
   128 random bits, the *salt*, from which its AES key is derived (HKDF-SHA256); the nonce is the
   number of the frame, or 0. No process has to remember a counter, so kills, forks and restored
   machines repeat nothing.
2. A frame opens only with the keys, lengths, depth and place in its pack that it was sealed with,
   and only in its namespace and pack.
3. A record opens only under the name that it was sealed with.
4. Frames are encrypted after the codec, and stay as long as they were: their tags are in the pack's
   table.
"""

from __future__ import annotations

import hmac
import os
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import xxhash

from persistkv.errors import CorruptPackError
from persistkv.memory.pages import huge_memory
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.keys import (
    KEY_ID_BYTES,
    SALT_BYTES,
    SECRET_BYTES,
    STORE,
    TAG_BYTES,
    DataKey,
    Keyring,
    derive,
    gcm,
    open_record,
    seal_record,
)
from persistkv.storage.format.pack import (
    FRAME_BYTES,
    ID_BYTES,
    NO_SALT,
    PLAIN_KEY,
    SEALED_TABLE,
    TRAILER_BYTES,
    Frame,
    PackedKeys,
    PackTable,
    PlacedFrame,
    pack_id,
    with_trailer,
    without_trailer,
)
from persistkv.tenants import DEFAULT_TENANT

# number of the frame in its pack, followed by zeros up to the 12 bytes of a nonce
_NONCE = struct.Struct("<Q4x")
# group, number of blocks, bytes of a block, depth, stored and raw length of a frame
_PLACE = struct.Struct("<IIIIQQ")
# start of a record and of a signature: id of the data key, salt
_RECORD = struct.Struct(f"<{KEY_ID_BYTES}s{SALT_BYTES}s")
RECORD_BYTES = _RECORD.size + TAG_BYTES
"""Bytes by which a key's seal makes a record longer."""
_CHECKSUM_BYTES = 16
# maximum number of buffers of 1 MiB that are kept: enough for the frames of a pack, and for as many
# frames that wait to be written
_MOST_FREE = 32
# purposes of derived keys: a key of one purpose reveals nothing about the keys of other purposes
_PACK_PURPOSE = b"persistkv pack 1"
_RECORD_PURPOSE = b"persistkv record 1"
_RECEIPT_PURPOSE = b"persistkv receipt 1"
_TABLE = b"table"  # name of each record that holds the table of a pack
_KEY = b"data key "  # start of the names of records that hold the data keys of tenants


class FrameSeal(ABC):
    """Seals the frames of one pack, or opens them. Thread-safe."""

    encrypts: ClassVar[bool]
    """Whether ``seal`` makes new bytes."""
    key_id: bytes
    """``PackTable.data_key``."""
    salt: bytes
    """``PackTable.salt``."""

    @abstractmethod
    def seal(
        self,
        placed: PlacedFrame,
        pieces: Sequence[Buffer],
    ) -> tuple[Sequence[Buffer], bytes]:
        """Return the bytes of a frame as stored, and its tag.

        :param placed: the frame; its offset and tag are ignored.
        :param pieces: its bytes, encoded or raw, in order. They are not changed.
        """

    @abstractmethod
    def open(self, placed: PlacedFrame, pieces: Sequence[memoryview]) -> None:
        """Verify a frame, and decrypt its stored bytes in place.

        :param pieces: the stored bytes, in order: writable memory, which then holds the bytes that
            ``seal`` was called with.
        :raises CorruptPackError: they are not what ``seal`` returned for this place. The content of
            the memory is then undefined.
        """


class Seal(ABC):
    """How a store seals packs and records. Thread-safe."""

    encrypts: ClassVar[bool]
    """Whether packs and records that it has sealed can be read only with a key."""

    @property
    @abstractmethod
    def keyring_id(self) -> str:
        """Id of the keyring that it seals with; empty: no key.

        :raises StoreError: the keys of the store are not known yet.
        """

    @property
    @abstractmethod
    def names_secret(self) -> bytes:
        """Secret of the digests that replace tenants' names in a catalogue; empty: no key."""

    @abstractmethod
    def lacking(self, tenants: Iterable[str]) -> list[str]:
        """Return those of these tenants for which the store has to make a data key before
        ``new_pack``."""

    @abstractmethod
    def new_pack_id(
        self,
        namespace: bytes,
        keys: PackedKeys,
        codec: str,
        tenant: str,
    ) -> bytes:
        """Return the id of a new pack, 16 bytes."""

    @abstractmethod
    def is_id_of(self, table: PackTable) -> bool:
        """Return whether a table has an id that ``new_pack_id`` may have returned for it."""

    @abstractmethod
    def new_pack(self, namespace: bytes, tenant: str = DEFAULT_TENANT) -> FrameSeal:
        """Return the seal of a new pack's frames; each call returns one of its own.

        :raises CorruptPackError: the tenant has no data key.
        """

    @abstractmethod
    def of_pack(self, table: PackTable) -> FrameSeal:
        """Return the seal of a stored pack's frames.

        :raises CorruptPackError: the pack was sealed without a key, or with one that is not known.
        """

    @abstractmethod
    def sealed(
        self,
        name: bytes,
        body: Buffer,
        tenant: str = STORE,
    ) -> bytes:
        """Return a sealed record.

        :param name: names kind and place of the record, which opens only under the same name.
        :param tenant: whose data key seals it, so that it can be forgotten with the tenant.
        :raises CorruptPackError: the tenant has no data key.
        """

    @abstractmethod
    def sealed_with(
        self,
        key_id: bytes,
        name: bytes,
        body: Buffer,
    ) -> bytes:
        """Return what ``sealed`` returns, for one data key of the store.

        :raises CorruptPackError: there is no such key.
        """

    @abstractmethod
    def opened(self, name: bytes, record: Buffer) -> bytes:
        """Return the body of a sealed record.

        :raises CorruptPackError: it is damaged, was sealed under another name or with another key.
        """

    @abstractmethod
    def signature(self, content: bytes) -> bytes:
        """Return a signature of the store under a document; empty: it has no key."""

    @abstractmethod
    def is_signature(self, content: bytes, signature: bytes) -> bool:
        """Return whether ``signature`` has returned this for a document; False without a key."""

    @abstractmethod
    def encode_table(self, table: PackTable) -> bytes:
        """Return the table of a pack as stored behind its payload, with the trailer at its end."""

    @abstractmethod
    def decode_table(self, stored: Buffer) -> PackTable:
        """Return the table that ends ``stored``.

        :raises CorruptPackError: it is damaged, or was sealed with another key.
        """

    @abstractmethod
    def stored_bytes(self, length: int) -> int:
        """Return the bytes of ``encode_table`` for an encoded table of ``length`` bytes."""


class _PlainFrames(FrameSeal):
    """Checksums of the frames of a pack without a key; the frames themselves stay unchanged."""

    encrypts = False
    key_id = PLAIN_KEY
    salt = NO_SALT

    def __init__(self, namespace: bytes) -> None:
        self._namespace = namespace

    def seal(
        self,
        placed: PlacedFrame,
        pieces: Sequence[Buffer],
    ) -> tuple[Sequence[Buffer], bytes]:
        return pieces, self._checksum(placed.keys, pieces)

    def open(self, placed: PlacedFrame, pieces: Sequence[memoryview]) -> None:
        frame = placed.frame
        if sum(map(len, pieces)) != frame.stored_length:
            raise _wrong_frame(frame)
        if self._checksum(placed.keys, pieces) != frame.tag:
            raise _wrong_frame(frame)

    def _checksum(
        self,
        keys: Iterable[bytes],
        pieces: Iterable[Buffer],
    ) -> bytes:
        """Return the checksum of a frame's bytes. Its seed is a checksum of namespace and keys, so
        the bytes do not verify at the place of another frame."""
        # Pass the checksum of the keys as a seed: to hash it in front of the bytes would take a
        # copy, or one more call.
        namespace_seed = int.from_bytes(self._namespace[:8], "little")
        joined_keys = b"".join(keys)
        seed = xxhash.xxh3_64_intdigest(joined_keys, seed=namespace_seed)
        digest = xxhash.xxh3_128(seed=seed)
        for piece in pieces:
            digest.update(piece)
        return digest.digest()


class PlainSeal(Seal):
    """Seal of a store without a key. Use ``PLAIN``."""

    encrypts = False
    keyring_id = ""
    names_secret = b""

    def lacking(self, tenants: Iterable[str]) -> list[str]:
        return []

    def new_pack_id(
        self,
        namespace: bytes,
        keys: PackedKeys,
        codec: str,
        tenant: str,
    ) -> bytes:
        """Return the digest of namespace, keys, codec and tenant: engines that store the same
        blocks at once store one pack."""
        return pack_id(namespace, keys, codec, tenant)

    def is_id_of(self, table: PackTable) -> bool:
        expected = pack_id(table.namespace, table.keys, table.codec, table.tenant)
        return table.pack_id == expected

    def new_pack(self, namespace: bytes, tenant: str = DEFAULT_TENANT) -> FrameSeal:
        return _PlainFrames(namespace)

    def of_pack(self, table: PackTable) -> FrameSeal:
        if table.data_key != PLAIN_KEY:
            raise CorruptPackError(
                "key", f"the pack is sealed with the key {table.data_key.hex()}"
            )
        return _PlainFrames(table.namespace)

    def sealed(
        self,
        name: bytes,
        body: Buffer,
        tenant: str = STORE,
    ) -> bytes:
        checksum = _record_checksum(name, body)
        return b"".join([body, checksum])

    def sealed_with(
        self,
        key_id: bytes,
        name: bytes,
        body: Buffer,
    ) -> bytes:
        return self.sealed(name, body)

    def opened(self, name: bytes, record: Buffer) -> bytes:
        content = memoryview(record)
        # a record shorter than a checksum has an empty body, and fails the comparison
        end = max(0, len(content) - _CHECKSUM_BYTES)
        body = content[:end]
        if content[end:] != _record_checksum(name, body):
            raise CorruptPackError("record", "its checksum does not match")
        return bytes(body)

    def signature(self, content: bytes) -> bytes:
        return b""

    def is_signature(self, content: bytes, signature: bytes) -> bool:
        return False

    def encode_table(self, table: PackTable) -> bytes:
        return table.encode()

    def decode_table(self, stored: Buffer) -> PackTable:
        return PackTable.parse(stored)

    def stored_bytes(self, length: int) -> int:
        # the seal adds nothing, because an encoded table has a checksum of its own
        return length


PLAIN = PlainSeal()


class _Buffers:
    """Page-aligned memory for sealed frames, which is written past the page cache without a copy.

    Buffers without a reference are lent again: new memory would cost more than the
    encryption (10.5 instead of 4.6 ms of CPU per 32 MiB). Thread-safe.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        """Buffers of ``FRAME_BYTES`` that no view is left of; at most ``_MOST_FREE``."""

    def take(self, length: int) -> memoryview:
        """Return memory of ``length`` bytes with any content. It is lent again when no view of it
        exists."""
        import numpy as np  # tools that seal nothing do not need numpy

        # only a frame of one large block is so long: it is rare, so its memory is not kept
        if length > FRAME_BYTES:
            return memoryview(huge_memory(length))[:length]
        try:
            memory = self._free.pop()
        except IndexError:
            # allocate two at once, because a huge page (2 MiB) holds two buffers
            pair = memoryview(huge_memory(2 * FRAME_BYTES))
            memory = pair[:FRAME_BYTES]
            self._give(pair[FRAME_BYTES:])
        # All views of ``lent.data``, and their slices, keep this array alive. When the last one is
        # gone, the array is finalized, which gives its memory back.
        lent = np.frombuffer(memory, np.uint8)
        finalizer = weakref.finalize(lent, self._give, memory)
        finalizer.atexit = False  # a process that exits needs no buffers
        return lent.data[:length]

    def _give(self, memory: memoryview) -> None:
        """Keep a buffer for the next ``take``, unless enough are kept: then it is freed."""
        if len(self._free) < _MOST_FREE:
            self._free.append(memory)


class _KeyFrames(FrameSeal):
    """Seal of the frames of a pack with a key.

    :param key: data key.
    :param buffers: memory for sealed frames.
    """

    encrypts = True

    def __init__(
        self,
        key: DataKey,
        salt: bytes,
        namespace: bytes,
        buffers: _Buffers,
    ) -> None:
        self.key_id = key.id
        self.salt = salt
        self._namespace = namespace
        self._buffers = buffers
        # use one AES key for all frames, with a nonce for each: deriving one for each frame would
        # cost as much as the encryption of 20 KiB
        self._key = derive(key.secret, salt, _PACK_PURPOSE)

    def seal(
        self,
        placed: PlacedFrame,
        pieces: Sequence[Buffer],
    ) -> tuple[Sequence[Buffer], bytes]:
        # encrypt to other memory, because ``pieces`` may be rows, which the engine still uses
        stored = self._buffers.take(placed.frame.stored_length)
        nonce = _NONCE.pack(placed.number)
        encryptor = gcm(self._key, nonce).encryptor()
        encryptor.authenticate_additional_data(self._associated(placed))
        start = 0
        # encrypt piece by piece: gathering the blocks first would be another copy
        for piece in pieces:
            start += encryptor.update_into(piece, stored[start:])
        encryptor.finalize()
        return [stored], encryptor.tag

    def open(self, placed: PlacedFrame, pieces: Sequence[memoryview]) -> None:
        """See ``FrameSeal.open``. The memory holds unverified bytes until this returns."""
        from cryptography.exceptions import InvalidTag

        frame = placed.frame
        if sum(map(len, pieces)) != frame.stored_length:
            raise _wrong_frame(frame)
        nonce = _NONCE.pack(placed.number)
        decryptor = gcm(self._key, nonce, frame.tag).decryptor()
        decryptor.authenticate_additional_data(self._associated(placed))
        # decrypt before the tag is verified: the caller uses the memory only if this call returns
        for piece in pieces:
            decryptor.update_into(piece, piece)
        try:
            decryptor.finalize()
        except InvalidTag:
            raise _wrong_frame(frame) from None

    def _associated(self, placed: PlacedFrame) -> bytes:
        """Return the data that the tag of a frame authenticates in addition to its bytes:
        namespace, fields and keys. The frame opens only with the same data."""
        frame = placed.frame
        fields = _PLACE.pack(
            frame.group,
            frame.block_count,
            frame.block_bytes,
            frame.depth,
            frame.stored_length,
            frame.raw_length,
        )
        parts = [self._namespace, fields]
        for key in placed.keys:
            # include the length, so that no byte can move from one key to the next
            key_length = len(key).to_bytes(2, "little")
            parts.append(key_length)
            parts.append(key)
        return b"".join(parts)


class KeySeal(Seal):
    """Seal of a store with a key. The function ``keyring`` returns the known data keys, and
    ``reload`` those that are known after it has read new ones from the store.

    :param reload: its parameter is the id of the wanted data key; empty: any new one. Called
        without a lock. None: no key is read again.
    """

    encrypts = True

    def __init__(
        self,
        keyring: Callable[[], Keyring],
        reload: Callable[[bytes], Keyring] | None = None,
    ) -> None:
        self._keyring = keyring
        self._reload = reload or (lambda key_id: keyring())
        self._buffers = _Buffers()

    @property
    def keyring_id(self) -> str:
        return self._keyring().id

    @property
    def names_secret(self) -> bytes:
        return self._keyring().names_secret

    def lacking(self, tenants: Iterable[str]) -> list[str]:
        return self._keyring().lacking(tenants)

    def new_pack_id(
        self,
        namespace: bytes,
        keys: PackedKeys,
        codec: str,
        tenant: str,
    ) -> bytes:
        """Return random bytes: a digest of the keys would confirm a guess of the prompt."""
        return os.urandom(ID_BYTES)

    def is_id_of(self, table: PackTable) -> bool:
        # the record that contains a table is authenticated, and so is the id in it
        return True

    def new_pack(self, namespace: bytes, tenant: str = DEFAULT_TENANT) -> FrameSeal:
        key = self._key_of(tenant)
        salt = os.urandom(SALT_BYTES)
        return _KeyFrames(key, salt, namespace, self._buffers)

    def of_pack(self, table: PackTable) -> FrameSeal:
        key = self._key(table.data_key)
        return _KeyFrames(key, table.salt, table.namespace, self._buffers)

    def sealed(
        self,
        name: bytes,
        body: Buffer,
        tenant: str = STORE,
    ) -> bytes:
        return _sealed(self._key_of(tenant), name, body)

    def sealed_with(
        self,
        key_id: bytes,
        name: bytes,
        body: Buffer,
    ) -> bytes:
        return _sealed(self._key(key_id), name, body)

    def opened(self, name: bytes, record: Buffer) -> bytes:
        # the store may have written a short record before it had a key
        if len(record) < RECORD_BYTES:
            raise CorruptPackError("record", "it was not sealed with a key")
        key_id, salt = _RECORD.unpack_from(record)
        key = self._key(key_id)
        sealing_key = derive(key.secret, salt, _RECORD_PURPOSE)
        sealed = memoryview(record)[_RECORD.size :]
        return open_record(sealing_key, name, sealed)

    def signature(self, content: bytes) -> bytes:
        key = self._keyring().store
        salt = os.urandom(SALT_BYTES)
        mac = _mac(key, salt, content)
        return _RECORD.pack(key.id, salt) + mac

    def is_signature(self, content: bytes, signature: bytes) -> bool:
        """Return whether any data key of the store has signed the document: a signature names its
        key."""
        if len(signature) < _RECORD.size:
            return False
        key_id, salt = _RECORD.unpack_from(signature)
        try:
            key = self._key(key_id)
        except CorruptPackError:
            return False
        expected = _mac(key, salt, content)
        return hmac.compare_digest(expected, signature[_RECORD.size :])

    def encode_table(self, table: PackTable) -> bytes:
        record = self.sealed(_TABLE, table.encode(), table.tenant)
        return with_trailer(record, SEALED_TABLE)

    def decode_table(self, stored: Buffer) -> PackTable:
        record = without_trailer(stored, SEALED_TABLE)
        table = self.opened(_TABLE, record)
        return PackTable.parse(table)

    def stored_bytes(self, length: int) -> int:
        # the record has a trailer of its own, by which a rebuild finds the record before it opens
        # it
        return length + RECORD_BYTES + TRAILER_BYTES

    def sealed_key(self, key: DataKey) -> bytes:
        """Return the data key of a tenant as a record."""
        name = _KEY + key.id
        body = key.secret + key.tenant.encode()
        return self.sealed(name, body)

    def opened_key(self, key_id: bytes, record: Buffer) -> DataKey:
        """Return the data key of a tenant.

        :raises CorruptPackError: the record is not what ``sealed_key`` returned for it.
        """
        body = self.opened(_KEY + key_id, record)
        tenant = body[SECRET_BYTES:].decode()
        return DataKey(key_id, tenant, body[:SECRET_BYTES])

    def _key_of(self, tenant: str) -> DataKey:
        """Return the data key that seals new content of a tenant."""
        key = self._keyring().of(tenant)
        if key is not None:
            return key
        # Another process may have made the key since the keys were read. Its id is not known here,
        # so ask for any new key.
        any_new_key = b""
        key = self._reload(any_new_key).of(tenant)
        if key is None:
            raise CorruptPackError("key", "the tenant has none")
        return key

    def _key(self, key_id: bytes) -> DataKey:
        """Return the data key with this id, which a pack or record names."""
        key = self._keyring().keys.get(key_id)
        if key is not None:
            return key
        # Another engine may have made the key since the keys were read. Read the keys again once
        # only, because a damaged record may name a key that does not exist.
        key = self._reload(key_id).keys.get(key_id)
        if key is None:
            raise CorruptPackError("key", f"there is no key {key_id.hex()}")
        return key


def _mac(
    key: DataKey,
    salt: bytes,
    content: bytes,
) -> bytes:
    """Return the HMAC-SHA256 of a document in its signature."""
    mac_key = derive(key.secret, salt, _RECEIPT_PURPOSE)
    return hmac.digest(mac_key, content, "sha256")


def record_key(record: Buffer) -> bytes:
    """Return the id of the data key that a record of a store with a key names, unverified."""
    return bytes(record[:KEY_ID_BYTES])


def _sealed(
    key: DataKey,
    name: bytes,
    body: Buffer,
) -> bytes:
    """Return a record that a data key seals."""
    # use a new salt for each write: the nonce is constant, and a name may get another body
    salt = os.urandom(SALT_BYTES)
    sealing_key = derive(key.secret, salt, _RECORD_PURPOSE)
    sealed = seal_record(sealing_key, name, body)
    return _RECORD.pack(key.id, salt) + sealed


def _record_checksum(name: bytes, body: Buffer) -> bytes:
    """Return the checksum at the end of a record without a key."""
    # hash piece by piece, without a copy: an index of 10 million blocks is a record of 130 MB
    digest = xxhash.xxh3_128(name + b"\0")
    digest.update(body)
    return digest.digest()


def _wrong_frame(frame: Frame) -> CorruptPackError:
    return CorruptPackError("frame", f"does not verify at offset {frame.offset}")
