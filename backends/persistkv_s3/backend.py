"""The S3 driver: one handle on the namespaces of one store.

An unreachable server does not prevent an engine from starting: the handle is then *dark*. Lookups miss and commits
raise until the server has answered once and the handle has checked the store's format. A handle opened with the
argument ``read_only`` is never dark: opening raises. If the server rejects requests, opening raises in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from persistkv.config import StoreUrl
from persistkv.errors import CorruptPackError, CorruptStoreError, StoreError, StoreUnavailableError
from persistkv.storage.backend import Capabilities, Changes, CommitBatch, CommitResult, Namespace, ReadSpan
from persistkv.storage.extensions import BackendStats, InspectableBackend, Policy, RequestUse
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest, decode_manifest
from persistkv.storage.format.pack import Frame, PackTable
from persistkv.storage.identity import Identity
from persistkv_s3.authentication import Authenticator, SignedObjects
from persistkv_s3.client.boto import BotoClient, PlainBucket
from persistkv_s3.client.bucket import Breaker, Bucket
from persistkv_s3.client.transport import PASSING, ObjectExistsError, ObjectMissingError, Transport
from persistkv_s3.log.follower import Follower
from persistkv_s3.log.layout import (
    FORMAT,
    IDENTITIES,
    STATUSES,
    Names,
    decode_format,
    encode_format,
    encode_namespace,
    parse_identity,
    parse_namespace,
)
from persistkv_s3.options import Place, S3Options, parse_url
from persistkv_s3.retention import Retention, Round
from persistkv_s3.session import NamespaceSession

logger = logging.getLogger(__name__)

_STATUS_KEPT_S = 86_400.0  # one day


class S3Backend(InspectableBackend):
    """``read`` may be called from many threads, concurrently with one other call."""

    capabilities = Capabilities(remote=True)

    def __init__(self, place: Place, options: S3Options, transport: Transport, *, read_only: bool = False) -> None:
        """Initialise without sending a request; ``connect`` sends the first one.

        :param transport: makes single attempts; closed with the handle.
        """
        self.breaker = Breaker(str(place), options.slow_s)
        """Decides whether requests are sent at present."""
        self._place = place
        self._options = options
        self._read_only = read_only or options.read_only
        self.capabilities = replace(self.capabilities, writable=not self._read_only)
        self.status_interval_s = None if self._read_only else options.status_s
        self._authenticator = Authenticator(options.secret())
        self._bucket = Bucket(transport, self.breaker, options.deadline_s, options.connections)
        self._policy = options.policy
        self._retention = Retention(self._bucket, place.prefix, options.retention_s, options.grace_s)
        self._namespaces: dict[bytes, Namespace] = {}
        self._sessions: dict[bytes, NamespaceSession] = {}
        self._status_shown = False
        self._dark: StoreError | None = None
        """Why the store has never been reached."""
        self._closed = False

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> S3Backend:
        place, options = parse_url(url)
        return cls.connect(place, options, BotoClient(place, options), read_only=read_only)

    @classmethod
    def new_policy(cls, url: StoreUrl) -> Policy:
        return parse_url(url)[1].policy

    @classmethod
    def plain_medium(cls, url: StoreUrl) -> PlainBucket:
        return PlainBucket(*parse_url(url))

    @classmethod
    def connect(cls, place: Place, options: S3Options, transport: Transport, *, read_only: bool = False) -> S3Backend:
        """Open a store with a given client, which the handle then owns; otherwise like ``open``."""
        backend = cls(place, options, transport, read_only=read_only)
        try:
            backend._check_format()
            if not backend._read_only and (differences := backend._policy.contradictions(options.policy)):
                text = "%s: the URL says %s; the store keeps its recorded policy (persistkv set changes it)"
                logger.warning(text, place, differences)
        except PASSING as error:
            if read_only:
                backend.close()
                raise
            logger.warning("%s does not answer (%s); lookups miss until it does", place, error)
            backend._dark = error
        except BaseException:
            backend.close()
            raise
        return backend

    def _check_format(self) -> None:
        key = self._place.prefix + FORMAT
        try:
            self._policy = self._recorded_policy()
            return
        except ObjectMissingError:
            if self._read_only:
                raise StoreUnavailableError(f"{self._place} holds no store, and is opened read-only") from None
        except CorruptPackError:
            raise CorruptStoreError(f"{self._place}: the object there is not of a persistkv store") from None
        try:
            self._bucket.put(key, [encode_format(self._policy)])
        except ObjectExistsError:  # another process was faster
            self._policy = self._recorded_policy()

    def _recorded_policy(self) -> Policy:
        return decode_format(self._bucket.get(self._place.prefix + FORMAT), str(self._place))

    def policy(self) -> Policy:
        self._check_open()
        self._policy = self._recorded_policy()
        return self._policy

    def set_policy(self, policy: Policy) -> None:
        self._check_open(writes=True)
        self.policy()  # a store of this format
        self._bucket.put(self._place.prefix + FORMAT, [encode_format(policy)], only_if_absent=False)
        self._policy = policy

    def _is_dark(self) -> bool:
        """Return whether the server has never answered; if it answers now, complete the opening."""
        if self._dark is not None:
            try:
                self._check_format()
                for namespace in () if self._read_only else self._namespaces.values():
                    self._put_identity(namespace)
            except PASSING as error:
                self._dark = error
                return True
            self._dark = None
        return False

    def _put_identity(self, namespace: Namespace) -> None:
        with suppress(ObjectExistsError):
            self._bucket.put(self._identity_key(namespace.id), [encode_namespace(namespace)])

    def namespaces(self) -> Iterator[Namespace]:
        self._check_open()
        if self._is_dark():
            return iter([])
        found = sorted(self._bucket.list(self._place.prefix + IDENTITIES), key=lambda info: -info.modified)
        return self._fetched([name for info in found if (name := parse_identity(info.key)) is not None])

    def _fetched(self, names: list[bytes]) -> Iterator[Namespace]:
        """Yield namespaces, fetched a few at a time."""
        for start in range(0, len(names), self._options.connections):
            fetched = self._bucket.all(self._namespace, names[start : start + self._options.connections])
            yield from (namespace for namespace in fetched if namespace is not None)

    def holds(self, namespace: bytes) -> bool:
        self._check_open()
        return not self._is_dark() and self._namespace(namespace) is not None

    def open_namespace(self, identity: Identity) -> Namespace:
        self._check_open()
        if self._is_dark():
            return self._namespaces.setdefault(identity.digest, Namespace(identity, self._bucket.now()))
        found = self._namespace(identity.digest)
        if found is None and self._read_only:
            raise StoreUnavailableError(f"{self._place} holds no namespace {identity.digest.hex()}: open read-only")
        if found is None:
            self._put_identity(Namespace(identity, self._bucket.now()))
            found = self._namespace(identity.digest)  # another process may have been faster
        if found is None:
            raise CorruptStoreError(f"{self._identity_key(identity.digest)} does not read")
        return found

    def _identity_key(self, name: bytes) -> str:
        return f"{self._place.prefix}{IDENTITIES}{name.hex()}"

    def _namespace(self, name: bytes) -> Namespace | None:
        """Return a namespace, fetched once, because identities never change; None if it is missing or invalid."""
        if name not in self._namespaces:
            data = self._small_object(self._identity_key(name))
            found = None if data is None else parse_namespace(data, name)
            if found is None:
                return None
            self._namespaces[name] = found
        return self._namespaces[name]

    def _small_object(self, key: str) -> bytes | None:
        """Return a whole object; None if it is missing or too large."""
        try:
            return bytes(self._bucket.get(key))
        except (ObjectMissingError, CorruptPackError):
            return None

    def session(self, namespace: bytes) -> NamespaceSession:
        """Return this handle's session with a namespace."""
        self._check_open()
        if namespace not in self._sessions and self._namespace(namespace) is None:
            raise StoreError(f"{self._place} holds no namespace {namespace.hex()}")
        return self._sessions.get(namespace) or self._sessions.setdefault(namespace, self._make_session(namespace))

    def _make_session(self, namespace: bytes) -> NamespaceSession:
        names, options = Names(self._place.prefix, namespace, self._authenticator.key_id), self._options
        objects = SignedObjects(self._bucket, names, namespace, self._authenticator)
        place = f"{options.endpoint_url or ''} {self._place.bucket} {names.base}"
        follower = Follower(objects, options.refresh_s, options.cache_directory(), place)
        return NamespaceSession(objects, follower, options.touch_s)

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        self._check_open(writes=True)
        if any(pack.namespace != namespace for pack in batch.packs):
            raise StoreError(f"a pack of another namespace than {namespace.hex()}")
        session = self.session(namespace)
        if self._is_dark():
            raise StoreUnavailableError(f"{self._place} has not answered yet ({self._dark})")
        if session.follower.emptied:  # format and identity are missing, too
            self._check_format()
            self._put_identity(self._namespaces[namespace])
            session.restart()
        result = session.commit(batch, 1 + max(other.state.moment for other in self._sessions.values()))
        if self._retention.is_due():
            try:
                self.retain()
            except StoreError as error:
                logger.warning("%s: retention failed (%s); the next period retries it", self._place, error)
        return result

    def retain(self, now: float | None = None) -> Round | None:
        """Evict as the ttl and the capacity require and remove orphans, unless an engine has done so in this period.

        Fetches the index of all namespaces. ``changes`` reports the evicted packs.

        :param now: do it in any case, as if this were the server's time.
        :raises StoreError: it was not completed; the round of the next period continues.
        """
        self._check_open(writes=True)
        names = [namespace.id for namespace in self.namespaces()]
        sessions = {name: self._sessions.get(name) or self._make_session(name) for name in names}
        if now is not None:
            return self._retention.run(sessions, self.policy(), now)
        return self._retention.run_if_first(sessions, self.policy)

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        session = self.session(namespace)
        if not self._is_dark():
            look = session.follower.load if cursor is None else session.follower.look
            look()
        return session.state.changes(cursor)

    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        return self.session(namespace).packs.read(spans)

    def read_frames(
        self,
        namespace: bytes,
        pack_id: bytes,
        frames: Sequence[Frame],
        buffer: memoryview,
        take: Callable[[int, memoryview], None],
    ) -> None:
        self.session(namespace).packs.read_frames(pack_id, frames, buffer, take)

    def manifests(self, namespace: bytes) -> Iterator[RequestManifest]:
        session = self.session(namespace)
        session.follower.look()
        for manifest in list(session.state.manifests.values()):
            try:
                yield decode_manifest(manifest.head)
            except CorruptPackError:
                continue

    def manifests_naming(self, namespace: bytes, packs: Sequence[bytes]) -> list[RequestManifest]:
        naming = self.session(namespace).state.naming
        names = {name for pack in packs for name in naming.get(pack, ())}
        return [head for head in self.manifests(namespace) if head.id in names] if names else []

    def chain(self, namespace: bytes, manifest_id: str) -> list[bytes] | None:
        held = self.session(namespace).state.manifests.get(manifest_id)
        return None if held is None else list(held.packs)

    def tables(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[PackTable]:
        packs = self.session(namespace).state.packs
        return [held.table for held in map(packs.get, pack_ids) if held is not None]

    def manifest_keys(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[ManifestKeys | None]:
        session = self.session(namespace)
        return [session.manifest_keys(manifest_id) for manifest_id in manifest_ids]

    def uses(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        session = self.session(namespace)
        return [session.state.request_use(manifest_id) for manifest_id in manifest_ids]

    def stats(self) -> BackendStats:
        sessions = [self.session(namespace.id) for namespace in self.namespaces()]
        for session in sessions:
            session.follower.look()
        packs = [pack for session in sessions for pack in session.state.packs.values()]
        return BackendStats(
            packs=len(packs),
            blocks=sum(len(pack.table.keys) for pack in packs),
            requests=sum(len(session.state.manifests) for session in sessions),
            raw_bytes=sum(pack.table.raw_length for pack in packs),
            stored_bytes=sum(pack.table.payload_length for pack in packs),
            disk_bytes=sum(session.state.stored_bytes for session in sessions),
            capacity=self._policy.capacity,
        )

    @property
    def breaker_state(self) -> str:
        return self.breaker.state

    @property
    def requests(self) -> dict[str, int]:
        return self._bucket.requests

    def publish_status(self, engine: str, row: bytes | None) -> None:
        self._check_open(writes=True)
        key = f"{self._place.prefix}{STATUSES}{engine}"
        if row is None:
            self._bucket.delete([key])
            return
        if not self._status_shown:  # delete those that killed engines left
            old = self._bucket.now() - _STATUS_KEPT_S
            found = self._bucket.list(self._place.prefix + STATUSES)
            self._bucket.delete([info.key for info in found if info.modified < old])
            self._status_shown = True
        self._bucket.put(key, [row], only_if_absent=False)

    def statuses(self) -> dict[str, bytes]:
        self._check_open()
        keys = [info.key for info in self._bucket.list(self._place.prefix + STATUSES)]
        rows = zip(keys, self._bucket.all(self._small_object, keys), strict=True)
        return {key.rpartition("/")[2]: row for key, row in rows if row is not None}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            for session in () if self._read_only else self._sessions.values():
                session.close()
        finally:
            self._bucket.close()

    def _check_open(self, *, writes: bool = False) -> None:
        if self._closed:
            raise StoreError(f"{self._place} is closed")
        if writes and self._read_only:
            raise StoreError(f"{self._place} is open read-only")
