"""Keys of a shared store: which of its data keys this handle knows.

1. The wrapped data keys of the store are blobs ``keyrings/<store key>/<random name>``. An engine
   that creates a store writes one. Several may do so at once: each uses the data keys that any of
   them has written.
2. No name is written twice, except ``replaced``: a deletion that takes effect late destroys no keys
   that were written since, as by a rotation back.
3. The content of a keyring is under its id. The id is that of the store key that made it, so
   engines that create the store at once agree on it; a rotation does not change it.
4. A rotation writes one blob for the new store key, then a blob ``replaced`` for the old one, then
   deletes the others of the old one. While one is left, the old key opens the store, so that a
   rotation that was killed can be repeated. A handle that is open keeps its keys. Of an old key
   that has a blob ``replaced``, only the data keys that are under the new one, too, count: other
   data keys are from an engine whose request took effect after the rotation, and the new key cannot
   read content that they seal.
5. No data key of the store is made where content is whose keys are missing, or for a key that was
   replaced.
6. The data keys of tenants are blobs ``<keyring>/tenants/<data key>``, sealed records of the store:
   a handle reads one when it meets it. Rotations leave them as they are.
7. A handle neither keeps nor reads a data key that a record names as destroyed
   (``forgetting.records``): a request that is executed late may restore its blob.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    CorruptStoreError,
    StoreError,
)
from persistkv.storage.blobs import BlobInfo, BlobMissingError, UnavailableError
from persistkv.storage.format.keys import (
    DataKey,
    Keyring,
    StoredKeys,
    StoreKey,
    WrappedKey,
    decode_keys,
    encode_keys,
)
from persistkv.storage.format.seal import PLAIN, KeySeal, Seal
from persistkv.storage.shared.format import MAX_SMALL_BYTES, PLAIN_NAME, StoreNames

if TYPE_CHECKING:
    from persistkv.storage.shared.calls import Medium

logger = logging.getLogger(__name__)

KEYRINGS = "keyrings/"
# name of the blob which marks that another store key has replaced the key
REPLACED = "replaced"
_MOST_LISTS = 3  # maximum number of lists of the keys, while some are deleted
# maximum number of rotations through which an old key is followed
_MOST_ROTATIONS = 1000
_NAME_BYTES = 8  # random bytes in the name of a blob
# minimum seconds between two searches for unknown keys of the store: junk may name any key
_RELOAD_S = 60.0


class StoreKeys:
    """The data keys of a shared store, as one handle knows them. Thread-safe.

    :param key: the user's store key; None: the store has none.
    """

    def __init__(self, medium: Medium, key: StoreKey | None) -> None:
        self._medium = medium
        self._key = key
        self._keyring: Keyring | None = None
        """Data keys that are known; None: none was read yet, or the store has no key. Each change
        replaces the whole object, so readers need no lock."""
        self._lock = medium.clock.lock()
        """Held by a thread that changes ``_keyring``. Reentrant."""
        self._reloaded_at = -math.inf
        """Monotonic time of the last search for data keys of the store itself."""
        self._tenant_key_seal = KeySeal(self._known)
        """Seals and opens the blobs of tenants' data keys. Threads use it while their caller holds
        ``_lock``, so it must not search for unknown keys as ``seal`` does, which takes that
        lock."""
        self.seal: Seal = PLAIN
        """Seal of the store; before ``open``, it raises."""
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
        """Read the data keys of the store, unless they are known; return whether there are any. A
        store without a key needs none: return True.

        :param creates: make them if there are none.
        :raises ConfigurationError: another key has replaced this one.
        :raises CorruptStoreError: content is there whose keys are missing, or a key is damaged.
        :raises StoreError: the medium failed.
        """
        if self._key is None:
            return True
        if self._keyring is not None:
            return True
        with self._lock:
            wrapped = self._usable_wrapped(self._key)
            if not wrapped and creates:
                self._create_data_key(self._key)
                # read again: of engines that create the store at the same time, each uses the data
                # keys of all
                wrapped = self._usable_wrapped(self._key)
            if not wrapped:
                return False
            self._keyring = self._unwrapped(self._key, wrapped)
            return True

    def make(self, tenants: Iterable[str]) -> None:
        """Make the data keys of these tenants, unless another engine has made them. A key is
        durable before it seals anything.

        :raises StoreError: the medium failed.
        """
        with self._lock:
            lacking = self._known().lacking(tenants)
            if not lacking:
                return
            # add the keys that other engines have made, because only one key per tenant is needed
            self._add_all_tenant_keys()
            still_lacking = self._known().lacking(lacking)
            for tenant in still_lacking:
                data_key = DataKey.new(tenant)
                # write the key before it is used: it must seal nothing before it is durable
                self._put_tenant(data_key)
                self._keyring = self._known().extended([data_key])

    def holds(self, key_id: bytes) -> bool:
        """Return whether a data key of a tenant is there: the handle has it, or finds it in the
        store. False: it is destroyed, or its blob was deleted; content under it cannot be read.

        :raises CorruptPackError: its blob does not read, perhaps only at present.
        :raises StoreError: the medium failed.
        """
        medium = self._medium
        if key_id in self._known().keys:
            return True
        if key_id in medium.records.forgotten.keys:
            return False
        with self._lock:
            self._search(key_id)
            if key_id in self._known().keys:
                return True
        # ``_search`` has found no usable blob, but a damaged one may be readable later
        name = self._names.tenant(key_id)
        if medium.exists(name):
            raise CorruptPackError("key", f"{name} does not read")
        # check the policy, too: in a directory that is not mounted at present, every blob is
        # missing
        if not medium.exists(self._names.policy):
            raise UnavailableError("the store is gone, or not mounted at present")
        return False

    def drop(self, key_ids: Collection[bytes]) -> set[str]:
        """Remove destroyed data keys from this handle; return the tenants of those that it had."""
        with self._lock:
            if self._keyring is None:
                return set()
            before = self._keyring
            self._keyring = before.without(key_ids)
        keys_before = before.keys
        dropped = keys_before.keys() & set(key_ids)
        return {keys_before[key_id].tenant for key_id in dropped}

    def of_tenant(self, tenant: str) -> dict[bytes, BlobInfo]:
        """Return the blobs of a tenant's data keys in the store by their ids, without those that a
        record names as destroyed.

        :raises StoreError: the medium failed.
        """
        if self._key is None:
            return {}
        with self._lock:
            listed_blobs = self._add_all_tenant_keys()
            known = self._known()
        found: dict[bytes, BlobInfo] = {}
        # destroyed keys are not among them, because a handle drops these
        for data_key in known.of_tenants():
            info = listed_blobs.get(data_key.id)
            if data_key.tenant == tenant and info is not None:
                found[data_key.id] = info
        return found

    def undeleted(self) -> set[bytes]:
        """Return the ids of the destroyed data keys whose blobs are in the store: they are not
        deleted yet, or a late request has written them again.

        :raises StoreError: the medium failed.
        """
        if self._key is None:
            return set()
        listed_blobs = self._tenant_key_blobs()
        destroyed = self._medium.records.forgotten.keys
        return listed_blobs.keys() & destroyed

    def destroy(self, key_ids: Collection[bytes]) -> Sequence[str]:
        """Delete data keys of tenants for good; return what the medium keeps of them
        (``Blobs.erase``).

        :raises StoreError: the medium failed; some may be deleted.
        """
        if not key_ids:
            return []
        names = self._names
        blobs = [names.tenant(key_id) for key_id in sorted(key_ids)]
        return self._medium.blobs.erase(names.tenants, blobs)

    def _tenant_key_blobs(self) -> dict[bytes, BlobInfo]:
        """Return the blobs of all data keys of tenants by the ids of the keys."""
        found: dict[bytes, BlobInfo] = {}
        # make a stable list, because the forgetting of a tenant must find all of its keys
        for info in self._medium.listed(self._names.tenants, stable=True):
            key_id = self._names.parse_tenant(info.name)
            if key_id is not None:
                found[key_id] = info
        return found

    def _add_all_tenant_keys(self) -> dict[bytes, BlobInfo]:
        """Add the data keys of all tenants in the store; return their blobs by the ids of the
        keys."""
        listed_blobs = self._tenant_key_blobs()
        known_keys = self._known().keys
        unknown = listed_blobs.keys() - known_keys.keys()
        names = self._names
        self._add_tenant_keys(names.tenant(key_id) for key_id in sorted(unknown))
        return listed_blobs

    def are_complete(self) -> bool:
        """Return whether this handle knows all data keys of the store itself, which seal its index
        and records; tenants' keys do not count. False also after a rotation has deleted the blobs
        of its store key: the handle cannot tell then.

        :raises StoreError: the medium failed.
        """
        if self._key is None:
            return True
        wrapped = self._wrapped_keys(self._key.id)
        known = self._known().keys
        if not wrapped:
            return False
        return all(entry.id in known for entry in wrapped)

    def write_again(self) -> None:
        """Write all known data keys again, after the store was deleted. Do nothing if another key
        has replaced that of this handle.

        :raises StoreError: the medium failed.
        """
        if self._key is None or self._successor(self._key.id):
            return
        known = self._known()
        # write one blob with the data keys of the store itself, then one for the key of each tenant
        self._write(self._key, known)
        for data_key in known.of_tenants():
            self._put_tenant(data_key)

    def rotate(self, key: StoreKey) -> None:
        """Wrap the data keys of the store with ``key``, which alone opens the store from then on.
        Handles that are open stay open.

        If this call fails or is killed, at least one of the two keys opens the store. While the
        present one does, the call can be repeated.

        :raises ConfigurationError: the store has no key; its key is ``key`` already, or was
            replaced; or ``key`` has content of its own. Nothing was changed.
        :raises StoreError: the medium failed.
        """
        present_key = self._key
        if present_key is None:
            raise ConfigurationError("store", "a store without a key", "one with a key")
        if key.id == present_key.id:
            raise ConfigurationError(
                "new key", key.id, "another key than the present one"
            )
        # read from the medium, because another operator may have replaced the key since this handle
        # was opened
        wrapped = self._usable_wrapped(present_key)
        keyring = self._unwrapped(present_key, wrapped)
        self._write_for_new_key(keyring, key)
        self._mark_replaced(present_key, key)
        # Engines may have made data keys under the old store key meanwhile. List them after the
        # blob ``replaced`` is written: an engine that makes keys later sees this blob, and does not
        # use them.
        old_blobs = self._wrapped_by_blob(present_key.id)
        present = list(chain.from_iterable(old_blobs.values()))
        has_late_keys = any(entry.id not in keyring.keys for entry in present)
        if has_late_keys:
            complete = self._unwrapped(present_key, present)
            self._write(key, complete)
        # delete these blobs last: while one is left, a killed rotation can be repeated
        self._medium.blobs.delete(list(old_blobs))

    def _write_for_new_key(self, keyring: Keyring, key: StoreKey) -> None:
        """Write the data keys of the store, wrapped with another store key.

        :raises ConfigurationError: that key has content of its own. Nothing was changed.
        """
        self._refuse_content(key, keyring)
        written = self._write(key, keyring)
        try:
            # check again, because an engine may have created a store with that key meanwhile
            self._refuse_content(key, keyring)
        except ConfigurationError:
            self._medium.blobs.delete([written])
            raise

    def _mark_replaced(self, old: StoreKey, new: StoreKey) -> None:
        """Record that one store key has replaced another. Both have all data keys, so that one of
        them opens the store at any time."""
        medium = self._medium
        # delete the marker of the new key: it exists if this rotation goes back to an earlier key
        marker_of_new = _blob(new.id, REPLACED)
        medium.blobs.delete([marker_of_new])
        marker_of_old = _blob(old.id, REPLACED)
        successor = new.id.encode()
        medium.put(marker_of_old, [successor])

    def _refuse_content(self, key: StoreKey, keyring: Keyring) -> None:
        """Raise a ConfigurationError if a new key has a store of its own on this medium: it wraps
        data keys of another keyring."""
        present = self._wrapped_keys(key.id)
        if any(entry.keyring != keyring.id for entry in present):
            raise ConfigurationError("new key", key.id, "a key without content")

    def _known(self) -> Keyring:
        """Return the data keys that are known; raise an UnavailableError before ``open`` has read
        them."""
        if self._keyring is None:
            raise UnavailableError("the keys of the store are not read yet")
        return self._keyring

    @property
    def _names(self) -> StoreNames:
        return StoreNames(self.keyring_id)

    def _reload(self, key_id: bytes) -> Keyring:
        """Search the store for a data key that ``seal`` needs and this handle lacks; return all
        keys that are known afterwards. If the medium fails, these are the keys known before.

        :param key_id: empty: any new key of the store itself.
        """
        with self._lock:
            try:
                self._search(key_id)
            except StoreError as error:
                logger.debug("the keys of the store were not read again (%s)", error)
            return self._known()

    def _search(self, key_id: bytes) -> None:
        """Add a data key that is not known, if the store has it: first as the key of a tenant,
        which takes one read, then, at most once a minute, among the keys of the store itself."""
        name = self._names.tenant(key_id)
        self._add_tenant_keys([name])
        if self._key is None or key_id in self._known().keys:
            return
        now = self._medium.clock.monotonic()
        if now < self._reloaded_at + _RELOAD_S:
            return
        self._reloaded_at = now
        has_changed = self._read_again(self._key)
        if has_changed:
            # the blob cannot be opened with this key, but perhaps with another key of the store
            self._add_tenant_keys([name])

    def _read_again(self, key: StoreKey) -> bool:
        """Read the data keys of the store itself again; return whether they have changed. The
        caller holds ``_lock``."""
        wrapped = self._wrapped_keys(key.id)
        if not wrapped:
            return False
        # Use no blob of a store key that was replaced. Either a killed rotation has left the blob,
        # or its upload took effect late: then the new store key cannot read content that its keys
        # seal.
        is_replaced = bool(self._successor(key.id))
        if is_replaced:
            return False
        present = self._unwrapped(key, wrapped)
        if present.of_store() == self._known().of_store():
            return False
        # Forget the keys of tenants, because another store may be in the place of a deleted one.
        # They are read again when they are needed.
        self._keyring = present
        return True

    def _add_tenant_keys(self, names: Iterable[str]) -> None:
        """Read the data keys of tenants in blobs, and add them to the known ones. Missing, damaged
        and destroyed ones are left out. The caller holds ``_lock``."""
        # read in the threads for uploads, because those for loads and for the index may wait for
        # ``_lock``
        found = self._medium.uploads.all(self._tenant_key, names)
        destroyed = self._medium.records.forgotten.keys
        usable: list[DataKey] = []
        for data_key in found:
            if data_key is not None and data_key.id not in destroyed:
                usable.append(data_key)
        self._keyring = self._known().extended(usable)

    def _tenant_key(self, name: str) -> DataKey | None:
        """Return the data key of a tenant in a blob; None if the blob is missing, damaged or no
        key."""
        key_id = self._names.parse_tenant(name)
        if key_id is None:
            return None
        try:
            record = self._medium.whole(name, MAX_SMALL_BYTES)
            return self._tenant_key_seal.opened_key(key_id, record)
        except (BlobMissingError, CorruptPackError):
            return None

    def _put_tenant(self, key: DataKey) -> None:
        name = self._names.tenant(key.id)
        record = self._tenant_key_seal.sealed_key(key)
        self._medium.put(name, [record])

    def _usable_wrapped(self, key: StoreKey) -> list[WrappedKey]:
        """Return the data keys of the store that are wrapped with a store key; of a store key that
        was replaced, only data keys that a newer store key wraps, too.

        :raises ConfigurationError: another store key has replaced it, and left it no usable data
            keys.
        """
        wrapped = self._wrapped_keys(key.id)
        # read the successors after the blobs: a rotation that begins between the two reads takes
        # over all data keys of the blobs, so they are usable
        successors = self._successors(key.id)
        if not successors:
            return wrapped
        ids_in_newer = self._wrapped_ids(successors)
        # No newer store key wraps anything: a rotation back to this key has deleted the blobs of
        # the newer ones, and a late request of an earlier rotation has then written the blob
        # ``replaced`` of this key again.
        if wrapped and not ids_in_newer:
            return wrapped
        # A data key that no newer store key wraps is from an engine whose request took effect after
        # the rotation: who opens the store with the newer key cannot read content under it.
        usable = [entry for entry in wrapped if entry.id in ids_in_newer]
        if usable:
            return usable
        expected = f"the key {successors[-1]}, which has replaced it (rotate-key)"
        raise ConfigurationError("key", key.id, expected)

    def _wrapped_ids(self, key_ids: Iterable[str]) -> set[bytes]:
        """Return the ids of the data keys that any of these store keys wraps."""
        found: set[bytes] = set()
        for key_id in key_ids:
            wrapped = self._wrapped_keys(key_id)
            found.update(entry.id for entry in wrapped)
        return found

    def _successors(self, key_id: str) -> list[str]:
        """Return the ids of the keys that have replaced this one, one after the other."""
        found = [key_id]
        while len(found) <= _MOST_ROTATIONS:
            successor = self._successor(found[-1])
            if not successor:
                break
            # successors form a circle after a rotation back, or a late request
            if successor in found:
                break
            found.append(successor)
        return found[1:]

    def _successor(self, key_id: str) -> str:
        """Return the id of the key that has replaced this one; empty: none has."""
        marker = _blob(key_id, REPLACED)
        try:
            content = self._medium.whole(marker, MAX_SMALL_BYTES)
        except BlobMissingError:
            return ""
        return bytes(content).decode("ascii", "replace")

    def _wrapped_keys(self, key_id: str) -> list[WrappedKey]:
        """Return the data keys in all blobs of a store key; see ``_wrapped_by_blob``."""
        blobs = self._wrapped_by_blob(key_id)
        return list(chain.from_iterable(blobs.values()))

    def _wrapped_by_blob(self, key_id: str) -> dict[str, list[WrappedKey]]:
        """Return the data keys in each blob of a store key, by the name of the blob.

        :raises UnavailableError: blobs vanished between list and read in all attempts.
        """
        for _ in range(_MOST_LISTS):
            # A rotation may delete a blob after the list. List again, because a handle without the
            # keys in the blob would lack some of the content.
            with suppress(BlobMissingError):
                return self._try_wrapped_by_blob(key_id)
        raise UnavailableError("the keys of the store are being replaced")

    def _try_wrapped_by_blob(self, key_id: str) -> dict[str, list[WrappedKey]]:
        """Make one attempt of ``_wrapped_by_blob``.

        :raises BlobMissingError: a blob vanished after the list.
        """
        marker = _blob(key_id, REPLACED)
        found: dict[str, list[WrappedKey]] = {}
        prefix = _blob(key_id, "")
        for info in self._medium.listed(prefix):
            # leave out the marker, which has no keys, but the name of a store key
            if info.name != marker:
                found[info.name] = self._wrapped_in(info.name)
        return found

    def _wrapped_in(self, name: str) -> list[WrappedKey]:
        """Return the data keys in a blob; raise a CorruptStoreError if it is damaged."""
        content = self._medium.whole(name, MAX_SMALL_BYTES)
        try:
            return list(decode_keys(content).wrapped)
        except CorruptPackError as error:
            raise CorruptStoreError(f"{name}: {error}") from None

    def _unwrapped(self, key: StoreKey, wrapped: list[WrappedKey]) -> Keyring:
        """Return the keyring of data keys that a store key wraps; raise a CorruptStoreError if one
        is damaged."""
        try:
            return key.unwrap_all(wrapped)
        except CorruptPackError as error:
            raise CorruptStoreError(f"the keys of the store: {error}") from None

    def _create_data_key(self, key: StoreKey) -> None:
        """Write a data key for a new store. It is deleted again if a rotation from this store key,
        or to it, has ended meanwhile: then the store has other data keys.

        :raises CorruptStoreError: the store exists, and its data keys are missing.
        """
        names = StoreNames(key.id)
        if self._medium.exists(names.policy):
            raise CorruptStoreError(
                f"there is content of the key {key.id}, but no data keys in "
                f"{_blob(key.id, '')}: without these blobs, nothing can read it"
            )
        created = self._write(key, key.new_keyring())
        present = self._wrapped_keys(key.id)
        keyrings = {entry.keyring for entry in present}
        # A new keyring, such as the one just written, has the id of its store key. A keyring with
        # another id was rotated to this key.
        was_rotated_here = keyrings != {key.id}
        was_rotated_away = bool(self._successor(key.id))
        if was_rotated_away or was_rotated_here:
            self._medium.blobs.delete([created])

    def _write(self, key: StoreKey, keyring: Keyring) -> str:
        """Write a blob with all data keys of the store in a keyring, and return its name."""
        random_part = os.urandom(_NAME_BYTES).hex()
        name = _blob(key.id, random_part)
        wrapped: list[WrappedKey] = []
        for data_key in keyring.of_store():
            wrapped.append(key.wrap(keyring.id, data_key))
        content = encode_keys(StoredKeys(tuple(wrapped)))
        self._medium.put(name, [content])
        return name


def _blob(store_key: str, name: str) -> str:
    """Return the name of a blob of a store key; the prefix of all of them for an empty ``name``."""
    return f"{KEYRINGS}{store_key}/{name}"
