"""The file ``keys`` of a store with a key: its data keys, wrapped with the user's key.

1. The file is durable before the first content that they seal. A damaged catalogue is renamed
   without it, so ``rebuild`` can open the packs.
2. The catalogue names the keyring, whose id is random: two stores with one key of the user have
   different data keys. A store whose file is missing, or another one's, is refused: it is neither
   read nor written, and no keys are made for it.
3. Only holders of the writer lock write the file. Any process may add a tenant's data key: others
   read the file again when they meet one that they do not know.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    CorruptStoreError,
    StoreError,
)
from persistkv.storage.format.keys import (
    DataKey,
    Keyring,
    StoredKeys,
    StoreKey,
    TenantKey,
    WrongKeyError,
    decode_keys,
    encode_keys,
)
from persistkv.storage.format.seal import PLAIN, KeySeal, Seal
from persistkv_lmdb.files import (
    KEY_FILE,
    KEY_PART_FILE,
    open_regular,
    sync_directory,
)

_MOST_BYTES = 16 << 20  # 16 MiB
_ID_BYTES = 8  # of a keyring
_HINT = "key_file, key_env or key_command"


class KeyFile:
    """The data keys of the store in a directory.

    :param key: the user's; None: none was given.
    """

    def __init__(self, store: Path, key: StoreKey | None) -> None:
        self._store = store
        self._key = key
        self._path = store / KEY_FILE
        self._keyring: Keyring | None = None
        """The data keys of the open store; None: it has none, or is not open."""
        self._lock = threading.Lock()
        self._seal = KeySeal(self._known, self._reload)

    def prepare(self) -> str:
        """Return the id of the keyring for a new store, after making it, unless it is there; empty:
        the store gets no key.

        :raises ConfigurationError: data keys are there, and the user's key does not unwrap them.
        """
        there = self._read()
        if there.wrapped:
            return self._unwrapped(there).id
        if self._key is None:
            return ""
        data_keys = self._key.new_keyring().keys.values()
        keyring = Keyring(os.urandom(_ID_BYTES).hex(), data_keys)
        self._write(self._wrapped(self._key, keyring, ()))
        return keyring.id

    def known(self) -> str:
        """Return the id of the keyring of a store without a catalogue; empty: it has no key.

        :raises ConfigurationError: the user's key is missing, another one, or not for this store.
        """
        there = self._read()
        if there.wrapped:
            return self._unwrapped(there).id
        if self._key is not None:
            raise ConfigurationError(
                "key", self._key.id, f"no key: there is no {self._path}"
            )
        return ""

    def seal(self, keyring_id: str) -> Seal:
        """Return the seal of a store.

        :param keyring_id: that the catalogue names; empty: the store has no key.
        :raises ConfigurationError: the user's key is missing, another one, or not for this store.
        :raises CorruptStoreError: the file is missing, damaged, or that of another store.
        """
        if not keyring_id:
            if self._key is not None:
                raise ConfigurationError(
                    "key",
                    self._key.id,
                    f"no key: {self._store} was created without one, and stays so",
                )
            return PLAIN
        there = self._read()
        if not there.wrapped:
            raise CorruptStoreError(
                f"{self._path} is missing: nothing can read the store without it"
            )
        keyring = self._unwrapped(there)
        if keyring.id != keyring_id:
            raise CorruptStoreError(
                f"{self._path} is of the keyring {keyring.id}, and the store of {keyring_id}"
            )
        self._keyring = keyring
        self._add(there.tenants)
        return self._seal

    def make(self, tenants: Iterable[str]) -> None:
        """Make the data keys of these tenants, unless another process has made them. The caller
        holds the writer lock.

        :raises CorruptStoreError: the file is missing, damaged, or that of another store.
        :raises OSError: the file was not replaced.
        """
        there = self._read()
        # a key that is added to another file is lost when the store's own is put back
        if {key.keyring for key in there.wrapped} != {self._known().id}:
            raise CorruptStoreError(
                f"{self._path} is missing or of another store: packs of new tenants are dropped"
            )
        self._add(there.tenants)
        made = list(map(DataKey.new, self._known().lacking(tenants)))
        if not made:
            return
        added = [TenantKey(key.id, self._seal.sealed_key(key)) for key in made]
        self._write(StoredKeys(there.wrapped, (*there.tenants, *added)))
        self._add(added)

    def _known(self) -> Keyring:
        if self._keyring is None:
            raise StoreError(f"{self._store} is not open, or has no key")
        return self._keyring

    def _reload(self, key_id: bytes) -> Keyring:
        """Read the keys of tenants again."""
        self._add(self._read().tenants)
        return self._known()

    def _add(self, tenants: Iterable[TenantKey]) -> None:
        """Add the data keys of tenants that are not known."""
        with self._lock:
            known = self._known()
            new = [key for key in tenants if key.id not in known.keys]
            try:
                opened = [self._seal.opened_key(key.id, key.sealed) for key in new]
            except CorruptPackError as error:
                raise CorruptStoreError(f"{self._path} is damaged: {error}") from None
            self._keyring = known.extended(opened)

    def rotate(self, key: StoreKey) -> None:
        """Wrap the data key of the store with another key of the user. The caller holds the writer
        lock.

        :raises ConfigurationError: the store has no key; its key is the other one already, or is
            not the user's.
        :raises OSError: the file was not replaced.
        """
        there = self._read()
        if not there.wrapped:
            raise ConfigurationError("store", str(self._store), "a store with a key")
        keyring = self._unwrapped(there)
        if key.id == there.wrapped[0].store_key:
            raise ConfigurationError(
                "new key", key.id, "another key than the present one"
            )
        self._write(self._wrapped(key, keyring, there.tenants))

    def _wrapped(
        self, key: StoreKey, keyring: Keyring, tenants: tuple[TenantKey, ...]
    ) -> StoredKeys:
        return StoredKeys((key.wrap(keyring.id, keyring.store),), tenants)

    def _unwrapped(self, there: StoredKeys) -> Keyring:
        given = there.wrapped[0].store_key
        if self._key is None:
            raise ConfigurationError(
                "key", "none", f"the key {given} of {self._store}: name it with {_HINT}"
            )
        try:
            return self._key.unwrap_all(there.wrapped)
        except WrongKeyError:
            raise ConfigurationError(
                "key", self._key.id, f"the key {given} of {self._store}"
            ) from None
        except CorruptPackError as error:
            raise CorruptStoreError(f"{self._path} is damaged: {error}") from None

    def _read(self) -> StoredKeys:
        """Return the content of the file; no keys if it is missing."""
        try:
            fd = open_regular(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return StoredKeys()
        with os.fdopen(fd, "rb") as file:
            content = file.read(_MOST_BYTES)
        try:
            return decode_keys(content)
        except CorruptPackError as error:
            raise CorruptStoreError(f"{self._path} is damaged: {error}") from None

    def _write(self, keys: StoredKeys) -> None:
        """Replace the file durably. The content of the one before is not overwritten: an engine may
        be reading it, and a backup may be a link to it."""
        part = self._store / KEY_PART_FILE
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(open_regular(part, flags), "wb") as file:
            file.write(encode_keys(keys))
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._path)
        sync_directory(self._store)
