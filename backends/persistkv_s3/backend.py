"""The S3 driver: one handle on the namespaces of one store.

1. Other engines' commits arrive through the feed (``feed/leader``). A thread of the handle polls the head and applies
   the feed to the local catalogues (``catalogue``). If there is no leader and this handle has unmerged commits, it runs
   for election as the leader.
2. An unreachable server does not prevent an engine from starting: the handle is then *dark*. Lookups miss and commits
   raise until the server has answered once. A handle opened with the argument ``read_only`` is never dark: opening
   raises. If the server rejects requests, opening raises in any case.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import msgspec

from persistkv.config import StoreUrl
from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    CorruptStoreError,
    StoreError,
    StoreUnavailableError,
)
from persistkv.storage.backend import Capabilities, Changes, CommitBatch, CommitResult, Namespace, ReadSpan
from persistkv.storage.catalog.backend import check_batch, totals
from persistkv.storage.catalog.rows import decode_namespace, encode_namespace
from persistkv.storage.extensions import BackendStats, InspectableBackend, Policy, RequestUse
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import Frame, PackTable
from persistkv.storage.identity import Identity
from persistkv_s3.authentication import Authenticator, SignedObjects
from persistkv_s3.catalogue import Catalogue
from persistkv_s3.client.boto import BotoClient, PlainBucket
from persistkv_s3.client.bucket import Breaker, Bucket
from persistkv_s3.client.transport import (
    ABSENT,
    PASSING,
    Clock,
    ConditionFailedError,
    ObjectMissingError,
    Take,
    Transport,
)
from persistkv_s3.feed.format import NO_NAMESPACE, Names, parse_identity
from persistkv_s3.feed.head import StoreHead
from persistkv_s3.feed.leader import ROUND_S, Leader
from persistkv_s3.options import Place, S3Options, parse_url
from persistkv_s3.session import NamespaceSession

logger = logging.getLogger(__name__)

_STATUS_KEPT_S = 86_400.0  # one day
_IDLE_AFTER_S = 60.0  # without reads and commits
_IDLE_POLL_S = 30.0
_LEAST_PAUSE_S = 0.05
_POLICY_TRIES = 10


class S3Backend(InspectableBackend):
    """Handle of an S3 store.

    Any thread may call ``read``, ``read_frames`` and ``tables``, concurrently with one other call.
    """

    capabilities = Capabilities(remote=True)

    def __init__(
        self,
        place: Place,
        options: S3Options,
        transport: Transport,
        *,
        read_only: bool = False,
        clock: Clock | None = None,
        background: bool = True,
    ) -> None:
        """Open a store through ``transport``, which is closed with the handle.

        :param background: True: a thread of the handle calls ``step``; False: the caller must do so.
        :raises StoreError: the server rejects requests, the head cannot be used, or ``read_only`` and the server does
            not answer. The transport is closed.
        """
        clock = clock or Clock()
        self.breaker = Breaker(str(place), options.slow_s, clock)
        self._place = place
        self._options = options
        self._read_only = read_only or options.read_only
        self.capabilities = replace(self.capabilities, writable=not self._read_only)
        self.status_interval_s = None if self._read_only else options.status_s
        self._clock = clock
        self._authenticator = Authenticator(options.secret())
        self._bucket = Bucket(transport, self.breaker, options.deadline_s, options.connections, clock)
        self._names = Names(place.prefix, key_id=self._authenticator.key_id)
        self._head = StoreHead(self._bucket, self._names, self._authenticator, str(place))
        self._namespaces: dict[bytes, Namespace] = {}
        self._sessions: dict[bytes, NamespaceSession] = {}
        self._leader = Leader(self._head, self._session_or_none, self._sessions, options.grace_s)
        self._status_shown = False
        self._dark: StoreError | None = None
        """Last error of a server that has not answered since the handle was opened; None: it has answered."""
        self._closed = False
        self._lock = threading.RLock()
        self._poll_at = self._round_at = self._watch_at = 0.0
        self._used_at = clock.monotonic()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._head.open(options.policy, create=not self._read_only)
            if not self._read_only and (differences := self._head.head.policy.contradictions(options.policy)):
                text = "%s: the URL says %s; the store keeps its recorded policy (persistkv set changes it)"
                logger.warning(text, place, differences)
        except PASSING as error:
            if read_only:
                self.close()
                raise
            logger.warning("%s does not answer (%s); lookups miss until it does", place, error)
            self._dark = error
        except BaseException:
            self.close()
            raise
        self._poll_at = clock.monotonic() + options.refresh_s
        if background:
            self._thread = threading.Thread(target=self._run, name="persistkv-s3-feed", daemon=True)
            self._thread.start()

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> S3Backend:
        place, options = parse_url(url)
        return cls(place, options, BotoClient(place, options), read_only=read_only)

    @classmethod
    def new_policy(cls, url: StoreUrl) -> Policy:
        return parse_url(url)[1].policy

    @classmethod
    def plain_medium(cls, url: StoreUrl) -> PlainBucket:
        return PlainBucket(*parse_url(url))

    # Background work

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self.step())
            self._wake.clear()

    def step(self) -> float:
        """Do the polls and merges that are due; return the seconds until more are due. Failures are only logged."""
        try:
            with self._lock:
                if not self._closed and not self._is_dark():
                    self._poll_if_due()
                    self._lead_if_due()
        except PASSING as error:
            logger.debug("%s: background work failed (%s); it is repeated", self._place, error)
        except StoreError as error:
            logger.warning("%s: background work failed (%s); it is repeated", self._place, error)
        due = [self._poll_at]
        if self._leader.leads:
            due.append(self._round_at)
        elif self._waiting:
            due.append(self._watch_at)
        return max(_LEAST_PAUSE_S, min(due) - self._clock.monotonic())

    @property
    def _waiting(self) -> bool:
        """Whether a commit of this handle is not merged into the feed yet."""
        return any(session.is_waiting for session in list(self._sessions.values()))

    def _poll_if_due(self) -> None:
        now = self._clock.monotonic()
        watches = self._waiting and not self._leader.leads
        if now < self._poll_at and not (watches and now >= self._watch_at):
            return
        idle = now - self._used_at > _IDLE_AFTER_S and not self._waiting
        interval = max(_IDLE_POLL_S, self._options.refresh_s) if idle else max(self._options.refresh_s, _LEAST_PAUSE_S)
        self._poll_at = now + interval * self._clock.random.uniform(0.75, 1.25)
        self._watch_at = now + ROUND_S
        if not self._leader.leads:
            self._refresh()

    def _lead_if_due(self) -> None:
        if self._read_only:
            return
        now = self._clock.monotonic()
        if not self._leader.leads:
            if not (self._waiting and self._leader.may_elect and self._leader.elect()):
                return
            self._round_at = now
        if now >= self._round_at:
            self._round_at = now + ROUND_S
            self._leader.round()

    def _refresh(self) -> None:
        """Read the head, and apply the feeds of open namespaces to their local catalogues. A handle that may write
        rebuilds the head if necessary.
        """
        try:
            self._head.poll()
        except (ObjectMissingError, CorruptPackError):
            if self._read_only:
                raise StoreUnavailableError(f"{self._place}: the store was deleted, or its head is damaged") from None
            self._head.open(self._head.head.policy, create=True)
            for name in self._sessions:
                self._put_identity(self._namespaces[name])
        for session in list(self._sessions.values()):
            session.sync()

    def refresh(self) -> None:
        """Apply the commits of all engines to the local catalogues, including commits that are not in the feed yet.

        :raises StoreError: the server or a catalogue failed; the catalogues have a consistent earlier state.
        """
        with self._lock:
            self._check_open()
            found = [(session, session.inbox()) for session in list(self._sessions.values())]
            self._refresh()
            for session, infos in found:
                session.read_inbox(infos)

    def _is_dark(self) -> bool:
        """Return whether the server has not answered this handle yet. If so, first retry the opening of the store."""
        if self._dark is not None:
            try:
                self._head.open(self._options.policy, create=not self._read_only)
                for namespace in () if self._read_only else self._namespaces.values():
                    self._put_identity(namespace)
            except PASSING as error:
                self._dark = error
                return True
            self._dark = None
        return False

    # Policy

    def policy(self) -> Policy:
        with self._lock:
            self._check_open()
            self._head.poll()
            return self._head.head.policy

    def set_policy(self, policy: Policy) -> None:
        if policy.placement is not None:
            raise ConfigurationError("placement", policy.placement, "none: this driver has one placement")
        with self._lock:
            self._check_open(writes=True)
            for _ in range(_POLICY_TRIES):
                self._head.poll()
                base = self._head.version
                head = msgspec.structs.replace(base.head, capacity=policy.capacity, ttl_s=policy.ttl_s)
                if self._head.write(head, base):
                    return
        raise StoreUnavailableError(f"{self._place}: other engines changed the head meanwhile; try again")

    # Namespaces

    def _put_identity(self, namespace: Namespace, *, replace: bool = False) -> None:
        pieces = self._authenticator.signed(NO_NAMESPACE, "identity", [encode_namespace(namespace)])
        with suppress(ConditionFailedError):
            self._bucket.put(self._names.identity(namespace.id), pieces, condition=None if replace else ABSENT)

    def namespaces(self) -> Iterator[Namespace]:
        self._check_open()
        if self._is_dark():
            return iter([])
        found = sorted(self._bucket.list(self._names.identities_prefix), key=lambda info: -info.modified)
        names = [name for info in found if (name := parse_identity(info.key)) is not None]
        opened = self._bucket.each(self._namespace, names, self._options.connections)
        return (namespace for _, namespace in opened if namespace is not None)

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
        for replaces in (False, True):  # junk is replaced: the digest determines the content
            if found is None:
                self._put_identity(Namespace(identity, self._bucket.now()), replace=replaces)
                found = self._namespace(identity.digest)  # that of another process if it was faster
        if found is None:
            raise CorruptStoreError(f"{self._names.identity(identity.digest)} does not read")
        return found

    def _namespace(self, name: bytes) -> Namespace | None:
        """Return the namespace with this id, cached after the first call; None if it is missing or invalid."""
        if name not in self._namespaces:
            found = decode_namespace(name, self._small_object(self._names.identity(name), NO_NAMESPACE, "identity"))
            if found is None:
                return None
            self._namespaces[name] = found
        return self._namespaces[name]

    def note(self, namespace: bytes, name: str) -> bytes | None:
        self._check_open()
        if self._is_dark():
            return None
        return self._small_object(self._names.note(namespace, name), namespace, f"note {name}")

    def put_note(self, namespace: bytes, name: str, content: bytes) -> None:
        self._check_open(writes=True)
        pieces = self._authenticator.signed(namespace, f"note {name}", [content])
        self._bucket.put(self._names.note(namespace, name), pieces)

    def _small_object(self, key: str, namespace: bytes | None = None, signed_as: str = "") -> bytes | None:
        """Return a whole object; None if it is missing, larger than 1 MiB, or not authentic.

        :param namespace, signed_as: as for ``Authenticator.opened``. None: the object is not signed.
        """
        try:
            data = self._bucket.get(key)
            return bytes(data if namespace is None else self._authenticator.opened(namespace, signed_as, data))
        except (ObjectMissingError, CorruptPackError):
            return None

    def session(self, namespace: bytes) -> NamespaceSession:
        """Return this handle's session with a namespace, which the first call opens.

        :raises StoreError: the store has no such namespace, or a request failed; the next call tries again.
        """
        self._check_open()
        found = self._session_or_none(namespace)
        if found is None:
            raise StoreError(f"{self._place} holds no namespace {namespace.hex()}")
        return found

    def _session_or_none(self, namespace: bytes) -> NamespaceSession | None:
        if namespace in self._sessions:
            return self._sessions[namespace]
        if self._namespace(namespace) is None:
            return None
        with self._lock:
            if namespace not in self._sessions:
                self._sessions[namespace] = self._make_session(namespace)
        return self._sessions[namespace]

    def _make_session(self, namespace: bytes) -> NamespaceSession:
        objects = SignedObjects(self._bucket, self._names.of(namespace), self._authenticator)
        place = f"{self._options.endpoint_url or ''} {self._place.bucket} {objects.names.base} {socket.gethostname()}"
        file = f"{blake2b(place.encode(), digest_size=16).hexdigest()}.catalogue"
        catalogue = Catalogue(self._directory() / file, namespace)
        session = NamespaceSession(objects, catalogue, self._head, self._options.touch_s)
        if self._dark is None:
            try:
                infos = session.inbox()
                self._head.poll()
                session.sync()
                session.read_inbox(infos)
            except BaseException:
                catalogue.close()
                raise
        return session

    def _directory(self) -> Path:
        """Return the directory of local catalogues, created if necessary; a temporary one if it cannot be written."""
        wanted = self._options.cache_directory()
        if wanted is not None:
            try:
                wanted.mkdir(parents=True, exist_ok=True, mode=0o700)
                with tempfile.TemporaryFile(dir=wanted):
                    return wanted
            except OSError as error:
                logger.warning("no local catalogue is kept in %s (%s)", wanted, error)
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="persistkv-s3-", ignore_cleanup_errors=True)
        return Path(self._temporary.name)

    # Content

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        self._check_open(writes=True)
        check_batch(namespace, batch)
        session = self.session(namespace)
        if batch.deletions or batch.bad or not self._options.refresh_s:
            self.refresh()  # manifests that another engine wrote since may name the deleted packs
        self._used_at = self._clock.monotonic()
        waited = session.is_waiting
        result = session.commit(batch)
        if session.is_waiting and not waited:
            self._wake.set()
        return result

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        if self._is_dark():
            self._check_open()
            if namespace not in self._namespaces:
                raise StoreError(f"{self._place} has not answered yet, so no namespace {namespace.hex()} is known")
            return Changes(b"", [], reset=True)
        return self._fresh(namespace).catalogue.changes(namespace, cursor)

    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        self._used_at = self._clock.monotonic()
        return self.session(namespace).read(spans)

    def read_frames(
        self, namespace: bytes, pack_id: bytes, frames: Sequence[Frame], buffer: memoryview, take: Take
    ) -> None:
        self._used_at = self._clock.monotonic()
        self.session(namespace).read_frames(pack_id, frames, buffer, take)

    def index_file(self, namespace: bytes) -> Path | None:
        return None if self._is_dark() else self.session(namespace).catalogue.path.with_suffix(".index")

    def tables(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[PackTable]:
        return self.session(namespace).catalogue.tables(namespace, pack_ids)

    def manifests(self, namespace: bytes) -> Iterator[RequestManifest]:
        return self._fresh(namespace).catalogue.manifests(namespace)

    def manifest_keys(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[ManifestKeys | None]:
        session = self.session(namespace)
        return [session.manifest_keys(manifest_id) for manifest_id in manifest_ids]

    def manifests_naming(self, namespace: bytes, packs: Sequence[bytes]) -> list[RequestManifest]:
        return self.session(namespace).catalogue.manifests_naming(namespace, packs)

    def chain(self, namespace: bytes, manifest_id: str) -> list[bytes] | None:
        return self.session(namespace).catalogue.chain(namespace, manifest_id)

    def uses(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        return self.session(namespace).catalogue.uses(namespace, manifest_ids)

    def _fresh(self, namespace: bytes) -> NamespaceSession:
        """Return the session with a namespace, after a call of ``refresh`` if the option ``refresh`` is 0."""
        session = self.session(namespace)
        if not self._options.refresh_s:
            self.refresh()
        return session

    def stats(self) -> BackendStats:
        catalogues = [self._fresh(namespace.id).catalogue for namespace in self.namespaces()]
        states = [state for catalogue in catalogues for state in catalogue.states()]
        return totals(states, sum(catalogue.disk_bytes() for catalogue in catalogues), self._head.head.capacity)

    @property
    def breaker_state(self) -> str:
        return self.breaker.state

    @property
    def requests(self) -> dict[str, int]:
        return self._bucket.requests

    def publish_status(self, engine: str, row: bytes | None) -> None:
        self._check_open(writes=True)
        key = f"{self._names.statuses_prefix}{engine}"
        if row is None:
            self._bucket.delete([key])
            return
        if not self._status_shown:  # delete those that killed engines left
            old = self._bucket.now() - _STATUS_KEPT_S
            found = self._bucket.list(self._names.statuses_prefix)
            self._bucket.delete([info.key for info in found if info.modified < old])
            self._status_shown = True
        self._bucket.put(key, [row])

    def statuses(self) -> dict[str, bytes]:
        self._check_open()
        keys = [info.key for info in self._bucket.list(self._names.statuses_prefix)]
        rows = zip(keys, self._bucket.all(self._small_object, keys), strict=True)
        return {key.rpartition("/")[2]: row for key, row in rows if row is not None}

    def close(self) -> None:
        """Publish unpublished uses, merge own commits, resign as leader, and release all resources; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        try:
            thread = self._thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(self._options.deadline_s)
            if not self._read_only and (thread is None or not thread.is_alive()):  # or the server hangs
                self._publish_last()
            for session in list(self._sessions.values()):
                session.catalogue.close()
        finally:
            self._bucket.close()
            if self._temporary is not None:
                self._temporary.cleanup()

    def _publish_last(self) -> None:
        """Publish unpublished uses; without another leader, merge own commits; resign. Failures are only logged."""
        try:
            for session in list(self._sessions.values()):
                session.write_uses()
            if self._waiting:
                self._refresh()  # rebuilds a lost head
            if self._leader.leads or (self._waiting and self._leader.may_elect and self._leader.elect()):
                self._leader.resign()
        except StoreError as error:
            logger.warning(
                "%s: could not publish the last uses (%s); the next engine merges the rest", self._place, error
            )

    def _check_open(self, *, writes: bool = False) -> None:
        if self._closed:
            raise StoreError(f"{self._place} is closed")
        if writes and self._read_only:
            raise StoreError(f"{self._place} is open read-only")
        if writes and self._is_dark():
            raise StoreUnavailableError(f"{self._place} has not answered yet ({self._dark})")
