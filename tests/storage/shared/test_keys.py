"""Stores with a key: what was written without the key is a miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreUnavailableError,
)
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.blocking import BlockingStore
from persistkv.storage.format.keys import (
    DEFAULT_TENANT,
    STORE,
    DataKey,
    StoreKey,
    encode_keys,
)
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.format.seal import PLAIN, KeySeal, Seal
from persistkv.storage.records import StoreOptions
from persistkv.storage.shared.format import (
    NONCE_BYTES,
    Delta,
    Names,
    PackEntry,
    encode_delta,
    seal_object,
)
from persistkv.testing.conformance.suite import read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from tests.storage.shared.town import NAMESPACE, START, Engine, Town, town_of

SECRET = "0123456789abcdef" * 4
KEY = "PERSISTKV_TEST_KEY"
NAMES = Names(NAMESPACE, StoreKey(SECRET.encode()).id)


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


def forge(town: Town, table: PackTable, seal: Seal) -> None:
    """Write a commit that names the blob of the held pack, with another table."""
    held = NAMES.pack_name(blob_of(town, "/packs/"))
    assert held is not None
    entry = PackEntry(held[:-NONCE_BYTES], held[-NONCE_BYTES:], table.encode(), START)
    body = encode_delta(Delta([entry]))
    name = NAMES.new_commit(random.Random(1))
    town.server.put(name, [seal_object(name, body, seal, NAMESPACE)])


def forge_commit(town: Town) -> None:
    """Store another payload under the pack's name, and a commit without the key that describes
    it."""
    evil = sample_pack(NAMESPACE, 1, content=66)
    payload = payload_of(evil)
    town.server.put(blob_of(town, "/packs/"), [payload, evil.table.encode()])
    forge(town, evil.table, PLAIN)


def forge_with_other_key(town: Town) -> None:
    """Do the same, sealed with another key."""
    keyring = StoreKey(b"x" * 32).new_keyring()
    stranger = KeySeal(lambda: keyring)
    evil = sample_pack(NAMESPACE, 1, content=66, seal=stranger)
    payload = b"".join(evil.stream())
    table = stranger.encode_table(evil.table)
    town.server.put(blob_of(town, "/packs/"), [payload, table])
    forge(town, evil.table, stranger)


def change_payload(town: Town) -> None:
    name = blob_of(town, "/packs/")
    data = town.data(name)
    town.server.put(name, [bytes([data[0] ^ 1]) + data[1:]])


@pytest.mark.parametrize("attack", [forge_commit, forge_with_other_key, change_payload])
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
    pack = first.pack(1)
    keys = pack.segments[0].keys
    first.store(pack)
    store.refresh()
    assert store.contains(keys[0])
    attack(town)
    assert sorted(store.read(keys, range(4))) == sorted(keys)

    again = keyed(town)
    again.store(again.pack(1))
    store.refresh()
    assert store.read(keys, range(4)) == [], "it is written again"


def test_keyed_store_is_readable_only_with_same_key(town: Town) -> None:
    ours, theirs = keyed(town), keyed(town)
    packs: list[PackWriter] = []
    for seed in (1, 2):
        packs.append(ours.pack(seed, blocks=5, block_bytes=400_000))
    names = [pack.pack_id for pack in packs]
    ours.backend.commit(
        NAMESPACE, CommitBatch(packs, [sample_manifest("r", packs=names)])
    )
    theirs.backend.refresh()
    for engine in (ours, theirs):
        for pack in packs:
            found = read_pack(engine.backend, NAMESPACE, pack.table)
            assert found == payload_of(pack)
        assert (
            engine.backend.manifest_keys(NAMESPACE, ["r"])[0]
            == sample_manifest("r").keys
        )
    keyless = town.engine(refresh_s=0.0)
    stranger = town.engine(refresh_s=0.0, key_env="PERSISTKV_OTHER_KEY")
    for engine in (keyless, stranger):
        assert tables(engine.backend, NAMESPACE) == {}
        engine.store(engine.pack(3))
    assert len(tables(ours.backend, NAMESPACE)) == 2, "each sees its own"


@pytest.mark.parametrize("present", ["", "key_env=PERSISTKV_OTHER_KEY"])
@pytest.mark.parametrize("asked", ["", f"key_env={KEY}"])
def test_open_with_another_key_says_that_content_exists(
    tmp_path: Path, present: str, asked: str
) -> None:
    place = f"file://{tmp_path}/store"
    with closing(open_backend(f"{place}?{present}")) as backend:
        namespace = backend.open_namespace(sample_identity()).id
        backend.commit(
            namespace, CommitBatch([sample_pack(namespace, 1, seal=backend.seal)])
        )
    if present == asked:
        open_backend(f"{place}?{asked}", read_only=True).close()
        return
    with pytest.raises(StoreUnavailableError) as raised:
        open_backend(f"{place}?{asked}", read_only=True)
    other = StoreKey(SECRET[::-1].encode()).id
    expected = f"under another key (id {other})" if present else "one without a key"
    assert expected in str(raised.value)
    assert SECRET not in str(raised.value)


def test_open_absent_store_does_not_mention_keys(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreUnavailableError, match=r"there is no store$"):
        open_backend(f"file://{tmp_path}/store", read_only=True)


def test_commit_copied_to_other_name_is_ignored(town: Town) -> None:
    first = keyed(town)
    pack = first.pack(1)
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
        NAMESPACE, CommitBatch([first.pack(1)], [sample_manifest("r")])
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
    pack = first.pack(1)
    first.store(pack)
    town.run(200)
    assert first.held() == {pack.pack_id}


def test_engines_that_create_a_store_at_once_read_each_other(town: Town) -> None:
    """Each makes data keys before it sees those of the other."""
    secret = StoreKey(SECRET.encode())
    for tenant in (STORE, DEFAULT_TENANT):
        wrapped = secret.wrap(secret.id, DataKey.new(tenant))
        name = f"keyrings/{secret.id}/{wrapped.id.hex()}"
        town.server.put(name, [encode_keys([wrapped])])
    first = keyed(town)
    # later ones, which only a handle that is opened after them reads at once
    for tenant in (STORE, DEFAULT_TENANT):
        key = DataKey(bytes(8), tenant, bytes(range(32)))
        key = key._replace(id=tenant.encode().ljust(8, b"\0"))
        wrapped = secret.wrap(secret.id, key)
        name = f"keyrings/{secret.id}/{wrapped.id.hex()}"
        town.server.put(name, [encode_keys([wrapped])])
    second = keyed(town)
    for engine, seed in ((first, 1), (second, 2)):
        engine.store(engine.pack(seed))
    for engine in (first, second, keyed(town)):
        for table in tables(engine.backend, NAMESPACE).values():
            assert read_pack(engine.backend, NAMESPACE, table) is not None
        assert len(tables(engine.backend, NAMESPACE)) == 2


def test_open_content_without_its_data_keys_raises_and_keeps_it(town: Town) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    town.server.delete(town.names("keyrings/"))
    before = town.names("")
    with pytest.raises(CorruptStoreError, match="no data keys"):
        keyed(town)
    assert town.names("") == before


def test_deleted_store_is_written_again_with_its_keys(town: Town) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    town.server.delete(town.names(""))
    town.run(200)
    first.store(first.pack(2))
    assert len(tables(keyed(town).backend, NAMESPACE)) == 1


def test_rotation_other_key_opens_store_and_old_one_does_not(town: Town) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    other = StoreKey(SECRET[::-1].encode())
    first.backend.rotate_key(other)
    before = set(town.names(""))
    # the handle runs on
    first.store(first.pack(2))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=other.id):
            keyed(town)
    second = town.engine(refresh_s=0.0, key_env="PERSISTKV_OTHER_KEY")
    found = tables(second.backend, NAMESPACE)
    assert len(found) == 2
    for table in found.values():
        assert read_pack(second.backend, NAMESPACE, table) is not None
    assert set(town.names("")) >= before, "nothing was destroyed"
    # and back
    second.backend.rotate_key(StoreKey(SECRET.encode()))
    assert len(tables(keyed(town).backend, NAMESPACE)) == 2


def test_rotation_to_key_with_content_raises(town: Town) -> None:
    keyed(town)
    other = town.engine(refresh_s=0.0, key_env="PERSISTKV_OTHER_KEY")
    with pytest.raises(ConfigurationError, match="without content"):
        other.backend.rotate_key(StoreKey(SECRET.encode()))
    assert tables(keyed(town).backend, NAMESPACE) == {}


def test_keyed_backend_key_is_absent_from_repr_and_log(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    assert SECRET not in repr(first.backend) + repr(vars(first.backend)) + caplog.text
