"""Fuzz targets: real stored bytes, and the properties that must hold after any damage.

Each target receives damaged bytes in two ways. Unchanged, their checksum shows the damage. Sealed,
their checksum is valid again, so only the parser can reject them. Bytes that a key seals are
accepted only unchanged.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import random
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from persistkv.base import make_offload_key
from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.memory.rows import Rows, StagedBlocks
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.catalogue.rows import META, SEQUENCE, manifest_row
from persistkv.storage.catalogue.rows import PACKS as PACK_ROWS
from persistkv.storage.format.codec import (
    Codec,
    PlanesCodec,
    RawCodec,
    ZstdCodec,
    parse_codec,
)
from persistkv.storage.format.keys import (
    DataKey,
    StoredKeys,
    StoreKey,
    TenantKey,
    decode_keys,
    encode_keys,
)
from persistkv.storage.format.manifest import (
    RequestManifest,
    decode_manifest,
    decode_manifest_keys,
    encode_manifest,
    encode_manifest_keys,
)
from persistkv.storage.format.pack import (
    FRAME_BYTES,
    PLAIN_KEY,
    SEALED_TABLE,
    PackedKeys,
    PackTable,
    align,
    pack_frames,
    with_trailer,
)
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.format.seal import PLAIN, KeySeal, Seal
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.shared import Clock
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.forgetting.records import (
    ForgetRecord,
    ForgottenTenants,
    decode_records,
)
from persistkv.storage.shared.format import (
    NO_NAMESPACE,
    Delta,
    Dropped,
    Latest,
    ManifestEntry,
    Names,
    PackEntry,
    Pin,
    StoreNames,
    TenantContent,
    Tombstone,
    UseEntry,
    decode_content,
    decode_delta,
    decode_latest,
    encode,
    open_object,
    record_name,
    seal_object,
)
from persistkv.storage.shared.index.objects import IndexObjects
from persistkv.storage.shared.replica import Replica
from persistkv.storage.store.store import Store
from persistkv.storage.threads import StoreThreads
from persistkv.tenants import DEFAULT_TENANT, tenant_digest
from persistkv.testing import MemoryBlobs
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.layout import DATABASES, PIECES

BLOCK = 1024
STRIDE = 4096
IDENTITY = Identity.of(
    {"weights": "w", "config": {"layers": [1, 2.5, None, True], "näme": "ü"}}
)
LAYOUT = RowLayout(
    STRIDE, (GroupLayout(((0, BLOCK),)), GroupLayout(((0, BLOCK), (2048, 512))))
)
SIZES = tuple(group.block_bytes for group in LAYOUT.groups)


class Violation(Exception):
    """A required property does not hold."""


def require(holds: bool, problem: str) -> None:
    """Raise ``Violation`` if a property does not hold."""
    if not holds:
        raise Violation(problem)


class Target(ABC):
    """One parser and its samples."""

    name: str
    samples: Sequence[bytes]

    @abstractmethod
    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        """Parse damaged bytes of sample ``number``. Return whether they were accepted.

        :param sealed: fix the checksum first.
        :raises Violation: a required property does not hold. Any other exception is a crash.
        """


@functools.cache
def blocks(group: int) -> np.ndarray:
    """Return four blocks with values that ``planes`` and ``zstd`` compress."""
    values = (
        np.random.default_rng(group)
        .standard_normal((4, SIZES[group] // 2))
        .astype(np.float32)
    )
    return (values.view(np.uint32) >> 20 << 4).astype(np.uint16).view(np.uint8)


def keys(group: int, hash_bytes: int = 32) -> list[bytes]:
    """Return the keys of these blocks."""
    return [
        make_offload_key(bytes([index + 1]) * hash_bytes, group) for index in range(4)
    ]


def packs(seal: Seal = PLAIN) -> list[PackWriter]:
    """Return one pack for each codec and kind of table."""
    both = [
        Section(
            group, SIZES[group], keys(group), StagedBlocks([blocks(group)]), depth=0
        )
        for group in (0, 1)
    ]
    uneven = Section(0, BLOCK, keys(0)[:2] + keys(0, 16)[2:], StagedBlocks([blocks(0)]))
    made = [
        (RawCodec(), both),
        (ZstdCodec(), both[:1]),
        (PlanesCodec(), both),
        (PlanesCodec(4), [uneven]),
    ]
    return [
        PackWriter(IDENTITY.digest, codec, sections, seal=seal)
        for codec, sections in made
    ]


PACKS = packs()
PAYLOADS = [b"".join(map(bytes, pack.stream())) for pack in PACKS]


def seal_table(body: bytes) -> bytes:
    """Return a pack table with a valid trailer."""
    return (
        body
        + len(body).to_bytes(8, "little")
        + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
        + b"PKVPACK1"
    )


class Tables(Target):
    """Pack tables: rejected, or valid in all properties that readers rely on, also in the catalogue
    of a store."""

    name = "table"
    samples = tuple(pack.table.encode() for pack in PACKS)

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        data = seal_table(data[:-24]) if sealed else data
        try:
            table = PackTable.parse(data)
        except CorruptPackError:
            return False
        require(
            sealed or any(table == pack.table for pack in PACKS),
            "damage passed the checksum",
        )
        _check_table(table)
        if sealed:
            require(table.encode() == data, "a parsed table encodes to other bytes")
        _serve(number, data, PAYLOADS[number], exact=not sealed)
        return True


def _check_table(table: PackTable) -> None:
    keys = table.keys.unpack()
    require(len(keys) == len(table.keys), "the number of keys differs from the table's")
    require(len(set(keys)) == len(keys), "a key occurs twice")
    require(
        sum(frame.block_count for frame in table.frames) == len(table.keys),
        "the frames' blocks are not as many as the keys",
    )
    require(
        sum(frame.raw_length for frame in table.frames) == table.raw_length,
        "wrong raw length",
    )
    end = 0
    for frame in table.frames:
        require(frame.offset == end, "frames are not contiguous")
        require(
            frame.stored_length
            <= frame.raw_length
            <= max(FRAME_BYTES, frame.block_bytes),
            "wrong length of a frame",
        )
        end = align(end + frame.stored_length)
    require(end == table.payload_length, "wrong payload length")


class Payloads(Target):
    """Payloads: a store serves only the stored bytes. If the checksums were forged too, it must not
    crash."""

    name = "payload"
    samples = tuple(PAYLOADS)

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        table = PACKS[number].table
        if sealed:
            table = _resealed(table, data)
        return _serve(number, table.encode(), data, exact=not sealed)


def _resealed(table: PackTable, payload: bytes) -> PackTable:
    frames = []
    seal = PLAIN.of_pack(table)
    for placed in table.placed_frames():
        frame = placed.frame
        stored = payload[frame.offset : frame.offset + frame.stored_length]
        _, tag = seal.seal(placed, [stored])
        frames.append(frame._replace(tag=tag))
    return msgspec.structs.replace(table, packed_frames=pack_frames(frames))


@functools.cache
def _store() -> LmdbBackend:
    """Return the store of this process, which ends with it."""
    directory = tempfile.TemporaryDirectory(prefix="persistkv-fuzz-", dir="/dev/shm")
    backend = LmdbBackend.open(
        StoreUrl.parse(f"lmdb://{directory.name}/store?capacity=4MiB&placement=inline")
    )
    atexit.register(directory.cleanup)
    atexit.register(backend.close)
    return backend


def _empty_store() -> LmdbBackend:
    """Return the store of this process without content, whatever the damage has left in it."""
    backend = _store()
    with backend.rows(write=True) as rows:
        for table in set(DATABASES) - {META}:
            for key in [bytes(key) for key, _ in rows.range(table, b"")]:
                rows.delete(table, key)
    return backend


@functools.cache
def loop_and_threads() -> tuple[asyncio.AbstractEventLoop, StoreThreads]:
    """Return the event loop and the threads of all cases: starting threads for each one would use
    up the address space."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop, StoreThreads(1)


def _serve(number: int, table: bytes, payload: bytes, *, exact: bool) -> bool:
    """Open a store with a damaged pack and read all blocks of the pack. Return whether any block
    was served."""
    backend = _empty_store()
    namespace = backend.open_namespace(IDENTITY).id
    backend.commit(namespace, CommitBatch([PACKS[number]]))
    name = namespace + PACKS[number].pack_id
    with backend.rows(write=True) as rows:
        rows.put(PACK_ROWS, name, SEQUENCE.pack(1) + table)
        rows.put(PIECES, name + bytes(4), payload)
    memory = bytearray(b"\xaa" * (10 * STRIDE))
    loop, threads = loop_and_threads()
    store = Store(
        backend,
        IDENTITY,
        Rows(memoryview(memory), LAYOUT),
        StoreOptions(),
        url="fuzz://store",
        threads=threads,
    )
    wanted = [
        (section.group, key, block)
        for section in PACKS[number].sections
        for key, block in zip(
            section.keys, section.source.gather(0, 4).reshape(4, -1), strict=True
        )
    ]
    keys = [key for _, key, _ in wanted]
    outcome = loop.run_until_complete(store.read(keys, range(len(wanted))))
    failed = set(outcome.failed)
    store.index.close()
    require(
        memory[len(wanted) * STRIDE :]
        == b"\xaa" * (len(memory) - len(wanted) * STRIDE),
        "a row of no requested block was written",
    )
    for row, (group, key, block) in enumerate(wanted):
        if exact and key not in failed:
            served = b"".join(map(bytes, store.rows.pieces(group, [row])))
            require(
                served == block.tobytes(), "served other bytes than the stored ones"
            )
    return len(failed) < len(wanted)


class Frames(Target):
    """Frames, decoded by codecs: the codec fills exactly the buffer, or rejects the frame."""

    name = "codec"
    codecs: Sequence[Codec] = (
        RawCodec(),
        ZstdCodec(),
        ZstdCodec(19),
        PlanesCodec(),
        PlanesCodec(4),
    )
    pairs = tuple(
        itertools.product(
            codecs, (blocks(0).tobytes(), blocks(1).tobytes()[:-1], bytes(70_000))
        )
    )
    samples = tuple(bytes(codec.encode(raw)) for codec, raw in pairs)

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        codec, raw = self.pairs[number]
        out = memoryview(bytearray(b"\xaa" * (len(raw) + 32)))
        try:
            codec.decode_into(data, out[16:-16])
        except CorruptPackError as error:
            require(
                "llocat" not in error.problem,
                "it tried to allocate the size that the frame claims",
            )
            return False
        finally:
            require(
                out[:16] == out[-16:] == b"\xaa" * 16,
                "bytes outside of the buffer were written",
            )
        return True


class Manifests(Target):
    """Heads of manifests: rejected, or stable when encoded and decoded again."""

    name = "manifest"
    samples = tuple(
        encode_manifest(
            RequestManifest(
                id=f"engine-{count}", created=1.7e9, tokens=16 * count, group_blocks=(count, 2), raw_bytes=count << 20,
                ordered=bool(count % 2), labels={f"label {index}": "välue" * index for index in range(count)},
            )
        )
        for count in (0, 1, 12)
    )  # fmt: skip

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        data = seal_manifest(data) if sealed else data
        try:
            manifest = decode_manifest(data)
        except CorruptPackError:
            return False
        require(sealed or data in self.samples, "damage passed the checksum")
        again = encode_manifest(manifest)
        require(
            encode_manifest(decode_manifest(again)) == again,
            "a manifest changes when it is encoded again",
        )
        return manifest.blocks >= 0


class ManifestKeyLists(Target):
    """Keys of manifests: rejected when decoded or unpacked, or as many as the list claims."""

    name = "manifest keys"
    samples = tuple(
        encode_manifest_keys(packed)
        for packed in (
            (),
            (PackedKeys.of(keys(0)), PackedKeys.of(keys(1))),
            (PackedKeys.of(keys(0)[:2] + keys(0, 16)), PackedKeys.of([])),
        )
    )

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        data = seal_manifest(data) if sealed else data
        try:
            lists = decode_manifest_keys(data)
            unpacked = [packed.unpack() for packed in lists]
        except CorruptPackError:
            return False
        require(sealed or data in self.samples, "damage passed the checksum")
        for packed, names in zip(lists, unpacked, strict=True):
            require(
                len(packed) == len(names) and b"".join(names) == packed.data,
                "unpacked keys differ from the list",
            )
        ManifestWrite(decode_manifest(Manifests.samples[0]), lists)
        return True


def seal_manifest(data: bytes) -> bytes:
    """Return a manifest's row with a valid checksum."""
    return data[:1] + xxhash.xxh3_64_digest(data[9:]) + data[9:]


class Identities(Target):
    """Identities as stored in a catalogue."""

    name = "identity"
    samples = (
        IDENTITY.encode(),
        Identity.of({"a": [[[["x" * 50]]]], "b": -1e300}).encode(),
    )

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        try:
            identity = Identity.decode(data)
            digest = identity.digest
        except (ValueError, RecursionError):
            # the errors that callers of the catalogue handle
            return False
        require(
            len(digest) == 16 and isinstance(identity.diff(IDENTITY), list),
            "an identity cannot be compared",
        )
        return True


class CodecTexts(Target):
    """Codecs in text form."""

    name = "codec text"
    samples = (b"raw", b"zstd:3", b"planes:2")

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        try:
            text = data.decode()
            codec = parse_codec(text)
        except (ConfigurationError, UnicodeDecodeError):
            return False
        require(
            parse_codec(str(codec)) == codec, "a codec's text parses to another codec"
        )
        return True


SHARED_NAMES = Names(IDENTITY.digest)
SHARED_OBJECT = SHARED_NAMES.new_commit(random.Random(0))
SHARED_HEADER = 12  # bytes of magic number and format


def shared_delta(packs: Sequence[PackTable]) -> Delta:
    """Return a commit of packs and one request."""
    ids = b"".join(pack.pack_id for pack in packs)
    digest = manifest_row(IDENTITY.digest, "r")[16:]
    return Delta(
        packs=[
            PackEntry(pack.pack_id, bytes(16), pack.encode(), 1.7e9) for pack in packs
        ],
        uses=[UseEntry(1.7e9, ids)],
        removed=[Tombstone(bytes(32), 1.7e9)],
        manifests=[
            ManifestEntry(digest, 2, 1.7e9, Manifests.samples[0], ids, bytes(16), 0, 9)
        ],
        dropped=[Dropped(bytes(16), 1, 1.7e9)],
        pins=[Pin(digest, 1, pinned=True)],
        includes=["x"],
    )


def resealed_object(data: bytes) -> bytes:
    """Return an object of the index with a valid header and checksum."""
    return seal_object(SHARED_OBJECT, data[SHARED_HEADER:-16], PLAIN, IDENTITY.digest)


class SharedDeltas(Target):
    """Objects of a shared store's index: a replica that applies one is valid, and all its packs
    were written."""

    name = "shared delta"
    samples = tuple(
        seal_object(
            SHARED_OBJECT,
            encode(shared_delta(packs)),
            PLAIN,
            IDENTITY.digest,
        )
        for packs in (
            [pack.table for pack in PACKS[:1]],
            [pack.table for pack in PACKS],
        )
    )

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        data = resealed_object(data) if sealed else data
        try:
            delta = decode_delta(
                open_object(SHARED_OBJECT, data, PLAIN, IDENTITY.digest)
            )
        except CorruptPackError:
            return False
        require(sealed or data in self.samples, "damage passed the checksum")
        again = encode(delta)
        require(
            encode(decode_delta(again)) == again,
            "an object changes when it is encoded again",
        )
        with replica_of(delta) as replica:
            check_replica(replica, PACKS)
        return True


@contextmanager
def replica_of(
    delta: Delta,
    forgotten: ForgottenTenants | None = None,
) -> Iterator[Replica]:
    """Return a replica that has applied a delta.

    :param forgotten: see ``Replica``.
    """
    with tempfile.TemporaryDirectory() as directory:
        replica = Replica(
            Path(directory),
            IDENTITY.digest,
            forgotten=forgotten,
            map_bytes=64 << 20,
        )
        replica.apply([(SHARED_OBJECT, delta)])
        try:
            yield replica
        finally:
            replica.close()


def check_replica(replica: Replica, packs: Sequence[PackWriter]) -> None:
    """Check that all packs in a replica were written, and that others can read its base."""
    for table in replica.catalogue.changes(None).added:
        require(
            any(table == pack.table for pack in packs),
            "the replica has a table that was never written",
        )
    require(replica.disk_bytes() >= 0, "wrong totals")
    list(replica.catalogue.manifests())
    for part in replica.dump(part_bytes=1 << 20):
        decode_delta(encode(part))


class SharedHints(Target):
    """The blob ``latest`` of a shared store: rejected, or stable when it is encoded and parsed
    again."""

    name = "shared latest"
    samples = (
        seal_object(
            SHARED_OBJECT,
            encode(Latest(bytes(16), 1.7e9, [])),
            PLAIN,
            IDENTITY.digest,
        ),
        seal_object(
            SHARED_OBJECT,
            encode(Latest(b"w", 1.7e9, [("x", 9)])),
            PLAIN,
            IDENTITY.digest,
        ),
    )

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        data = resealed_object(data) if sealed else data
        try:
            latest = decode_latest(
                open_object(SHARED_OBJECT, data, PLAIN, IDENTITY.digest)
            )
        except CorruptPackError:
            return False
        require(sealed or data in self.samples, "damage passed the checksum")
        again = encode(latest)
        require(
            encode(decode_latest(again)) == again,
            "the hint changes when it is encoded again",
        )
        return True


FORGET_BLOB = StoreNames().new_record(random.Random(0))
FORGOTTEN = (
    ForgetRecord(tenant_digest(DEFAULT_TENANT), 1.8e9, ()),
    ForgetRecord(tenant_digest("anna"), 1.7e9, (bytes(8), b"a key id")),
)


class ForgetRecords(Target):
    """Records of forgotten tenants: rejected, or a replica that honours them holds nothing of
    these tenants, and others can read its base."""

    name = "forget records"
    samples = tuple(
        seal_object(FORGET_BLOB, encode(FORGOTTEN[:count]), PLAIN, NO_NAMESPACE)
        for count in range(3)
    )

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        if sealed:
            body = data[SHARED_HEADER:-16]
            data = seal_object(FORGET_BLOB, body, PLAIN, NO_NAMESPACE)
        try:
            body = open_object(FORGET_BLOB, data, PLAIN, NO_NAMESPACE)
            records = decode_records(body)
        except CorruptPackError:
            return False
        require(sealed or data in self.samples, "damage passed the checksum")
        again = encode(records)
        require(
            encode(decode_records(again)) == again,
            "records change when they are encoded again",
        )
        content = shared_delta([pack.table for pack in PACKS])
        forgotten = ForgottenTenants()
        with replica_of(content, forgotten) as replica:
            forgotten.add(records)
            replica.remove_forgotten()
            check_replica(replica, PACKS)
            is_forgotten = forgotten.covers(DEFAULT_TENANT, PLAIN_KEY, 1.7e9)
            held = replica.held(pack.pack_id for pack in PACKS)
            require(
                len(held) == (0 if is_forgotten else len(PACKS)),
                "a replica has removed other packs than those of forgotten tenants",
            )
        return True


STORE_KEY = StoreKey(b"0123456789abcdef" * 4)
KEYRING = STORE_KEY.new_keyring().extended([DataKey.new(DEFAULT_TENANT)])
KEY_SEAL = KeySeal(lambda: KEYRING)
SEALED_PACKS = packs(KEY_SEAL)
SEALED_PAYLOADS = [b"".join(map(bytes, pack.stream())) for pack in SEALED_PACKS]
TRAILER = 24  # bytes
TAG = 16


class SealedTables(Target):
    """Tables of packs that a key seals."""

    name = "sealed table"
    samples = tuple(KEY_SEAL.encode_table(pack.table) for pack in SEALED_PACKS)

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        if sealed:
            data = with_trailer(data[:-TRAILER], SEALED_TABLE)
        try:
            table = KEY_SEAL.decode_table(data)
        except CorruptPackError:
            return False
        # bytes before a table are no part of it
        require(data.endswith(self.samples), "a changed table was accepted")
        require(
            any(table == pack.table for pack in SEALED_PACKS),
            "a table was read that was never written",
        )
        return True


def sealed_frames() -> dict[tuple[int, int], bytes]:
    """Return the stored bytes of each frame with its tag, by pack and number of the frame."""
    found: dict[tuple[int, int], bytes] = {}
    for place, pack in enumerate(SEALED_PACKS):
        for number, frame in enumerate(pack.table.frames):
            end = frame.offset + frame.stored_length
            stored = SEALED_PAYLOADS[place][frame.offset : end]
            found[place, number] = stored + frame.tag
    return found


class SealedFrames(Target):
    """Frames that a key seals, each with its tag at the end."""

    name = "sealed frame"
    places = tuple(sealed_frames())
    samples = tuple(sealed_frames().values())

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        if len(data) < TAG:
            # a table has no shorter tags
            return False
        pack, place = self.places[number]
        table = SEALED_PACKS[pack].table
        placed = list(table.placed_frames())[place]
        stored = memoryview(bytearray(data[:-TAG]))
        frame = placed.frame._replace(tag=data[-TAG:])
        if sealed:
            frame = frame._replace(stored_length=len(stored))
        try:
            changed = replace(placed, frame=frame)
            KEY_SEAL.of_pack(table).open(changed, [stored])
        except CorruptPackError:
            return False
        require(data == self.samples[number], "a changed frame was accepted")
        return True


class SealedRecords(Target):
    """Records that a key seals."""

    name = "sealed record"
    bodies = (b"", b"body", bytes(range(256)) * 20)
    samples = tuple(KEY_SEAL.sealed(b"name", body) for body in bodies)

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        if sealed:
            # a key of the store, so that the record itself is examined
            data = KEYRING.store.id + data[len(KEYRING.store.id) :]
        try:
            body = KEY_SEAL.opened(b"name", data)
        except CorruptPackError:
            return False
        require(data in self.samples, "a changed record was accepted")
        require(body in self.bodies, "a record was read that was never written")
        return True


class WrappedKeys(Target):
    """The wrapped data keys of a store: rejected, or some of those that were written."""

    name = "wrapped keys"
    wrapped = tuple(STORE_KEY.wrap(KEYRING.id, key) for key in KEYRING.of_store())
    tenants = tuple(
        TenantKey(key.id, KEY_SEAL.sealed_key(key)) for key in KEYRING.of_tenants()
    )
    samples = (
        encode_keys(StoredKeys(wrapped, tenants)),
        encode_keys(StoredKeys(wrapped)),
        encode_keys(StoredKeys()),
    )

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        if sealed:
            data = self.samples[0][:8] + data[8:]
        try:
            found = decode_keys(data)
            keyring = STORE_KEY.unwrap_all(found.wrapped)
            own = [KEY_SEAL.opened_key(key.id, key.sealed) for key in found.tenants]
        except CorruptPackError:
            return False
        keyring = keyring.extended(own)
        require(
            all(entry in self.wrapped for entry in found.wrapped)
            and all(entry in self.tenants for entry in found.tenants),
            "a changed key was accepted",
        )
        require(
            keyring.keys.items() <= KEYRING.keys.items() and keyring.id == KEYRING.id,
            "a key was read that was never written",
        )
        return True


@functools.cache
def keyed_medium() -> Medium:
    """Return a store with a key in memory, which has the data key of a tenant."""
    blobs = MemoryBlobs()
    blobs.connections = 1  # no threads
    medium = Medium(blobs, STORE_KEY, Clock())
    medium.keys.open(creates=True)
    medium.keys.make([DEFAULT_TENANT])
    return medium


@functools.cache
def keyed_packs() -> list[PackWriter]:
    made = packs(keyed_medium().seal)
    for pack in made:
        # complete their tables
        b"".join(map(bytes, pack.stream()))
    return made


def tenant_contents() -> Iterator[bytes]:
    """Yield what the data key of a tenant seals in objects of the index."""
    for count in (1, len(keyed_packs())):
        tables = [pack.table for pack in keyed_packs()[:count]]
        delta = shared_delta(tables)
        yield encode(TenantContent(delta.packs, delta.manifests))


class SealedContents(Target):
    """Content of a tenant in an object of the index of a store with a key. Sealed, it is damaged
    before its data key seals it."""

    name = "sealed content"
    samples = tuple(tenant_contents())

    def check(self, number: int, data: bytes, sealed: bool) -> bool:
        try:
            if sealed:
                delta = _read_sealed(data)
            else:
                content = decode_content(data)
                delta = Delta(packs=content.packs, manifests=content.manifests)
        except CorruptPackError:
            return False
        again = encode(TenantContent(delta.packs, delta.manifests))
        require(
            encode(decode_content(again)) == again,
            "content changes when it is encoded again",
        )
        with replica_of(delta) as replica:
            check_replica(replica, keyed_packs())
        return True


def _read_sealed(content: bytes) -> Delta:
    """Write an object with the content of a tenant, and return the delta that a reader decodes."""
    medium = keyed_medium()
    objects = IndexObjects(medium, IDENTITY.digest)
    name = record_name(IDENTITY.digest, f"content of {SHARED_OBJECT}")
    record = medium.seal.sealed(name, content, DEFAULT_TENANT)
    info = objects.put(SHARED_OBJECT, encode(Delta(sealed=[record])))
    return objects.read(info)


TARGETS: tuple[Target, ...] = (
    Tables(), Payloads(), Frames(), Manifests(), ManifestKeyLists(), Identities(), CodecTexts(), SharedDeltas(),
    SharedHints(), ForgetRecords(), SealedTables(), SealedFrames(), SealedRecords(), WrappedKeys(), SealedContents(),
)  # fmt: skip
