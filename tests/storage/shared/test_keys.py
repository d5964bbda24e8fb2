"""Stores with a key: content that was written without the key is a miss."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from contextlib import closing, suppress
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
from persistkv.storage.blobs import UnavailableError
from persistkv.storage.format.keys import (
    STORE,
    DataKey,
    Keyring,
    StoredKeys,
    StoreKey,
    encode_keys,
)
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.format.seal import PLAIN, KeySeal, Seal
from persistkv.storage.records import StoreOptions
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.storage.shared.format import (
    NONCE_BYTES,
    Delta,
    Names,
    PackEntry,
    encode,
    seal_object,
)
from persistkv.storage.store.blocking import BlockingStore
from persistkv.tenants import DEFAULT_TENANT
from persistkv.testing import FaultyBlobs
from persistkv.testing.blobs import METHODS
from persistkv.testing.conformance.suite import read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from tests.storage.shared.town import NAMESPACE, START, Engine, Town, TownClock, town_of

SECRET = "0123456789abcdef" * 4
KEY = "PERSISTKV_TEST_KEY"
OURS = StoreKey(SECRET.encode())
OTHER = StoreKey(SECRET[::-1].encode())
NAMES = Names(NAMESPACE, OURS.id)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)
    monkeypatch.setenv("PERSISTKV_OTHER_KEY", SECRET[::-1])


def keyed(town: Town) -> Engine:
    """Return a new handle with our key, which sees each commit at once."""
    return town.engine(key_env=KEY, refresh_s=0.0)


def readable(engine: Engine) -> list[PackTable]:
    """Return the packs that an engine holds; it reads each of them."""
    found = list(tables(engine.backend, NAMESPACE).values())
    for table in found:
        assert read_pack(engine.backend, NAMESPACE, table) is not None
    return found


def blob_of(town: Town, part: str) -> str:
    """Return the name of the only blob of our key with this part."""
    (name,) = [name for name in town.names(part) if name.startswith(NAMES.base)]
    return name


def forge(town: Town, table: PackTable, seal: Seal) -> None:
    """Write a commit that names the blob of the held pack, with another table."""
    held = NAMES.pack_name(blob_of(town, "/packs/"))
    assert held is not None
    entry = PackEntry(held[:-NONCE_BYTES], held[-NONCE_BYTES:], table.encode(), START)
    body = encode(Delta([entry]))
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
    keyring = keyring.extended([DataKey.new(DEFAULT_TENANT)])
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
    town: Town,
    attack: Callable[[Town], None],
) -> None:
    first = keyed(town)
    rows = Rows(
        memoryview(bytearray(4 * 4096)), RowLayout(4096, (GroupLayout(((0, 4096),)),))
    )
    store = BlockingStore(
        first.backend, sample_identity(), rows, StoreOptions(), url="shared://test"
    )
    pack = first.pack(1)
    keys = pack.sections[0].keys
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
    tmp_path: Path,
    present: str,
    asked: str,
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


def test_changed_policy_keeps_limits_that_were_read_before_and_log_says_so(
    town: Town,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = town.engine(key_env=KEY, capacity=1_000_000)
    (name,) = town.names(f"{OURS.id}/policy")
    town.server.put(name, [b"junk"])
    town.run(130)
    assert first.backend.policy().capacity == 1_000_000
    assert "the policy does not read" in caplog.text
    assert "the limits that were read before stay" in caplog.text
    assert "nothing is evicted" not in caplog.text


def test_engines_that_create_a_store_at_once_read_each_other(town: Town) -> None:
    """Each makes data keys before it sees those of the other."""
    secret = StoreKey(SECRET.encode())
    wrapped = secret.wrap(secret.id, DataKey.new(STORE))
    name = f"keyrings/{secret.id}/{wrapped.id.hex()}"
    town.server.put(name, [encode_keys(StoredKeys((wrapped,)))])
    first = keyed(town)
    # a later one, which only a handle that is opened after them reads at once
    wrapped = secret.wrap(secret.id, DataKey(bytes(8), STORE, bytes(range(32))))
    name = f"keyrings/{secret.id}/{wrapped.id.hex()}"
    town.server.put(name, [encode_keys(StoredKeys((wrapped,)))])
    second = keyed(town)
    for engine, seed in ((first, 1), (second, 2)):
        engine.store(engine.pack(seed))
    for engine in (first, second, keyed(town)):
        assert len(readable(engine)) == 2


def test_sweep_of_a_handle_that_lacks_a_data_key_spares_what_it_cannot_read(
    town: Town,
) -> None:
    """After a rotation it cannot learn the key, and objects that are sealed with it are no junk."""
    first = keyed(town)
    wrapped = OURS.wrap(OURS.id, DataKey(bytes(8), STORE, bytes(range(32))))
    name = f"keyrings/{OURS.id}/{wrapped.id.hex()}"
    town.server.put(name, [encode_keys(StoredKeys((wrapped,)))])
    second = keyed(town)
    second.backend.rotate_key(OTHER)
    second.store(second.pack(1))
    town.kill(second)
    town.now += 9 * 86_400.0
    assert first.backend.opened_namespace(NAMESPACE).sweep() == 0
    third = town.engine(key_env="PERSISTKV_OTHER_KEY")
    (table,) = tables(third.backend, NAMESPACE).values()
    assert read_pack(third.backend, NAMESPACE, table) is not None


def test_packs_of_tenants_are_read_by_all_and_keys_are_made_once(town: Town) -> None:
    first, second = keyed(town), keyed(town)
    for seed, engine in enumerate((first, second, first)):
        for tenant in ("anna", "berta"):
            engine.store(engine.pack(10 * seed + len(tenant), tenant=tenant))
    assert len(town.names("/tenants/")) == 2
    for name in town.names(""):
        assert b"anna" not in town.data(name), name
    town.run(70)
    for engine in (first, second, keyed(town)):
        found = readable(engine)
        assert len(found) == 6
        of_tenant = {(table.tenant, table.data_key) for table in found}
        assert len(of_tenant) == 2


def once_before_put(engine: Engine, part: str, call: Callable[[], object]) -> None:
    """Call once before the engine's next put of a blob with this part in its name."""

    def call_if_due(name: str) -> None:
        if part in name:
            engine.blobs.clear_faults("put")
            call()

    engine.blobs.before("put", call_if_due)


def test_engines_that_make_key_of_tenant_at_once_keep_all(town: Town) -> None:
    first, second = keyed(town), keyed(town)
    # between the list of the keys and the write of its own
    once_before_put(
        first, "/tenants/", lambda: second.store(second.pack(2, tenant="anna"))
    )
    first.store(first.pack(1, tenant="anna"))
    assert len(town.names("/tenants/")) == 2
    town.run(70)
    for engine in (first, second, keyed(town)):
        assert len(readable(engine)) == 2


def test_rotation_open_handles_make_and_read_keys_of_tenants(town: Town) -> None:
    first, second = keyed(town), keyed(town)
    first.store(first.pack(1, tenant="anna"))
    first.backend.rotate_key(StoreKey(SECRET[::-1].encode()))
    first.store(first.pack(2, tenant="berta"))
    second.store(second.pack(3, tenant="cleo"))
    third = town.engine(refresh_s=0.0, key_env="PERSISTKV_OTHER_KEY")
    third.store(third.pack(4, tenant="dora"))
    town.run(70)
    for engine in (first, second, third):
        assert len(readable(engine)) == 4


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


def test_store_deleted_and_created_by_other_engine_is_sealed_with_its_keys(
    tmp_path: Path,
) -> None:
    """The new data keys, of which the smallest id seals, are random."""
    for number in range(5):
        with town_of(tmp_path / str(number)) as town:
            first = keyed(town)
            first.store(first.pack(1))
            town.server.delete(town.names(""))
            keyed(town)
            town.run(200)
            pack = first.pack(2)
            first.store(pack)
            found = tables(keyed(town).backend, NAMESPACE)
            assert set(found) == {pack.pack_id}
            reader = keyed(town).backend
            table = found[pack.pack_id]
            assert read_pack(reader, NAMESPACE, table) == payload_of(pack)


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
    assert len(readable(second)) == 2
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


def other_keyed(town: Town) -> Engine:
    """Return a new handle with the other key."""
    return town.engine(key_env="PERSISTKV_OTHER_KEY", refresh_s=0.0)


def held_by_either_key(town: Town) -> list[set[bytes]]:
    """Return what our key and the other one open, without creating a store; each pack is read."""
    found: list[set[bytes]] = []
    for variable in (KEY, "PERSISTKV_OTHER_KEY"):
        options = SharedOptions(key_env=variable, cache=False, read_only=True)
        with suppress(ConfigurationError, StoreUnavailableError):
            engine = Engine(town, options, read_only=True)
            found.append({table.pack_id for table in readable(engine)})
            engine.backend.close()
    return found


def test_rotation_to_present_key_raises_and_keeps_store(town: Town) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    before = town.names("")
    with pytest.raises(ConfigurationError, match="another key"):
        first.backend.rotate_key(StoreKey(SECRET.encode()))
    assert town.names("") == before
    assert keyed(town).held() == first.held()


def test_rotation_by_second_operator_raises_and_changes_nothing(town: Town) -> None:
    first, second = keyed(town), keyed(town)
    first.backend.rotate_key(OTHER)
    before = town.names("")
    with pytest.raises(ConfigurationError, match=OTHER.id):
        second.backend.rotate_key(StoreKey(b"third" * 8))
    assert town.names("") == before


class AtCall:
    """Calls a function once: at one call of the medium of an engine."""

    def __init__(
        self,
        engine: Engine,
        number: int,
        function: Callable[[], object],
        *,
        after: bool = False,
    ) -> None:
        """Call ``function`` before call ``number`` (from 0) of the medium, or after it."""
        self._number = number
        self._function = function
        self._calls = 0
        add = engine.blobs.after if after else engine.blobs.before
        for method in METHODS:
            add(method, self._count)

    @property
    def is_missed(self) -> bool:
        """Whether the medium had fewer calls."""
        return self._calls <= self._number

    def _count(self, subject: str) -> None:
        self._calls += 1
        if self._calls == self._number + 1:
            self._function()


def fail() -> None:
    raise UnavailableError("no reply")


@pytest.mark.parametrize("after", [False, True])
def test_rotation_that_fails_at_any_call_keeps_content_and_is_repeated(
    tmp_path: Path,
    after: bool,
) -> None:
    for number in itertools.count():
        with town_of(tmp_path / str(number)) as town:
            first = keyed(town)
            pack = first.pack(1)
            first.store(pack)
            AtCall(first, number, fail, after=after)
            has_failed = False
            try:
                first.backend.rotate_key(OTHER)
            except UnavailableError:
                has_failed = True
            first.blobs.clear_faults()
            held = held_by_either_key(town)
            assert held, f"after call {number}, no key opens the store"
            assert all(found == {pack.pack_id} for found in held)

            # the same command again, unless the last call of the first one took effect
            with suppress(ConfigurationError):
                keyed(town).backend.rotate_key(OTHER)
            with pytest.raises(ConfigurationError, match=OTHER.id):
                keyed(town)
            assert other_keyed(town).held() == {pack.pack_id}
            left = town.names(f"keyrings/{OURS.id}/")
            assert left == [f"keyrings/{OURS.id}/replaced"]
        if not has_failed:
            break
    assert number > 5, "the calls of a rotation were counted"


def test_rotation_content_of_engine_that_opens_at_any_call_is_kept(
    tmp_path: Path,
) -> None:
    """With the present key: until it is refused."""
    for number in itertools.count():
        with town_of(tmp_path / str(number)) as town:
            first = keyed(town)
            first.store(first.pack(1))
            opened: list[Engine] = []

            def open_another(town: Town = town, opened: list[Engine] = opened) -> None:
                with suppress(ConfigurationError):
                    opened.append(keyed(town))

            opening = AtCall(first, number, open_another)
            first.backend.rotate_key(OTHER)
            first.blobs.clear_faults()
            for engine in opened:
                engine.store(engine.pack(2))
            expected = 1 + len(opened)
            found = tables(other_keyed(town).backend, NAMESPACE)
            assert len(found) == expected
        if opening.is_missed:
            break
    assert number > 5


def test_creation_of_store_during_rotation_loses_no_content(tmp_path: Path) -> None:
    """A second engine has found no keys, and writes its own before any call of the rotation, or
    after the last one."""
    for number in itertools.count():
        with town_of(tmp_path / str(number)) as town:
            is_last = rotate_while_engine_creates(town, number)
        if is_last:
            break
    assert number > 5


def rotate_while_engine_creates(town: Town, number: int) -> bool:
    """Let an engine write data keys before call ``number`` of a rotation; return whether there is
    no such call."""
    has_found_none = threading.Event()
    may_write = threading.Event()
    late_blobs = FaultyBlobs(town.server.handle())

    def wait(name: str) -> None:
        if name.startswith("keyrings/"):
            has_found_none.set()
            assert may_write.wait(60)

    late_blobs.before("put", wait)
    opened: list[SharedBackend] = []

    def create() -> None:
        options = SharedOptions(key_env=KEY, cache=False, refresh_s=0.0)
        clock = TownClock(town)
        with suppress(ConfigurationError):
            opened.append(
                SharedBackend(late_blobs, options, clock=clock, background=False)
            )

    late = threading.Thread(target=create, daemon=True)
    late.start()
    assert has_found_none.wait(60)
    first = keyed(town)
    first.store(first.pack(1))

    def let_write() -> None:
        may_write.set()
        late.join(60)

    writing = AtCall(first, number, let_write)
    first.backend.rotate_key(OTHER)
    is_last = writing.is_missed
    first.blobs.clear_faults()
    may_write.set()
    late.join(60)
    assert not late.is_alive()
    for backend in opened:
        backend.open_namespace(sample_identity())
        seal = backend.seal
        backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2, seal=seal)]))
        backend.close()
    assert len(tables(other_keyed(town).backend, NAMESPACE)) == 1 + len(opened)
    return is_last


def test_rotation_while_engine_creates_store_with_other_key_keeps_both(
    tmp_path: Path,
) -> None:
    """The other key has content of its own before any call of the rotation."""
    for number in itertools.count():
        with town_of(tmp_path / str(number)) as town:
            first = keyed(town)
            first.store(first.pack(1))
            opened: list[Engine] = []

            def create(town: Town = town, opened: list[Engine] = opened) -> None:
                opened.append(other_keyed(town))

            creation = AtCall(first, number, create)
            with suppress(ConfigurationError):
                first.backend.rotate_key(OTHER)
            first.blobs.clear_faults()
            for engine in opened:
                engine.store(engine.pack(2))
            held = held_by_either_key(town)
            if len(held) == 2:
                assert [len(found) for found in held] == [1, 1], "two stores"
            else:
                assert [len(found) for found in held] == [1 + len(opened)]
        if creation.is_missed:
            break
    assert number > 5


def test_late_deletion_of_rotation_destroys_no_keys_of_rotation_back(
    town: Town,
) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    first.blobs.postpone("delete", only=lambda names: "replaced" not in names)
    with pytest.raises(UnavailableError):
        first.backend.rotate_key(OTHER)
    other_keyed(town).backend.rotate_key(OURS)
    assert first.blobs.run_postponed() == 1
    assert keyed(town).held() == first.held()


def put_late_keyring(town: Town) -> Keyring:
    """Write the data key of an engine that began to create the store before the rotation: its
    request took effect late."""
    late = OURS.new_keyring()
    wrapped = [OURS.wrap(late.id, data_key) for data_key in late.of_store()]
    content = encode_keys(StoredKeys(tuple(wrapped)))
    town.server.put(f"keyrings/{OURS.id}/00112233445566aa", [content])
    return late


def test_open_with_replaced_key_despite_late_creation_raises(town: Town) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    first.backend.rotate_key(OTHER)
    put_late_keyring(town)
    with pytest.raises(ConfigurationError, match=OTHER.id):
        keyed(town)
    assert len(readable(other_keyed(town))) == 1


def test_open_with_twice_replaced_key_despite_late_creation_raises(town: Town) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    first.backend.rotate_key(OTHER)
    third = StoreKey(b"third" * 8)
    other_keyed(town).backend.rotate_key(third)
    put_late_keyring(town)
    with pytest.raises(ConfigurationError, match=third.id):
        keyed(town)


def test_open_after_rotation_back_despite_late_mark_finds_content(town: Town) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    first.backend.rotate_key(OTHER)
    (name,) = [name for name in town.names("replaced") if OURS.id in name]
    mark = town.data(name)
    other_keyed(town).backend.rotate_key(OURS)
    # the request is executed again
    town.server.put(name, [mark])
    assert len(readable(keyed(town))) == 1


def test_open_handle_after_rotation_and_late_creation_stores_for_new_key(
    town: Town,
) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    first.backend.rotate_key(OTHER)
    late = put_late_keyring(town)
    # an object that names the late data key: the handle searches it
    pack = sample_pack(NAMESPACE, 9, content=66)
    payload_of(pack)
    forge(town, pack.table, KeySeal(lambda: late))
    town.run(70)
    first.store(first.pack(2))
    assert len(readable(first)) == 2
    assert len(readable(other_keyed(town))) == 2


def test_store_deleted_after_rotation_is_not_written_for_replaced_key(
    town: Town,
) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    first.backend.rotate_key(OTHER)
    town.server.delete(town.names("/policy"))
    town.run(200)
    first.store(first.pack(2))
    with pytest.raises(ConfigurationError, match=OTHER.id):
        keyed(town)
    assert len(tables(other_keyed(town).backend, NAMESPACE)) == 2


def test_keyed_backend_key_is_absent_from_repr_and_log(
    town: Town,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = keyed(town)
    first.store(first.pack(1))
    assert SECRET not in repr(first.backend) + repr(vars(first.backend)) + caplog.text
