"""Stores with a key: what was written without the key is a miss."""

from __future__ import annotations

import hmac
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    StoreUnavailableError,
)
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.blocking import BlockingStore
from persistkv.storage.format.authentication import TAG_BYTES, Authenticator
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.records import StoreOptions
from persistkv.storage.shared import SharedOptions
from persistkv.storage.shared.format import (
    NONCE_BYTES,
    Delta,
    Names,
    PackEntry,
    encode_delta,
    seal,
)
from persistkv.storage.shared.options import parse_shared
from persistkv.testing.conformance.suite import read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from tests.storage.shared.town import NAMESPACE, START, Engine, Town, town_of

SECRET = "0123456789abcdef" * 4
KEY = "PERSISTKV_TEST_KEY"
OURS = Authenticator(SECRET.encode())
NAMES = Names(NAMESPACE, OURS.key_id)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)
    monkeypatch.setenv("PERSISTKV_OTHER_KEY", SECRET[::-1])


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with town_of(tmp_path) as town:
        yield town


def keyed(town: Town) -> Engine:
    """Return a new handle with our key, which sees each commit at once."""
    return town.engine(key_env=KEY, refresh_s=0.0)


def blob_of(town: Town, part: str) -> str:
    """Return the name of the only blob of our key with this part."""
    (name,) = [name for name in town.names(part) if name.startswith(NAMES.base)]
    return name


def forge(
    town: Town,
    table: PackTable,
    tags: bytes = b"",
    authenticator: Authenticator | None = None,
) -> None:
    """Write a commit that names the blob of the held pack, with another table."""
    held = NAMES.pack_name(blob_of(town, "/packs/"))
    assert held is not None
    entry = PackEntry(
        table.pack_id, held[-NONCE_BYTES:], tags + table.encode(), START + 1e6
    )
    body = encode_delta(Delta([entry]))
    name = NAMES.new_commit(random.Random(1))
    town.server.put(
        name, [seal(name, body, authenticator or Authenticator(), NAMESPACE)]
    )


def forge_commit(town: Town) -> None:
    """Store another payload under the pack's name, and a commit without the key that describes
    it."""
    evil = sample_pack(NAMESPACE, 1, content=66)
    payload = payload_of(evil)
    town.server.put(blob_of(town, "/packs/"), [payload, evil.table.encode()])
    forge(town, evil.table)


def forge_tags(town: Town) -> None:
    """Do the same with tags and a signature made with another key."""
    evil = sample_pack(NAMESPACE, 1, content=66)
    payload = payload_of(evil)
    stranger = Authenticator(b"x" * 32)
    tags = stranger.pack_tags(evil.table, [payload])
    town.server.put(blob_of(town, "/packs/"), [payload, tags, evil.table.encode()])
    forge(town, evil.table, tags, stranger)


def change_payload(town: Town) -> None:
    name = blob_of(town, "/packs/")
    data = town.data(name)
    town.server.put(name, [bytes([data[0] ^ 1]) + data[1:]])


@pytest.mark.parametrize("attack", [forge_commit, forge_tags, change_payload])
def test_read_forged_pack_misses_and_commit_replaces_it(
    town: Town, attack: Callable[[Town], None]
) -> None:
    first = keyed(town)
    rows = Rows(
        memoryview(bytearray(4 * 4096)), RowLayout(4096, (GroupLayout(((0, 4096),)),))
    )
    store = BlockingStore(
        first.backend, sample_identity(), rows, StoreOptions(), url="shared://test"
    )
    pack = sample_pack(NAMESPACE, 1)
    keys = pack.segments[0].keys
    first.store(pack)
    store.refresh()
    assert store.contains(keys[0])
    attack(town)
    assert read_pack(keyed(town).backend, NAMESPACE, pack.table) is None
    assert sorted(store.read(keys, range(4))) == sorted(keys)

    keyed(town).store(sample_pack(NAMESPACE, 1))
    assert read_pack(keyed(town).backend, NAMESPACE, pack.table) == payload_of(pack), (
        "it is written again"
    )


def test_keyed_store_is_readable_only_with_same_key(town: Town) -> None:
    ours, theirs = keyed(town), keyed(town)
    packs: list[PackWriter] = []
    for seed in (1, 2):
        packs.append(sample_pack(NAMESPACE, seed, blocks=5, block_bytes=400_000))
    names = [pack.pack_id for pack in packs]
    ours.backend.commit(
        NAMESPACE, CommitBatch(packs, [sample_manifest("r", packs=names)])
    )
    theirs.backend.refresh()
    for engine in (ours, theirs):
        for pack in packs:
            assert read_pack(engine.backend, NAMESPACE, pack.table) == payload_of(pack)
        assert (
            engine.backend.manifest_keys(NAMESPACE, ["r"])[0]
            == sample_manifest("r").keys
        )
    keyless = town.engine(refresh_s=0.0)
    stranger = town.engine(refresh_s=0.0, key_env="PERSISTKV_OTHER_KEY")
    for engine in (keyless, stranger):
        assert tables(engine.backend, NAMESPACE) == {}
        engine.store(sample_pack(NAMESPACE, 3))
    assert len(tables(ours.backend, NAMESPACE)) == 2, "each sees its own"


@pytest.mark.parametrize("present", ["", "key_env=PERSISTKV_OTHER_KEY"])
@pytest.mark.parametrize("asked", ["", f"key_env={KEY}"])
def test_open_with_another_key_says_that_content_exists(
    tmp_path: Path, present: str, asked: str
) -> None:
    place = f"file://{tmp_path}/store"
    with closing(open_backend(f"{place}?{present}")) as backend:
        namespace = backend.open_namespace(sample_identity()).id
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    if present == asked:
        open_backend(f"{place}?{asked}", read_only=True).close()
        return
    with pytest.raises(StoreUnavailableError) as raised:
        open_backend(f"{place}?{asked}", read_only=True)
    other = Authenticator(SECRET[::-1].encode()).key_id
    expected = f"under another key (id {other})" if present else "one without a key"
    assert expected in str(raised.value)
    assert SECRET not in str(raised.value)


def test_open_absent_store_does_not_mention_keys(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreUnavailableError, match=r"there is no store$"):
        open_backend(f"file://{tmp_path}/store", read_only=True)


def test_commit_copied_to_other_name_is_ignored(town: Town) -> None:
    first = keyed(town)
    pack = sample_pack(NAMESPACE, 1)
    first.store(pack)
    added = blob_of(town, "/inbox/")
    first.backend.commit(NAMESPACE, CommitBatch(deletions=[pack.pack_id]))
    (removed,) = {name for name in town.names("/inbox/") if name != added}
    content = town.data(removed)
    town.server.delete([removed])
    town.server.put(NAMES.new_commit(random.Random(2)), [content])
    assert keyed(town).held() == {pack.pack_id}


def test_manifest_keys_tampered_blob_misses(town: Town) -> None:
    first = keyed(town)
    first.backend.commit(
        NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1)], [sample_manifest("r")])
    )
    assert first.backend.manifest_keys(NAMESPACE, ["r"])[0] == sample_manifest("r").keys
    name = blob_of(town, "/keys/")
    data = town.data(name)
    town.server.put(name, [data[:-1] + bytes([data[-1] ^ 1])])
    assert first.backend.manifest_keys(NAMESPACE, ["r"])[0] is None


def test_policy_without_the_key_is_not_believed(town: Town) -> None:
    """A stranger could empty the store with it."""
    town.engine(capacity=1, ttl_s=1.0)
    first = keyed(town)
    first.store(sample_pack(NAMESPACE, 1))
    town.run(200)
    assert first.held() == {sample_pack(NAMESPACE, 1).pack_id}


def test_frame_check_swapped_or_foreign_frames_rejects() -> None:
    pack = sample_pack(NAMESPACE, 1, blocks=3, block_bytes=1 << 20)
    payload = payload_of(pack)
    ours, table = Authenticator(b"s" * 32), pack.table
    tags = ours.pack_tags(table, [payload[:100], payload[100:]])
    assert len(tags) == 4 * TAG_BYTES
    frames = [
        payload[frame.offset : frame.offset + frame.stored_length]
        for frame in table.frames
    ]

    def authentic(table: PackTable, tags: bytes, order: tuple[int, ...]) -> list[bool]:
        is_ours = ours.frame_check(table, tags)
        return [
            is_ours(number, [frames[place][:7], frames[place][7:]])
            for number, place in enumerate(order)
        ]

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
    name = b"some/object"
    tag = hmac.digest(
        key, b"object\0" + NAMESPACE + bytes([11, 0, 0, 0]) + name + b"body", "sha256"
    )
    assert (
        b"".join(ours.signed(NAMESPACE, name.decode(), [b"bo", b"dy"])) == b"body" + tag
    )
    for data in (b"", b"short", b"bodY" + tag):
        with pytest.raises(CorruptPackError):
            ours.opened(NAMESPACE, name.decode(), data)


def test_secret_key_file_is_read_and_invalid_key_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    assert SharedOptions(key_file=str(path)).secret() == SECRET.encode()
    path.write_text("hunter2")
    monkeypatch.setenv(KEY, "hunter2")
    wrong = {"key_file": str(path), "key_env": KEY}
    for name, value in [
        *wrong.items(),
        ("key_file", "/no/such/file"),
        ("key_env", "NOT_SET_AT_ALL"),
    ]:
        options, _ = parse_shared({name: value}, "s3")
        with pytest.raises(ConfigurationError, match=f"{name}|cannot read") as caught:
            options.secret()
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="key_env"):
        parse_shared({"key_file": "x", "key_env": "y"}, "s3")


def test_keyed_backend_key_is_absent_from_repr_and_log(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    first = keyed(town)
    first.store(sample_pack(NAMESPACE, 1))
    assert SECRET not in repr(first.backend) + repr(vars(first.backend)) + caplog.text
