"""Keys of a shared store: which of its data keys this handle knows.

1. Each wrapped data key is a blob of its own, ``keyrings/<store key>/<data key>``. Blobs only
   appear, so several engines may create a store at once: each uses the data keys of all.
2. The content of a keyring is under its id. The id is that of the store key that made it, so these
   engines agree on it; a rotation does not change it.
3. A rotation writes the blobs for the new store key first, then a blob ``replaced`` for the old
   one, then deletes those of the old one. A handle that is open keeps its keys.
4. No data key is made where content is whose keys are missing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from persistkv.errors import ConfigurationError, CorruptPackError, CorruptStoreError
from persistkv.storage.blobs import BlobMissingError, UnavailableError
from persistkv.storage.format.keys import (
    DEFAULT_TENANT,
    STORE,
    DataKey,
    Keyring,
    StoreKey,
    WrappedKey,
    decode_keys,
    encode_keys,
)
from persistkv.storage.format.seal import PLAIN, KeySeal, Seal
from persistkv.storage.shared.format import MAX_SMALL_BYTES, PLAIN_NAME, StoreNames

if TYPE_CHECKING:
    from persistkv.storage.shared.calls import Medium

KEYRINGS = "keyrings/"
_REPLACED = "replaced"
_RELOAD_S = 60.0  # between two searches for an unknown key: junk may name any


class StoreKeys:
    """The data keys of a shared store, as one handle knows them. Thread-safe.

    :param key: the user's; None: the store has none.
    """

    def __init__(self, medium: Medium, key: StoreKey | None) -> None:
        self._medium = medium
        self._key = key
        self._keyring: Keyring | None = None
        self._lock = medium.clock.lock()
        self._reloaded_at = -math.inf
        self.seal: Seal = PLAIN
        """Seals what the handle writes, and opens what it reads; before ``open``, it raises."""
        if key is not None:
            self.seal = KeySeal(self._known, self._reload)

    @property
    def key_id(self) -> str:
        """Id of the user's key; empty without one."""
        return "" if self._key is None else self._key.id

    @property
    def keyring_id(self) -> str:
        """Id of the keyring, part of all names; ``PLAIN_NAME`` without a key.

        :raises UnavailableError: the medium has not answered yet.
        """
        return PLAIN_NAME if self._key is None else self._known().id

    def open(self, *, creates: bool) -> bool:
        """Read the data keys, unless they are known; return whether there are any.

        :param creates: make them if there are none.
        :raises ConfigurationError: another key has replaced this one.
        :raises CorruptStoreError: content is there whose keys are missing, or a key is damaged.
        :raises StoreError: the medium failed.
        """
        if self._key is None or self._keyring is not None:
            return True
        with self._lock:
            keys = self._read(self._key)
            lacking = {STORE, DEFAULT_TENANT} - {key.tenant for key in keys}
            if lacking and creates:
                self._create(self._key, keys, sorted(lacking))
                keys = self._read(self._key)
            elif lacking:
                return False
            self._keyring = self._unwrapped(self._key, keys)
            return True

    def write_again(self) -> None:
        """Write the data keys that this handle knows: the store was deleted.

        :raises StoreError: the medium failed.
        """
        if self._key is not None:
            for wrapped in self._key.wrap_all(self._known()):
                self._put(wrapped)

    def rotate(self, key: StoreKey) -> None:
        """Wrap all data keys with another key of the user, from which on only that one opens the
        store. Handles that are open stay open.

        If this call fails or is killed, one of the two keys opens the store, and it can be
        repeated.

        :raises ConfigurationError: the store has no key, or the other key has content of its own.
        :raises StoreError: the medium failed.
        """
        if self._key is None:
            raise ConfigurationError("store", "a store without a key", "one with a key")
        keyring = self._known()
        there = self._wrapped(key)
        if any(entry.keyring != keyring.id for entry in there):
            raise ConfigurationError("new key", key.id, "a key without content")
        for data_key in keyring.keys.values():
            self._put(key.wrap(keyring.id, data_key))
        # again: engines that created the store may have made keys since
        for wrapped in self._wrapped(self._key):
            if wrapped.id not in keyring.keys:
                self._put(key.wrap(keyring.id, self._key.unwrap(wrapped)))
        self._medium.blobs.delete([_blob(key.id, _REPLACED)])
        self._medium.put(_blob(self._key.id, _REPLACED), [key.id.encode()])
        infos = self._medium.listed(_blob(self._key.id, ""))
        marker = _blob(self._key.id, _REPLACED)
        self._medium.blobs.delete([info.name for info in infos if info.name != marker])

    def _known(self) -> Keyring:
        if self._keyring is None:
            raise UnavailableError("the keys of the store are not read yet")
        return self._keyring

    def _reload(self) -> Keyring:
        """Read the data keys again, at most once a minute."""
        known = self._known()
        with self._lock:
            now = self._medium.clock.monotonic()
            if self._key is None or now < self._reloaded_at + _RELOAD_S:
                return known
            self._reloaded_at = now
            keys = self._wrapped(self._key)
            # after a rotation, no other data key is made
            if keys:
                self._keyring = self._unwrapped(self._key, keys)
            return self._known()

    def _read(self, key: StoreKey) -> list[WrappedKey]:
        """Return the data keys that are wrapped with a key.

        :raises ConfigurationError: another key has replaced it.
        """
        try:
            marker = self._medium.whole(_blob(key.id, _REPLACED), MAX_SMALL_BYTES)
        except BlobMissingError:
            return self._wrapped(key)
        other = bytes(marker).decode("ascii", "replace")
        raise ConfigurationError(
            "key", key.id, f"the key {other}, which has replaced it (rotate-key)"
        )

    def _wrapped(self, key: StoreKey) -> list[WrappedKey]:
        found: list[WrappedKey] = []
        for info in self._medium.listed(_blob(key.id, "")):
            if info.name.endswith(_REPLACED):
                continue
            try:
                found += decode_keys(self._medium.whole(info.name, MAX_SMALL_BYTES))
            except BlobMissingError:
                continue
            except CorruptPackError as error:
                raise CorruptStoreError(f"{info.name}: {error}") from None
        return found

    def _unwrapped(self, key: StoreKey, wrapped: list[WrappedKey]) -> Keyring:
        try:
            return key.unwrap_all(wrapped)
        except CorruptPackError as error:
            raise CorruptStoreError(f"the keys of the store: {error}") from None

    def _create(
        self, key: StoreKey, there: list[WrappedKey], tenants: list[str]
    ) -> None:
        """Make the data keys that a store lacks.

        :param there: those that it has.
        """
        names = StoreNames(key.id)
        if not there and self._medium.exists(names.policy):
            raise CorruptStoreError(
                f"there is content of the key {key.id}, but no data keys in "
                f"{_blob(key.id, '')}: without these blobs, nothing can read it"
            )
        keyring = there[0].keyring if there else key.id
        for tenant in tenants:
            self._put(key.wrap(keyring, DataKey.new(tenant)))

    def _put(self, wrapped: WrappedKey) -> None:
        name = _blob(wrapped.store_key, wrapped.id.hex())
        self._medium.put(name, [encode_keys([wrapped])])


def _blob(store_key: str, name: str) -> str:
    return f"{KEYRINGS}{store_key}/{name}"
