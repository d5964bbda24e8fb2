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
from functools import partial
from pathlib import Path
from typing import Self

from persistkv.config import StoreUrl
from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    PersistKVError,
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
from persistkv.storage.catalogue.catalogue import (
    Catalogue,
    check_batch,
    tenants_of,
    totals,
)
from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.catalogue.rows import EMPTY_CURSOR, NamespaceState
from persistkv.storage.checks import Check
from persistkv.storage.forgetting import Forgotten
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.format.manifest import ManifestKeys
from persistkv.storage.format.pack import Frame, PackTable
from persistkv.storage.format.seal import Seal
from persistkv.storage.identity import Identity
from persistkv.storage.policy import Policy
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.clock import Clock
from persistkv.storage.shared.forgetting.forget import Forgetting
from persistkv.storage.shared.format import MAX_SMALL_BYTES
from persistkv.storage.shared.keys import StoreKeys
from persistkv.storage.shared.namespace import SharedNamespace
from persistkv.storage.shared.opened import OpenedNamespaces
from persistkv.storage.shared.options import SharedOptions, parse_shared
from persistkv.storage.shared.policy import RecordedPolicy
from persistkv.storage.shared.records import Identities, Statuses
from persistkv.storage.stats import BackendStats, MergeState, Rebuilt
from persistkv.tenants import check_tenant

logger = logging.getLogger(__name__)

_RETRY_S = 5.0  # seconds until the next step after a defect in the background work
_LEAST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 30.0
_MOST_IDENTITY_BYTES = MAX_SMALL_BYTES - 1024  # its blob has 1 KiB of other content
_CLOSE_S = 10.0  # seconds for which ``close`` waits for the handle's thread


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
        self._read_only = read_only or options.read_only
        writes = not self._read_only
        self.capabilities = replace(self.capabilities, writable=writes)
        self.status_interval_s = options.status_s if writes else None
        key = options.store_key()
        medium = Medium(blobs, key, clock or Clock())
        self._medium = medium
        self._policy = RecordedPolicy(medium, options.policy, place, creates=writes)
        self._identities = Identities(medium)
        self._statuses = Statuses(medium)
        self._opened = OpenedNamespaces(
            medium, self._policy, options, place, is_writable=writes
        )
        self._closed = False
        self._lock = medium.clock.lock()
        """Held while namespaces are opened or replaced, and while callers use the policy."""
        self._wake = threading.Event()
        """Set to make the thread step at once: there is new work, or the handle is closed."""
        self._thread: threading.Thread | None = None
        """Does background work; None: the caller calls ``step``."""
        try:
            # Decide by the argument, which commands pass, and not by the option ``read_only``: a
            # command fails at once if the medium does not answer, but an engine starts all the
            # same.
            self._open_policy(must_answer=read_only)
        except BaseException:
            self.close()
            raise
        if background:
            self._thread = threading.Thread(
                target=self._run, name="persistkv-shared", daemon=True
            )
            self._thread.start()

    def _open_policy(self, *, must_answer: bool) -> None:
        """Read the policy for the first time.

        :param must_answer: raise if the medium does not answer.
        """
        if must_answer:
            self._policy.refresh()
        elif not self._policy.has_answered():
            text = "%s does not answer (%s); lookups miss until it does"
            logger.warning(text, self._place, self._policy.last_error)

    @property
    def seal(self) -> Seal:
        return self._medium.seal

    @property
    def keys(self) -> StoreKeys:
        """Data keys of the store, as this handle knows them."""
        return self._medium.keys

    @classmethod
    def open_blobs(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
        *,
        read_only: bool,
    ) -> Blobs:
        """Return the medium of a store; a driver of URLs implements this.

        :param options: those options of the URL that are not options of every shared store.
        :raises ConfigurationError: an option is invalid.
        """
        raise NotImplementedError(
            f"{cls.__name__} opens no URLs such as {url.scheme}://"
        )

    @classmethod
    def check_options(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
    ) -> None:
        """Raise a ConfigurationError if ``open_blobs`` would, without opening anything."""

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> Self:
        options, rest = cls.split_options(url)
        only_reads = read_only or options.read_only
        blobs = cls.open_blobs(url, rest, read_only=only_reads)
        place = f"{url.scheme}://{url.location}"
        return cls(blobs, options, place, read_only=read_only)

    @classmethod
    def check_medium(cls, url: StoreUrl) -> Iterator[Check]:
        """Yield what ``Blobs.check`` finds on the medium of a store, which need not exist.

        :raises ConfigurationError: an option of the URL is invalid.
        """
        options, rest = cls.split_options(url)
        read_only = options.read_only
        with closing(cls.open_blobs(url, rest, read_only=read_only)) as blobs:
            yield from blobs.check(writes=not read_only)

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
            all_names = [info.name for info in blobs.list("")]
            blobs.delete(all_names)

    @classmethod
    def rebuild(
        cls,
        url: StoreUrl,
        progress: Callable[[int, int], None],
    ) -> Rebuilt | None:
        """See ``Backend``. Engines may use the store meanwhile."""
        with closing(cls.open(url)) as backend:
            return backend.rebuild_index(progress)

    def rebuild_index(self, progress: Callable[[int, int], None]) -> Rebuilt | None:
        """Commit again all packs that no index names, and return their totals. None: no namespace
        has such packs, nor blobs that were skipped.

        :raises StoreError: the medium failed; packs that were committed before stay committed.
        """
        tables: list[PackTable] = []
        skipped: Counter[str] = Counter()  # reason → number of blobs
        num_namespaces = 0
        for namespace in self.namespaces():
            opened = self.opened_namespace(namespace.id)
            committed, skipped_here = opened.rebuild(progress)
            tables += committed
            skipped += skipped_here
            if committed:
                num_namespaces += 1
        if not tables and not skipped:
            return None
        blocks = sum(len(table.keys) for table in tables)
        stored_bytes = sum(table.payload_length for table in tables)
        # only the tables of the blobs were read
        table_bytes = sum(len(table.encode()) for table in tables)
        return Rebuilt(
            packs=len(tables),
            blocks=blocks,
            namespaces=num_namespaces,
            stored_bytes=stored_bytes,
            read_bytes=table_bytes,
            skipped=skipped,
            capacity=self._policy.current().capacity,
            damaged=None,
        )

    # Background work

    def _run(self) -> None:
        """Do background work, in a thread of its own, until the handle is closed."""
        while not self._closed:
            try:
                pause_s = self.step()
            # a defect in one step must not end merging and following for good
            except Exception:
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
            self._step_store()
        except (StoreError, ConfigurationError) as error:
            # ConfigurationError: another store key had replaced that of this handle before the
            # medium answered for the first time
            self._log(error)
        due_at = self._policy.due_at
        for namespace in self._opened:
            if self._closed:
                break
            try:
                namespace.step(self._policy.current())
            except StoreError as error:
                self._log(error)
                # Repeat the step soon, because the rest of its work was skipped. The part that
                # failed waits for a pause of its own.
                due_at = -math.inf
            due_at = min(due_at, namespace.due_at())
        now = self._medium.clock.monotonic()
        pause_s = max(due_at - now, _LEAST_PAUSE_S)
        return min(pause_s, _LONGEST_PAUSE_S)

    def _step_store(self) -> None:
        """Read the policy if that is due, care for a namespace without an engine, and write new
        identities.

        :raises StoreError: the medium failed.
        """
        if self._policy.is_due():
            self._refresh_policy()
            # a namespace without an engine need not be found sooner than a new policy
            if not self._read_only:
                self._opened.care_for_abandoned()
        # write nothing before the medium has answered that the store is there
        if self._policy.is_known:
            self._identities.write_new()

    def _log(self, error: PersistKVError) -> None:
        is_temporary = isinstance(error, UnavailableError)
        level = logging.DEBUG if is_temporary else logging.WARNING
        text = "%s: background work failed (%s); it is repeated"
        logger.log(level, text, self._place, error)

    def refresh(self) -> None:
        """Read everything that is durable now, commits that are not merged included.

        :raises StoreError: the medium failed.
        """
        self._check_open()
        self._refresh_policy()
        self._opened.refresh()

    # Policy

    def _refresh_policy(self) -> None:
        """Read the policy. If another store has replaced the one that was read before, open its
        namespaces with empty replicas.

        :raises StoreError: the medium failed; or the handle is read-only and there is no store.
        """
        is_other_store = self._policy.refresh()
        if not is_other_store:
            return
        with self._lock:
            for namespace_id in self._opened.begin_anew():
                # write the identity again, because the new store may lack it
                namespace = self._identities.known(namespace_id)
                if namespace is not None:
                    self._identities.add(namespace, writes=not self._read_only)

    def policy(self) -> Policy:
        with self._lock:
            self._check_open()
            self._refresh_policy()
        return self._policy.current()

    def set_policy(self, policy: Policy) -> None:
        """Record another policy; other handles read it within a minute."""
        if policy.placement is not None:
            raise ConfigurationError(
                "placement", policy.placement, "none: this driver has one placement"
            )
        with self._lock:
            self._check_open(writes=True)
            self._refresh_policy()
            self._policy.replace(policy)
        # wake the thread, which applies the new limits
        self._wake.set()

    # Namespaces

    def namespaces(self) -> Iterator[Namespace]:
        """Iterate over the namespaces of the store; none before the medium has answered."""
        self._check_open()
        if not self._policy.has_answered():
            return iter([])
        return self._identities.all()

    def holds(self, namespace: bytes) -> bool:
        self._check_open()
        if not self._policy.has_answered():
            return False
        return self._identities.find(namespace) is not None

    def open_namespace(self, identity: Identity) -> Namespace:
        """Return the namespace of an identity, and add it to the store if it is missing.

        :raises ConfigurationError: the identity is too large for its blob.
        :raises StoreError: see ``_find_namespace`` and ``opened_namespace``.
        """
        self._check_open()
        length = len(identity.encode())
        if length > _MOST_IDENTITY_BYTES:
            expected = f"{_MOST_IDENTITY_BYTES} bytes at most"
            raise ConfigurationError("identity", f"{length} bytes", expected)
        # an engine also starts while the medium does not answer: the namespace is added later
        if not self._policy.has_answered():
            return self._open_later(identity)
        found = self._find_namespace(identity.digest)
        if found is None:
            found = self._add_identity(identity)
            # if the medium does not answer now, a later ``step`` or ``commit`` writes the identity
            with suppress(UnavailableError):
                self._identities.write_new()
        self.opened_namespace(found.id)
        return found

    def _open_later(self, identity: Identity) -> Namespace:
        """Return the namespace of an identity for an engine that starts before the medium has
        answered. It is opened, and its identity is written, when the medium answers."""
        known = self._identities.known(identity.digest)
        if known is not None:
            return known
        return self._add_identity(identity)

    def _find_namespace(self, namespace_id: bytes) -> Namespace | None:
        """Return a namespace of the store; None: it must be added.

        :raises StoreError: the medium failed; or the handle is read-only and there is none.
        """
        try:
            found = self._identities.find(namespace_id)
        except UnavailableError:
            if self._read_only:
                raise
            # The answer is that of a new namespace. If the store holds it, its identity is written
            # again, unchanged.
            return None
        if found is None and self._read_only:
            text = (
                f"{self._place} holds no namespace {namespace_id.hex()}: open read-only"
            )
            raise StoreUnavailableError(text)
        return found

    def _add_identity(self, identity: Identity) -> Namespace:
        """Add a namespace that begins now; ``Identities.write_new`` makes it durable."""
        created = self._medium.time.now_or_wall()
        namespace = Namespace(identity, created)
        self._identities.add(namespace, writes=not self._read_only)
        return namespace

    def opened_namespace(self, namespace_id: bytes) -> SharedNamespace:
        """Return a namespace; the first call opens it. Its index may be read later, if the medium
        does not answer.

        :raises StoreError: the store has no such namespace, or the replica cannot be opened.
        """
        self._check_open()
        with self._lock:
            opened = self._opened.find(namespace_id)
            if opened is None:
                if self._identities.find(namespace_id) is None:
                    text = f"{self._place} holds no namespace {namespace_id.hex()}"
                    raise StoreError(text)
                opened = self._opened.open(namespace_id)
        if not opened.is_open:
            with suppress(UnavailableError):
                opened.open()
            # wake the thread, which follows the index from now on, or tries again to read it
            self._wake.set()
        return opened

    def catalogue(self, namespace: bytes) -> Catalogue:
        return self._for_query(namespace).replica.catalogue

    # Notes and status

    def note(self, namespace: bytes, name: str) -> bytes | None:
        """Return the content of a note about a namespace; None if it is missing or damaged, or if
        the medium has not answered yet."""
        self._check_open()
        if not self._policy.has_answered():
            return None
        try:
            blob = self._medium.names.note(namespace, name)
            return self._medium.sealed(blob, namespace)
        except (BlobMissingError, CorruptPackError):
            return None

    def notes(
        self,
        namespace: bytes,
        names: Sequence[str],
    ) -> list[bytes | None]:
        read = partial(self.note, namespace)
        return self._medium.maintenance.all(read, names)

    def note_names(self, namespace: bytes) -> list[str]:
        """Return the names of the notes about a namespace; none before the medium has answered."""
        self._check_open()
        if not self._policy.has_answered():
            return []
        prefix = self._medium.names.note(namespace, "")
        found = self._medium.listed(prefix)
        return [info.name.removeprefix(prefix) for info in found]

    def put_note(
        self,
        namespace: bytes,
        name: str,
        content: bytes | None,
    ) -> None:
        """Write a note about a namespace; None: delete it."""
        self._check_open(writes=True)
        medium = self._medium
        blob = medium.names.note(namespace, name)
        if content is None:
            medium.blobs.delete([blob])
        else:
            medium.put_sealed(blob, content, namespace, MAX_SMALL_BYTES)

    def publish_status(self, engine: str, row: bytes | None) -> None:
        self._check_open(writes=True)
        self._statuses.publish(engine, row)

    def statuses(self) -> dict[str, bytes]:
        self._check_open()
        return self._statuses.all()

    # Content

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        """Make a batch durable (``Backend.commit``); see ``inbox`` for the steps.

        :raises TenantForgottenError: the batch may have content from before its tenant was
            forgotten.
        """
        self._check_open(writes=True)
        check_batch(namespace, batch, self.seal)
        self._medium.records.refuse_forgotten(batch)
        # make data keys of tenants and the identity durable first, because the content needs them
        tenants_without_key = self.seal.lacking(tenants_of(batch))
        if tenants_without_key:
            self._medium.keys.make(tenants_without_key)
        self._identities.write_new()
        opened = self.opened_namespace(namespace)
        # read everything before a deletion, because requests of other engines may name the packs
        has_deletions = batch.deletions or batch.bad or batch.manifest_deletions
        if has_deletions or self._options.always_refreshes:
            opened = self._refreshed(namespace)
        try:
            result = opened.commit(batch)
        except CorruptPackError:
            # If a tenant was forgotten meanwhile, the data key that should seal a pack is gone.
            # Then raise the error that says that the tenant was forgotten.
            self._medium.records.refuse_forgotten(batch)
            raise
        # wake the thread, which plans the merge of this commit
        self._wake.set()
        return result

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        """Return the changes of a namespace after a cursor (``Backend.changes``); nothing before
        the medium has answered."""
        self._check_open()
        is_known_here = self._identities.known(namespace) is not None
        # an engine that starts while the medium does not answer begins with an empty index
        if not self._policy.has_answered() and is_known_here:
            return Changes(EMPTY_CURSOR, [], reset=True)
        # this raises if the medium has not answered and the engine has not opened the namespace
        return super().changes(namespace, cursor)

    def read(
        self,
        namespace: bytes,
        spans: Sequence[ReadSpan],
    ) -> list[bool]:
        """Fill the buffers of spans; return for each whether it was filled (``Backend.read``)."""
        pack_ids = [span.pack_id for span in spans]
        opened = self._for_packs(namespace, pack_ids)
        opened.follower.note_use()
        return opened.packs.read(spans)

    def read_frames(
        self,
        namespace: bytes,
        pack_id: bytes,
        frames: Sequence[Frame],
        buffer: memoryview,
        take: TakeFrame,
    ) -> None:
        opened = self._for_packs(namespace, [pack_id])
        opened.follower.note_use()
        opened.packs.read_frames(pack_id, frames, buffer, take)

    def tables(
        self,
        namespace: bytes,
        pack_ids: Sequence[bytes],
    ) -> list[PackTable]:
        opened = self._for_packs(namespace, pack_ids)
        return opened.replica.catalogue.tables(pack_ids)

    def manifest_keys(
        self,
        namespace: bytes,
        manifest_ids: Sequence[str],
    ) -> list[ManifestKeys | None]:
        packs = self.opened_namespace(namespace).packs
        return self._medium.loads.all(packs.manifest_keys, manifest_ids)

    def stats(self) -> BackendStats:
        """Return the totals of all namespaces, as the replicas show them."""
        states: list[NamespaceState] = []
        disk_bytes = 0
        for namespace in self.namespaces():
            replica = self._for_query(namespace.id).replica
            states.append(replica.catalogue.state())
            disk_bytes += replica.disk_bytes()
        return totals(states, disk_bytes, self._policy.current().capacity)

    def tenants(self) -> list[TenantTotals]:
        """Return the totals of the tenants in all namespaces together, by name; also those of
        tenants with a quota and without content."""
        found: dict[str, TenantTotals] = {}
        for namespace in self.namespaces():
            replica = self._for_query(namespace.id).replica
            for part in replica.tenants():
                new = TenantTotals(part.tenant)
                whole = found.setdefault(part.tenant, new)
                whole.packs += part.packs
                whole.stored_bytes += part.stored_bytes
        quotas = self._policy.current().quotas
        for tenant, quota in quotas.items():
            new = TenantTotals(tenant)
            whole = found.setdefault(tenant, new)
            whole.quota = quota
        return [found[tenant] for tenant in sorted(found)]

    def rotate_key(self, key: StoreKey) -> None:
        self._check_open(writes=True)
        self._medium.keys.rotate(key)

    def forget(self, tenant: str) -> Forgotten:
        """Forget a tenant in all namespaces; see ``forgetting.forget``."""
        check_tenant("tenant", tenant)
        self._check_open(writes=True)
        self._refresh_policy()
        namespaces = [
            self.opened_namespace(namespace.id) for namespace in self.namespaces()
        ]
        forgetting = Forgetting(self._medium, self._policy, namespaces, tenant)
        return forgetting.run()

    def merge_state(self, namespace: bytes) -> MergeState:
        return self.opened_namespace(namespace).merge_state()

    def _for_query(self, namespace: bytes) -> SharedNamespace:
        """Return a namespace for a query, after a refresh if the option ``refresh`` is 0."""
        if self._options.always_refreshes:
            return self._refreshed(namespace)
        return self.opened_namespace(namespace)

    def _refreshed(self, namespace: bytes) -> SharedNamespace:
        """Return a namespace after reading everything that is durable now."""
        self._refresh_policy()
        # the store may lack the identity if it has answered for the first time, or was replaced
        self._identities.write_new()
        opened = self.opened_namespace(namespace)
        opened.refresh()
        return opened

    def _for_packs(
        self,
        namespace: bytes,
        pack_ids: Sequence[bytes],
    ) -> SharedNamespace:
        """Return a namespace for a read of packs. If the option ``refresh`` is 0 and the replica
        lacks one of them, refresh the namespace first."""
        opened = self.opened_namespace(namespace)
        if not self._options.always_refreshes:
            return opened
        wanted = set(pack_ids)
        known = opened.replica.blobs(wanted)
        if len(known) == len(wanted):
            return opened
        return self._refreshed(namespace)

    def index_file(self, namespace: bytes) -> Path | None:
        if not self._policy.has_answered():
            return None
        return self.opened_namespace(namespace).index_file()

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
            # a thread that is alive hangs in a call of the medium, and may still use the namespaces
            if thread is None or not thread.is_alive():
                self._opened.close()
        finally:
            self._medium.close()

    def _check_open(self, *, writes: bool = False) -> None:
        """Raise a StoreError if the handle is closed.

        :param writes: raise also if it is read-only, or the medium has not answered yet.
        """
        if self._closed:
            raise StoreError(f"{self._place} is closed")
        if writes and self._read_only:
            raise StoreError(f"{self._place} is open read-only")
        if writes and not self._policy.has_answered():
            text = f"{self._place} has not answered yet: {self._policy.last_error}"
            raise UnavailableError(text)
