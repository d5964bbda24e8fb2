"""Bugs that are planted one at a time: each breaks one rule of the protocol, and some history must
fail."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from persistkv.storage.blobs import BlobInfo
from persistkv.storage.catalogue.rows import TableRows
from persistkv.storage.shared.forgetting.records import ForgetRecords, ForgottenTenants
from persistkv.storage.shared.format import BASE_LEVEL, Delta
from persistkv.storage.shared.inbox import Inbox, _Start
from persistkv.storage.shared.index import merge, sweep
from persistkv.storage.shared.index.merge import Merger
from persistkv.storage.shared.index.reader import IndexReader
from persistkv.storage.shared.index.sweep import Sweeper
from persistkv.storage.shared.keys import StoreKeys
from persistkv.storage.shared.replica import Replica
from persistkv.storage.shared.replica.application import Application
from tests.storage.shared.history import HangKind
from tests.storage.shared.simulation import Process


def plant_included(patch: pytest.MonkeyPatch) -> None:
    """Delete what a segment includes before the segment is durable."""
    publish = Merger._publish

    def planted(self: Merger, segment: Delta, began: float, planned: float) -> None:
        self._medium.blobs.delete(list(segment.includes))
        publish(self, segment, began, planned)

    patch.setattr(Merger, "_publish", planted)


def plant_unread(patch: pytest.MonkeyPatch) -> None:
    """Let a base include objects that its writer has listed and not read."""
    write_base = Merger.write_base

    def planted(self: Merger) -> None:
        infos = self._medium.listed(self._names.index, stable=True)
        self._reader._note_list(infos)
        self._replica.mark_contained(
            [info.name for info in infos if self._names.is_object(info.name)]
        )
        write_base(self)

    patch.setattr(Merger, "write_base", planted)


def plant_inbox(patch: pytest.MonkeyPatch) -> None:
    """Open without reading the inbox."""
    refresh = IndexReader.refresh

    def planted(
        self: IndexReader,
        *,
        inbox_age_s: float | None = None,
        stable: bool = False,
    ) -> list[BlobInfo]:
        return refresh(self, stable=stable)

    patch.setattr(IndexReader, "refresh", planted)


def plant_names(patch: pytest.MonkeyPatch) -> None:
    """Draw names from a source of the process, which a copy of the machine repeats."""
    patch.setattr(Process, "repeats_names", True)


def plant_order(patch: pytest.MonkeyPatch) -> None:
    """Let a sweep read once, the index before the inbox, and delete what the replica holds."""
    patch.setattr(Replica, "live_names", lambda self, names: set())
    patch.setattr(
        Sweeper,
        "_all_deltas",
        lambda self, now: _read_once(self, ("index", "inbox"), stable=True),
    )


def plant_once(patch: pytest.MonkeyPatch) -> None:
    """Let a sweep read once, trust a single list, and delete what the replica holds."""
    patch.setattr(Replica, "live_names", lambda self, names: set())
    patch.setattr(
        Sweeper,
        "_all_deltas",
        lambda self, now: _read_once(self, ("inbox", "index"), stable=False),
    )


_is_second: defaultdict[Sweeper, bool] = defaultdict(bool)


def _read_once(
    sweeper: Sweeper,
    order: Sequence[str],
    *,
    stable: bool,
) -> Iterator[Delta]:
    _is_second[sweeper] = not _is_second[sweeper]
    if not _is_second[sweeper]:
        return
    for part in order:
        for info in sweeper._medium.listed(
            getattr(sweeper._names, part), stable=stable
        ):
            found = sweeper._fetch(info)
            if isinstance(found, Delta):
                yield found


def plant_before(patch: pytest.MonkeyPatch) -> None:
    """Check the age of a commit before its last request, not after it."""
    check = Inbox._check_age

    def planted(self: Inbox, start: _Start, written: float | None = None) -> None:
        is_before = written is None
        if is_before:
            check(self, start)

    patch.setattr(Inbox, "_check_age", planted)


def plant_parts(patch: pytest.MonkeyPatch) -> None:
    """Let the first part of a base name what the base includes: the others may never be written."""

    def planted(self: Merger) -> None:
        began = self._clock.monotonic()
        self._base_wanted_at = math.inf
        self._reader.refresh(stable=True)
        listed = self._to_include()
        if len(listed) < 2:
            return
        level = max(BASE_LEVEL, 1 + max(self._names.level(name) for name in listed))
        includes = listed
        for part in list(self._replica.dump(merge.PART_BYTES)):
            named = msgspec.structs.replace(part, includes=includes)
            self._write_part(level, named, began)
            includes = []
        self._announce()

    patch.setattr(Merger, "write_base", planted)


def plant_dates(patch: pytest.MonkeyPatch) -> None:
    """Let a sweep trust the date of a reply that the machine's clock does not confirm."""
    patch.setattr(sweep, "AGREEING_S", math.inf)


def plant_reload(patch: pytest.MonkeyPatch) -> None:
    """Let a handle never search for data keys that others have made."""
    patch.setattr(StoreKeys, "_reload", lambda self, key_id: self._known())


def plant_unread_record(patch: pytest.MonkeyPatch) -> None:
    """Read the records of forgotten tenants only when a handle opens the store."""
    refresh = ForgetRecords.refresh

    def planted(self: ForgetRecords) -> None:
        if not self._is_read:
            refresh(self)

    patch.setattr(ForgetRecords, "refresh", planted)


def plant_replica(patch: pytest.MonkeyPatch) -> None:
    """Let a replica keep what it holds of forgotten tenants."""
    patch.setattr(Replica, "remove_forgotten", lambda self: None)


def plant_apply(patch: pytest.MonkeyPatch) -> None:
    """Add content of forgotten tenants to a replica that has removed it before."""
    init = Application.__init__

    def planted(
        self: Application,
        rows: TableRows,
        namespace: bytes,
        forgotten: ForgottenTenants,
    ) -> None:
        init(self, rows, namespace, ForgottenTenants())

    patch.setattr(Application, "__init__", planted)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "included": plant_included,
    "unread": plant_unread,
    "inbox": plant_inbox,
    "names": plant_names,
    "order": plant_order,
    "once": plant_once,
    "before": plant_before,
    "parts": plant_parts,
    "dates": plant_dates,
    "reload": plant_reload,
    "record": plant_unread_record,
    "replica": plant_replica,
    "apply": plant_apply,
}
"""For each rule of the protocol, a function that breaks it."""


HANGS_FOR = {
    "apply": [HangKind("PUT", "/inbox/")],
    "dates": [HangKind("PUT", "/packs/")],
    "parts": [HangKind("PUT", "/index/")],
    "reload": [HangKind("PUT", "/inbox/")],
    "order": [HangKind("LIST", "/inbox/", "/swept", before=1.0)],
    "once": [HangKind("LIST", "/index/", "/swept", before=0.0)],
    "before": [HangKind("PUT", "/inbox/")],
}
"""For some rules, requests whose suspension lets histories without the rule lose content sooner."""
