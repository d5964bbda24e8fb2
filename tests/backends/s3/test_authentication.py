"""Stores with a key: any object that was written without the key is a miss."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.records import StoreOptions
from persistkv.storage.store import Store
from persistkv.testing.conformance.suite import read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.authentication import TAG_BYTES, Authenticator
from persistkv_s3.feed.format import Entry, InboxName, Names, PackRow, seal
from persistkv_s3.options import parse_url
from tests.backends.s3.conftest import Handle, Opener

NAMESPACE = sample_identity().digest
SECRET = "0123456789abcdef" * 4
WITH_KEY = "refresh=0s&key_env=PERSISTKV_TEST_KEY"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSISTKV_TEST_KEY", SECRET)
    monkeypatch.setenv("PERSISTKV_OTHER_KEY", SECRET[::-1])


def names_of(backend: Any) -> Names:
    names = backend.session(NAMESPACE).objects.names
    assert isinstance(names, Names)
    return names


def replace(client: Any, bucket: str, key: str, change: Callable[[bytes], bytes]) -> None:
    data = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    client.put_object(Bucket=bucket, Key=key, Body=change(data))


FORGED = InboxName(NAMESPACE, bytes(16), 1)
NONCE = bytes(8)


def commit_of(table: PackTable, tags: bytes = b"") -> bytes:
    """Return a commit of a pack, as a writer without the key would create it."""
    packs = [PackRow(table.pack_id, NONCE, tags + table.encode())]
    return seal(Entry(writer=FORGED.writer, number=FORGED.number, time=4e9, packs=packs))


def inbox_key() -> str:
    return Names("store/", key_id=Authenticator(SECRET.encode()).key_id).inbox(FORGED)


def pack_key(backend: S3Backend, pack: PackWriter) -> str:
    """Return the key of a pack that the backend holds."""
    nonce = backend.session(NAMESPACE).catalogue.objects([pack.pack_id])[pack.pack_id].nonce
    return names_of(backend).pack(pack.pack_id, nonce)


def unsigned_object(pack: PackWriter) -> bytes:
    """Return the object of a pack, as a writer without the key would create it."""
    payload = payload_of(pack)
    return payload + pack.table.encode()


def test_keyed_store_is_readable_only_with_same_key(open_store: Opener, raw_client: Any, bucket: str) -> None:
    (ours, _), (theirs, _) = open_store(WITH_KEY), open_store(WITH_KEY)
    ours.open_namespace(sample_identity())
    packs = [sample_pack(NAMESPACE, seed, blocks=5, block_bytes=400_000) for seed in (1, 2)]
    ours.commit(NAMESPACE, CommitBatch(packs, [sample_manifest("r", packs=[pack.pack_id for pack in packs])]))
    for backend in (ours, theirs):
        for pack in packs:
            assert read_pack(backend, NAMESPACE, pack.table) == payload_of(pack)
        assert backend.manifest_keys(NAMESPACE, ["r"])[0] == sample_manifest("r").keys
    theirs.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1, blocks=5, block_bytes=400_000)]))
    (keyless, _), (stranger, _) = open_store(), open_store("refresh=0s&key_env=PERSISTKV_OTHER_KEY")
    for backend in (keyless, stranger):
        backend.open_namespace(sample_identity())
        assert tables(backend, NAMESPACE) == {}
        backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 3)]))
    assert len(tables(ours, NAMESPACE)) == 2, "each sees its own"


def forge_commit(handle: Handle, client: Any, bucket: str, pack: PackWriter) -> None:
    """Store another payload under the pack's name, and an unsigned commit that describes it."""
    evil = sample_pack(NAMESPACE, 1, content=66)
    client.put_object(Bucket=bucket, Key=pack_key(handle.backend, pack), Body=unsigned_object(evil))
    client.put_object(Bucket=bucket, Key=inbox_key(), Body=commit_of(evil.table))


def forge_tags(handle: Handle, client: Any, bucket: str, pack: PackWriter) -> None:
    """Do the same with tags and a signature made with another key."""
    evil = sample_pack(NAMESPACE, 1, content=66)
    payload = payload_of(evil)
    stranger = Authenticator(b"x" * 32)
    tags = stranger.pack_tags(evil.table, [payload])
    body = payload + tags + evil.table.encode()
    client.put_object(Bucket=bucket, Key=pack_key(handle.backend, pack), Body=body)
    signed = stranger.signed(NAMESPACE, f"inbox {bytes(16).hex()}-1", [commit_of(evil.table, tags)])
    client.put_object(Bucket=bucket, Key=inbox_key(), Body=b"".join(signed))


def change_payload(handle: Handle, client: Any, bucket: str, pack: PackWriter) -> None:
    key = pack_key(handle.backend, pack)
    replace(client, bucket, key, lambda data: bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize("attack", [forge_commit, forge_tags, change_payload])
def test_read_forged_pack_misses_and_commit_replaces_it(
    open_store: Opener, raw_client: Any, bucket: str, attack: Callable[..., None]
) -> None:
    handle = open_store(WITH_KEY)
    memory = bytearray(4 * 4096)
    rows = Rows(memoryview(memory), RowLayout(4096, (GroupLayout(((0, 4096),)),)))
    store = Store(handle.backend, sample_identity(), rows, StoreOptions(), url="s3://test")
    pack = sample_pack(NAMESPACE, 1)
    keys = pack.segments[0].keys
    handle.backend.commit(NAMESPACE, CommitBatch([pack]))
    store.refresh()
    assert store.contains(keys[0])
    attack(handle, raw_client, bucket, pack)
    (fresh, _) = open_store(WITH_KEY)
    assert read_pack(fresh, NAMESPACE, pack.table) is None
    assert sorted(store.read(keys, range(4))) == sorted(keys)

    again = sample_pack(NAMESPACE, 1)
    (other, _) = open_store(WITH_KEY)
    other.commit(NAMESPACE, CommitBatch([again]))
    assert read_pack(other, NAMESPACE, pack.table) == payload_of(pack), "it is written again"


def test_commit_copied_to_other_object_key_is_ignored(open_store: Opener, raw_client: Any, bucket: str) -> None:
    backend, _ = open_store(WITH_KEY)
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    backend.commit(NAMESPACE, CommitBatch(deletions=[pack.pack_id]))
    listed = raw_client.list_objects_v2(Bucket=bucket, Prefix="store/inbox")
    first, second = (entry["Key"] for entry in listed["Contents"])
    raw_client.copy_object(Bucket=bucket, Key=second, CopySource={"Bucket": bucket, "Key": first})
    (fresh, _) = open_store(f"{WITH_KEY}&cache=no")
    assert set(tables(fresh, NAMESPACE)) == {pack.pack_id}


def test_manifest_keys_tampered_object_misses(open_store: Opener, raw_client: Any, bucket: str) -> None:
    backend, _ = open_store(WITH_KEY)
    backend.open_namespace(sample_identity())
    backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1)], [sample_manifest("r")]))
    assert backend.manifest_keys(NAMESPACE, ["r"])[0] == sample_manifest("r").keys
    (entry,) = raw_client.list_objects_v2(Bucket=bucket, Prefix=f"{names_of(backend).base}keys/")["Contents"]
    replace(raw_client, bucket, entry["Key"], lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert backend.manifest_keys(NAMESPACE, ["r"])[0] is None


def test_frame_check_swapped_or_foreign_frames_rejects() -> None:
    pack = sample_pack(NAMESPACE, 1, blocks=3, block_bytes=1 << 20)
    payload = payload_of(pack)
    ours, table = Authenticator(b"s" * 32), pack.table
    tags = ours.pack_tags(table, [payload[:100], payload[100:]])
    assert len(tags) == 4 * TAG_BYTES
    frames = [payload[frame.offset : frame.offset + frame.stored_length] for frame in table.frames]

    def authentic(table: PackTable, tags: bytes, order: tuple[int, ...]) -> list[bool]:
        is_ours = ours.frame_check(table, tags)
        return [is_ours(number, [frames[place][:7], frames[place][7:]]) for number, place in enumerate(order)]

    assert authentic(table, tags, (0, 1, 2)) == [True] * 3
    assert authentic(table, tags, (1, 0, 2)) == [False, False, True]
    moved = tags[TAG_BYTES : 2 * TAG_BYTES] + tags[:TAG_BYTES] + tags[2 * TAG_BYTES :]
    assert authentic(table, moved, (1, 0, 2)) == [False, False, True]
    assert not Authenticator(b"t" * 32).frame_check(table, tags)(0, [frames[0]])
    other = sample_pack(sample_identity(1).digest, 1, blocks=3, block_bytes=1 << 20)
    payload_of(other)
    assert authentic(other.table, tags, (0, 1, 2)) == [False] * 3, "another identity's"


def test_authenticator_tags_match_documented_format() -> None:
    pack = sample_pack(NAMESPACE, 1)
    payload = payload_of(pack)
    key = hmac.digest(b"persistkv s3 authentication 1", SECRET.encode(), "sha256")
    digest = sha256(pack.table.encode()).digest()
    frame = hmac.digest(key, b"frame\0" + digest + bytes(4) + payload, "sha256")
    table = hmac.digest(key, b"table\0" + digest + frame, "sha256")
    ours = Authenticator(SECRET.encode())
    assert ours.pack_tags(pack.table, [payload]) == frame + table
    assert ours.key_id == hmac.digest(key, b"key id\0", "sha256").hex()[:16]
    name = b"log/s-1"
    tag = hmac.digest(key, b"object\0" + NAMESPACE + bytes([7, 0, 0, 0]) + name + b"body", "sha256")
    assert b"".join(ours.signed(NAMESPACE, name.decode(), [b"bo", b"dy"])) == b"body" + tag
    for data in (b"", b"short", b"bodY" + tag):
        with pytest.raises(CorruptPackError):
            ours.opened(NAMESPACE, name.decode(), data)


def test_secret_key_file_is_read_and_invalid_key_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    _, options = parse_url(StoreUrl.parse(f"s3://bucket/p?key_file={path}"))
    assert options.secret() == SECRET.encode()
    path.write_text("hunter2")
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "hunter2")
    for wrong in (f"key_file={path}", "key_file=/no/such/file", "key_env=PERSISTKV_TEST_KEY", "key_env=NOT_SET_AT_ALL"):
        with pytest.raises(ConfigurationError, match=f"s3 option {wrong.partition('=')[0]}|cannot read") as caught:
            parse_url(StoreUrl.parse(f"s3://bucket/p?{wrong}"))[1].secret()
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="key_env"):
        parse_url(StoreUrl.parse("s3://bucket/p?key_file=x&key_env=y"))


def test_keyed_backend_key_is_absent_from_repr_and_log(open_store: Opener, caplog: pytest.LogCaptureFixture) -> None:
    backend, _ = open_store(WITH_KEY)
    backend.open_namespace(sample_identity())
    backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1)]))
    assert SECRET not in repr(backend) + repr(vars(backend)) + caplog.text
