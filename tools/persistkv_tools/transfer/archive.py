"""Files of ``persistkv export``: contexts of one or more namespaces, complete, for any store. See
docs/format.md.

1. The identity, the packs and the requests in a file are all that a store needs to serve them.
2. Each record begins with a head: kind, length and checksum. The last record has a checksum over
   all other heads. So a file is refused if it was changed or cut off, or if records were removed or
   reordered.
3. Reading trusts nothing: lengths are checked against the file before anything is allocated.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import xxhash

from persistkv import __version__
from persistkv.errors import FileError, PersistKVError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import (
    ManifestKeys,
    RequestManifest,
    encode_manifest,
    encode_manifest_keys,
)
from persistkv.storage.format.pack import PackTable
from persistkv.storage.identity import Identity
from persistkv_tools.packs import Took
from persistkv_tools.render import PIPE_CLOSED

ARCHIVE_VERSION = 1
STANDARD_OUTPUT = Path("-")
_MAGIC = b"PKVARCH1"
_RECORD = struct.Struct("<4sIQQ")
MANIFEST_LENGTH = struct.Struct("<I")
_HEAD, NAMESPACE, PACK, REQUEST, _END = b"HEAD", b"NSPC", b"PACK", b"RQST", b"END "


class CorruptArchiveError(PersistKVError):
    """A file is not a complete, undamaged file of ``persistkv export``, or it changed while it was
    imported."""


class _Head(msgspec.Struct, frozen=True):
    version: int
    created: float
    """Time when the file was begun: seconds since the epoch."""
    writer: str


class _End(msgspec.Struct, frozen=True):
    records: int
    heads: str
    """xxh3-64 over the heads of all preceding records, hexadecimal."""


@contextmanager
def _file_errors(action: str, path: Path) -> Iterator[None]:
    """Translate errors of an open file; a pipe that its reader closed ends the command."""
    try:
        yield
    except BrokenPipeError:
        raise SystemExit(PIPE_CLOSED) from None
    except OSError as error:
        raise FileError(action, path, error) from None


class ArchiveWriter:
    """Writes an export file, used in a ``with`` statement. A temporary file replaces the target if
    the block succeeds; otherwise the target is unchanged. The file has mode 0600: contexts are
    private. Standard output (``-``) is written directly; if the block raised, the output lacks its
    end, and ``ArchiveReader`` refuses it.

    :raises ConfigurationError: the file cannot be written. All methods and the end of the block
        raise it, too.
    :raises SystemExit: standard output is a pipe that its reader closed. Raised in the same places.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = (
            None if path == STANDARD_OUTPUT else path.with_name(path.name + ".part")
        )
        self._records = 0
        self._heads = xxhash.xxh3_64()
        with _file_errors("write", path):
            if self._part is None:
                descriptor = os.dup(sys.stdout.fileno())
            else:
                self._part.unlink(missing_ok=True)
                descriptor = os.open(
                    self._part,
                    os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                    0o600,
                )
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._file.write(_MAGIC)
        self._write(
            _HEAD,
            msgspec.json.encode(
                _Head(ARCHIVE_VERSION, time.time(), f"persistkv {__version__}")
            ),
        )

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._write(
                    _END,
                    msgspec.json.encode(_End(self._records, self._heads.hexdigest())),
                )
                with _file_errors("write", self._path):
                    self._file.flush()
                    if self._part is not None:
                        os.fsync(self._file.fileno())
                        os.replace(self._part, self._path)
        finally:
            with suppress(OSError):  # flush of a file that is abandoned
                self._file.close()
            if self._part is not None:
                self._part.unlink(missing_ok=True)

    def namespace(self, identity: Identity) -> None:
        """Begin a namespace: packs and requests that follow belong to it."""
        self._write(NAMESPACE, identity.encode())

    def pack(self, table: PackTable, payload: Buffer) -> None:
        """Write a pack of the namespace that was begun last; ``payload`` is its frames as stored,
        padding included."""
        self._write(PACK, payload, table.encode())

    def request(self, manifest: RequestManifest, keys: ManifestKeys) -> None:
        """Write a request of the namespace that was begun last; its packs must be written
        already."""
        head = encode_manifest(manifest)
        self._write(
            REQUEST, MANIFEST_LENGTH.pack(len(head)), head, encode_manifest_keys(keys)
        )

    def _write(self, kind: bytes, *parts: Buffer) -> None:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        head = _RECORD.pack(kind, 0, sum(map(len, parts)), digest.intdigest())
        self._heads.update(head)
        self._records += 1
        with _file_errors("write", self._path):
            self._file.writelines((head, *parts))


class ArchiveReader:
    """Reads an export file: first all records in order, then single records again by position.

    :raises ConfigurationError: the file cannot be opened, or is a pipe. All methods raise it if a
        read fails.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _file_errors("read", path):
            self._file = path.open("rb")
        if not self._file.seekable():
            self._file.close()
            raise FileError(
                "read", path, ValueError("it is a pipe, and import reads a file twice")
            )
        self._size = os.fstat(self._file.fileno()).st_size
        self._heads: dict[int, bytes] = {}
        """Head of each record, by its position."""

    def close(self) -> None:
        self._file.close()

    def records(self, took: Took) -> Iterator[tuple[int, bytes, memoryview]]:
        """Yield byte position, kind and body of each record; raise CorruptArchiveError, also if one
        is missing."""
        if self._read(len(_MAGIC)) != _MAGIC:
            raise CorruptArchiveError(f"{self._path} is not a file of persistkv export")
        heads, at = xxhash.xxh3_64(), len(_MAGIC)
        try:
            kind, body = self._record()
            head = msgspec.json.decode(body, type=_Head)
            if kind != _HEAD or head.version != ARCHIVE_VERSION:
                raise self.corrupt(
                    at, f"version {head.version}; this release reads {ARCHIVE_VERSION}"
                )
            while kind != _END:
                heads.update(self._heads[at])
                at = self._file.tell()
                kind, body = self._record()
                took(len(body))
                if kind != _END:
                    yield at, kind, body
            end = msgspec.json.decode(body, type=_End)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.corrupt(at, str(error)) from None
        if (end.records, end.heads) != (
            len(self._heads) - 1,
            heads.hexdigest(),
        ) or self._read(1):
            raise self.corrupt(at, "records are missing, or bytes follow the last one")

    def again(self, at: int) -> memoryview:
        """Read the body of the record at byte ``at`` again; raise CorruptArchiveError if the file
        changed."""
        self._file.seek(at)
        return self._record()[1]

    def _record(self) -> tuple[bytes, memoryview]:
        at = self._file.tell()
        head = self._read(_RECORD.size)
        if len(head) < _RECORD.size:
            raise self.corrupt(at, "the file ends before its last record")
        if self._heads.setdefault(at, head) != head:
            raise self.corrupt(at, "the file changed while it was read")
        kind, reserved, length, checksum = _RECORD.unpack(head)
        if reserved:
            raise self.corrupt(at, f"{reserved:#x} instead of 0 in a reserved field")
        if length > self._size - at - _RECORD.size:
            raise self.corrupt(
                at, f"a record of {length:,} bytes is longer than the file"
            )
        body = memoryview(self._read(length))
        if len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
            raise self.corrupt(at, "the checksum does not match")
        return kind, body

    def _read(self, length: int) -> bytes:
        with _file_errors("read", self._path):
            return self._file.read(length)

    def corrupt(self, at: int, problem: str) -> CorruptArchiveError:
        """Return the error that names the file, the byte ``at`` where a bad record begins, and the
        problem."""
        return CorruptArchiveError(f"{self._path}, at byte {at:,}: {problem}")
