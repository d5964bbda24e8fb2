"""Files in the directory of the segments that ``rebuild`` needs and that no pack holds: identities
and erasures.

1. ``segments/NAMESPACE.identity`` has the content of the namespace's row. It is durable before the
   commit that adds the namespace's first pack, unless the disk refuses it.
2. ``segments/erased`` lists packs that were deleted because a user or a check asked for it: evicted
   content may reappear, deleted content may not. A record is durable before the deletion.
3. An *erasure* has a number. It covers the packs of its name that were written while the number of
   the last erasure, which the catalogue records, was smaller: not only the deleted copy, but also
   evicted ones. Content that is stored again afterwards is not covered.
4. The list is bounded. If it is full, or if the disk has no space for a record, all erasures become
   one that covers all packs written before: ``rebuild`` does not find these.
5. Only holders of the writer lock change these files. They move with the segments if a damaged
   store is renamed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from persistkv.storage.backend import Namespace
from persistkv.storage.catalogue.rows import decode_namespace
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.files import (
    SEGMENT_DIRECTORY,
    open_regular,
    read_regular,
    sync_directory,
    translated_io,
    write_durably,
)

_IDENTITY_SUFFIX = ".identity"
_ERASED = "erased"
# number of an erasure; checksum of a pack's name, or ``_ALL``
_RECORD = struct.Struct("<QQ")
_ALL = 0  # stands for the checksum of a name: the erasure covers all packs
# First record of the file, which covers nothing. It takes space on disk in advance: on a full disk,
# an erasure of all packs replaces it.
_NO_ERASURE = _RECORD.pack(0, _ALL)
# numbers from here on are damage: a store never deletes so often
_END_OF_NUMBERS = 1 << 62
MOST_ERASED_BYTES = 4 << 20  # 4 MiB: 262,144 records
_MOST_IDENTITY_BYTES = 1 << 20  # 1 MiB


class Erasures(NamedTuple):
    """The erasures of a store."""

    last: int
    """Number of the last one; 0: there is none."""
    by_name: Mapping[int, int]
    """Checksum of a pack's name → number of the name's last erasure. The key ``_ALL`` stands for
    all packs: its value is the number of the last erasure that covers them."""

    def covers(self, name: bytes, last_erasure: int) -> bool:
        """Return whether a pack was deleted after it had been written, so that a rebuild must not
        list it. Names with one checksum count as one name.

        :param name: namespace and pack id.
        :param last_erasure: number of the last erasure when the pack was written.
        """
        of_name = self.by_name.get(_checksum(name), 0)
        of_all = self.by_name.get(_ALL, 0)
        return last_erasure < max(of_name, of_all)


class RecoveryFiles:
    """Files beside the segments of the store in the directory ``store`` from which a rebuild learns
    what no pack holds: the identities of namespaces, and which packs were deleted (erasures)."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._directory = store / SEGMENT_DIRECTORY
        self._known_generations: dict[bytes, bytes] = {}
        """Generation of each namespace whose identity this process has found or written in its
        file, by id: later commits need not look again."""

    def write_identity(
        self,
        namespace: bytes,
        row: Buffer,
        generation: bytes,
    ) -> None:
        """Write the identity of a namespace durably, unless its file holds it already.

        An error is ignored: the store is valid without the file, and the next commit tries again.

        :param row: value of the namespace's row in the catalogue.
        :param generation: generation of the namespace, which changes if the namespace ends and
            begins again.
        """
        if self._known_generations.get(namespace) == generation:
            return
        path = self._identity_path(namespace)
        with suppress(OSError):
            # Also begin the list of erasures, with a record that covers nothing, while the disk has
            # space: on a full disk, ``_record_erasure_of_all`` overwrites this record, which needs
            # no space.
            if _size(self._erased) < _RECORD.size:
                _write(self._erased, _NO_ERASURE)
            present_row = _content(path, _MOST_IDENTITY_BYTES)
            # the file is missing, or a killed process has written only a part of it
            if present_row != row:
                _write(path, row)
            # sync even if the file exists: its creator may have been killed before the sync
            sync_directory(self._directory)
            self._known_generations[namespace] = generation

    def delete_identities(self, namespaces: Iterable[bytes]) -> None:
        """Delete the identities of namespaces without content. An error is ignored: an identity
        alone is harmless."""
        for namespace in namespaces:
            with suppress(OSError):
                self._identity_path(namespace).unlink()

    def identities(self) -> dict[bytes, Namespace]:
        """Return the namespaces whose identities can be read, by id."""
        found: dict[bytes, Namespace] = {}
        for path in self._directory.glob(f"*{_IDENTITY_SUFFIX}"):
            # a file that cannot be read, or whose name is not hexadecimal, is skipped
            with suppress(OSError, ValueError):
                digits = path.name.removesuffix(_IDENTITY_SUFFIX)
                name = bytes.fromhex(digits)
                row = _content(path, _MOST_IDENTITY_BYTES)
                namespace = decode_namespace(name, row)
                if namespace is not None:
                    found[name] = namespace
        return found

    def record_erasure(self, names: Collection[bytes], number: int) -> None:
        """Record an erasure of packs durably. If the list or the disk is full, record that it
        covers all packs. A store that never had segments has nothing to erase.

        :param names: namespace and pack id of each.
        :param number: of the erasure.
        :raises StoreError: it cannot be written.
        """
        records = b"".join([_RECORD.pack(number, _checksum(name)) for name in names])
        # without a directory of segments, there is nothing to erase
        with translated_io(self._store), suppress(FileNotFoundError):
            try:
                is_recorded = self._append(records)
            except OSError:
                # most likely, the disk is full
                is_recorded = False
            if not is_recorded:
                self._record_erasure_of_all(number)

    def _record_erasure_of_all(self, number: int) -> None:
        """Record durably that the erasure ``number`` covers all packs: in place of the first
        record, which needs no new space.

        :raises OSError: it cannot be written; ``FileNotFoundError``: there is no list.
        """
        record = _RECORD.pack(number, _ALL)
        write_durably(self._erased, record, offset=0)
        # delete the other records: the first one now covers their packs, too
        os.truncate(self._erased, _RECORD.size)

    def erasures(self) -> Erasures:
        """Return all erasures; none if the file is missing.

        :raises OSError: it cannot be read, or is no regular file.
        """
        content = _content(self._erased, MOST_ERASED_BYTES)
        # a killed process may have left a part of a record
        num_records = len(content) // _RECORD.size
        records = content[: num_records * _RECORD.size]
        last_of: dict[int, int] = {}
        for number, checksum in _RECORD.iter_unpack(records):
            # skip larger numbers, which are damage: they would also cover every pack that the store
            # writes under the name from now on
            if number < _END_OF_NUMBERS:
                earlier = last_of.get(checksum, 0)
                last_of[checksum] = max(earlier, number)
        return Erasures(last=max(last_of.values(), default=0), by_name=last_of)

    def _identity_path(self, namespace: bytes) -> Path:
        return self._directory / f"{namespace.hex()}{_IDENTITY_SUFFIX}"

    @property
    def _erased(self) -> Path:
        """Path of the list of erasures."""
        return self._directory / _ERASED

    def _append(self, records: bytes) -> bool:
        """Add records to the list durably; return False if it would get too long.

        :raises OSError: they cannot be written.
        """
        # a killed process may have left a part of a record
        num_records = _size(self._erased) // _RECORD.size
        if not num_records:
            # the list begins with a record that erases nothing, which ``_record_erasure_of_all``
            # replaces
            _write(self._erased, _NO_ERASURE)
            sync_directory(self._directory)
            num_records = 1
        end = num_records * _RECORD.size
        if end + len(records) > MOST_ERASED_BYTES:
            return False
        write_durably(self._erased, records, offset=end)
        return True


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is missing."""
    with suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _content(path: Path, at_most: int) -> bytes:
    """Return the first ``at_most`` bytes of a file; none if it is missing.

    :raises OSError: it cannot be read, or is no regular file.
    """
    with suppress(FileNotFoundError):
        return read_regular(path, at_most)
    return b""


def _write(path: Path, content: Buffer) -> None:
    """Write a file of a few KiB durably. If it is new, the caller must sync its directory."""
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _checksum(name: bytes) -> int:
    """Return the checksum of a pack's name (namespace and pack id), which records contain instead
    of the name."""
    return xxhash.xxh3_64_intdigest(name)
