"""The file ``keys`` of a store with a key: its data keys, wrapped with the user's key.

1. The file is durable before the first content that they seal. A damaged catalogue is renamed
   without it, so ``rebuild`` can open the packs.
2. The catalogue names the keyring, whose id is random: two stores with one key of the user have
   different data keys. A store whose file is missing, or another one's, is refused: it is neither
   read nor written, and no keys are made for it.
3. Only holders of the writer lock write the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from persistkv.errors import ConfigurationError, CorruptPackError, CorruptStoreError
from persistkv.storage.format.keys import (
    Keyring,
    StoreKey,
    WrappedKey,
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

    def prepare(self) -> str:
        """Return the id of the keyring for a new store, after making it, unless it is there; empty:
        the store gets no key.

        :raises ConfigurationError: data keys are there, and the user's key does not unwrap them.
        """
        there = self._read()
        if there or self._key is None:
            return self._keyring(there).id if there else ""
        data_keys = self._key.new_keyring().keys.values()
        keyring = Keyring(os.urandom(_ID_BYTES).hex(), data_keys)
        self._write(self._key.wrap_all(keyring))
        return keyring.id

    def known(self) -> str:
        """Return the id of the keyring of a store without a catalogue; empty: it has no key.

        :raises ConfigurationError: the user's key is missing, another one, or not for this store.
        """
        there = self._read()
        if there:
            return self._keyring(there).id
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
        if not there:
            raise CorruptStoreError(
                f"{self._path} is missing: nothing can read the store without it"
            )
        keyring = self._keyring(there)
        if keyring.id != keyring_id:
            raise CorruptStoreError(
                f"{self._path} is of the keyring {keyring.id}, and the store of {keyring_id}"
            )
        return KeySeal(lambda: keyring)

    def rotate(self, key: StoreKey) -> None:
        """Wrap the data keys with another key of the user. The caller holds the writer lock.

        :raises ConfigurationError: the store has no key; its key is the other one already, or is
            not the user's.
        :raises OSError: the file was not replaced.
        """
        there = self._read()
        if not there:
            raise ConfigurationError("store", str(self._store), "a store with a key")
        keyring = self._keyring(there)
        if key.id == there[0].store_key:
            raise ConfigurationError(
                "new key", key.id, "another key than the present one"
            )
        self._write(key.wrap_all(keyring))

    def _keyring(self, there: list[WrappedKey]) -> Keyring:
        given = there[0].store_key
        if self._key is None:
            raise ConfigurationError(
                "key", "none", f"the key {given} of {self._store}: name it with {_HINT}"
            )
        try:
            return self._key.unwrap_all(there)
        except WrongKeyError:
            raise ConfigurationError(
                "key", self._key.id, f"the key {given} of {self._store}"
            ) from None
        except CorruptPackError as error:
            raise CorruptStoreError(f"{self._path} is damaged: {error}") from None

    def _read(self) -> list[WrappedKey]:
        """Return the wrapped keys; none if the file is missing."""
        try:
            fd = open_regular(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        with os.fdopen(fd, "rb") as file:
            content = file.read(_MOST_BYTES)
        try:
            return decode_keys(content)
        except CorruptPackError as error:
            raise CorruptStoreError(f"{self._path} is damaged: {error}") from None

    def _write(self, keys: list[WrappedKey]) -> None:
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
