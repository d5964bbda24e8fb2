"""A new catalogue from the packs in the segment files, for a store whose ``data.mdb`` is lost or
damaged.

1. A pack is listed only if its trailer names its own place, its table is valid, and every frame
   verifies. A pack that was overwritten after its eviction does not verify.
2. Deleted packs stay deleted (``recovery``). Evicted and expired ones may reappear: their bytes are
   valid.
3. Of copies of a pack, the one written last is listed. If valid packs overlap, those that end later
   are listed.
4. The catalogue is built in a file of its own, which is renamed when it is complete and durable.
   The segments are only read. The damaged catalogue is renamed, not deleted. A rebuild that was
   killed is repeated from the beginning.
5. Pages that no listed pack has are recorded as holes: the first commit returns their disk space to
   the file system.
6. No other process may have the store open for writing meanwhile, and none can open it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import lmdb

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptPackError, CorruptStoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch, Namespace
from persistkv.storage.catalogue import CatalogTransaction
from persistkv.storage.catalogue.order import read_clock, write_clock
from persistkv.storage.catalogue.rows import NamespaceState, TableRows
from persistkv.storage.format.pack import (
    ID_BYTES,
    PackTable,
    align,
)
from persistkv.storage.format.pack_writer import PlacedPack
from persistkv.storage.format.seal import Seal
from persistkv.storage.policy import Policy
from persistkv.storage.stats import Rebuilt
from persistkv_lmdb import files
from persistkv_lmdb.keys import KeyFile
from persistkv_lmdb.layout import (
    DATABASES,
    DEFAULT_CAPACITY,
    Trailer,
    create_databases,
    decode_table,
    decode_trailer,
    find_trailers,
    write_keyring,
    write_last_erasure,
    write_policy,
)
from persistkv_lmdb.opening import Guard, quarantine_directory
from persistkv_lmdb.payloads.allocator import Allocator, pages_for, pages_of
from persistkv_lmdb.payloads.segments import Extent, segment_number
from persistkv_lmdb.recovery import RecoveryFiles
from persistkv_lmdb.repair.fsck import DAMAGE, CheckResult, inspect

# Reasons why a trace of a pack in the files is not listed (``Rebuilt.skipped``).
INVALID = "overwritten or damaged"
SPLIT = "in several extents"
DELETED = "deleted"
UNKNOWN = "of an unknown identity"
OVERLAPPING = "overlapping"
COPY = "another copy"
UNREADABLE = "unreadable parts of the files"

_PART_FILE = "data.mdb.rebuild"  # name of the new catalogue until it is complete
_READ_BYTES = 8 << 20  # 8 MiB: bytes that are read at once
_PACKS_AT_ONCE = 512  # number of packs that one transaction adds
# 4 KiB: bytes of the rows of a pack besides its table, in pages that are half full
_ROWS_BYTES = 4 << 10
# bytes of the map for each byte of a table, because tables take whole pages
_TABLE_SHARE = 4
_FIRST_MAP_BYTES = 64 << 20  # 64 MiB: map of the new catalogue, without what packs take
_GROWTH_BYTES = 128 << 20  # 128 MiB: space that the next commits need


class _Window(NamedTuple):
    """Consecutive pages of a segment file that were read."""

    fd: int
    """Descriptor of the file."""
    segment: int
    """Number of the segment."""
    first_page: int
    """Number of the first page in the segment."""
    content: memoryview
    """All pages; valid until the next window is read."""


class ScannedPack(NamedTuple):
    """A pack that was found in a segment file and verified, in its only extent."""

    extent: Extent
    """All pages of the pack: payload, table and trailer."""
    name: bytes
    """Namespace and pack id."""
    last_erasure: int
    """Number of the last erasure when the pack was written."""
    tail_length: int
    """Bytes from the beginning of the pack's table to the end of its trailer."""


def rebuild(
    path: Path,
    policy: Policy,
    keys: KeyFile,
    progress: Callable[[int, int], None],
) -> Rebuilt | None:
    """Rebuild the store in a directory; see ``Backend.rebuild``. None: its catalogue is valid, and
    nothing was changed.

    :param policy: of the new catalogue. Without capacity: the default, or more if the segments need
        it.
    :param keys: data keys of the store.
    :param progress: called with the bytes that were searched so far, and with those of all
    segments.
    """
    if not (path / files.SEGMENT_DIRECTORY).is_dir():
        reason = "a store keeps packs there unless it has placement=inline, which cannot be rebuilt"
        raise StoreUnavailableError(
            f"{path} has no directory {files.SEGMENT_DIRECTORY}: {reason}"
        )
    files.prepare_directory(path, read_only=False)
    # exclude other writers, and processes that want to open the store, during the whole rebuild
    with (
        closing(Guard(path)) as guard,
        guard.excluding_writers(),
        files.translated_io(path),
    ):
        if not _is_lost(path):
            return None
        with closing(_Rebuild(path, policy, keys)) as running:
            return running.run(progress)


def _is_lost(path: Path) -> bool:
    """Return whether the catalogue is missing, empty or damaged.

    :raises StoreUnavailableError: the check did not complete.
    :raises CorruptStoreError: it is valid, and of another release.
    """
    if not files.has_catalogue(path):
        return True
    found = inspect(path)
    if found.result is CheckResult.UNKNOWN:
        raise StoreUnavailableError(f"{path}: {found.reason}")
    if found.result is CheckResult.FOREIGN:
        raise CorruptStoreError(f"{path}: {found.reason}")
    return found.result in DAMAGE


class _Rebuild:
    """Rebuild of the store in a directory, which no other process has open for writing; ``run``
    once. Parameters as in ``rebuild``."""

    def __init__(
        self,
        path: Path,
        policy: Policy,
        keys: KeyFile,
    ) -> None:
        self._path = path
        self._policy = policy
        self._keyring_id = keys.prepare_keyring(create=False)
        self._seal = keys.open_seal(self._keyring_id)
        recovery = RecoveryFiles(path)
        self._namespaces = recovery.identities()
        """Namespaces whose identities are known, by id. Packs of other namespaces cannot be
        listed."""
        self._erasures = recovery.erasures()
        self._skipped: Counter[str] = Counter()
        """Reason → number of traces of packs that are not listed for it."""
        self._totals = NamespaceState(generation=b"")
        """Totals of the listed packs of all namespaces, for the report."""
        self._segments = _open_segments(path)
        num_pages = sum(segment.pages for segment in self._segments.values())
        self._read_bytes = num_pages * PAGE_BYTES
        """Bytes of all segment files."""

    def close(self) -> None:
        """Close the segment files."""
        for segment in self._segments.values():
            # drop the file from the page cache, which other files need more
            os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(segment.fd)

    def run(self, progress: Callable[[int, int], None]) -> Rebuilt:
        """Search the segments, build a catalogue of the packs, and put it in place of the damaged
        one. Without packs, nothing is changed."""
        found = self._packs_to_list(self._find_packs(progress))
        if not found:
            return self._report(num_namespaces=0, capacity=0, damaged=None)
        namespaces = {pack.name[:ID_BYTES] for pack in found}
        part = self._path / _PART_FILE
        part.unlink(missing_ok=True)  # remove the file of a rebuild that was killed
        try:
            with files.translated(self._path):
                capacity = self._build(part, found)
            damaged = self._replace_catalogue(part)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return self._report(
            num_namespaces=len(namespaces), capacity=capacity, damaged=damaged
        )

    def _report(
        self,
        *,
        num_namespaces: int,
        capacity: int,
        damaged: Path | None,
    ) -> Rebuilt:
        """Return the result of the rebuild.

        :param damaged: directory with the damaged catalogue; None: there was none. Other parameters
            as in ``Rebuilt``.
        """
        return Rebuilt(
            packs=self._totals.packs,
            blocks=self._totals.blocks,
            namespaces=num_namespaces,
            stored_bytes=self._totals.stored_bytes,
            read_bytes=self._read_bytes,
            skipped=self._skipped,
            capacity=capacity,
            damaged=None if damaged is None else str(damaged),
        )

    # Packs in the segment files. They are read through the page cache: a pack is verified soon
    # after its trailer was read, and its table is read again for the new catalogue.

    def _find_packs(
        self, progress: Callable[[int, int], None]
    ) -> Iterator[ScannedPack]:
        """Yield the packs that are valid and were not deleted, in the order of their trailers;
        ``_pack_at`` counts the trailers of others."""
        for window in self._read_windows(progress):
            for index in find_trailers(window.content):
                pack = self._pack_at(window, index)
                if pack is not None:
                    yield pack

    def _read_windows(self, progress: Callable[[int, int], None]) -> Iterator[_Window]:
        """Read the segment files in windows of 8 MiB. Count windows that cannot be read, and report
        the searched bytes to ``progress``.

        A trailer is within one page, so it is in one window; its pack may begin before.
        """
        searched_bytes = 0
        memory = memoryview(bytearray(_READ_BYTES))
        pages_at_once = _READ_BYTES // PAGE_BYTES
        for number, segment in self._segments.items():
            for first_page in range(0, segment.pages, pages_at_once):
                num_pages = min(pages_at_once, segment.pages - first_page)
                content = memory[: num_pages * PAGE_BYTES]
                num_read = 0
                with suppress(OSError):  # OSError means a bad sector
                    num_read = os.preadv(segment.fd, [content], first_page * PAGE_BYTES)
                if num_read == len(content):
                    yield _Window(segment.fd, number, first_page, content)
                else:
                    self._skipped[UNREADABLE] += 1
                searched_bytes += len(content)
                progress(searched_bytes, self._read_bytes)

    def _pack_at(self, window: _Window, index: int) -> ScannedPack | None:
        """Return the pack whose trailer is at the end of a page. If it is not valid, or was
        deleted, count it and return None.

        :param index: number of the page in the window.
        """
        start = index * PAGE_BYTES
        page = window.content[start : start + PAGE_BYTES]
        trailer = decode_trailer(page, window.segment, window.first_page + index)
        if trailer is None:
            self._skipped[INVALID] += 1
            return None
        # a trailer names the last extent only
        if trailer.num_extents > 1:
            self._skipped[SPLIT] += 1
            return None
        try:
            table = read_table(window.fd, trailer, self._seal)
            name = table.namespace + table.pack_id
            # check this before the payload, whose verification takes most of the time
            if self._erasures.covers(name, trailer.last_erasure):
                self._skipped[DELETED] += 1
                return None
            verify_payload(window.fd, trailer.extent, table, self._seal)
        except (CorruptPackError, OSError):  # OSError means a bad sector
            self._skipped[INVALID] += 1
            return None
        return ScannedPack(
            trailer.extent, name, trailer.last_erasure, trailer.tail_length
        )

    def _packs_to_list(self, packs: Iterable[ScannedPack]) -> list[ScannedPack]:
        """Return the packs that the catalogue will list, ordered by name; count the others. A pack
        is listed if

        1. its namespace is known,
        2. it overlaps no pack that ends later, because each page belongs to one pack at most,
        3. no other copy of it was written later: a pack that was evicted and stored again may have
           left an old copy.
        """
        known: list[ScannedPack] = []
        for pack in packs:
            if pack.name[:ID_BYTES] in self._namespaces:
                known.append(pack)
            else:
                self._skipped[UNKNOWN] += 1
        without_overlaps = list(self._without_overlaps(known))
        return self._last_copies(without_overlaps)

    def _without_overlaps(self, packs: list[ScannedPack]) -> Iterator[ScannedPack]:
        """Yield packs that do not overlap, from the end of the segments to their beginning. Of
        packs that overlap, the one that ends later is yielded."""
        packs.sort(
            key=lambda pack: (pack.extent.segment, pack.extent.end),
            reverse=True,
        )
        # first page of the last pack that was yielded, by segment
        begins: dict[int, int] = {}
        for pack in packs:
            extent = pack.extent
            begin = begins.get(extent.segment)
            if begin is not None and extent.end > begin:
                self._skipped[OVERLAPPING] += 1
                continue
            begins[extent.segment] = extent.page
            yield pack

    def _last_copies(self, packs: list[ScannedPack]) -> list[ScannedPack]:
        """Return the copy of each pack that was written last, ordered by name."""
        # The copy that names the latest erasure was written last. Copies that name the same erasure
        # were evicted and stored again: any of them is right, and the order by extent chooses one.
        packs.sort(key=lambda pack: (pack.last_erasure, pack.extent))
        last: dict[bytes, ScannedPack] = {}
        for pack in packs:
            if pack.name in last:
                self._skipped[COPY] += 1
            last[pack.name] = pack
        return [last[name] for name in sorted(last)]

    # The new catalogue

    def _build(self, file: Path, packs: Sequence[ScannedPack]) -> int:
        """Write a catalogue of packs, ordered by name, durably to a new file; return its capacity.
        All packs count as used at one moment, because their last uses are lost."""
        with _create_environment(file, packs) as env:
            with env.begin(write=True, buffers=True) as txn:
                # the capacity follows from the size of the catalogue, at the end
                policy = replace(self._policy, capacity=DEFAULT_CAPACITY)
                databases = create_databases(env, txn, policy)
                rows = TableRows(txn, databases, self._seal)
                self._write_first_rows(rows, packs)
            # use several transactions, because one would hold all new pages in memory
            for namespace, group in _groups_of(packs):
                with env.begin(write=True, buffers=True) as txn:
                    rows = TableRows(txn, databases, self._seal)
                    self._add_packs(rows, self._namespaces[namespace], group)
            with env.begin(write=True, buffers=True) as txn:
                num_pages = env.info()["last_pgno"] + 1
                catalogue_bytes = num_pages * env.stat()["psize"]
                capacity = self._capacity(catalogue_bytes, packs)
                self._write_last_rows(TableRows(txn, databases), capacity)
            env.sync(True)
        return capacity

    def _write_first_rows(
        self,
        rows: TableRows,
        packs: Sequence[ScannedPack],
    ) -> None:
        """Record the keyring, the space in the segments and the last erasure."""
        write_keyring(rows, self._keyring_id)
        # Later erasures must have larger numbers than the packs name, because an erasure covers
        # only packs that name a smaller number. The list of erasures, which has the last one, may
        # be lost.
        last_erasure = self._erasures.last
        for pack in packs:
            last_erasure = max(last_erasure, pack.last_erasure)
        write_last_erasure(rows, last_erasure)
        self._record_space(rows, packs)

    def _write_last_rows(self, rows: TableRows, capacity: int) -> None:
        """Record the moment at which the packs count as used, and the policy."""
        # No transaction above counted as a use, so all packs got the moment after the recorded one.
        # Record this moment, so that the first use gets a later one.
        moment, clock = read_clock(rows)
        write_clock(rows, moment + 1, clock)
        write_policy(rows, replace(self._policy, capacity=capacity))

    def _record_space(self, rows: TableRows, packs: Sequence[ScannedPack]) -> None:
        """Record the segments; their pages that no pack has are holes."""
        allocator = Allocator(rows)
        segments: list[Extent] = []
        used = [pack.extent for pack in packs]
        for number, segment in self._segments.items():
            segments.append(Extent(number, page=0, pages=segment.pages))
            # An extent of no pages at the end of the segment: the loop below finds the holes before
            # extents, and with this one also the last hole of the segment.
            used.append(Extent(number, page=segment.pages, pages=0))
        holes: list[Extent] = []
        # by segment, the page after the last extent: the next hole begins there
        begins = dict.fromkeys(self._segments, 0)
        for extent in sorted(used):
            begin = begins[extent.segment]
            hole_pages = extent.page - begin
            if hole_pages > 0:
                holes.append(Extent(extent.segment, begin, hole_pages))
            begins[extent.segment] = extent.end
        allocator.record_files(segments, holes)
        allocator.finish()

    def _add_packs(
        self,
        rows: TableRows,
        namespace: Namespace,
        packs: Sequence[ScannedPack],
    ) -> None:
        """Add packs of one namespace to the catalogue, in the caller's transaction."""
        allocator = Allocator(rows)
        placed: list[PlacedPack] = []
        for pack in packs:
            segment = self._segments[pack.extent.segment]
            table = read_table(segment.fd, pack, self._seal)
            self._totals.count(table, sign=1)
            # a ``PlacedPack`` adds the rows only, because the payload is in its place
            placed.append(PlacedPack(table))
            allocator.record_pack(pack.name, [pack.extent])
        # describe the namespace, because its first packs also add its own rows
        opened = {namespace.id: namespace}
        commit = CatalogTransaction(
            rows,
            payloads=None,
            namespace=namespace.id,
            opened=opened,
        )
        commit.add(CommitBatch(placed))
        commit.finish()

    def _capacity(self, catalogue_bytes: int, packs: Sequence[ScannedPack]) -> int:
        """Return the given capacity; without one, the default, or as much as the found content
        needs."""
        if self._policy.capacity is not None:
            return self._policy.capacity
        # the catalogue may grow to twice its size, and may take a quarter of the capacity at most
        grown_catalogue = 2 * catalogue_bytes
        for_catalogue = 4 * grown_catalogue
        pack_bytes = PAGE_BYTES * pages_of(pack.extent for pack in packs)
        for_content = grown_catalogue + pack_bytes + _GROWTH_BYTES
        needed = max(for_catalogue, for_content)
        return max(DEFAULT_CAPACITY, align(needed))

    def _replace_catalogue(self, part: Path) -> Path | None:
        """Move the damaged catalogue, if it exists, into a new directory, and rename the new
        catalogue to its place. Return that directory; None: there was no catalogue.

        :param part: file of the new catalogue.
        """
        data = self._path / files.DATA_FILE
        damaged = None
        if data.exists():
            damaged = quarantine_directory(self._path)
            data.rename(damaged / files.DATA_FILE)
            files.sync_directory(damaged)
        # remove LMDB's lock file, which names transactions of the damaged catalogue; LMDB makes a
        # new one
        (self._path / files.LOCK_FILE).unlink(missing_ok=True)
        part.rename(data)
        files.sync_directory(self._path)
        return damaged


class OpenSegment(NamedTuple):
    """An open segment file and its number of whole pages."""

    fd: int
    pages: int


def _open_segments(path: Path) -> dict[int, OpenSegment]:
    """Open the segment files of a store, and return them by number, without those that have no
    whole page. The caller closes them."""
    found: dict[int, OpenSegment] = {}
    # if a file cannot be opened, close those that were opened before it
    with ExitStack() as on_failure:
        for file in sorted((path / files.SEGMENT_DIRECTORY).iterdir()):
            number = segment_number(file.name)
            if number is None:
                continue
            fd = files.open_regular(file, os.O_RDONLY)
            status = os.fstat(fd)
            pages = status.st_size // PAGE_BYTES
            if pages:
                found[number] = OpenSegment(fd, pages)
                on_failure.callback(os.close, fd)
            else:
                os.close(fd)
        on_failure.pop_all()
    return found


def _create_environment(file: Path, packs: Sequence[ScannedPack]) -> lmdb.Environment:
    """Create the environment of a catalogue of packs in a new file."""
    table_bytes = sum(pack.tail_length for pack in packs)
    # the bound can be generous, because the map takes address space, not memory
    map_bytes = _FIRST_MAP_BYTES + _TABLE_SHARE * table_bytes + _ROWS_BYTES * len(packs)
    return lmdb.open(
        str(file),
        subdir=False,
        lock=False,  # no locks, because no other process knows the file
        sync=False,  # no syncs, because one at the end is enough
        map_size=align(map_bytes),
        max_dbs=len(DATABASES),
        mode=0o600,
    )


def read_table(
    fd: int,
    pack: Trailer | ScannedPack,
    seal: Seal,
) -> PackTable:
    """Return the table of a pack, read from the end of its extent.

    :param fd: of the segment file.
    :raises CorruptPackError: it is not valid, or does not fit the extent.
    """
    table_pages = pages_for(pack.tail_length)
    if table_pages > pack.extent.pages:
        raise CorruptPackError(
            "table length", f"{pack.tail_length} bytes in {pack.extent.pages} pages"
        )
    pack_end = pack.extent.end * PAGE_BYTES
    tail = _read(fd, pack_end - pack.tail_length, pack.tail_length)
    table = decode_table(memoryview(tail), seal)
    # payload and table must fill the extent exactly, or the table is another pack's
    payload_pages = pack.extent.pages - table_pages
    if table.payload_length != payload_pages * PAGE_BYTES:
        raise CorruptPackError(
            "payload length",
            f"{table.payload_length} bytes in {pack.extent.pages} pages",
        )
    # without encryption, a pack's id follows from its namespace, keys, codec and tenant
    if not seal.is_id_of(table):
        raise CorruptPackError("name", "it is that of other keys")
    return table


def verify_payload(
    fd: int,
    extent: Extent,
    table: PackTable,
    seal: Seal,
) -> None:
    """Verify all frames of a pack, and the zeros between them.

    :raises CorruptPackError: some bytes are others than those that were written.
    """
    frame_seal = seal.of_pack(table)
    for placed in table.placed_frames():
        frame = placed.frame
        start = extent.offset + frame.offset
        stored = _read(fd, start, align(frame.stored_length))
        # copy the frame, because it is decrypted in place
        content = bytearray(stored[: frame.stored_length])
        padding = stored[frame.stored_length :]
        frame_seal.open(placed, [memoryview(content)])
        if any(padding):
            raise CorruptPackError("padding", f"after the frame at {frame.offset}")


def _read(
    fd: int,
    offset: int,
    length: int,
) -> bytes:
    """Read bytes of a file; raise CorruptPackError if it ends before."""
    content = os.pread(fd, length, offset)
    if len(content) < length:
        raise CorruptPackError("length", f"the file ends before byte {offset + length}")
    return content


def _groups_of(
    packs: Iterable[ScannedPack],
) -> Iterator[tuple[bytes, list[ScannedPack]]]:
    """Divide packs, ordered by name, into groups of at most 512 packs of one namespace. Yield each
    group with the id of the namespace."""
    by_namespace = groupby(packs, key=lambda pack: pack.name[:ID_BYTES])
    for namespace, packs_of_namespace in by_namespace:
        while group := list(islice(packs_of_namespace, _PACKS_AT_ONCE)):
            yield namespace, group
