"""The head of a store: the only object of the feed that is overwritten.

1. Every write is conditional on the ETag of the version that it is based on: one write both publishes feed objects and
   fences former leaders.
2. After a write with unknown outcome the head is read, before anything else is written.
3. A missing, damaged or unauthentic head is rebuilt from each namespace's newest readable snapshot and the feed objects
   that follow it: each contains the term of its predecessor.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from persistkv.errors import CorruptPackError, CorruptStoreError, StoreUnavailableError
from persistkv.storage.extensions import Policy
from persistkv_s3.authentication import Authenticator, SignedObjects
from persistkv_s3.client.bucket import Bucket
from persistkv_s3.client.transport import (
    ABSENT,
    ConditionFailedError,
    ObjectMissingError,
    RefusedError,
    S3Error,
    UnchangedError,
)
from persistkv_s3.feed.format import (
    MAX_FEED_BYTES,
    MAX_SNAPSHOT_BYTES,
    NO_NAMESPACE,
    NONCE_BYTES,
    Feed,
    Head,
    Names,
    NamespaceHead,
    Snapshot,
    decode_head,
    encode_head,
    feed_name,
    parse_feed,
    parse_identity,
)

logger = logging.getLogger(__name__)

_SIGNED_AS = "head"


class StoreHead:
    """Reads and writes the head; the attribute ``head`` is its newest known version. Thread-safe.

    :param where: the store, for messages.
    """

    def __init__(self, bucket: Bucket, names: Names, authenticator: Authenticator, where: str) -> None:
        self.head = Head()
        self.changed_at = 0.0
        """Monotonic time at which this handle first read or wrote this version."""
        self._etag = ""
        self.bucket = bucket
        self.names = names
        self._authenticator = authenticator
        self._where = where
        self._lock = threading.RLock()

    def open(self, policy: Policy, *, create: bool) -> None:
        """Read the head; create or rebuild it, with the given policy, if necessary.

        :raises StoreUnavailableError: there is no head and ``create`` is False, or the server does not honour
            conditional PUTs.
        :raises CorruptStoreError: the object is not a head of this format, or it is damaged and ``create`` is False.
        """
        with self._lock:
            try:
                self.poll()
                return
            except ObjectMissingError:
                if not create:
                    raise StoreUnavailableError(f"{self._where} holds no store, and is opened read-only") from None
                condition = ABSENT
            except CorruptPackError as error:
                if not create:
                    raise CorruptStoreError(f"{self._where}: unreadable head: {error}") from None
                logger.warning("%s: the head is unreadable (%s): rebuilding it", self._where, error)
                condition = ""
            store = self.bucket.clock.random.randbytes(NONCE_BYTES)
            head = Head(store=store, capacity=policy.capacity, ttl_s=policy.ttl_s, unquoted=self._probe())
            self._rebuild(head)
            with suppress(ConditionFailedError):  # another process was faster
                if not condition:
                    etag = self.bucket.get_if_changed(self.names.head, None)[1]
                    condition = etag.strip('"') if head.unquoted else etag
                self._put(head, condition)
            self._etag = ""
            self.poll()

    def poll(self) -> bool:
        """Read the head if it has changed; return whether it has. After an error ``self.head`` is unchanged.

        :raises ObjectMissingError: there is no head.
        :raises CorruptPackError: the head is damaged, or was not written with the key.
        :raises CorruptStoreError: the object is not a head of this format.
        """
        with self._lock:
            try:
                data, etag = self.bucket.get_if_changed(self.names.head, self._etag or None)
            except UnchangedError:
                return False
            head = decode_head(self._authenticator.opened(NO_NAMESPACE, _SIGNED_AS, data), self._where)
            self._adopt(head, etag)
            return True

    def write(self, head: Head) -> bool:
        """Replace the head, and set its ``beat``, if ``self.head`` is still the version in the bucket, and return True;
        otherwise read the newer version and return False.

        :raises S3Error: the write failed or its outcome is unknown; ``self.head`` is the newest version that was read.
        """
        with self._lock:
            head.beat = self.head.beat + 1
            etag = self._etag.strip('"') if self.head.unquoted else self._etag
            try:
                self._adopt(head, self._put(head, etag))
                return True
            except ConditionFailedError:
                self.poll()
            except S3Error as error:
                if not (error.uncertain and self.poll()):
                    raise
            return self.head == head

    def _adopt(self, head: Head, etag: str) -> None:
        self.head, self._etag, self.changed_at = head, etag, self.bucket.clock.monotonic()

    def _put(self, head: Head, condition: str) -> str:
        data = self._authenticator.signed(NO_NAMESPACE, _SIGNED_AS, [encode_head(head)])
        return self.bucket.put(self.names.head, data, condition=condition)

    def _probe(self) -> bool:
        """Check that the server honours conditional PUTs; return whether it needs ETags without quotes."""
        bucket, key = self.bucket, self.names.probe + self.bucket.clock.random.randbytes(NONCE_BYTES).hex()

        def holds(condition: str) -> bool:
            try:
                bucket.put(key, [bucket.clock.random.randbytes(NONCE_BYTES)], condition=condition)
                return True
            except ConditionFailedError:
                return False
            except RefusedError as error:
                if "NotImplemented" not in str(error):
                    raise
                return condition == other  # refused either way

        etag = bucket.put(key, [b"persistkv"])
        other = '"00000000000000000000000000000000"'
        try:
            for condition, header in ((ABSENT, "If-None-Match"), (other, "If-Match")):
                if holds(condition):
                    raise StoreUnavailableError(f"{self._where}: the server ignores {header} on PUT")
            if holds(etag):
                return False
            if holds(etag.strip('"')):
                return True
            raise StoreUnavailableError(f"{self._where}: the server refuses a PUT with a correct If-Match")
        finally:
            bucket.delete([key])

    def _rebuild(self, head: Head) -> None:
        """Add to ``head`` all namespaces of the bucket, from their snapshots and feed objects."""
        names = (parse_identity(info.key) for info in self.bucket.list(self.names.identities_prefix))
        for namespace in filter(None, names):
            found = self._rebuilt(namespace)
            if found is not None:
                head.namespaces[namespace] = found
                head.epoch = max([head.epoch, *(int.from_bytes(term[:4], "big") for _, _, term in found.spans)])

    def _rebuilt(self, namespace: bytes) -> NamespaceHead | None:
        names = self.names.of(namespace)
        objects = SignedObjects(self.bucket, names, self._authenticator)
        at, term, found = 0, b"", None
        listed = self.bucket.list(f"{names.base}snapshots/")
        for name in sorted((info.key.removeprefix(names.base) for info in listed), reverse=True):
            snapshot = objects.record(name, Snapshot, MAX_SNAPSHOT_BYTES, may_be_missing=True)
            if snapshot is not None:
                at, term = snapshot.position, snapshot.term
                found = NamespaceHead(generation=snapshot.generation, snapshot=name, snapshot_position=at, position=at)
                break
        feeds: dict[int, list[bytes]] = {}
        for info in self.bucket.list(f"{names.base}feed/"):
            if (parsed := parse_feed(info.key)) is not None:
                feeds.setdefault(parsed[0], []).append(parsed[1])
        while True:
            for following in sorted(feeds.get(at + 1, ()), reverse=True):
                name = feed_name(at + 1, following)
                feed = objects.record(name, Feed, MAX_FEED_BYTES, may_be_missing=True)
                if feed is not None and feed.previous == term:
                    break
            else:
                return found
            found = found or NamespaceHead(generation=feed.generation)
            at, term = at + 1, feed.term
            found.append(at, term)
