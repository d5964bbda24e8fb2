"""Forgetting of a tenant in a shared store.

1. A record is written: from then on, no handle that has read it shows or writes the content
   (``records``). It is durable before anything is deleted, so that a blob of a data key that is
   missing is never taken for damage, and a call that fails before it has changed nothing.
2. The data keys are deleted, with all versions of their blobs. They seal all payloads, tables and
   requests: the rest of these in objects, versions and copies can never be read.
3. The blobs of the packs and of the keys of requests are deleted, which frees their space. Packs
   that no index names, such as those of a commit in progress, are found by their trailers.
4. A data key that another engine has made between the list of the keys and the record is destroyed,
   too: content may have been accepted under it before the record.
5. In a store without a key, deletion is all there is. The blobs are deleted before the record,
   while the index names them. After it, the index is written again without the tenant, and the
   objects that it replaces are deleted.
6. Each step can be repeated after a kill.
"""

from __future__ import annotations

from collections.abc import Sequence

from persistkv.errors import StoreError
from persistkv.storage.forgetting import Forgotten
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.forgetting.records import ForgetRecord, ForgottenTenants
from persistkv.storage.shared.namespace import SharedNamespace
from persistkv.storage.shared.policy import RecordedPolicy
from persistkv.storage.shared.replica import Removals

_REPLICAS = (
    "replicas of the index on the machines of engines (option cache), which the key of the store "
    "seals: an engine that uses the store removes the tenant from its own within a minute, and "
    "deletes the file when it ends; elsewhere, delete the directory"
)
_ROUNDS = 20  # maximum number of records, while engines make data keys of the tenant


class Forgetting:
    """Forgets one tenant; used once.

    :param namespaces: all of the store.
    """

    def __init__(
        self,
        medium: Medium,
        policy: RecordedPolicy,
        namespaces: Sequence[SharedNamespace],
        tenant: str,
    ) -> None:
        self._medium = medium
        self._namespaces = namespaces
        self._tenant = tenant
        self._policy = policy
        self._contents: list[tuple[SharedNamespace, Removals]] = []
        """Packs and requests of the tenant that are to be deleted, by namespace."""
        # totals of the deleted content, for the report
        self._packs = 0
        self._requests = 0
        self._stored_bytes = 0
        self._left: list[str] = []
        """Blobs that the medium has kept, in sentences (``Blobs.erase``)."""

    def run(self) -> Forgotten:
        """Write the record, then delete keys and content.

        :raises StoreError: the medium failed, and the call can be repeated; or engines make data
            keys of the tenant all the time.
        """
        # read the indexes first, which must name all content that is durable now
        for namespace in self._namespaces:
            namespace.refresh()
        self._write_records()
        self._policy.announce_forgotten()
        store_keys = self._medium.keys
        keys = self._medium.records.forgotten.keys_of(self._tenant)
        # look before the deletion: the report names the keys whose blobs this attempt deletes
        deleted_now = keys & store_keys.undeleted()
        self._left += store_keys.destroy(keys)
        self._erase()
        # erase also what the index did not name, such as packs of commits in progress
        for namespace in self._namespaces:
            rest = namespace.erase_rest(self._tenant)
            self._packs += rest.packs
            self._stored_bytes += rest.stored_bytes
            self._left += rest.left
        key_ids = sorted(key_id.hex() for key_id in deleted_now)
        # report each sentence once, because several namespaces may leave the same
        left = dict.fromkeys(self._left)
        return Forgotten(
            tenant=self._tenant,
            time=self._medium.time.now_or_wall(),
            key_ids=tuple(key_ids),
            packs=self._packs,
            requests=self._requests,
            stored_bytes=self._stored_bytes,
            out_of_reach=(*left, _REPLICAS),
        )

    def _write_records(self) -> None:
        """Write the record, or several: no handle that has read them shows the content."""
        if self._medium.seal.encrypts:
            self._record_keys()
        else:
            self._record_time()

    def _record_time(self) -> None:
        """In a store without a key, write a record of the present time: content up to it is
        forgotten."""
        records = self._medium.records
        record = records.new(self._tenant, [])
        self._note_content(record)
        # erase before the record is written, while the index names the blobs: afterwards, replicas
        # lack the content
        self._erase()
        records.write(record)

    def _record_keys(self) -> None:
        """Record the data keys of the tenant as destroyed. Other engines may have made further keys
        before the first record was written, and accepted content under them: search again, and
        record these keys, too, until a search finds none.

        :raises StoreError: they make keys all the time.
        """
        records = self._medium.records
        # time of the first record; None: no record is written yet
        first: float | None = None
        for _ in range(_ROUNDS):
            keys = self._keys_until(first)
            if not keys:
                return
            record = records.new(self._tenant, keys)
            self._note_content(record)
            written = records.write(record)
            first = written if first is None else min(first, written)
        raise StoreError(
            "engines make data keys of the tenant all the time: end its requests, and repeat the "
            "command"
        )

    def _note_content(self, record: ForgetRecord) -> None:
        """Note the packs and requests that a record will cover. When it is written, the replicas
        lose them."""
        covered = ForgottenTenants()
        covered.add([record])
        for namespace in self._namespaces:
            content = namespace.replica.content_of(covered)
            self._contents.append((namespace, content))

    def _erase(self) -> None:
        """Delete the blobs of the content that was noted."""
        for namespace, content in self._contents:
            self._left += namespace.erase(self._tenant, content)
            self._packs += len(content.tables)
            self._requests += len(content.manifests)
            for table in content.tables:
                self._stored_bytes += table.payload_length
        self._contents.clear()

    def _keys_until(self, time: float | None) -> list[bytes]:
        """Return the ids of the tenant's data keys that no record names, and that were written
        until ``time`` on the medium's clock; None: at any time."""
        blobs = self._medium.keys.of_tenant(self._tenant)
        found: list[bytes] = []
        for key_id, info in blobs.items():
            if time is None or info.time <= time:
                found.append(key_id)
        return found
