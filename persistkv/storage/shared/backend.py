"""A shared store: one handle on the namespaces of one medium.

1. Packs and the objects of the index are immutable blobs. Nothing needs a leader, a lock, a lease
   or a conditional write: the index is a set (``format``), and any engine may merge it (``merge``).
2. A thread of the handle follows the index, merges commits and sweeps: ``step``.
3. A medium that does not answer does not prevent an engine from starting: lookups miss and commits
   raise until it does. A handle that is opened with the argument ``read_only`` raises instead. A
   medium that refuses requests always does.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Self

import msgspec

from persistkv.config import StoreUrl
from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    StoreError,
    StoreUnavailableError,
)
from persistkv.storage.backend import (
    Backend,
    Capabilities,
    Changes,
    CommitBatch,
    CommitResult,
    Namespace,
    ReadSpan,
    TakeFrame,
)
from persistkv.storage.blobs import BlobMissingError, Blobs, UnavailableError
from persistkv.storage.catalog.catalogue import Catalogue, check_batch, totals
from persistkv.storage.catalog.rows import (
    EMPTY_CURSOR,
    decode_namespace,
    encode_namespace,
)
from persistkv.storage.checks import Check
from persistkv.storage.format.authentication import Authenticator
from persistkv.storage.format.manifest import ManifestKeys
from persistkv.storage.format.pack import Frame, PackTable
from persistkv.storage.identity import Identity
from persistkv.storage.policy import Policy
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.clock import Clock
from persistkv.storage.shared.format import (
    MAX_SMALL_BYTES,
    NO_NAMESPACE,
    NONCE_BYTES,
)
from persistkv.storage.shared.index.rebuild import FoundPack
from persistkv.storage.shared.index.totals import TotalsBoard
from persistkv.storage.shared.namespace import SharedNamespace
from persistkv.storage.shared.options import SharedOptions, parse_shared
from persistkv.storage.shared.replica import ReplicaFolder
from persistkv.storage.stats import BackendStats, MergeState, Rebuilt

logger = logging.getLogger(__name__)

_POLICY_S = 60.0  # between reads of the policy
_RETRY_S = 5.0  # until a medium that has not answered is tried again
_CREATION_S = 120.0  # two minutes: a policy that was read and is a minute old, twice
_LEAST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 30.0
_CARE_S = 3 * 3600.0  # three hours: for a namespace without an engine
_CARE_CHANCE = 0.25
_MOST_ABANDONED = 4  # namespaces without engines that one handle cares for at a time
_STATUS_KEPT_S = 86_400.0  # one day
_MOST_IDENTITY_BYTES = MAX_SMALL_BYTES - 1024  # 1 KiB for the rest of its blob
_CLOSE_S = 10.0  # wait for the thread of a handle that is closed


class StoredPolicy(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """Content of the blob ``policy``, which marks a store."""

    store: bytes
    """Random name of the store: one that was deleted and created anew has another."""
    capacity: int | None
    ttl_s: float | None


class SharedBackend(Backend):
    """Handle of a shared store.

    Any thread may call ``read``, ``read_frames`` and ``tables``, concurrently with one other call.

    :param blobs: the medium, closed with the handle.
    :param options: capacity and ttl are recorded if the store is created.
    :param place: name of the store in messages, and of its replicas on this machine.
    :param read_only: write nothing; the store must exist.
    :param background: True: a thread of the handle calls ``step``; False: the caller must do so.
    :raises StoreError: the medium refuses requests; or ``read_only`` and there is no store, or it
        does not answer. The medium is closed.
    """

    capabilities = Capabilities(remote=True)

    def __init__(
        self,
        blobs: Blobs,
        options: SharedOptions,
        place: str = "shared",
        *,
        read_only: bool = False,
        clock: Clock | None = None,
        background: bool = True,
    ) -> None:
        self._place = place
        self._options = options
        self._cache = options.cache_directory()
        self._read_only = read_only or options.read_only
        self.capabilities = replace(self.capabilities, writable=not self._read_only)
        self.status_interval_s = None if self._read_only else options.status_s
        self._clock = clock or Clock()
        self._medium = Medium(blobs, Authenticator(options.secret()), self._clock)
        self._names = self._medium.names
        self._board = TotalsBoard(self._medium)
        self._stored: StoredPolicy | None = None
        self._last_error = ""
        """Why the medium has not answered yet."""
        self._namespaces: dict[bytes, Namespace] = {}
        self._unwritten: dict[bytes, Namespace] = {}
        """Namespaces whose identities the store lacks."""
        self._opened: dict[bytes, SharedNamespace] = {}
        self._abandoned: dict[bytes, SharedNamespace] = {}
        """Namespaces without engines that this handle cares for."""
        self._closed = False
        self._lock = self._clock.lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._policy_at = self._clock.monotonic()
        # monotonic time at which this handle created the store
        self._created_at = -math.inf
        self._statuses_cleaned = False
        try:
            self._open_policy()
        except UnavailableError as error:
            if read_only:
                self.close()
                raise
            self._last_error = str(error)
            logger.warning(
                "%s does not answer (%s); lookups miss until it does", place, error
            )
        except BaseException:
            self.close()
            raise
        if background:
            self._thread = threading.Thread(
                target=self._run, name="persistkv-shared", daemon=True
            )
            self._thread.start()

    @classmethod
    def open_blobs(
        cls, url: StoreUrl, options: Mapping[str, str], *, read_only: bool
    ) -> Blobs:
        """Return the medium of a store; a driver of URLs implements this.

        :param options: those options of the URL that are not options of every shared store.
        :raises ConfigurationError: an option is invalid.
        """
        raise NotImplementedError(
            f"{cls.__name__} opens no URLs such as {url.scheme}://"
        )

    @classmethod
    def check_options(cls, url: StoreUrl, options: Mapping[str, str]) -> None:
        """Raise a ConfigurationError if ``open_blobs`` would, without opening anything."""

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> Self:
        options, rest = cls.split_options(url)
        blobs = cls.open_blobs(url, rest, read_only=read_only or options.read_only)
        place = f"{url.scheme}://{url.location}"
        return cls(blobs, options, place, read_only=read_only)

    @classmethod
    def check_medium(cls, url: StoreUrl) -> Iterator[Check]:
        """Yield what ``Blobs.check`` finds on the medium of a store, which need not exist.

        :raises ConfigurationError: an option of the URL is invalid.
        """
        options, rest = cls.split_options(url)
        writes = not options.read_only
        with closing(cls.open_blobs(url, rest, read_only=options.read_only)) as blobs:
            yield from blobs.check(writes=writes)

    @classmethod
    def split_options(cls, url: StoreUrl) -> tuple[SharedOptions, dict[str, str]]:
        """Return the options of a URL: those of every shared store, and those of the medium.

        :raises ConfigurationError: an option of the first kind is invalid.
        """
        return parse_shared(url.options, url.scheme)

    @classmethod
    def new_policy(cls, url: StoreUrl) -> Policy:
        options, rest = cls.split_options(url)
        cls.check_options(url, rest)
        return options.policy

    @classmethod
    def erase(cls, url: StoreUrl) -> None:
        _, rest = cls.split_options(url)
        with closing(cls.open_blobs(url, rest, read_only=False)) as blobs:
            blobs.delete([info.name for info in blobs.list("")])

    @classmethod
    def rebuild(
        cls, url: StoreUrl, progress: Callable[[int, int], None]
    ) -> Rebuilt | None:
        """See ``Backend``. Engines may use the store meanwhile."""
        options, rest = cls.split_options(url)
        blobs = cls.open_blobs(url, rest, read_only=False)
        place = f"{url.scheme}://{url.location}"
        backend = cls(blobs, options, place, background=False)
        try:
            return backend.rebuild_index(progress)
        finally:
            backend.close()

    def rebuild_index(self, progress: Callable[[int, int], None]) -> Rebuilt | None:
        """Name all packs again that no index names; None: there are none, and no other traces of
        packs.

        :raises StoreError: the medium failed; packs that were named before stay.
        """
        found: list[FoundPack] = []
        skipped: Counter[str] = Counter()
        namespaces = 0
        for namespace in self.namespaces():
            packs, ignored = self._open(namespace.id).rebuild(progress)
            found += packs
            skipped += ignored
            namespaces += bool(packs)
        if not found and not skipped:
            return None
        return Rebuilt(
            packs=len(found),
            blocks=sum(len(pack.table.keys) for pack in found),
            namespaces=namespaces,
            stored_bytes=sum(pack.table.payload_length for pack in found),
            read_bytes=sum(len(pack.entry.body) for pack in found),
            skipped=skipped,
            capacity=self.policy_now().capacity,
            damaged=None,
        )

    # Background work

    def _run(self) -> None:
        while not self._closed:
            try:
                pause_s = self.step()
            except Exception:  # a defect must not end merging and following for good
                logger.exception(
                    "%s: background work failed; it is repeated", self._place
                )
                pause_s = _RETRY_S
            self._wake.wait(pause_s)
            self._wake.clear()

    def step(self) -> float:
        """Do the background work that is due; return the seconds until more is due. Failures are
        only logged."""
        try:
            self._refresh_policy()
            if self._stored is not None:
                self._write_identities()
        except StoreError as error:
            self._log(error)
        due = [self._policy_at]
        for namespace in [*self._opened.values(), *self._abandoned.values()]:
            if self._closed:
                break
            try:
                namespace.step(self.policy_now())
            except StoreError as error:
                self._log(error)
                due.append(self._clock.monotonic() + _LEAST_PAUSE_S)
            due.append(namespace.due_at())
        pause_s = min(due) - self._clock.monotonic()
        return min(max(_LEAST_PAUSE_S, pause_s), _LONGEST_PAUSE_S)

    def _log(self, error: StoreError) -> None:
        level = (
            logging.DEBUG if isinstance(error, UnavailableError) else logging.WARNING
        )
        logger.log(
            level, "%s: background work failed (%s); it is repeated", self._place, error
        )

    def _refresh_policy(self) -> None:
        """Read the policy, if that is due, and look for namespaces that no engine uses."""
        now = self._clock.monotonic()
        if self._closed or now < self._policy_at:
            return
        self._policy_at = now + (_RETRY_S if self._stored is None else _POLICY_S)
        self._open_policy()
        if self._read_only:
            return
        self._care_for_abandoned(now)

    def _care_for_abandoned(self, now: float) -> None:
        """Open a namespace that no engine uses, if it has content to evict. It is kept for as long
        as the blobs of evicted packs are needed, and a sweep.
        """
        for name, namespace in list(self._abandoned.items()):
            if name in self._opened or now - namespace.opened_at > _CARE_S:
                del self._abandoned[name]
                namespace.close()
        found = self._board.abandoned(self.policy_now())
        if found is None or found in self._opened or found in self._abandoned:
            return
        # a thousand engines may find it at once
        is_turn = self._clock.random.random() < _CARE_CHANCE
        if is_turn and len(self._abandoned) < _MOST_ABANDONED:
            self._abandoned[found] = self._make_namespace(found)

    def refresh(self) -> None:
        """Read everything that is durable now, commits that are not merged included.

        :raises StoreError: the medium failed.
        """
        self._check_open()
        self._open_policy()
        for namespace in list(self._opened.values()):
            namespace.refresh()

    # Policy

    def _open_policy(self) -> None:
        """Read the policy; create the store if there is none and this handle may write.

        :raises StoreError: the medium failed; or the handle is read-only and there is no store.
        """
        found = self._read_policy()
        if found is None and self._read_only:
            text = (
                "there is no store" if self._stored is None else "the store was deleted"
            )
            raise StoreUnavailableError(f"{self._place}: {text}")
        if found is None:
            found = self._new_policy()
            self._write_policy(found)
            self._created_at = self._clock.monotonic()
        before, self._stored = self._stored, found
        if before is None:
            self._report_differences()
        elif found.store != before.store:
            self._begin_anew()

    def _new_policy(self) -> StoredPolicy:
        """Return the policy of a store that this handle creates: also in place of one that was
        deleted."""
        kept = self._stored
        wanted = (
            self._options.policy if kept is None else Policy(kept.capacity, kept.ttl_s)
        )
        return StoredPolicy(
            self._clock.random.randbytes(NONCE_BYTES), wanted.capacity, wanted.ttl_s
        )

    def _report_differences(self) -> None:
        differences = self.policy_now().contradictions(self._options.policy)
        if differences and not self._read_only:
            text = (
                "%s: the URL says %s; the store keeps its recorded policy (persistkv set "
                "changes it)"
            )
            logger.warning(text, self._place, differences)

    def _begin_anew(self) -> None:
        """Forget the replicas: the store was deleted, and another one is in its place."""
        # Engines that create a store at the same moment replace each other's policy: that is no
        # reason for a warning.
        is_new = self._clock.monotonic() - self._created_at < _CREATION_S
        level = logging.DEBUG if is_new else logging.WARNING
        logger.log(
            level,
            "%s: the store was deleted or replaced; its content is read anew",
            self._place,
        )
        with self._lock:
            for name, opened in list(self._opened.items()):
                opened.discard()
                self._opened[name] = self._make_namespace(name)
                if not self._read_only:
                    self._unwritten[name] = self._namespaces[name]

    def _read_policy(self) -> StoredPolicy | None:
        """Return the recorded policy; None if there is none."""
        try:
            return _POLICY.decode(self._medium.sealed(self._names.policy, NO_NAMESPACE))
        except BlobMissingError:
            return None
        except (CorruptPackError, msgspec.DecodeError) as error:
            if self._medium.authenticator.key_id or self._stored is None:
                logger.warning(
                    "%s: the policy does not read (%s): nothing is evicted",
                    self._place,
                    error,
                )
            return self._stored or StoredPolicy(bytes(NONCE_BYTES), None, None)

    def _write_policy(self, policy: StoredPolicy) -> None:
        body = _ENCODER.encode(policy)
        self._medium.put_sealed(self._names.policy, body, NO_NAMESPACE, MAX_SMALL_BYTES)

    def policy_now(self) -> Policy:
        """Return the policy that was read last."""
        stored = self._stored
        return (
            Policy(None, None)
            if stored is None
            else Policy(stored.capacity, stored.ttl_s)
        )

    def policy(self) -> Policy:
        with self._lock:
            self._check_open()
            self._open_policy()
        return self.policy_now()

    def set_policy(self, policy: Policy) -> None:
        if policy.placement is not None:
            raise ConfigurationError(
                "placement", policy.placement, "none: this driver has one placement"
            )
        with self._lock:
            self._check_open(writes=True)
            self._open_policy()
            stored = self._stored
            assert stored is not None
            changed = StoredPolicy(stored.store, policy.capacity, policy.ttl_s)
            self._write_policy(changed)
            self._stored = changed
        self._wake.set()

    # Namespaces

    def namespaces(self) -> Iterator[Namespace]:
        self._check_open()
        if self._is_dark():
            return iter([])
        infos = sorted(
            self._medium.listed(self._names.identities), key=lambda info: -info.time
        )
        names = [
            name
            for info in infos
            if (name := self._names.parse_identity(info.name)) is not None
        ]
        found = self._medium.maintenance.each(self._namespace, names)
        return (namespace for _, namespace in found if namespace is not None)

    def holds(self, namespace: bytes) -> bool:
        self._check_open()
        return not self._is_dark() and self._namespace(namespace) is not None

    def open_namespace(self, identity: Identity) -> Namespace:
        self._check_open()
        name = identity.digest
        length = len(identity.encode())
        if length > _MOST_IDENTITY_BYTES:
            raise ConfigurationError(
                "identity", f"{length} bytes", f"{_MOST_IDENTITY_BYTES} bytes at most"
            )
        if self._is_dark():
            if name not in self._namespaces:
                self._namespaces[name] = Namespace(identity, self._clock.wall())
                if not self._read_only:
                    self._unwritten[name] = self._namespaces[name]
            return self._namespaces[name]
        try:
            found = self._namespace(name)
        except UnavailableError:
            if self._read_only:
                raise
            found = None
        if found is None and self._read_only:
            raise StoreUnavailableError(
                f"{self._place} holds no namespace {name.hex()}: open read-only"
            )
        if found is None:
            found = Namespace(identity, self._medium.time.now() or self._clock.wall())
            self._namespaces[name] = found
            self._unwritten[name] = found
            with suppress(UnavailableError):
                self._write_identities()
        self._open(name)
        return found

    def _write_identities(self) -> None:
        """Write the identities of opened namespaces that the store lacks.

        :raises StoreError: the medium failed; the rest is written later.
        """
        for name, namespace in list(self._unwritten.items()):
            self._put_identity(namespace)
            self._unwritten.pop(name, None)

    def _put_identity(self, namespace: Namespace) -> None:
        name = self._names.identity(namespace.id)
        body = encode_namespace(namespace)
        self._medium.put_sealed(name, body, NO_NAMESPACE, MAX_SMALL_BYTES)

    def _namespace(self, name: bytes) -> Namespace | None:
        """Return the namespace with this id; None if it is missing or invalid."""
        known = self._namespaces.get(name)
        if known is not None:
            return known
        try:
            row = self._medium.sealed(self._names.identity(name), NO_NAMESPACE)
        except (BlobMissingError, CorruptPackError):
            return None
        found = decode_namespace(name, row)
        if found is not None:
            self._namespaces[name] = found
        return found

    def _open(self, name: bytes) -> SharedNamespace:
        """Return a namespace; the first call opens it. Its index may be read later, if the medium
        does not answer.

        :raises StoreError: the store has no such namespace, or the replica cannot be opened.
        """
        self._check_open()
        with self._lock:
            opened = self._opened.get(name)
            if opened is None:
                if self._namespace(name) is None:
                    raise StoreError(f"{self._place} holds no namespace {name.hex()}")
                opened = self._make_namespace(name)
                self._opened[name] = opened
        if not opened.is_open:
            with suppress(UnavailableError):
                opened.open()
            self._wake.set()
        return opened

    def catalogue(self, namespace: bytes) -> Catalogue:
        return self._fresh(namespace).replica.catalogue

    def _make_namespace(self, name: bytes) -> SharedNamespace:
        stored = self._stored
        if stored is None:
            raise UnavailableError(f"{self._place} has not answered yet")
        key_id = self._medium.authenticator.key_id or "plain"
        place = blake2b(self._place.encode() + stored.store, digest_size=16).hexdigest()
        folder = ReplicaFolder(self._cache, [place, f"{name.hex()}-{key_id}"])
        return SharedNamespace(
            self._medium,
            name,
            folder,
            self._options,
            self._board,
            is_writable=not self._read_only,
        )

    def _is_dark(self) -> bool:
        """Return whether the medium has not answered this handle yet. If so, try again."""
        if self._stored is None:
            try:
                self._open_policy()
            except UnavailableError as error:
                self._last_error = str(error)
        return self._stored is None

    # Notes and status

    def note(self, namespace: bytes, name: str) -> bytes | None:
        self._check_open()
        if self._is_dark():
            return None
        try:
            return self._medium.sealed(self._names.note(namespace, name), namespace)
        except (BlobMissingError, CorruptPackError):
            return None

    def put_note(self, namespace: bytes, name: str, content: bytes) -> None:
        self._check_open(writes=True)
        blob = self._names.note(namespace, name)
        self._medium.put_sealed(blob, content, namespace, MAX_SMALL_BYTES)

    def publish_status(self, engine: str, row: bytes | None) -> None:
        self._check_open(writes=True)
        name = f"{self._names.statuses}{engine.lower()}"
        if row is None:
            self._medium.blobs.delete([name])
            return
        if len(row) > MAX_SMALL_BYTES:
            raise StoreError(
                f"{self._place}: a status of {len(row)} bytes: readers accept {MAX_SMALL_BYTES}"
            )
        self._medium.put(name, [row])
        if not self._statuses_cleaned:  # those that killed engines left
            oldest = self._medium.time.now() - _STATUS_KEPT_S
            infos = self._medium.listed(self._names.statuses)
            self._medium.blobs.delete(
                [info.name for info in infos if info.time < oldest]
            )
            self._statuses_cleaned = True

    def statuses(self) -> dict[str, bytes]:
        self._check_open()
        found: dict[str, bytes] = {}
        for info in self._medium.listed(self._names.statuses):
            with suppress(BlobMissingError, CorruptPackError):
                row = self._medium.whole(info.name, MAX_SMALL_BYTES)
                found[info.name.removeprefix(self._names.statuses)] = bytes(row)
        return found

    # Content

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        self._check_open(writes=True)
        check_batch(namespace, batch)
        self._write_identities()
        opened = self._open(namespace)
        if batch.deletions or batch.bad or not self._options.refresh_s:
            # requests of other engines may name the deleted packs
            opened = self._refreshed(namespace)
        result = opened.commit(batch)
        self._wake.set()
        return result

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        self._check_open()
        if self._is_dark() and namespace in self._namespaces:
            return Changes(EMPTY_CURSOR, [], reset=True)
        return super().changes(namespace, cursor)

    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        opened = self._searched(namespace, [span.pack_id for span in spans])
        opened.use()
        return opened.packs.read(spans)

    def read_frames(
        self,
        namespace: bytes,
        pack_id: bytes,
        frames: Sequence[Frame],
        buffer: memoryview,
        take: TakeFrame,
    ) -> None:
        opened = self._open(namespace)
        opened.use()
        opened.packs.read_frames(pack_id, frames, buffer, take)

    def tables(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[PackTable]:
        return self._searched(namespace, pack_ids).replica.catalogue.tables(pack_ids)

    def manifest_keys(
        self, namespace: bytes, manifest_ids: Sequence[str]
    ) -> list[ManifestKeys | None]:
        packs = self._open(namespace).packs
        return self._medium.loads.all(packs.manifest_keys, manifest_ids)

    def stats(self) -> BackendStats:
        replicas = [
            self._fresh(namespace.id).replica for namespace in self.namespaces()
        ]
        states = [replica.catalogue.state() for replica in replicas]
        disk_bytes = sum(replica.disk_bytes() for replica in replicas)
        return totals(states, disk_bytes, self.policy_now().capacity)

    def merge_state(self, namespace: bytes) -> MergeState:
        return self._open(namespace).merge_state()

    def _fresh(self, namespace: bytes) -> SharedNamespace:
        """Return a namespace, after a refresh if the option ``refresh`` is 0."""
        return (
            self._open(namespace)
            if self._options.refresh_s
            else self._refreshed(namespace)
        )

    def _refreshed(self, namespace: bytes) -> SharedNamespace:
        """Return a namespace after reading everything that is durable now."""
        self._open_policy()
        self._write_identities()
        opened = self._open(namespace)
        opened.refresh()
        return opened

    def _searched(self, namespace: bytes, pack_ids: Sequence[bytes]) -> SharedNamespace:
        """Return a namespace. If the option ``refresh`` is 0, search the store for packs that are
        not known."""
        opened = self._open(namespace)
        if not self._options.refresh_s and len(opened.replica.blobs(pack_ids)) < len(
            set(pack_ids)
        ):
            return self._refreshed(namespace)
        return opened

    def index_file(self, namespace: bytes) -> Path | None:
        return None if self._is_dark() else self._open(namespace).index_file()

    @property
    def requests(self) -> Mapping[str, int]:
        return self._medium.blobs.requests()

    @property
    def breaker_state(self) -> str:
        return self._medium.blobs.state()

    def close(self) -> None:
        """Publish waiting uses, and release all resources; idempotent. Commits that are not merged
        are merged by another engine, or by the next one that opens the store.
        """
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        try:
            thread = self._thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(_CLOSE_S)
            if thread is None or not thread.is_alive():  # or the medium hangs
                for namespace in [*self._opened.values(), *self._abandoned.values()]:
                    namespace.close()
        finally:
            self._medium.close()

    def _check_open(self, *, writes: bool = False) -> None:
        if self._closed:
            raise StoreError(f"{self._place} is closed")
        if writes and self._read_only:
            raise StoreError(f"{self._place} is open read-only")
        if writes and self._is_dark():
            raise UnavailableError(
                f"{self._place} has not answered yet: {self._last_error}"
            )


_ENCODER = msgspec.msgpack.Encoder()
_POLICY = msgspec.msgpack.Decoder(StoredPolicy)
