"""The recorded policy of a shared store. Its blob marks the store: without it, there is none."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec

from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    StoreUnavailableError,
)
from persistkv.storage.blobs import BlobMissingError, UnavailableError
from persistkv.storage.policy import Policy
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import (
    MAX_SMALL_BYTES,
    NO_NAMESPACE,
    NONCE_BYTES,
    PLAIN_NAME,
    ArrayStruct,
    StoreNames,
    decode,
    encode,
)
from persistkv.storage.shared.keys import KEYRINGS, REPLACED

logger = logging.getLogger(__name__)

_POLICY_S = 60.0  # seconds between reads of the policy
# one hour: seconds between reads of the records of forgotten tenants
_RECORDS_S = 3600.0
_RETRY_S = 5.0  # seconds until a medium that has not answered is tried again
# Two minutes, which include two reads of the policy: if another store appears so soon after this
# handle has created one, another engine has created it at the same time.
_CREATION_S = 120.0


class StoredPolicy(ArrayStruct, frozen=True):
    """Content of the blob ``policy``, which marks a store."""

    store: bytes
    """Random name of the store. A store that was deleted and created again has another one."""
    capacity: int | None
    ttl_s: float | None
    quotas: Mapping[str, int]
    """Quotas in bytes, by tenant, as in ``Policy``."""
    forgotten: bytes = b""
    """Random mark. Each `forget` changes it, which shows that there are new records."""

    @property
    def policy(self) -> Policy:
        """The limits as a policy.

        :raises ConfigurationError: a value is out of range.
        """
        return Policy(self.capacity, self.ttl_s, quotas=self.quotas)

    def check(self) -> None:
        """Raise a ConfigurationError if a value is out of range."""
        _ = self.policy


class RecordedPolicy:
    """The policy of a store as one handle knows it. One thread at a time may call ``refresh``,
    ``has_answered`` and ``replace``.

    :param wanted: recorded if the store is created.
    :param place: name of the store in messages.
    :param creates: whether a missing store is created.
    """

    def __init__(
        self,
        medium: Medium,
        wanted: Policy,
        place: str,
        *,
        creates: bool,
    ) -> None:
        self._medium = medium
        self._wanted = wanted
        self._place = place
        self._creates = creates
        self._clock = medium.clock
        self._stored: StoredPolicy | None = None
        """The policy that was read last; None: the medium has not answered yet."""
        self._created_at = -math.inf
        """Monotonic time at which this handle created the store; minus infinity: it did not."""
        self._records_at = -math.inf
        """Monotonic time from which on ``refresh`` reads the records of forgotten tenants even if
        the policy shows no new ones."""
        self.due_at = self._clock.monotonic()
        """Monotonic time at which ``is_due`` is true."""
        self.last_error = ""
        """Why the medium has not answered yet."""

    @property
    def is_known(self) -> bool:
        """Whether the medium has answered, and the policy was read."""
        return self._stored is not None

    def current(self) -> Policy:
        """Return the policy that was read last; without limits before the first answer."""
        stored = self._stored
        return Policy(None, None) if stored is None else stored.policy

    def store_name(self) -> bytes:
        """Return the random name of the store.

        :raises UnavailableError: the medium has not answered yet.
        """
        return self._known().store

    def _known(self) -> StoredPolicy:
        """Return the policy that was read last.

        :raises UnavailableError: the medium has not answered yet.
        """
        if self._stored is None:
            raise UnavailableError(f"{self._place} has not answered yet")
        return self._stored

    def has_answered(self) -> bool:
        """Return whether the medium has answered this handle. If it has not, try again.

        :raises StoreError: the medium refuses; or there is no store, and none is created.
        """
        if not self.is_known:
            try:
                self.refresh()
            except UnavailableError as error:
                self.last_error = str(error)
        return self.is_known

    def is_due(self) -> bool:
        """Return whether it is time for a ``refresh``; if so, plan the next one."""
        now = self._clock.monotonic()
        if now < self.due_at:
            return False
        pause_s = _POLICY_S if self.is_known else _RETRY_S
        self.due_at = now + pause_s
        return True

    def refresh(self) -> bool:
        """Read the policy, and create the store if there is none; return whether another store is
        in the place of the one that was read before.

        :raises StoreError: the medium failed; or there is no store, and none is created.
        """
        before = self._stored
        found = None
        has_keys = self._medium.keys.open(creates=self._creates)
        # a store without data keys does not exist yet
        if has_keys:
            found = self._read()
            # read the records first, because content is served as soon as the policy counts as read
            self._read_records(found)
        if found is None:
            found = self._create()
        self._stored = found
        if before is None:
            self._report_differences()
            return False
        if found.store == before.store:
            return False
        self._report_replacement()
        return True

    def _read_records(self, found: StoredPolicy | None) -> None:
        """Read the records of forgotten tenants if the policy shows that there are new ones. Read
        them once an hour in any case: of two engines that write the policy at the same time, one
        overwrites the mark of the other.

        :param found: the policy as it is now.
        """
        now = self._clock.monotonic()
        is_same = (
            found is not None
            and self._stored is not None
            and found.forgotten == self._stored.forgotten
        )
        if is_same and now < self._records_at:
            return
        self._medium.records.refresh()
        self._records_at = now + _RECORDS_S

    def announce_forgotten(self) -> None:
        """Change the mark in the policy (``StoredPolicy.forgotten``), so that all handles read the
        records of forgotten tenants when they read the policy next, within a minute.

        :raises StoreError: the medium failed, and handles read the records within an hour; or the
            store was deleted.
        """
        stored = self._read()
        if stored is None:
            raise StoreUnavailableError(f"{self._place}: the store was deleted")
        mark = self._clock.random.randbytes(NONCE_BYTES)
        changed = msgspec.structs.replace(stored, forgotten=mark)
        self._write(changed)

    def replace(self, policy: Policy) -> None:
        """Write other limits into the policy that was read last, and keep the rest of it.

        :raises StoreError: the medium failed; the policy is unchanged, or after an
            ``UnavailableError`` perhaps the new one.
        """
        before = self._known()
        changed = msgspec.structs.replace(
            before,
            capacity=policy.capacity,
            ttl_s=policy.ttl_s,
            quotas=policy.quotas,
        )
        self._write(changed)
        self._stored = changed

    def _create(self) -> StoredPolicy:
        """Write the policy of a new store. If the store was deleted while this handle was open,
        create it again, with the limits, data keys and records that this handle knows.

        :raises StoreUnavailableError: this handle does not create stores.
        """
        if not self._creates:
            raise StoreUnavailableError(f"{self._place}: {self._absence()}")
        if self._stored is None:
            policy = self._wanted
        else:
            policy = self.current()
            self._medium.records.write_again()
            self._medium.keys.write_again()
        store_name = self._clock.random.randbytes(NONCE_BYTES)
        created = StoredPolicy(store_name, policy.capacity, policy.ttl_s, policy.quotas)
        # write the policy last, because it marks the place as a store
        self._write(created)
        self._created_at = self._clock.monotonic()
        return created

    def _absence(self) -> str:
        """Return why a handle that creates no store finds none, for the message of the error: a
        wrong or missing store key looks like a missing store, because names depend on the key."""
        if self._stored is not None:
            return "the store was deleted"
        own = self._medium.keys.key_id  # empty if this handle has no store key
        plain_policy = StoreNames(PLAIN_NAME).policy
        if own and self._medium.exists(plain_policy):
            return (
                "there is no store under this key, but one without a key: leave out key_file, "
                "key_env and key_command to open it"
            )
        others = self._other_keys(own)
        if others:
            which = "under this key" if own else "without a key"
            ids = ", ".join(sorted(others))
            return (
                f"there is no store {which}, but content under another key (id {ids}): "
                "name that one with key_file, key_env or key_command"
            )
        return "there is no store"

    def _other_keys(self, own: str) -> set[str]:
        """Return the ids of the store keys on this medium, except the own one, that open content.

        A blob ``keyrings/<id>/<random name>`` has the data keys that the store key ``id`` opens.
        ``keyrings/<id>/replaced`` only marks that a rotation has replaced it.
        """
        others: set[str] = set()
        for info in self._medium.blobs.list(KEYRINGS):
            key_id, _, part = info.name.removeprefix(KEYRINGS).partition("/")
            if part != REPLACED:
                others.add(key_id)
        others.discard(own)
        return others

    def _read(self) -> StoredPolicy | None:
        """Return the recorded policy; None if there is none. Instead of one that does not read,
        return the one that was read before, or one without limits."""
        name = self._medium.names.policy
        try:
            body = self._medium.sealed(name, NO_NAMESPACE)
            found = decode(_DECODER, body, "policy")
            found.check()
            return found
        except BlobMissingError:
            return None
        except (CorruptPackError, ConfigurationError) as error:
            return self._in_place_of_damaged(error)

    def _in_place_of_damaged(self, error: Exception) -> StoredPolicy:
        """Log that the recorded policy does not read; return the one that holds meanwhile."""
        before = self._stored
        if before is None:
            text = "%s: the policy does not read (%s): nothing is evicted"
            logger.warning(text, self._place, error)
            # use zeros, because the store's name is not known
            unknown_store = bytes(NONCE_BYTES)
            return StoredPolicy(unknown_store, capacity=None, ttl_s=None, quotas={})
        # Warn at each read of a store with a key: a process without the key may have overwritten
        # the policy.
        if self._medium.seal.encrypts:
            text = "%s: the policy does not read (%s): the limits that were read before stay"
            logger.warning(text, self._place, error)
        return before

    def _write(self, policy: StoredPolicy) -> None:
        name = self._medium.names.policy
        body = encode(policy)
        self._medium.put_sealed(name, body, NO_NAMESPACE, MAX_SMALL_BYTES)

    def _report_differences(self) -> None:
        """Warn if the recorded policy is not the wanted one."""
        # a handle that creates no store does not compare: the limits in its URL do not matter
        if not self._creates:
            return
        differences = self.current().contradictions(self._wanted)
        if differences:
            text = "%s: the URL says %s; the store keeps its recorded policy"
            logger.warning(
                text + " (persistkv set changes it)", self._place, differences
            )

    def _report_replacement(self) -> None:
        """Log that another store has replaced the one that was read before."""
        # Do not warn right after a creation: engines that create a store at the same moment replace
        # each other's policy.
        is_new = self._clock.monotonic() - self._created_at < _CREATION_S
        level = logging.DEBUG if is_new else logging.WARNING
        text = "%s: the store was deleted or replaced; its content is read again"
        logger.log(level, text, self._place)


_DECODER = msgspec.msgpack.Decoder(StoredPolicy)
