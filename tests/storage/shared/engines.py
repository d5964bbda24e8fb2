"""An engine as a history runs it."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from persistkv.errors import ConfigurationError, StoreError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.catalogue.rows import manifest_row
from persistkv.storage.format.pack import ID_BYTES, PLAIN_KEY, PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.format.seal import Seal
from persistkv.storage.shared import SharedBackend
from persistkv.tenants import DEFAULT_TENANT
from persistkv.testing.samples import sample_manifest
from tests.storage.shared.model import (
    FORGOTTEN,
    IDENTITIES,
    NAMESPACES,
    NEW_KEY,
    Held,
    Span,
    Stored,
    View,
    names_of,
    pack_of,
    payload,
)
from tests.storage.shared.simulation import MINUTE_S, Process

if TYPE_CHECKING:
    from tests.storage.shared.history import History


class Engine:
    """One run of an engine: it stores, reads, deletes and does background work until it is killed
    or its time ends.

    :param first_pack: number of the first pack that it stores, unless the packs of the history are
        few.
    """

    def __init__(self, history: History, process: Process, first_pack: int) -> None:
        self._history = history
        self._model = history.model
        self._process = process
        self._draw = process.new_random("life")
        self._numbers = count(first_pack)
        self._content = self._draw.randrange(2)
        self._known: dict[bytes, dict[bytes, PackTable]] = {
            name: {} for name in NAMESPACES
        }
        self._cursors: dict[bytes, bytes | None] = dict.fromkeys(NAMESPACES)
        self._opened: set[bytes] = set()
        self._has_new_key = False
        """Whether the key with which the handle was opened is the one that replaces the first."""
        self._is_stopping = False
        self._is_stopped = False

    def live(self) -> None:
        """Run until the history ends."""
        self._process.sleep(self._draw.uniform(0, 5))
        try:
            backend = self._history.open(self._process)
        except StoreError as error:
            self._note(f"could not open: {error}")
            return
        # not ``is_rotated``: the key may have been replaced while the handle was opened
        self._has_new_key = backend.keys.key_id == NEW_KEY.id
        self._process.spawn(lambda: self._work(backend))
        self._use(backend)
        calm = self._history.time.calm
        if self._process.now < self._history.time.until:
            self._stop(backend)
            return
        self._process.sleep(calm.end - self._process.now)
        # it raises if the key was replaced before the medium has answered the handle
        with suppress(ConfigurationError):
            self._compare(backend)
        self._stop(backend)

    def _stop(self, backend: SharedBackend) -> None:
        self._is_stopping = True
        wait_s = 0.5
        while not self._is_stopped:
            self._process.sleep(wait_s)
            # the thread may be suspended for days
            wait_s = min(2 * wait_s, 5 * MINUTE_S)
        with suppress(StoreError):
            backend.close()

    def _work(self, backend: SharedBackend) -> None:
        """Do the background work of the handle, in the second thread."""
        try:
            while not self._is_stopping:
                # In the calm minutes the thread is slow, which makes the simulation fast.
                least_s = (
                    15.0 if self._process.now >= self._history.time.calm.begin else 0.05
                )
                wait_s = min(max(backend.step(), least_s), MINUTE_S)
                self._process.sleep(self._pause_s() or wait_s)
        finally:
            self._is_stopped = True

    def _pause_s(self) -> float:
        return self._history.time.pause_s(self._process.now, self._draw)

    def _use(self, backend: SharedBackend) -> None:
        until = self._history.time.until
        while self._process.now < until and self._draw.random() > 0.04:
            namespace = self._draw.choice(NAMESPACES)
            try:
                if namespace not in self._opened:
                    backend.open_namespace(IDENTITIES[NAMESPACES.index(namespace)])
                    self._opened.add(namespace)
                self._act(backend, namespace)
            except (StoreError, ConfigurationError) as error:
                self._note(f"{type(error).__name__}: {error}")
            self._process.sleep(self._pause_s() or self._draw.uniform(0.2, 6.0))

    def _act(self, backend: SharedBackend, namespace: bytes) -> None:
        choice = self._draw.random()
        if choice < 0.5:
            self._store(backend, namespace)
        elif choice < 0.5 + self._history.deletes:
            self._delete(backend, namespace)
        elif choice < 0.85:
            self._read(backend, namespace)

    def _store(self, backend: SharedBackend, namespace: bytes) -> None:
        tenant = DEFAULT_TENANT
        if self._history.forgets and self._draw.random() < 0.5:
            tenant = FORGOTTEN
        packs = self._draw_packs(namespace, backend.seal, tenant)
        names = [pack.pack_id for pack in packs]
        manifests: list[ManifestWrite] = []
        if self._draw.random() < 0.4:
            # drawn: a copy has the same ones in its past
            name = f"request-{self._draw.randbytes(6).hex()}"
            request = sample_manifest(name, packs=names, ordered=False, tenant=tenant)
            manifests = [request]
        begin = self._process.now
        self._process.written.clear()
        shown = ", ".join(name.hex()[:8] for name in names)
        self._note(f"STORE {shown}")
        backend.commit(namespace, CommitBatch(packs, manifests))
        self._note(f"STORED {shown}")
        at = Span(begin, self._process.now)
        written = self._written_blobs(namespace)
        for pack in packs:
            blobs = frozenset(written[pack.pack_id])
            # a pack that was held has no table
            data_key = pack.table.data_key if blobs else PLAIN_KEY
            stored = Stored(at, blobs, data_key)
            self._model.stored[pack.pack_id].append(stored)
        for write in manifests:
            digest = manifest_row(namespace, write.manifest.id)[ID_BYTES:]
            self._model.requests[write.manifest.id] = Held(digest, names, at)

    def _draw_packs(
        self,
        namespace: bytes,
        seal: Seal,
        tenant: str,
    ) -> list[PackWriter]:
        """Return packs to store, and record which payloads may be read from now on."""
        numbers: set[int] = set()
        for _ in range(self._draw.randrange(1, 4)):
            pair = self._next_pack() // 2
            numbers.add(2 * pair + NAMESPACES.index(namespace))
        packs: list[PackWriter] = []
        for number in sorted(numbers):
            pack = pack_of(number, self._content, seal, tenant)
            self._model.payloads[pack.pack_id].add(payload(number, self._content))
            packs.append(pack)
        return packs

    def _written_blobs(self, namespace: bytes) -> dict[bytes, set[bytes]]:
        """Return the names of the blobs of packs that the process has written, by pack id."""
        found: dict[bytes, set[bytes]] = defaultdict(set)
        names = names_of(namespace, with_key=self._history.has_key)
        for blob in self._process.written:
            name = names.pack_name(blob)
            if name is not None:
                pack_id = name[:ID_BYTES]
                found[pack_id].add(name)
        return found

    def _next_pack(self) -> int:
        pool = self._history.pool
        return self._draw.randrange(2 * pool) if pool else next(self._numbers)

    def _delete(self, backend: SharedBackend, namespace: bytes) -> None:
        self._refresh(backend, namespace)
        if not self._known[namespace]:
            return
        name = self._draw.choice(sorted(self._known[namespace]))
        self._model.deleted.add(name)
        batch = CommitBatch(deletions=[name])
        if self._draw.random() < 0.3:
            batch = CommitBatch(bad=[name])
        self._note(f"DELETE {name.hex()[:8]}")
        backend.commit(namespace, batch)
        self._note(f"DELETED {name.hex()[:8]}")

    def _read(self, backend: SharedBackend, namespace: bytes) -> None:
        self._refresh(backend, namespace)
        known = sorted(self._known[namespace])
        for name in self._draw.sample(known, min(2, len(known))):
            self._history.read(backend, namespace, self._known[namespace][name])

    def _refresh(self, backend: SharedBackend, namespace: bytes) -> None:
        changes = backend.changes(namespace, self._cursors[namespace])
        known = self._known[namespace]
        if changes.reset:
            known.clear()
        for name in changes.removed:
            known.pop(name, None)
        for table in changes.added:
            known[table.pack_id] = table
        self._cursors[namespace] = changes.cursor

    def _compare(self, backend: SharedBackend) -> None:
        """Record what the handle shows after the calm minutes, and that ``changes`` led to the
        same."""
        views: dict[bytes, View] = {}
        for namespace in sorted(self._opened):
            views[namespace] = self._history.look(backend, namespace)
            self._refresh(backend, namespace)
            differ = views[namespace].packs ^ self._known[namespace].keys()
            assert not differ, (
                f"{self._process.name}: changes differ from the catalogue in {len(differ)} packs"
            )
        # Two engines that create a store at once make data keys of their own. A handle that learns
        # too late of the other's cannot search it after a rotation.
        if self._has_new_key != self._history.is_rotated:
            return
        self._history.views[self._process.name] = views
        for known in self._known.values():
            shown = {table.data_key for table in known.values()}
            assert not shown & self._history.destroyed, (
                f"{self._process.name} shows packs of a tenant that was forgotten"
            )

    def _note(self, text: str) -> None:
        self._process.note(text)
