"""Seals: what a key's seal accepts and refuses, and its format."""

from __future__ import annotations

import hmac
import os
import random
import struct
from collections.abc import Sequence

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.format.keys import (
    DataKey,
    StoredKeys,
    StoreKey,
    TenantKey,
    WrongKeyError,
    decode_keys,
    encode_keys,
)
from persistkv.storage.format.pack import Frame, PackTable, PlacedFrame
from persistkv.storage.format.pack_writer import PackCopy, PackWriter
from persistkv.storage.format.seal import PLAIN, RECORD_BYTES, KeySeal
from persistkv.tenants import DEFAULT_TENANT
from persistkv.testing.samples import (
    open_payload,
    payload_of,
    sample_pack,
    sample_section,
)

SECRET = b"0123456789abcdef" * 4
STORE_KEY = StoreKey(SECRET)
KEYRING = STORE_KEY.new_keyring().extended([DataKey.new(DEFAULT_TENANT)])
OURS = KeySeal(lambda: KEYRING)
OTHER_KEYRING = (
    StoreKey(b"x" * 32).new_keyring().extended([DataKey.new(DEFAULT_TENANT)])
)
THEIRS = KeySeal(lambda: OTHER_KEYRING)
NAMESPACE = bytes(range(16))


class SealedPack:
    """A pack as stored, and as it was before."""

    def __init__(self, seed: int, seal: KeySeal = OURS) -> None:
        sections = [
            sample_section(seed, blocks=5, block_bytes=700),
            sample_section(seed + 1, group=1, blocks=3, block_bytes=900_000),
        ]
        pack = PackWriter(NAMESPACE, ZstdCodec(), sections, seal=seal)
        self.payload = b"".join(map(bytes, pack.stream()))
        self.table = pack.table
        self.content = payload_of(pack)

    def keys(self, number: int) -> list[bytes]:
        frames = self.table.frames
        first = sum(frame.block_count for frame in frames[:number])
        count = frames[number].block_count
        return self.table.keys.unpack()[first : first + count]

    def stored(self, number: int) -> bytearray:
        frame = self.table.frames[number]
        end = frame.offset + frame.stored_length
        return bytearray(self.payload[frame.offset : end])


PACKS = [SealedPack(10 * number) for number in range(3)]


def is_accepted(
    table: PackTable,
    number: int,
    frame: Frame,
    keys: Sequence[bytes],
    stored: bytearray,
    seal: KeySeal = OURS,
) -> bool:
    try:
        placed = PlacedFrame(number, frame, keys)
        seal.of_pack(table).open(placed, [memoryview(stored)])
    except CorruptPackError:
        return False
    return True


def test_key_seal_pack_opens_to_content_and_hides_it() -> None:
    for pack in PACKS:
        payload = bytearray(pack.payload)
        open_payload(OURS, pack.table, memoryview(payload))
        assert payload == pack.content
        for frame in pack.table.frames:
            assert frame.stored_length >= 100
            start = pack.content[frame.offset : frame.offset + 32]
            assert start not in pack.payload


def test_key_seal_same_content_twice_has_nothing_in_common() -> None:
    pack = sample_pack(NAMESPACE, 1, seal=OURS)
    first = b"".join(map(bytes, pack.stream()))
    salt = pack.table.salt
    again = b"".join(map(bytes, pack.stream()))
    assert pack.table.salt != salt, "a retried commit"
    assert first != again
    assert sample_pack(NAMESPACE, 1, seal=OURS).pack_id != pack.pack_id


def test_key_seal_copies_of_packs_change_seal() -> None:
    plain = sample_pack(NAMESPACE, 1, codec=ZstdCodec())
    content = payload_of(plain)
    copy = PackCopy(plain.table, content, OURS)
    payload = bytearray(b"".join(map(bytes, copy.stream())))
    assert payload != content
    open_payload(OURS, copy.table, memoryview(payload))
    assert payload == content
    back = PackCopy(copy.table, payload, PLAIN)
    assert b"".join(map(bytes, back.stream())) == content
    assert back.table == plain.table


FORGERIES = (
    "flip",
    "truncate",
    "extend",
    "tag",
    "number",
    "swap",
    "replay",
    "keys",
    "depth",
    "group",
    "namespace",
    "salt",
    "key",
)


def forge(random_: random.Random, kind: str) -> bool:
    """Return whether a forged frame is accepted."""
    pack, other = random_.sample(PACKS, 2)
    table = pack.table
    number = random_.randrange(table.frame_count)
    frame, keys, stored = table.frames[number], pack.keys(number), pack.stored(number)
    seal = OURS
    if kind == "flip":
        stored[random_.randrange(len(stored))] ^= random_.randrange(1, 256)
    elif kind == "truncate":
        del stored[random_.randrange(len(stored)) :]
        if random_.random() < 0.5:
            frame = frame._replace(stored_length=len(stored))
    elif kind == "extend":
        stored += random_.randbytes(random_.randrange(1, 20))
        frame = frame._replace(stored_length=len(stored))
    elif kind == "tag":
        tag = bytearray(frame.tag)
        tag[random_.randrange(16)] ^= random_.randrange(1, 256)
        frame = frame._replace(tag=bytes(tag))
    elif kind == "number":
        number = (number + random_.randrange(1, 5)) % 7
    elif kind == "swap":
        place = (number + 1) % table.frame_count
        stored, frame = pack.stored(place), table.frames[place]
    elif kind == "replay":
        stored = other.stored(number)
        frame = other.table.frames[number]
    elif kind == "keys":
        names = list(keys)
        place = random_.randrange(len(names))
        names[place] = names[place][:-1] + bytes([names[place][-1] ^ 1])
        keys = names
    elif kind == "depth":
        frame = frame._replace(depth=frame.depth + random_.randrange(1, 100))
    elif kind == "group":
        frame = frame._replace(group=frame.group + 1)
    elif kind == "namespace":
        namespace = random_.randbytes(16)
        table = PackTable(
            namespace,
            table.pack_id,
            table.codec,
            table.payload_length,
            table.raw_length,
            table.packed_frames,
            table.keys,
            table.data_key,
            table.salt,
            table.tenant,
        )
    elif kind == "salt":
        table = other.table
    else:
        seal = THEIRS
    return is_accepted(table, number, frame, keys, stored, seal)


NAMES = (b"first", b"second")
RECORDS = {name: OURS.sealed(name, name * 20) for name in NAMES}


def forge_object(random_: random.Random, kind: str) -> bool:
    """Return whether a forged record, such as an object of an index, is accepted."""
    name, other = random_.sample(NAMES, 2)
    record = bytearray(RECORDS[name])
    if kind == "flip":
        record[random_.randrange(len(record))] ^= random_.randrange(1, 256)
    elif kind == "truncate":
        del record[random_.randrange(len(record)) :]
    elif kind == "extend":
        record += random_.randbytes(random_.randrange(1, 20))
    elif kind == "swap":
        record = bytearray(RECORDS[other])
    elif kind == "salt":
        record[8:24] = RECORDS[other][8:24]
    elif kind == "key":
        record = bytearray(THEIRS.sealed(name, name * 20))
    else:
        record = bytearray(PLAIN.sealed(name, name * 20))
    try:
        OURS.opened(name, record)
    except CorruptPackError:
        return False
    return True


FORGED_OBJECTS = ("flip", "truncate", "extend", "swap", "salt", "key", "plain")


def test_key_seal_valid_frames_are_accepted() -> None:
    for pack in PACKS:
        for number, frame in enumerate(pack.table.frames):
            stored, keys = pack.stored(number), pack.keys(number)
            assert is_accepted(pack.table, number, frame, keys, stored)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORGERIES), st.integers(0, 1 << 62))
def test_key_seal_forged_frame_is_refused(kind: str, seed: int) -> None:
    assert not forge(random.Random(seed), kind)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=100), st.data())
def test_key_seal_forged_record_is_refused(
    name: bytes,
    body: bytes,
    data: st.DataObject,
) -> None:
    record = OURS.sealed(name, body)
    assert len(record) == len(body) + RECORD_BYTES
    assert OURS.opened(name, record) == body
    damaged = bytearray(record)
    kind = data.draw(st.sampled_from(["flip", "cut", "name", "key", "plain"]))
    if kind == "flip":
        at = data.draw(st.integers(0, len(record) - 1))
        damaged[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[data.draw(st.integers(0, len(record) - 1)) :]
    elif kind == "name":
        name = name + b"x"
    elif kind == "key":
        damaged = bytearray(THEIRS.sealed(name, body))
    else:
        damaged = bytearray(PLAIN.sealed(name, body))
    with pytest.raises(CorruptPackError):
        OURS.opened(name, bytes(damaged))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_key_seal_100_000_forgeries_none_is_accepted() -> None:
    random_ = random.Random(7)
    accepted = 0
    for attempt in range(50_000):
        accepted += forge(random_, FORGERIES[attempt % len(FORGERIES)])
        kind = FORGED_OBJECTS[attempt % len(FORGED_OBJECTS)]
        accepted += forge_object(random_, kind)
    assert accepted == 0
    for name, record in RECORDS.items():
        assert OURS.opened(name, record) == name * 20


def test_plain_seal_refuses_pack_of_key_and_reverse() -> None:
    with pytest.raises(CorruptPackError, match="key"):
        PLAIN.of_pack(PACKS[0].table)
    with pytest.raises(CorruptPackError, match="key"):
        THEIRS.of_pack(PACKS[0].table)
    plain = sample_pack(NAMESPACE, 1)
    payload_of(plain)
    with pytest.raises(CorruptPackError, match="key"):
        OURS.of_pack(plain.table)
    table = OURS.encode_table(PACKS[0].table)
    assert OURS.decode_table(b"before" + table) == PACKS[0].table
    for seal in (PLAIN, THEIRS):
        with pytest.raises(CorruptPackError):
            seal.decode_table(table)


def test_key_seal_format_matches_documentation() -> None:
    """Decode as docs/format.md describes, with the library alone."""
    pack = PACKS[0]
    table = pack.table
    key = KEYRING.of(DEFAULT_TENANT)
    assert key is not None
    assert table.data_key == key.id
    for number, frame in enumerate(table.frames):
        subkey = HKDF(SHA256(), 32, table.salt, b"persistkv pack 1").derive(key.secret)
        place = NAMESPACE + struct.pack(
            "<IIIIQQ",
            frame.group,
            frame.block_count,
            frame.block_bytes,
            frame.depth,
            frame.stored_length,
            frame.raw_length,
        )
        for name in pack.keys(number):
            place += struct.pack("<H", len(name)) + name
        nonce = struct.pack("<Q4x", number)
        sealed = bytes(pack.stored(number)) + frame.tag
        end = frame.offset + frame.stored_length
        expected = pack.content[frame.offset : end]
        assert AESGCM(subkey).decrypt(nonce, sealed, place) == expected

    record = OURS.sealed(b"name", b"body")
    key_id, salt = record[:8], record[8:24]
    assert key_id == KEYRING.store.id
    subkey = HKDF(SHA256(), 32, salt, b"persistkv record 1").derive(
        KEYRING.store.secret
    )
    assert AESGCM(subkey).decrypt(bytes(12), record[24:], b"name") == b"body"


def test_store_key_unwraps_only_its_own_keys() -> None:
    wrapped = STORE_KEY.wrap(KEYRING.id, KEYRING.store)
    found = STORE_KEY.unwrap_all([wrapped])
    assert (found.id, found.store) == (STORE_KEY.id, KEYRING.store)
    stranger = StoreKey(SECRET[::-1])
    with pytest.raises(WrongKeyError):
        stranger.unwrap_all([wrapped])


def open_all(encoded: bytes) -> None:
    found = decode_keys(encoded)
    STORE_KEY.unwrap_all(found.wrapped)
    for key in found.tenants:
        OURS.opened_key(key.id, key.sealed)


def test_stored_keys_damaged_byte_is_refused() -> None:
    wrapped = STORE_KEY.wrap(KEYRING.id, KEYRING.store)
    anna = DataKey.new("anna")
    stored = StoredKeys((wrapped,), (TenantKey(anna.id, OURS.sealed_key(anna)),))
    encoded = encode_keys(stored)
    assert decode_keys(encoded) == stored
    assert b"anna" not in encoded
    for key in (KEYRING.store, anna):
        assert key.secret not in encoded
    rng = random.Random(3)
    for _ in range(300):
        damaged = bytearray(encoded)
        damaged[rng.randrange(len(damaged))] ^= rng.randrange(1, 256)
        with pytest.raises(CorruptPackError):
            open_all(bytes(damaged))


def test_wrapped_key_format_matches_documentation() -> None:
    """Decode as docs/format.md describes, with the libraries alone."""
    key = DataKey.new("Zoë & co.")
    wrapped = STORE_KEY.wrap(KEYRING.id, KEYRING.store)
    stored = StoredKeys((wrapped,), (TenantKey(key.id, OURS.sealed_key(key)),))
    encoded = encode_keys(stored)
    assert encoded.startswith(b"PKVKEYS1")
    (entry,), (tenant,) = msgspec.msgpack.decode(encoded[8:])
    keyring, key_id, store_key, salt, sealed = entry
    store_secret = hmac.digest(b"persistkv store key 1", SECRET, "sha256")
    assert store_key == hmac.digest(store_secret, b"id", "sha256").hex()[:16]
    assert (keyring, key_id) == (KEYRING.id, KEYRING.store.id)
    wrapping = HKDF(SHA256(), 32, salt, b"persistkv data key 1").derive(store_secret)
    name = msgspec.msgpack.encode([keyring, key_id])
    secret = AESGCM(wrapping).decrypt(bytes(12), sealed, name)
    assert secret == KEYRING.store.secret

    tenant_id, record = tenant
    assert (tenant_id, record[:8]) == (key.id, key_id)
    subkey = HKDF(SHA256(), 32, record[8:24], b"persistkv record 1").derive(secret)
    name = b"data key " + tenant_id
    content = AESGCM(subkey).decrypt(bytes(12), record[24:], name)
    assert content == key.secret + "Zoë & co.".encode()


def test_key_seal_packs_of_tenants_have_their_own_keys() -> None:
    anna = DataKey.new("anna")
    keyring = KEYRING.extended([anna])
    assert keyring.lacking(["anna", "berta", DEFAULT_TENANT, "berta"]) == ["berta"]
    seal = KeySeal(lambda: keyring)
    assert seal.lacking(["berta"]) == ["berta"]
    pack = sample_pack(NAMESPACE, 1, seal=seal, tenant="anna")
    payload = bytearray(b"".join(map(bytes, pack.stream())))
    assert pack.table.data_key == anna.id
    open_payload(seal, pack.table, memoryview(payload))
    assert payload == payload_of(pack)
    # without the key of the tenant, nothing opens
    with pytest.raises(CorruptPackError, match="no key"):
        OURS.of_pack(pack.table)
    with pytest.raises(CorruptPackError, match="tenant"):
        seal.new_pack(NAMESPACE, "berta")


def test_salts_of_many_packs_and_records_differ() -> None:
    salts: set[bytes] = set()
    for _ in range(2000):
        salts.add(OURS.new_pack(NAMESPACE).salt)
        salts.add(OURS.sealed(b"", b"")[8:24])
    assert len(salts) == 4000


def test_salts_of_forked_processes_differ() -> None:
    read, write = os.pipe()
    for _ in range(4):
        child = os.fork()
        if not child:
            os.write(write, OURS.new_pack(NAMESPACE).salt)
            os._exit(0)
        os.waitpid(child, 0)
    salts = {os.read(read, 16) for _ in range(4)}
    os.close(read)
    os.close(write)
    assert len(salts) == 4
