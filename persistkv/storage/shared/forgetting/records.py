"""Records of forgotten tenants, whose content a shared store must never show again.

1. A record names a tenant by a digest, the data keys that are destroyed, and the medium's time. It
   is durable before the keys are deleted, and never removed: a later record includes it.
2. Every handle reads the records when it opens the store, before anything is served, and when the
   policy, which it reads each minute, shows that there are new ones. It drops the data keys that
   they name.
3. Content that these keys have sealed does not exist: the replica refuses it, so that no merge,
   base or rebuild writes it again, and the sweep deletes its packs. That depends on no clock, and
   on no order of requests: they may be executed late, and machines may be suspended or restored.
4. In a store without a key, all content of the tenant up to the time of the record is refused. The
   time is that of its last use, so content that is used later may return.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from persistkv.errors import CorruptPackError, StoreError, TenantForgottenError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.blobs import BlobInfo, BlobMissingError, UnavailableError
from persistkv.storage.catalogue.catalogue import tenants_of
from persistkv.storage.format.pack import PLAIN_KEY
from persistkv.storage.shared.format import (
    MAX_OBJECT_BYTES,
    NO_NAMESPACE,
    ArrayStruct,
    DataKeyId,
    Digest,
    Time,
    decode,
    encode,
)
from persistkv.tenants import tenant_digest

if TYPE_CHECKING:
    from persistkv.storage.shared.calls import Medium

logger = logging.getLogger(__name__)

# maximum number of lists in a row, while other processes replace the records
_MOST_LISTS = 6


class ForgetRecord(ArrayStruct, frozen=True):
    """One forgetting of a tenant."""

    tenant: Digest
    """Digest of its name (``tenant_digest``)."""
    time: Time
    """Time of the forgetting, on the medium's clock: seconds since the epoch."""
    keys: tuple[DataKeyId, ...]
    """Ids of the data keys that are destroyed; empty without a key."""


class ForgottenTenants:
    """Content of the records that a handle has read. Any thread may ask, without a lock; one thread
    at a time adds."""

    def __init__(self) -> None:
        self.records: frozenset[ForgetRecord] = frozenset()
        """All records."""
        self.keys: frozenset[bytes] = frozenset()
        """Ids of all destroyed data keys."""
        self.tenants: frozenset[bytes] = frozenset()
        """Digests of the names of all forgotten tenants."""
        self.time = 0.0
        """Time of the latest record, on the medium's clock; 0: there is none."""
        self._until: dict[bytes, float] = {}
        """Digest of a tenant without data keys → time up to which it is forgotten."""

    def add(self, records: Iterable[ForgetRecord]) -> None:
        """Add records; known ones change nothing. Each frozenset is replaced by a new one, and
        times of ``_until`` one by one, so readers in other threads see the old or the new ones."""
        for record in records:
            self.records |= {record}
            self.time = max(self.time, record.time)
            self.keys |= set(record.keys)
            # without data keys, all content up to the time of the latest record is forgotten
            if not record.keys:
                until = self._until.get(record.tenant, -math.inf)
                self._until[record.tenant] = max(until, record.time)
            # change the tenants last: readers in other threads first look for the tenant here, then
            # at the rest
            self.tenants |= {record.tenant}

    def keys_of(self, tenant: str) -> frozenset[bytes]:
        """Return the ids of the destroyed data keys of a tenant."""
        digest = tenant_digest(tenant)
        found: set[bytes] = set()
        for record in self.records:
            if record.tenant == digest:
                found.update(record.keys)
        return frozenset(found)

    def covers(
        self,
        tenant: str,
        data_key: bytes,
        time: float,
    ) -> bool:
        """Return whether content is forgotten.

        :param data_key: id of the key that seals it; ``PLAIN_KEY``: none does.
        :param time: time of its last use, on the medium's clock.
        """
        if data_key != PLAIN_KEY:
            return data_key in self.keys
        if not self._until:
            return False
        digest = tenant_digest(tenant)
        # the default is before any time: the tenant was never forgotten
        until = self._until.get(digest, -1.0)
        return time <= until


class ForgetRecords:
    """The records of one store, as one handle reads and writes them. Thread-safe."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._lock = medium.clock.lock()
        """Held while records are read or written."""
        self.forgotten = ForgottenTenants()
        """Content of the records that were read so far."""
        self._read: set[str] = set()
        """Names of the blobs that were read."""
        self._is_read = False
        """Whether all records were read once."""
        self._junk: set[str] = set()
        """Names of the blobs that could not be read, which was logged."""
        self._to_refuse: set[str] = set()
        """Names of tenants whose data keys this handle had when it read their record:
        ``refuse_forgotten`` refuses the next batch of each, which may have content from before the
        record, and removes the name."""

    def refresh(self) -> None:
        """Read new records, and drop the data keys that they name.

        :raises StoreError: the medium failed, or other processes write records all the time;
            records that were read before stay.
        """
        with self._lock:
            missing_before: set[str] = set()
            for _ in range(_MOST_LISTS):
                missing = self._read_new_blobs()
                # A blob that vanishes after the list was replaced by another that includes it, and
                # that the next list shows. A blob that is missing after both lists is damage, and
                # is ignored.
                newly_missing = missing - missing_before
                if not newly_missing:
                    self._is_read = True
                    return
                missing_before = missing
            raise UnavailableError(
                "the records of forgotten tenants are being replaced"
            )

    def _read_new_blobs(self) -> set[str]:
        """Read the blobs that a list shows and that were not read; return the names of missing
        blobs."""
        missing: set[str] = set()
        prefix = self._medium.names.forgotten
        # the first list is stable, because no record may be overlooked before content is served
        for info in self._medium.listed(prefix, stable=not self._is_read):
            if info.name in self._read:
                continue
            try:
                records = self._fetch(info.name)
            except BlobMissingError:
                missing.add(info.name)
                continue
            # leave the blob to the next call, because it may become readable
            if records is None:
                continue
            self._apply(records)
            self._read.add(info.name)
        return missing

    def _fetch(self, name: str) -> Sequence[ForgetRecord] | None:
        """Return the records in a blob; None if it does not read: it may be junk, or sealed with a
        key that is not known yet.

        :raises BlobMissingError: there is no such blob.
        """
        try:
            body = self._medium.sealed(name, NO_NAMESPACE, MAX_OBJECT_BYTES)
            return decode_records(body)
        except CorruptPackError as error:
            if name not in self._junk:
                text = "%s does not read (%s): if `forget` wrote it, repeat the command"
                logger.warning(text, name, error)
            self._junk.add(name)
            return None

    def _apply(self, records: Collection[ForgetRecord]) -> None:
        """Apply records from now on: drop the data keys that they name, and note their tenants for
        ``refuse_forgotten``."""
        self.forgotten.add(records)
        tenants = self._medium.keys.drop(self.forgotten.keys)
        self._to_refuse |= tenants

    def new(self, tenant: str, keys: Iterable[bytes]) -> ForgetRecord:
        """Return a record of this moment.

        :param keys: ids of the data keys to destroy.
        """
        medium = self._medium
        # use the machine's time if the medium has never told its own
        time = medium.time.time_of_use() or medium.clock.wall()
        digest = tenant_digest(tenant)
        return ForgetRecord(digest, time, tuple(sorted(keys)))

    def write(self, record: ForgetRecord) -> float:
        """Write a record, and apply it from now on.

        :returns: the time of its blob on the medium's clock, perhaps rounded down to a second.
        :raises StoreError: the medium failed; the record may be durable.
        """
        medium = self._medium
        with self._lock:
            names = medium.names
            present = medium.listed(names.forgotten)
            # replace only the blobs that were read, because the new blob includes no others
            replaced = [info.name for info in present if info.name in self._read]
            # write one blob with all records, so that a new handle reads one
            body = encode([*self.forgotten.records, record])
            name = names.new_record(medium.clock.random)
            written = medium.put_sealed(name, body, NO_NAMESPACE)
            self._read.add(name)
            self._apply([record])
            # Delete the replaced blobs only now that the blob which includes them is durable. A
            # blob that stays does no harm.
            with suppress(StoreError):
                medium.blobs.delete(replaced)
            return self._listed_time(written)

    def _listed_time(self, written: BlobInfo) -> float:
        """Return the time that a list shows for a blob of records; that of the reply to its write
        if no list shows it. The date of a reply may be wrong, and the caller compares this time
        with those of the blobs of data keys: lists show both by the same clock."""
        medium = self._medium
        for info in medium.listed(medium.names.forgotten):
            if info.name == written.name:
                return info.time
        return written.time

    def write_again(self) -> None:
        """Write all known records again, after the store was deleted: other handles may still have
        the data keys, and write them again, too.

        :raises StoreError: the medium failed.
        """
        if not self.forgotten.records:
            return
        medium = self._medium
        name = medium.names.new_record(medium.clock.random)
        body = encode(list(self.forgotten.records))
        medium.put_sealed(name, body, NO_NAMESPACE)

    def refuse_forgotten(self, batch: CommitBatch) -> None:
        """Refuse, once for each forgotten tenant, a batch that may have content which was accepted
        before the tenant was forgotten.

        :raises TenantForgottenError: the batch has content of forgotten tenants. The caller drops
            all content that it has of them; the next batch is accepted.
        """
        if not self._to_refuse:
            return
        with self._lock:
            refused = self._to_refuse & tenants_of(batch)
            # accept the next batch of these tenants
            self._to_refuse -= refused
        if refused:
            raise TenantForgottenError(refused)


def decode_records(body: bytes) -> list[ForgetRecord]:
    """Decode the body of a blob with records; errors as in ``decode``."""
    return decode(_DECODER, body, "forget record")


_DECODER = msgspec.msgpack.Decoder(list[ForgetRecord])
