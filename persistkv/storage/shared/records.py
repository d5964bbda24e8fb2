"""Small blobs of a store that belong to no namespace's index: identities and statuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.backend import Namespace
from persistkv.storage.blobs import BlobMissingError
from persistkv.storage.catalogue.rows import decode_namespace, encode_namespace
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import MAX_SMALL_BYTES, NO_NAMESPACE

_STATUS_KEPT_S = 86_400.0  # one day: seconds for which the status of an engine is kept


class Identities:
    """Namespaces of a store by their identities. Namespaces are immutable, so each is read once.

    Any thread may call any method.
    """

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._known: dict[bytes, Namespace] = {}
        """Namespaces that were read or added, by id."""
        self._unwritten: dict[bytes, Namespace] = {}
        """Namespaces that the store lacks, by id."""

    def known(self, namespace_id: bytes) -> Namespace | None:
        """Return the namespace with this id if it was read or added; None: it was not."""
        return self._known.get(namespace_id)

    def find(self, namespace_id: bytes) -> Namespace | None:
        """Return the namespace with this id; None if it is missing or invalid.

        :raises StoreError: the medium failed.
        """
        known = self._known.get(namespace_id)
        if known is not None:
            return known
        blob = self._medium.names.identity(namespace_id)
        try:
            row = self._medium.sealed(blob, NO_NAMESPACE)
        except (BlobMissingError, CorruptPackError):
            return None
        found = decode_namespace(namespace_id, row)
        if found is not None:
            self._known[namespace_id] = found
        return found

    def all(self) -> Iterator[Namespace]:
        """Iterate over the namespaces of the store, the newest first.

        :raises StoreError: the medium failed, now or during the iteration.
        """
        medium = self._medium
        names = medium.names
        infos = medium.listed(names.identities)
        newest_first = sorted(infos, key=lambda info: -info.time)
        ids: list[bytes] = []
        for info in newest_first:
            namespace_id = names.parse_identity(info.name)
            if namespace_id is not None:
                ids.append(namespace_id)
        # ``each`` calls ``find`` concurrently, and keeps the order of the ids
        found = medium.maintenance.each(self.find, ids)
        # leave out None: the identity was deleted since the list, or is invalid
        return (namespace for _, namespace in found if namespace is not None)

    def add(self, namespace: Namespace, *, writes: bool) -> None:
        """Add a namespace that the store lacks.

        :param writes: whether ``write_new`` writes it.
        """
        self._known[namespace.id] = namespace
        if writes:
            self._unwritten[namespace.id] = namespace

    def write_new(self) -> None:
        """Write the namespaces that the store lacks.

        :raises StoreError: the medium failed; the rest is written later.
        """
        medium = self._medium
        unwritten = list(self._unwritten.items())
        for namespace_id, namespace in unwritten:
            body = encode_namespace(namespace)
            blob = medium.names.identity(namespace_id)
            medium.put_sealed(blob, body, NO_NAMESPACE, MAX_SMALL_BYTES)
            # use a default, because another thread may have written and removed the namespace, too
            self._unwritten.pop(namespace_id, None)


class Statuses:
    """Statuses of engines, see ``Backend.publish_status``."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._has_deleted_old = False
        """Whether this handle has deleted the statuses of killed engines, which it does once."""

    def publish(self, engine: str, row: bytes | None) -> None:
        """Write the status of an engine; None: delete it.

        :raises StoreError: it is larger than readers accept, or the medium failed.
        """
        medium = self._medium
        # convert to lower case, because names of blobs have no capital letters
        name = medium.names.statuses + engine.lower()
        if row is None:
            medium.blobs.delete([name])
            return
        if len(row) > MAX_SMALL_BYTES:
            text = f"a status of {len(row)} bytes: readers accept {MAX_SMALL_BYTES}"
            raise StoreError(text)
        medium.put(name, [row])
        # delete old statuses after the first write, because its reply contains the medium's time
        if not self._has_deleted_old:
            self._delete_old()
            self._has_deleted_old = True

    def _delete_old(self) -> None:
        """Delete statuses that were not written for a day: killed engines have left them."""
        medium = self._medium
        oldest_kept = medium.time.now() - _STATUS_KEPT_S
        infos = medium.listed(medium.names.statuses)
        old = [info.name for info in infos if info.time < oldest_kept]
        medium.blobs.delete(old)

    def all(self) -> dict[str, bytes]:
        """Return the statuses by the names of the engines in lower case."""
        medium = self._medium
        found: dict[str, bytes] = {}
        prefix = medium.names.statuses
        for info in medium.listed(prefix):
            engine = info.name.removeprefix(prefix)
            with suppress(BlobMissingError, CorruptPackError):
                row = medium.whole(info.name, MAX_SMALL_BYTES)
                found[engine] = bytes(row)
        return found
