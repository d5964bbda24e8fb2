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
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    CorruptStoreError,
    StoreError,
    TenantForgottenError,
)
from persistkv.storage.format.keys import (
    STORE,
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
from persistkv_lmdb.opening import quarantined

_MOST_BYTES = 16 << 20  # 16 MiB: maximum size of the file, when it is written and read
_READS = 5  # maximum number of attempts to read the file, if other processes replace it
_ID_BYTES = 8  # length of the id of a keyring
# the options of a URL with which a user gives a key
_HINT = "key_file, key_env or key_command"


class KeyFile:
    """The data keys of the store in a directory: its own, which is wrapped with the user's key, and
    those of tenants, which are sealed with the store's. They are known after ``open_seal``.

    :param key: key that the user gives for the store; None: the user gives none.
    """

    def __init__(self, store: Path, key: StoreKey | None) -> None:
        self._store = store
        self._key = key
        self._path = store / KEY_FILE
        self._keyring: Keyring | None = None
        """The data keys of the open store; None: it has none, or is not open."""
        self.forgotten: Mapping[str, int] = {}
        """Tenant → how often this process has noticed that keys of it have disappeared from the
        file, because the tenant was forgotten. Each change replaces the mapping. Callers compare
        it with an earlier state (``check_not_forgotten``)."""
        self._version: tuple[int, int] | None = None
        """Inode and time of modification (ns) of the file that ``refresh`` read last; None: it has
        not read any."""
        # Also held while the file is read. Otherwise, a thread that read the file before another
        # one made a key could take this key for destroyed, or add a key that was destroyed since.
        self._lock = threading.RLock()
        self._seal = KeySeal(self._known, self._reload)
        """Seal of the store, which ``open_seal`` returns. If it meets an unknown key, it reads the
        file again."""
        # Opens the records of tenants' keys in the file. It needs the store's key only, and must
        # not read the file again.
        self._record_seal = KeySeal(self._known)

    def prepare_keyring(self, *, create: bool) -> str:
        """Return the id of the keyring of a store whose catalogue is about to be created or
        rebuilt, so that the caller records it there; empty: the store has no key.

        :param create: make a keyring and the file for a new store, unless the file is there or the
            user gave no key. False: for a rebuild, whose packs need the keys that sealed them.
        :raises ConfigurationError: the user's key does not unwrap the data keys. Or the user gave a
            key for a rebuild, and there are no data keys.
        """
        stored = self._read()
        # the file exists because the creation was interrupted, or because the catalogue is lost
        if stored.wrapped:
            return self._unwrapped(stored).id
        if self._key is None:
            return ""
        if not create:
            raise ConfigurationError(
                "key", self._key.id, f"no key: there is no {self._path}"
            )
        # the id is random, so that stores with the same key of the user have different ids
        keyring_id = os.urandom(_ID_BYTES).hex()
        keyring = Keyring(keyring_id, [DataKey.new(STORE)])
        content = self._wrapped(self._key, keyring, tenants=())
        self._write(content)
        return keyring_id

    def open_seal(self, keyring_id: str) -> Seal:
        """Read the file, and return the seal of a store that is being opened.

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
        stored = self._read()
        if not stored.wrapped:
            raise CorruptStoreError(
                f"{self._path} is missing: nothing can read the store without it"
            )
        # If the store is opened again, keep the keys that are known: the file may be wrapped with
        # another key of the user meanwhile (``rotate``), which this handle was not given.
        keyring = self._keyring
        if keyring is None or keyring.id != stored.wrapped[0].keyring:
            keyring = self._unwrapped(stored)
        if keyring.id != keyring_id:
            raise CorruptStoreError(
                f"{self._path} is of the keyring {keyring.id}, and the store of {keyring_id}"
            )
        self._keyring = keyring
        self._add_keys(stored.tenants)
        return self._seal

    def make_missing(self, tenants: Iterable[str]) -> None:
        """Make data keys, durably, for those of the tenants that have none. The caller holds the
        writer lock, so no other process makes them at the same time.

        :raises CorruptStoreError: the file is missing, damaged, or that of another store.
        :raises StoreError: it has no room for more keys.
        :raises OSError: the file was not replaced.
        """
        # Check whose file it is: a user may have put another store's file there. Keys that are
        # added to that one would be lost when the user puts this store's file back.
        stored = self._read()
        self._check_is_of_store(stored)
        # first add the keys that other processes have made
        self._add_keys(stored.tenants)
        added: list[TenantKey] = []
        for tenant in self._known().lacking(tenants):
            key = DataKey.new(tenant)
            sealed = self._record_seal.sealed_key(key)
            added.append(TenantKey(key.id, sealed))
        if not added:
            return
        all_tenants = (*stored.tenants, *added)
        self._write(StoredKeys(stored.wrapped, all_tenants))
        self._add_keys(added)

    def _known(self) -> Keyring:
        """Return the keys of the open store that this process knows.

        :raises StoreError: the store is not open, or has no key.
        """
        if self._keyring is None:
            raise StoreError(f"{self._store} is not open, or has no key")
        return self._keyring

    def refresh(self) -> None:
        """Read the keys of tenants again, if any process has changed the file: add new ones, and
        drop those that were destroyed. Called before each transaction. Errors are ignored."""
        if self._keyring is None:
            return
        try:
            status = self._path.stat()
        except OSError:
            return  # the store was deleted, which the transaction will report
        # each change replaces the file, so that inode or time differ afterwards
        version = (status.st_ino, status.st_mtime_ns)
        if self._version == version:
            return
        # If the file is lost, damaged or not readable, the engine runs on with the keys that it
        # has.
        with self._lock, suppress(CorruptStoreError, OSError):
            stored = self._read()
            self._check_is_of_store(stored)
            self._add_keys(stored.tenants)
            stored_ids = {key.id for key in stored.tenants}
            known_ids = {key.id for key in self._known().of_tenants()}
            self._drop_keys(known_ids - stored_ids)
        # set this even after an error, so that a damaged file is not read before each transaction,
        # but only when it changes
        self._version = version

    def check_not_forgotten(
        self, tenants: Iterable[str], before: Mapping[str, int]
    ) -> None:
        """Raise a TenantForgottenError if any of these tenants was forgotten since the attribute
        ``forgotten`` had the value ``before``."""
        now = self.forgotten
        forgotten: list[str] = []
        for tenant in tenants:
            times_before = before.get(tenant, 0)
            if now.get(tenant, 0) != times_before:
                forgotten.append(tenant)
        if forgotten:
            raise TenantForgottenError(forgotten)

    def destroy(self, tenant: str) -> list[bytes]:
        """Destroy the data keys of a tenant in the file, and in the copies of it that quarantined
        stores have; return their ids, sorted. The caller holds the writer lock.

        :raises OSError: some keys may be left.
        """
        if self._keyring is None:
            return []
        self._check_is_of_store(self._read())
        destroyed: set[bytes] = set()
        # Take this store last. If the command is killed before, this store still has the key, from
        # which a repeated command knows whose rows to delete.
        for directory in (*quarantined(self._store), self._store):
            destroyed |= self._destroy_in(directory / KEY_FILE, tenant)
        self._drop_keys(destroyed)
        return sorted(destroyed)

    def _destroy_in(self, path: Path, tenant: str) -> set[bytes]:
        """Destroy the data keys of a tenant in one file; return their ids. Without any, the file is
        not written."""
        stored = self._read(path)
        destroyed: set[bytes] = set()
        kept: list[TenantKey] = []
        for key in stored.tenants:
            if self._tenant_of(key) == tenant:
                destroyed.add(key.id)
            else:
                kept.append(key)
        if destroyed:
            self._write(StoredKeys(stored.wrapped, tuple(kept)), path)
        return destroyed

    def ids_of(self, tenant: str) -> set[bytes]:
        """Return the ids of the known data keys of a tenant."""
        keys = self._known().of_tenants()
        return {key.id for key in keys if key.tenant == tenant}

    def _tenant_of(self, key: TenantKey) -> str | None:
        """Return the tenant whose key a record in the file is; None: the record is damaged, or of
        another store."""
        try:
            return self._record_seal.opened_key(key.id, key.sealed).tenant
        except CorruptPackError:
            return None

    def _drop_keys(self, key_ids: Collection[bytes]) -> None:
        """Drop data keys that were destroyed from those that are known, and count their tenants as
        forgotten."""
        with self._lock:
            known = self._known()
            tenants = {known.keys[key_id].tenant for key_id in key_ids}
            if tenants:
                self._keyring = known.without(key_ids)
                counts = Counter(self.forgotten)
                counts.update(tenants)
                self.forgotten = counts

    def _reload(self, key_id: bytes) -> Keyring:
        """Read the keys of tenants again, because the seal met the unknown key ``key_id``."""
        self.refresh()
        return self._known()

    def _add_keys(self, tenants: Iterable[TenantKey]) -> None:
        """Add those of the data keys in a file that are not known yet.

        :raises CorruptStoreError: one does not open with the store's key.
        """
        with self._lock:
            known = self._known()
            opened: list[DataKey] = []
            try:
                for key in tenants:
                    if key.id not in known.keys:
                        opened.append(self._record_seal.opened_key(key.id, key.sealed))
            except CorruptPackError as error:
                raise CorruptStoreError(f"{self._path} is damaged: {error}") from None
            self._keyring = known.extended(opened)

    def rotate(self, key: StoreKey) -> None:
        """Wrap the data key of the store with another key of the user. The caller holds the writer
        lock.

        :raises ConfigurationError: the store has no key, ``key`` is its present key, or the user
            did not give its present key.
        :raises OSError: the file was not replaced.
        """
        stored = self._read()
        if not stored.wrapped:
            raise ConfigurationError("store", str(self._store), "a store with a key")
        # this checks that the user has the present key, which wraps all entries
        keyring = self._unwrapped(stored)
        present_id = stored.wrapped[0].store_key
        if key.id == present_id:
            raise ConfigurationError(
                "new key", key.id, "another key than the present one"
            )
        self._write(self._wrapped(key, keyring, stored.tenants))

    def _wrapped(
        self,
        key: StoreKey,
        keyring: Keyring,
        tenants: tuple[TenantKey, ...],
    ) -> StoredKeys:
        """Return the content of the file: the store's key, wrapped with a user's, and the records
        of tenants' keys, which do not depend on the user's."""
        wrapped = key.wrap(keyring.id, keyring.store)
        return StoredKeys((wrapped,), tenants)

    def _unwrapped(self, stored: StoredKeys) -> Keyring:
        """Return the store's keyring, without tenants' keys, opened with the key of the URL.

        :raises ConfigurationError: the URL names no key, or another one.
        :raises CorruptStoreError: the file is damaged.
        """
        needed_key = stored.wrapped[0].store_key
        if self._key is None:
            raise ConfigurationError(
                "key",
                "none",
                f"the key {needed_key} of {self._store}: name it with {_HINT}",
            )
        try:
            return self._key.unwrap_all(stored.wrapped)
        except WrongKeyError:
            raise ConfigurationError(
                "key", self._key.id, f"the key {needed_key} of {self._store}"
            ) from None
        except CorruptPackError as error:
            raise CorruptStoreError(f"{self._path} is damaged: {error}") from None

    def _read(self, path: Path | None = None) -> StoredKeys:
        """Return the content of the file, or of a copy at ``path``; no keys if it is missing.

        :raises CorruptStoreError: it is damaged, or was replaced during each attempt.
        """
        path = path or self._path
        problem = ""
        for _ in range(_READS):
            try:
                fd = open_regular(path, os.O_RDONLY)
            except FileNotFoundError:
                return StoredKeys()
            with os.fdopen(fd, "rb") as file:
                content = file.read(_MOST_BYTES)
                is_replaced = os.fstat(file.fileno()).st_nlink == 0
            if is_replaced:
                # ``_write`` of another process overwrites the old file: the content may be
                # incomplete
                problem = "others replace it all the time"
                continue
            try:
                return decode_keys(content)
            except CorruptPackError as error:
                problem = str(error)
                break
        raise CorruptStoreError(f"{path} is damaged: {problem}")

    def _check_is_of_store(self, stored: StoredKeys) -> None:
        """Raise a CorruptStoreError if the content of the file is not that of the open store, or
        the file is missing."""
        own_id = self._known().id
        is_own = any(entry.keyring == own_id for entry in stored.wrapped)
        if not is_own:
            raise CorruptStoreError(f"{self._path} is missing, or of another store")

    def _write(self, keys: StoredKeys, path: Path | None = None) -> None:
        """Replace the file, or the copy at ``path``, durably.

        :raises StoreError: it would be longer than readers accept; nothing was written.
        """
        path = path or self._path
        content = encode_keys(keys)
        if len(content) > _MOST_BYTES:
            # only a key that is added makes the file longer
            num_present = len(keys.tenants) - 1
            raise StoreError(
                f"{path} has data keys of {num_present} tenants, and no room for more"
            )
        _replace_key_file(path, content)


def _replace_key_file(path: Path, content: bytes) -> None:
    """Replace a file of keys durably. Then overwrite the old file, because keys that are destroyed,
    now or later, could be read from its blocks on disk."""
    part = path.with_name(KEY_PART_FILE)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with ExitStack() as opened:
        # open the old file first, because no name leads to it after the rename
        old_fd = None
        with suppress(FileNotFoundError):
            old_fd = open_regular(path, os.O_WRONLY)
            opened.callback(os.close, old_fd)
        with os.fdopen(open_regular(part, flags), "wb") as file:
            if old_fd is not None:
                _copy_owner(old_fd, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        # sync before the old file is overwritten: a power loss must leave the old file or the new
        # one
        sync_directory(path.parent)
        if old_fd is not None:
            _overwrite(old_fd)


def _copy_owner(source: int, target: int) -> None:
    """Give a file the owner and the mode of another one: an engine of another user than that of the
    command reads it."""
    status = os.fstat(source)
    # only root may give files away; the mode is copied in any case
    with suppress(PermissionError):
        os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, status.st_mode & 0o777)


def _overwrite(fd: int) -> None:
    """Overwrite a file that was replaced with zeros, unless it has another name: a hard link may be
    a user's backup."""
    status = os.fstat(fd)
    if status.st_nlink == 0:
        os.pwrite(fd, bytes(status.st_size), 0)
        os.fsync(fd)
