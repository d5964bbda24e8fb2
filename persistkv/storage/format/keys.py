"""Keys of a store: the user's key wraps random data keys, which seal the content.

1. The user's *store key* seals data keys only. To replace it, they are wrapped again, and no
   content is written.
2. A data key is 256 random bits, made once. One seals the records of the store itself, and one the
   packs of each tenant. Several engines may make one for the same purpose at once: all are kept,
   and each pack and record names its own.
3. All data keys of a store belong to one *keyring*. Its id stays when the store key is replaced.

The library ``cryptography`` is imported when a key is used: stores without one do not need it
(``StoreKey``).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping
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
DEFAULT_TENANT = "default"
_STORE_KEY = b"persistkv store key 1"
_WRAPPED = b"persistkv data key 1"
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
    """A data key as a store keeps it."""

    keyring: str
    id: bytes
    tenant: str
    store_key: str
    """``StoreKey.id`` of the key that unwraps it."""
    salt: bytes
    sealed: bytes
    """The secret, sealed with the store key under the fields above."""

    @property
    def _name(self) -> bytes:
        return msgspec.msgpack.encode((self.keyring, self.id, self.tenant))


class Keyring:
    """The data keys of a store. Immutable.

    :param id: 16 hexadecimal digits; part of the names in a shared store.
    :param keys: at least one for ``STORE``, and one for ``DEFAULT_TENANT``.
    """

    def __init__(self, id: str, keys: Iterable[DataKey]) -> None:
        self.id = id
        by_id = {key.id: key for key in keys}
        self.keys: Mapping[bytes, DataKey] = by_id
        """By id."""
        self.store = self._first(STORE)
        """Key that seals new records."""
        self.default = self._first(DEFAULT_TENANT)
        """Key that seals new packs."""

    def _first(self, tenant: str) -> DataKey:
        """Return the data key with the smallest id of several for one tenant."""
        found = [key for key in self.keys.values() if key.tenant == tenant]
        if not found:
            raise CorruptPackError("keys", f"there is none for {tenant or 'the store'}")
        return min(found)


class StoreKey:
    """The key that a user gives for a store.

    :param secret: at least 32 bytes with the randomness of 32; they may serve another purpose, too.
    :raises MissingExtraError: the library is not installed.
    """

    def __init__(self, secret: bytes) -> None:
        if find_spec("cryptography") is None:
            raise MissingExtraError("cryptography", "encryption")
        self._secret = hmac.digest(_STORE_KEY, secret, "sha256")
        self.id = hmac.digest(self._secret, b"id", "sha256").hex()[:16]
        """16 hexadecimal digits, which identify the key without revealing it."""

    def wrap(self, keyring: str, key: DataKey) -> WrappedKey:
        """Return a data key as a store keeps it."""
        salt = os.urandom(SALT_BYTES)
        wrapped = WrappedKey(keyring, key.id, key.tenant, self.id, salt, b"")
        sealed = seal_record(self._wrapping(salt), wrapped._name, key.secret)
        return msgspec.structs.replace(wrapped, sealed=sealed)

    def unwrap(self, wrapped: WrappedKey) -> DataKey:
        """Return a data key.

        :raises WrongKeyError: another store key wraps it.
        :raises CorruptPackError: it is damaged.
        """
        if wrapped.store_key != self.id:
            raise WrongKeyError(
                "key", f"{wrapped.store_key} unwraps it, and {self.id} was given"
            )
        key = self._wrapping(wrapped.salt)
        secret = open_record(key, wrapped._name, wrapped.sealed)
        return DataKey(wrapped.id, wrapped.tenant, secret)

    def new_keyring(self) -> Keyring:
        """Return a keyring of new data keys."""
        tenants = (STORE, DEFAULT_TENANT)
        return Keyring(self.id, [DataKey.new(tenant) for tenant in tenants])

    def wrap_all(self, keyring: Keyring) -> list[WrappedKey]:
        """Return all data keys as a store keeps them."""
        return [self.wrap(keyring.id, key) for key in keyring.keys.values()]

    def unwrap_all(self, wrapped: Iterable[WrappedKey]) -> Keyring:
        """Return the keyring of all data keys of a store.

        :raises WrongKeyError: another store key wraps one.
        :raises CorruptPackError: one is damaged or missing.
        """
        entries = list(wrapped)
        keyrings = {entry.keyring for entry in entries}
        if len(keyrings) != 1:
            raise CorruptPackError("keys", f"they belong to {len(keyrings)} keyrings")
        return Keyring(keyrings.pop(), map(self.unwrap, entries))

    def _wrapping(self, salt: bytes) -> bytes:
        return derive(self._secret, salt, _WRAPPED)


def encode_keys(keys: Iterable[WrappedKey]) -> bytes:
    """Encode wrapped keys."""
    return _MAGIC + msgspec.msgpack.encode(list(keys))


def decode_keys(data: Buffer) -> list[WrappedKey]:
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


_DECODER = msgspec.msgpack.Decoder(list[WrappedKey])


def derive(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes for one purpose: HKDF-SHA256 (RFC 5869) of a secret."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, purpose + b"\1", "sha256")


def gcm(key: bytes, nonce: bytes, tag: bytes | None = None) -> Cipher[Any]:
    """Return AES-256-GCM for one message in several pieces.

    :param tag: of the message, to decrypt it.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(nonce, tag))


def seal_record(key: bytes, name: bytes, body: Buffer) -> bytes:
    """Encrypt a record with a key that seals nothing else; return it with its tag at the end.

    :param name: without it, the record does not open.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(_ZERO_NONCE, body, name)


def open_record(key: bytes, name: bytes, record: Buffer) -> bytes:
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
