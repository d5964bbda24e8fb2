"""Files of ``persistkv export``: contexts of one or more namespaces, complete, for any store. See docs/format.md.

1. The identity, the packs and the requests in a file are all that a store needs to serve them.
2. Each record has a checksum, and the last one a checksum over all their heads: what was changed, cut off, left out or
   put elsewhere does not read.
3. Reading trusts nothing: lengths are checked against the file before anything is allocated.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from persistkv import __version__
from persistkv.errors import ConfigurationError, CorruptPackError, PersistKVError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import (
    ManifestKeys,
    RequestManifest,
    decode_manifest,
    decode_manifest_keys,
    encode_manifest,
    encode_manifest_keys,
)
from persistkv.storage.format.pack import PackTable
from persistkv.storage.identity import Identity

ARCHIVE_VERSION = 1
_MAGIC = b"PKVARCH1"
_RECORD = struct.Struct("<4sIQQ")
_HEAD_LENGTH = struct.Struct("<I")
_HEAD, _NAMESPACE, _PACK, _REQUEST, _END = b"HEAD", b"NSPC", b"PACK", b"RQST", b"END "


class CorruptArchiveError(PersistKVError):
    """A file does not read as one of ``persistkv export``; nothing of it was imported."""


class ArchiveHead(msgspec.Struct, frozen=True):
    """Head of a file."""

    version: int
    created: float
    """Seconds since the epoch."""
    writer: str


class PackRecord(NamedTuple):
    """A pack of the namespace that was named last."""

    table: PackTable
    payload: memoryview


class RequestRecord(NamedTuple):
    """A request of the namespace that was named last; its packs precede it."""

    manifest: RequestManifest
    keys: ManifestKeys


Record = Identity | PackRecord | RequestRecord


class _End(msgspec.Struct, frozen=True):
    records: int
    heads: str
    """xxh3-64 over the heads of all records before, hexadecimal."""


class ArchiveWriter:
    """Writes a temporary file, which replaces the target at the end of a block that raised nothing.

    The file has mode 0600: contexts are private.
    """

    def __init__(self, path: Path) -> None:
        """:raises ConfigurationError: the file cannot be written; so do all methods, and the end of the block."""
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._records = 0
        self._heads = xxhash.xxh3_64()
        try:
            self._part.unlink(missing_ok=True)
            descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed(error) from None
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._file.write(_MAGIC)
        head = ArchiveHead(ARCHIVE_VERSION, time.time(), f"persistkv {__version__}")
        self._write(_HEAD, msgspec.json.encode(head))

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._write(_END, msgspec.json.encode(_End(self._records, self._heads.hexdigest())))
                self._finish()
        finally:
            with suppress(OSError):  # flush of a file that is abandoned
                self._file.close()
            self._part.unlink(missing_ok=True)

    def namespace(self, identity: Identity) -> None:
        """Begin a namespace: packs and requests that follow belong to it."""
        self._write(_NAMESPACE, identity.encode())

    def pack(self, table: PackTable, payload: Buffer) -> None:
        """A pack as it is stored."""
        self._write(_PACK, payload, table.encode())

    def request(self, manifest: RequestManifest, keys: ManifestKeys) -> None:
        """A request, whose packs are written already."""
        head = encode_manifest(manifest)
        self._write(_REQUEST, _HEAD_LENGTH.pack(len(head)), head, encode_manifest_keys(keys))

    def _write(self, kind: bytes, *parts: Buffer) -> None:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        head = _RECORD.pack(kind, 0, sum(map(len, parts)), digest.intdigest())
        self._heads.update(head)
        self._records += 1
        try:
            for part in (head, *parts):
                self._file.write(part)
        except OSError as error:
            raise self._failed(error) from None

    def _finish(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._part, self._path)
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> ConfigurationError:
        return ConfigurationError("--output", str(self._path), f"a place with room to write to ({error.strerror})")


def read_archive(path: Path, took: Callable[[int], None]) -> Iterator[Record]:
    """The records of a file, each checked by its checksum; packs and requests belong to the identity before them.

    :param took: called with the bytes of each record.
    :raises CorruptArchiveError: it does not read; nothing that was yielded before is known to be complete.
    :raises ConfigurationError: it cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigurationError("file", str(path), f"a readable file ({error.strerror})") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(_MAGIC)) != _MAGIC:
            raise CorruptArchiveError(f"{path} is no file of persistkv export")
        yield from _Reader(path, file, size).records(took)


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._heads = xxhash.xxh3_64()
        self._count = 0

    def records(self, took: Callable[[int], None]) -> Iterator[Record]:
        kind, body = self._record()
        self._check_head(kind, body)
        while True:
            before = self._heads.hexdigest()
            kind, body = self._record()
            took(len(body))
            if kind == _END:
                self._check_end(body, before)
                return
            yield self._decoded(kind, body)

    def _record(self) -> tuple[bytes, memoryview]:
        at = self._file.tell()
        head = self._file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            raise self._corrupt(at, "the file ends before its last record")
        kind, reserved, length, checksum = _RECORD.unpack(head)
        if reserved:
            raise self._corrupt(at, f"{reserved:#x} where 0 belongs")
        if length > self._size - at - _RECORD.size:
            raise self._corrupt(at, f"{length:,} bytes do not fit the file")
        body = memoryview(self._file.read(length))
        if len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
            raise self._corrupt(at, "its checksum does not match")
        self._heads.update(head)
        self._count += 1
        return kind, body

    def _check_head(self, kind: bytes, body: memoryview) -> None:
        try:
            head = msgspec.json.decode(body, type=ArchiveHead)
        except msgspec.DecodeError as error:
            raise self._corrupt(len(_MAGIC), f"its head does not read ({error})") from None
        if kind != _HEAD or head.version != ARCHIVE_VERSION:
            raise self._corrupt(len(_MAGIC), f"version {head.version}; this release reads {ARCHIVE_VERSION}")

    def _check_end(self, body: memoryview, heads: str) -> None:
        try:
            end = msgspec.json.decode(body, type=_End)
        except msgspec.DecodeError as error:
            raise self._corrupt(self._file.tell(), f"its end does not read ({error})") from None
        if (end.records, end.heads) != (self._count - 1, heads) or self._file.read(1):
            raise self._corrupt(self._file.tell(), "records are missing, or something follows the last one")

    def _decoded(self, kind: bytes, body: memoryview) -> Record:
        at = self._file.tell() - len(body)
        try:
            if kind == _NAMESPACE:
                return Identity.decode(body)
            if kind == _PACK:
                table = PackTable.parse(body)
                return PackRecord(table, body[: len(body) - len(table.encode())])
            if kind == _REQUEST:
                return _request(body)
        except (CorruptPackError, ValueError, struct.error) as error:
            raise self._corrupt(at, str(error)) from None
        raise self._corrupt(at, f"a record of kind {kind!r}; this release knows none")

    def _corrupt(self, at: int, problem: str) -> CorruptArchiveError:
        return CorruptArchiveError(f"{self._path}, at byte {at:,}: {problem}")


def _request(body: memoryview) -> RequestRecord:
    (length,) = _HEAD_LENGTH.unpack_from(body)
    head, keys = body[_HEAD_LENGTH.size :][:length], body[_HEAD_LENGTH.size + length :]
    return RequestRecord(decode_manifest(head), decode_manifest_keys(keys))
