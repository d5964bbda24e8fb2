"""Keys of a store: the user's key wraps random data keys, which seal the content.

1. The user's *store key* seals the data key of the store only. To replace the store key, the data
   key is wrapped again, and no content is written.
2. A data key is 256 random bits, made once. The data key of the store seals the store's records and
   the data keys of the tenants. The data key of a tenant seals the packs of this tenant. If several
   engines make a key for the same purpose at once, all of these keys are kept, and each pack and
   record names its own.
3. All data keys of a store belong to one *keyring*. Its id stays when the store key is replaced.
4. A process that has a store open reads and makes keys of tenants also after the store key was
   replaced, because it needs only the data key of the store.

The library ``cryptography`` is imported when a key is used: stores without one do not need it
(``StoreKey``).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from persistkv.errors import CorruptPackError, MissingExtraError
from persistkv.storage.format.codec import Buffer

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher

KEY_ID_BYTES = 8
SALT_BYTES = 16
TAG_BYTES = 16
SECRET_BYTES = 32
STORE = ""
"""``DataKey.tenant`` of the key that seals the store's own records."""
# purposes of derived keys: a key of one purpose reveals nothing about the keys of other purposes
_STORE_KEY = b"persistkv store key 1"
_WRAPPED = b"persistkv data key 1"
_NAMES = b"persistkv names 1"
# the nonce may be constant, because each derived key seals one record only
_ZERO_NONCE = bytes(12)
_MAGIC = b"PKVKEYS1"


class WrongKeyError(CorruptPackError):
    """A data key was wrapped with another store key."""


class DataKey(NamedTuple):
    """A key that seals content."""

    id: bytes
    """8 random bytes."""
    tenant: str
    """Whose packs it seals; ``STORE``: the records of the store."""
    secret: bytes
    """32 random bytes."""

    @classmethod
    def new(cls, tenant: str) -> DataKey:
        return cls(os.urandom(KEY_ID_BYTES), tenant, os.urandom(SECRET_BYTES))


class WrappedKey(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """The data key of a store, wrapped with the user's key."""

    keyring: str
    """``Keyring.id``."""
    id: bytes
    """``DataKey.id``."""
    store_key: str
    """``StoreKey.id`` of the key that unwraps it."""
    salt: bytes
    """16 random bytes, from which the wrapping key is derived."""
    sealed: bytes
    """The secret, sealed with the store key under keyring and id."""


class TenantKey(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """The data key of a tenant, sealed with that of the store."""

    id: bytes
    """``DataKey.id``."""
    sealed: bytes
    """The key as a sealed record (``KeySeal.sealed_key``)."""


class StoredKeys(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """The data keys of a store, as a file or blob holds them."""

    wrapped: tuple[WrappedKey, ...] = ()
    """Data keys of the store itself."""
    tenants: tuple[TenantKey, ...] = ()
    """Data keys of tenants."""


class Keyring:
    """The data keys of a store. Immutable.

    :param id: 16 hexadecimal digits; part of the names in a shared store.
    :param keys: at least one for ``STORE``.
    """

    def __init__(self, id: str, keys: Iterable[DataKey]) -> None:
        self.id = id
        by_id = {key.id: key for key in keys}
        self.keys: Mapping[bytes, DataKey] = by_id
        """The data keys by id."""
        self._sealing: dict[str, DataKey] = {}
        """The key that seals new content of each tenant: of several keys, the one with the smallest
        id, so that all engines choose the same."""
        for key_id in sorted(by_id):
            key = by_id[key_id]
            self._sealing.setdefault(key.tenant, key)
        store_key = self.of(STORE)
        if store_key is None:
            raise CorruptPackError("keys", "there is none for the store")
        self.store = store_key
        """Key that seals new records of the store."""

    @cached_property
    def names_secret(self) -> bytes:
        """Secret of the digests that replace tenants' names in a catalogue."""
        return derive(self.store.secret, b"", _NAMES)

    def of(self, tenant: str) -> DataKey | None:
        """Return the key that seals new packs of a tenant; None: none is known."""
        return self._sealing.get(tenant)

    def of_store(self) -> list[DataKey]:
        """Return the data keys of the store."""
        return [key for key in self.keys.values() if key.tenant == STORE]

    def of_tenants(self) -> list[DataKey]:
        """Return the data keys of tenants."""
        return [key for key in self.keys.values() if key.tenant != STORE]

    def extended(self, keys: Iterable[DataKey]) -> Keyring:
        """Return a keyring with more data keys."""
        every = [*self.keys.values(), *keys]
        return Keyring(self.id, every)

    def without(self, key_ids: Collection[bytes]) -> Keyring:
        """Return a keyring without these data keys."""
        kept = [key for key in self.keys.values() if key.id not in key_ids]
        return Keyring(self.id, kept)

    def lacking(self, tenants: Iterable[str]) -> list[str]:
        """Return those of these tenants of which no key is known, each once, in order."""
        return [name for name in dict.fromkeys(tenants) if name not in self._sealing]


class StoreKey:
    """The key that a user gives for a store.

    :param secret: at least 32 bytes with the randomness of 32; they may serve another purpose, too.
    :raises MissingExtraError: the library is not installed.
    """

    def __init__(self, secret: bytes) -> None:
        if find_spec("cryptography") is None:
            raise MissingExtraError("cryptography", "encryption")
        # derive a key from the secret, because the user may use the secret for other purposes, too
        self._secret = hmac.digest(_STORE_KEY, secret, "sha256")
        key_id = hmac.digest(self._secret, b"id", "sha256")
        self.id = key_id.hex()[:16]
        """16 hexadecimal digits, which identify the key without revealing it."""

    def wrap(self, keyring: str, key: DataKey) -> WrappedKey:
        """Return a data key of a store in the form in which the store keeps it."""
        salt = os.urandom(SALT_BYTES)
        name = _wrapped_name(keyring, key.id)
        sealed = seal_record(self._wrapping_key(salt), name, key.secret)
        return WrappedKey(keyring, key.id, self.id, salt, sealed)

    def _unwrap(self, wrapped: WrappedKey) -> DataKey:
        """Return a data key of the store itself, not of a tenant.

        :raises WrongKeyError: another store key wraps it.
        :raises CorruptPackError: it is damaged.
        """
        if wrapped.store_key != self.id:
            raise WrongKeyError(
                "key", f"{wrapped.store_key} unwraps it, and {self.id} was given"
            )
        name = _wrapped_name(wrapped.keyring, wrapped.id)
        wrapping_key = self._wrapping_key(wrapped.salt)
        secret = open_record(wrapping_key, name, wrapped.sealed)
        return DataKey(wrapped.id, tenant=STORE, secret=secret)

    def new_keyring(self) -> Keyring:
        """Return a new keyring, with a data key for the store. The keyring's id is that of this
        store key, and stays when the store key is replaced."""
        return Keyring(self.id, [DataKey.new(STORE)])

    def unwrap_all(self, wrapped: Iterable[WrappedKey]) -> Keyring:
        """Return the keyring of a store, without the keys of tenants.

        :raises WrongKeyError: another store key wraps one.
        :raises CorruptPackError: one is damaged or missing.
        """
        entries = list(wrapped)
        keyrings = {entry.keyring for entry in entries}
        # this also refuses an empty list, which names no keyring
        if len(keyrings) != 1:
            raise CorruptPackError("keys", f"they belong to {len(keyrings)} keyrings")
        data_keys = map(self._unwrap, entries)
        return Keyring(keyrings.pop(), data_keys)

    def _wrapping_key(self, salt: bytes) -> bytes:
        return derive(self._secret, salt, _WRAPPED)


def _wrapped_name(keyring: str, key_id: bytes) -> bytes:
    """Return the name under which the user's key seals the data key of a store."""
    return msgspec.msgpack.encode((keyring, key_id))


def encode_keys(keys: StoredKeys) -> bytes:
    """Encode keys for storage."""
    return _MAGIC + msgspec.msgpack.encode(keys)


def decode_keys(data: Buffer) -> StoredKeys:
    """Decode what ``encode_keys`` returned.

    :raises CorruptPackError: it is damaged.
    """
    content = bytes(data)
    if not content.startswith(_MAGIC):
        raise CorruptPackError("keys", "they are something else")
    try:
        return _DECODER.decode(content[len(_MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPackError("keys", str(error)) from None


_DECODER = msgspec.msgpack.Decoder(StoredKeys)


def derive(
    secret: bytes,
    salt: bytes,
    purpose: bytes,
) -> bytes:
    """Return a key of 32 bytes for one purpose: HKDF-SHA256 (RFC 5869) of a secret."""
    # extract, then expand to one block of output, whose number is 1
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, purpose + b"\1", "sha256")


def gcm(
    key: bytes,
    nonce: bytes,
    tag: bytes | None = None,
) -> Cipher[Any]:
    """Return AES-256-GCM for one message in several pieces.

    :param tag: tag of the message to decrypt; None: a message is encrypted.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(nonce, tag))


def seal_record(
    key: bytes,
    name: bytes,
    body: Buffer,
) -> bytes:
    """Encrypt a record with a key that seals nothing else; return it with its tag at the end.

    :param name: without it, the record does not open.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(_ZERO_NONCE, body, name)


def open_record(
    key: bytes,
    name: bytes,
    record: Buffer,
) -> bytes:
    """Return the body of a record that ``seal_record`` returned.

    :raises CorruptPackError: it is damaged, or was sealed with another key or name.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(_ZERO_NONCE, record, name)
    except InvalidTag:
        raise CorruptPackError(
            "record", "it was not written with the key, or it is damaged"
        ) from None
