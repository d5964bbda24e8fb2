"""The head of a store: the only object of the feed that is overwritten.

1. A head is a value, read together with its ETag (``HeadVersion``). Every write is derived from one version and
   conditional on the ETag of that version, not of a newer one that another thread has read meanwhile: one write both
   publishes feed objects and fences former leaders.
2. After a write with unknown outcome the head is read, before anything else is written.
3. A missing, damaged or unauthentic head is rebuilt from each namespace's newest readable snapshot and the feed objects
   that follow it: each contains the term of its predecessor. The write replaces only the damaged version that was read.
4. A head succeeds another only if its positions are the same, or one more and published under the writer's own term.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import NamedTuple

from persistkv.errors import CorruptPackError, CorruptStoreError, StoreError, StoreUnavailableError
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


class HeadVersion(NamedTuple):
    """A head as it was read or written."""

    head: Head
    etag: str
    """Empty: it was never in the bucket."""


class DamagedHeadError(CorruptPackError):
    """The head is damaged, or was not written with the key.

    :param etag: the ETag of the damaged version.
    """

    def __init__(self, cause: CorruptPackError, etag: str) -> None:
        super().__init__("head", str(cause))
        self.etag = etag


class NoSuccessorError(StoreError):
    """A new head would move a namespace backwards or by several positions, or publish under another leader's term."""


class StoreHead:
    """Reads and writes the head; the property ``head`` is its newest known version. Thread-safe.

    :param where: the store, for messages.
    """

    def __init__(self, bucket: Bucket, names: Names, authenticator: Authenticator, where: str) -> None:
        self.version = HeadVersion(Head(), "")
        """Newest known version. Read it once and derive a new head from that value: other threads replace it."""
        self.changed_at = 0.0
        """Monotonic time at which this handle first read or wrote this version."""
        self.bucket = bucket
        self.names = names
        self._authenticator = authenticator
        self._where = where
        self._lock = threading.RLock()

    @property
    def head(self) -> Head:
        """Head of the newest known version."""
        return self.version.head

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
            except DamagedHeadError as error:
                if not create:
                    raise CorruptStoreError(f"{self._where}: unreadable head: {error}") from None
                logger.warning("%s: the head is unreadable (%s): rebuilding it", self._where, error)
                condition = error.etag
            store = self.bucket.clock.random.randbytes(NONCE_BYTES)
            head = Head(store=store, capacity=policy.capacity, ttl_s=policy.ttl_s, unquoted=self._probe())
            self._rebuild(head)
            if condition != ABSENT and head.unquoted:
                condition = condition.strip('"')
            # The condition is that of the version read above: the rebuilt head lacks what was published since.
            with suppress(ConditionFailedError):  # another process was faster
                self._put(head, condition)
            self._adopt(self.read(None))

    def read(self, known: str | None) -> HeadVersion:
        """Read the head; it does not become ``version``.

        :param known: ETag of a known version; None: there is none.
        :raises UnchangedError: the head still has the ETag ``known``.
        :raises ObjectMissingError: there is no head.
        :raises DamagedHeadError: the head is damaged, or was not written with the key.
        :raises CorruptStoreError: the object is not a head of this format.
        """
        data, etag = self.bucket.get_if_changed(self.names.head, known)
        try:
            opened = self._authenticator.opened(NO_NAMESPACE, _SIGNED_AS, data)
            return HeadVersion(decode_head(opened, self._where), etag)
        except CorruptPackError as error:
            raise DamagedHeadError(error, etag) from None

    def poll(self) -> bool:
        """Read the head if it has changed; return whether it has. After an error ``version`` is unchanged.

        :raises StoreError: see ``read``.
        """
        with self._lock:
            try:
                version = self.read(self.version.etag or None)
            except UnchangedError:
                return False
            self._adopt(version)
            return True

    def write(self, head: Head, base: HeadVersion, term: bytes = b"") -> bool:
        """Replace the head, and set its ``beat``, if ``base`` is still the version in the bucket, and return True;
        otherwise read the newer version and return False.

        :param base: the version from which ``head`` was derived.
        :param term: the writer's own term; empty: it neither leads nor runs for election.
        :raises NoSuccessorError: ``head`` does not succeed ``base``; nothing was written.
        :raises S3Error: the write failed or its outcome is unknown; ``version`` is the newest version that was read.
        """
        _check_successor(base.head, head, term)
        with self._lock:
            head.beat = base.head.beat + 1
            etag = base.etag.strip('"') if base.head.unquoted else base.etag
            try:
                self._adopt(HeadVersion(head, self._put(head, etag)))
                return True
            except ConditionFailedError:
                self.poll()
            except S3Error as error:
                if not (error.uncertain and self.poll()):
                    raise
            return self.head == head

    def _adopt(self, version: HeadVersion) -> None:
        self.version = version
        self.changed_at = self.bucket.clock.monotonic()

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


def _check_successor(old: Head, new: Head, term: bytes) -> None:
    """:raises NoSuccessorError: ``new``, of a writer with this term, does not succeed ``old``."""
    leads = bool(term) and old.leader == term
    if new.leader != old.leader:
        elects = new.leader == term and new.epoch == old.epoch + 1
        resigns = leads and not new.leader
        if not elects and not resigns:
            raise NoSuccessorError("the head would replace the leader without an election")
    if old.namespaces.keys() - new.namespaces.keys():
        raise NoSuccessorError("the head would lack a namespace")
    for namespace, held in new.namespaces.items():
        before = old.namespaces.get(namespace)
        if held == before:
            continue
        position = 0 if before is None else before.position
        if not leads or held.position != position + 1 or held.term_of(held.position) != term:
            text = f"position {held.position} of {namespace.hex()} does not follow {position} in the writer's term"
            raise NoSuccessorError(text)
