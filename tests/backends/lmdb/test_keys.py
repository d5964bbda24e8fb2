"""LMDB stores with a key."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.errors import ConfigurationError, CorruptStoreError, StoreError
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.format.keys import (
    DataKey,
    StoredKeys,
    StoreKey,
    TenantKey,
    decode_keys,
    encode_keys,
)
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.seal import KeySeal
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.conformance.suite import (
    check_totals,
    other_process,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack

OLD, NEW = "0123456789abcdef" * 4, "fedcba9876543210" * 4
PLANTED = "planted-plaintext"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSISTKV_OLD_KEY", OLD)
    monkeypatch.setenv("PERSISTKV_NEW_KEY", NEW)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store"


def with_key(place: str, key: str = "PERSISTKV_OLD_KEY", **options: str) -> str:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"{place}?key_env={key}{more}"


def store_one(backend: Backend, seed: int) -> bytes:
    """Store a pack and a request; return the pack's id."""
    namespace = backend.open_namespace(sample_identity()).id
    pack = sample_pack(namespace, seed, seal=backend.seal, blocks=3)
    request = sample_manifest(f"r{seed}", seed, packs=[pack.pack_id])
    backend.commit(namespace, CommitBatch([pack], [request]))
    return pack.pack_id


def content(url: str) -> dict[bytes, bytes | None]:
    """Return the content of all packs by id."""
    with closing(open_backend(url, read_only=True)) as backend:
        name = sample_identity().digest
        found = tables(backend, name)
        return {pack: read_pack(backend, name, table) for pack, table in found.items()}


def snapshot(directory: Path) -> dict[str, bytes]:
    """Return the bytes of the files that hold content."""
    files = [directory / "data.mdb", directory / "keys"]
    files += (directory / "segments").glob("*.seg")
    return {str(file): file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize("key", [True, False])
def test_guess_of_tenants_name_is_confirmed_by_no_file_with_key(
    tmp_path: Path,
    place: str,
    key: bool,
) -> None:
    """Without a key, the digest of the name is the key of the tenant's rows."""
    guess = blake2b(b"anna", digest_size=16).digest()
    url = with_key(place) if key else place
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(sample_identity()).id
        for seed in range(3):
            pack = sample_pack(namespace, seed, seal=backend.seal, tenant="anna")
            backend.commit(namespace, CommitBatch([pack]))
        backend.set_policy(replace(backend.policy(), quotas={"anna": 1 << 30}))
    # opened again: the digest stays the same
    with closing(open_backend(url)) as backend:
        (totals,) = backend.tenants()
        assert (totals.tenant, totals.packs, totals.quota) == ("anna", 3, 1 << 30)
        backend.set_policy(replace(backend.policy(), quotas={"anna": 4096}))
        assert [totals.packs for totals in backend.tenants()] == [0]
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    found = [path.name for path in files if guess in path.read_bytes()]
    assert found == ([] if key else ["data.mdb"])


@pytest.mark.parametrize("placement", ["extents", "inline"])
@pytest.mark.parametrize("key", [True, False])
def test_planted_plaintext_is_not_in_any_file_with_key(
    tmp_path: Path,
    place: str,
    placement: str,
    key: bool,
) -> None:
    """In no file, free space or page: of stored, evicted and deleted content."""
    options = f"placement={placement}&capacity=8MiB"
    url = f"{place}?{options}"
    if key:
        url += "&key_env=PERSISTKV_OLD_KEY"
    planted: list[bytes] = [PLANTED.encode()]
    stored: list[bytes] = []
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(sample_identity()).id
        for seed in range(30):
            pack = sample_pack(
                namespace, seed, seal=backend.seal, blocks=8, block_bytes=1 << 16
            )
            planted += pack.keys.unpack()
            # half of each block repeats one byte
            planted.append(payload_of(pack)[100:132])
            request = sample_manifest(
                f"{PLANTED}-{seed}",
                seed,
                labels={"user": f"{PLANTED}-{seed}"},
                packs=[pack.pack_id],
            )
            deletions = stored[-1:] if seed % 3 else []
            batch = CommitBatch([pack], [request], deletions=deletions)
            backend.commit(namespace, batch)
            stored.append(pack.pack_id)
        backend.put_note(namespace, "planted", PLANTED.encode())
        assert tables(backend, namespace)
    found = 0
    for file in (tmp_path / "store").rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            found += sum(secret in data for secret in planted)
    if key:
        assert found == 0
    else:
        assert found > 10, "the scan finds what is there"


@pytest.mark.parametrize("key", [True, False])
def test_planted_plaintext_is_not_in_files_of_shared_store_with_key(
    tmp_path: Path,
    key: bool,
) -> None:
    """Replicas of the index on this machine included."""
    url = f"file://{tmp_path}/store?refresh=0s&cache={tmp_path}/cache"
    if key:
        url += "&key_env=PERSISTKV_OLD_KEY"
    planted: list[bytes] = [PLANTED.encode()]
    for seed in range(3):
        with closing(open_backend(url)) as backend:
            namespace = backend.open_namespace(sample_identity()).id
            pack = sample_pack(namespace, seed, seal=backend.seal, block_bytes=50_000)
            planted += [*pack.keys.unpack(), payload_of(pack)[100:132]]
            request = sample_manifest(
                f"{PLANTED}-{seed}", labels={"user": PLANTED}, packs=[pack.pack_id]
            )
            backend.commit(namespace, CommitBatch([pack], [request]))
            backend.put_note(namespace, "planted", PLANTED.encode())
            assert tables(backend, namespace)
    found = 0
    num_files = 0
    for file in tmp_path.rglob("*"):
        if file.is_file():
            num_files += 1
            data = file.read_bytes()
            found += sum(secret in data for secret in planted)
    assert num_files > 5
    assert (found == 0) == key


def test_open_with_other_missing_or_unneeded_key_raises_and_changes_nothing(
    tmp_path: Path,
    place: str,
) -> None:
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 1)
    before = snapshot(tmp_path / "store")
    other = StoreKey(NEW.encode())
    mine = StoreKey(OLD.encode())
    for read_only in (False, True):
        with pytest.raises(ConfigurationError, match=f"{other.id}.*{mine.id}"):
            open_backend(with_key(place, "PERSISTKV_NEW_KEY"), read_only=read_only)
        with pytest.raises(ConfigurationError, match=f"none.*{mine.id}.*key_file"):
            open_backend(place, read_only=read_only)
    assert snapshot(tmp_path / "store") == before
    assert len(content(with_key(place))) == 1

    plain = f"{place}-plain"
    with closing(open_backend(plain)) as backend:
        store_one(backend, 1)
        with pytest.raises(ConfigurationError, match="without one"):
            open_backend(with_key(plain))
    with pytest.raises(ConfigurationError, match="without one"):
        open_backend(with_key(plain))
    assert len(content(plain)) == 1


def test_open_second_handle_of_process_checks_its_key(place: str) -> None:
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 1)
        with pytest.raises(ConfigurationError, match="key"):
            open_backend(with_key(place, "PERSISTKV_NEW_KEY"))
        with pytest.raises(ConfigurationError, match="key"):
            open_backend(place)
        with closing(open_backend(with_key(place))) as second:
            store_one(second, 2)
    assert len(content(with_key(place))) == 2


def test_open_without_file_of_data_keys_raises_and_keeps_content(
    tmp_path: Path,
    place: str,
) -> None:
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 1)
    file = tmp_path / "store" / "keys"
    kept = file.read_bytes()
    file.unlink()
    before = snapshot(tmp_path / "store")
    with pytest.raises(CorruptStoreError, match="keys is missing"):
        open_backend(with_key(place))
    assert snapshot(tmp_path / "store") == before
    file.write_bytes(kept[:-1] + b"x")
    with pytest.raises(CorruptStoreError, match="damaged"):
        open_backend(with_key(place))
    file.write_bytes(kept)
    assert len(content(with_key(place))) == 1


def test_rebuild_with_key_finds_packs(tmp_path: Path, place: str) -> None:
    with closing(open_backend(with_key(place))) as backend:
        stored = {store_one(backend, seed) for seed in range(3)}
    before = content(with_key(place))
    (tmp_path / "store" / "data.mdb").unlink()
    driver = type(backend)
    for url in (place, with_key(place, "PERSISTKV_NEW_KEY")):
        with pytest.raises(ConfigurationError, match="key"):
            driver.rebuild(StoreUrl.parse(url), lambda done, of: None)
    found = driver.rebuild(StoreUrl.parse(with_key(place)), lambda done, of: None)
    assert found is not None
    assert found.packs == 3
    assert content(with_key(place)) == before
    assert set(before) == stored


def test_damaged_catalogue_with_key_is_renamed_and_its_packs_are_found(
    tmp_path: Path,
    place: str,
) -> None:
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 1)
    store = tmp_path / "store"
    with (store / "data.mdb").open("r+b") as file:
        file.truncate(5000)
    (store / "guard").write_text("open".ljust(31) + "\n")
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 2)
    assert len(content(with_key(place))) == 1
    (damaged,) = store.glob("damaged-*")
    url = StoreUrl.parse(with_key(f"lmdb://{damaged}"))
    found = type(backend).rebuild(url, lambda done, of: None)
    assert found is not None
    assert found.packs == 1


def commit_all(url: str, numbers: range, done: Connection) -> None:
    backend = open_backend(url)
    for number in numbers:
        store_one(backend, number)
        done.send(number)
    backend.close()


@pytest.fixture
def writer(place: str) -> Iterator[Connection]:
    """A process that commits until it is killed; yields the numbers of its commits."""
    with other_process(commit_all, with_key(place), range(1_000_000)) as writer:
        yield writer


def test_rotate_key_while_engine_runs_keeps_all_content(
    tmp_path: Path,
    place: str,
    writer: Connection,
) -> None:
    assert writer.recv() == 0
    with closing(open_backend(with_key(place))) as backend:
        before = (tmp_path / "store" / "keys").read_bytes()
        backend.rotate_key(StoreKey(NEW.encode()))
        # this handle runs on
        store_one(backend, 2_000_000)
    rotated = 0
    while writer.poll():
        rotated = writer.recv()
    for number in range(rotated + 1, rotated + 20):
        assert writer.recv() == number, "the engine runs on"
    assert (tmp_path / "store" / "keys").read_bytes() != before
    with pytest.raises(ConfigurationError, match="key"):
        open_backend(with_key(place))
    found = content(with_key(place, "PERSISTKV_NEW_KEY"))
    assert len(found) >= rotated + 20
    assert None not in found.values()


def test_rotate_key_keeps_linked_copy_of_file_of_data_keys(
    tmp_path: Path,
    place: str,
) -> None:
    """Backups link files that have not changed."""
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 1)
        file = tmp_path / "store" / "keys"
        copy = tmp_path / "copy"
        copy.hardlink_to(file)
        backend.rotate_key(StoreKey(NEW.encode()))
    copy.replace(file)
    assert len(content(with_key(place))) == 1


def test_engine_whose_files_are_replaced_after_rotation_stores_and_reads_on(
    tmp_path: Path,
    place: str,
) -> None:
    """It opens the store again, with the data keys that it knows."""
    namespace = sample_identity().digest
    with closing(open_backend(with_key(place))) as engine:
        stored = {store_one(engine, 1)}
        with closing(open_backend(with_key(place))) as operator:
            operator.rotate_key(StoreKey(NEW.encode()))
        (tmp_path / "store" / "lock.mdb").unlink()
        stored.add(store_one(engine, 2))
        (tmp_path / "store" / "lock.mdb").unlink()
        stored.add(store_of_tenant(engine, "anna", 3).pack_id)
        found = tables(engine, namespace)
        assert set(found) == stored
        for table in found.values():
            assert read_pack(engine, namespace, table) is not None
        with pytest.raises(ConfigurationError, match="key"):
            open_backend(with_key(place))
    assert set(content(with_key(place, "PERSISTKV_NEW_KEY"))) == stored


def test_file_of_data_keys_keeps_its_owner_and_mode(tmp_path: Path, place: str) -> None:
    """Commands may run as root, and engines as another user."""
    file = tmp_path / "store" / "keys"
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 1)
        file.chmod(0o640)
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(file, 65534, 65534)
        before = file.stat()
        store_of_tenant(backend, "anna", 2)
        backend.rotate_key(StoreKey(NEW.encode()))
        after = file.stat()
    assert after.st_ino != before.st_ino or after.st_mtime_ns != before.st_mtime_ns
    assert after.st_mode == before.st_mode
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


def test_tenants_beyond_room_for_their_keys_are_refused_and_store_stays_readable(
    tmp_path: Path,
    place: str,
) -> None:
    file = tmp_path / "store" / "keys"
    with closing(open_backend(with_key(place))) as backend:
        stored = store_of_tenant(backend, "anna", 1).pack_id
        there = decode_keys(file.read_bytes())
        assert isinstance(backend.seal, KeySeal)
        added: list[TenantKey] = []
        length = file.stat().st_size
        # room for a few more
        while length < (16 << 20) - 10_000:
            key = DataKey.new(f"{len(added):06}".ljust(128, "\U0001f511"))
            added.append(TenantKey(key.id, backend.seal.sealed_key(key)))
            length += len(encode_keys(StoredKeys((), (added[-1],)))) - 11
        keys_of_many = StoredKeys(there.wrapped, (*there.tenants, *added))
        file.write_bytes(encode_keys(keys_of_many))
        assert file.stat().st_size < 16 << 20
    with closing(open_backend(with_key(place))) as backend:
        # a batch makes the keys of many
        names = [f"{number:06}".ljust(128, "\U0001f512") for number in range(60)]
        with pytest.raises(StoreError, match="no room"):
            commit_of_tenants(backend, names, 2)
        later = store_of_tenant(backend, "anna", 999_999).pack_id
    found = content(with_key(place))
    assert {stored, later} <= set(found)
    assert None not in found.values()


def commit_of_tenants(backend: Backend, tenants: list[str], seed: int) -> None:
    """Commit a pack of each of these tenants at once."""
    namespace = backend.open_namespace(sample_identity()).id
    packs = []
    for number, tenant in enumerate(tenants):
        packs.append(
            sample_pack(
                namespace,
                1000 * seed + number,
                seal=backend.seal,
                tenant=tenant,
                block_bytes=4096,
                blocks=1,
            )
        )
    backend.commit(namespace, CommitBatch(packs))


def test_rotate_key_to_present_key_or_by_second_operator_raises_and_keeps_store(
    place: str,
) -> None:
    url = with_key(place)
    with closing(open_backend(url)) as backend, closing(open_backend(url)) as second:
        store_one(backend, 1)
        with pytest.raises(ConfigurationError, match="another key"):
            backend.rotate_key(StoreKey(OLD.encode()))
        assert len(content(url)) == 1
        backend.rotate_key(StoreKey(NEW.encode()))
        with pytest.raises(ConfigurationError, match=StoreKey(NEW.encode()).id):
            second.rotate_key(StoreKey(b"third" * 8))
    assert len(content(with_key(place, "PERSISTKV_NEW_KEY"))) == 1


def test_commit_pack_of_replaced_store_is_sealed_with_keys_of_present_one(
    tmp_path: Path,
    place: str,
) -> None:
    """A store in its place with the same key has data keys of its own."""
    with closing(open_backend(with_key(place))) as backend:
        namespace = backend.open_namespace(sample_identity()).id
        pack = sample_pack(namespace, 1, seal=backend.seal)
        shutil.rmtree(tmp_path / "store")
        backend.commit(namespace, CommitBatch([pack]))
        stored = store_one(backend, 2)
    found = content(with_key(place))
    assert set(found) == {pack.pack_id, stored}
    assert None not in found.values()


def with_flipped_bit(content: bytes) -> bytes:
    """Return data keys of which that of a tenant names another key that seals it."""
    stored = decode_keys(content)
    first, *others = stored.tenants
    flipped = bytes([first.sealed[0] ^ 1]) + first.sealed[1:]
    changed = TenantKey(first.id, flipped)
    return encode_keys(StoredKeys(stored.wrapped, (changed, *others)))


@pytest.mark.parametrize(
    "how",
    [
        "removed",
        "empty",
        "half",
        "of another store",
        "a flipped bit",
        "a link",
        "a directory",
    ],
)
def test_file_of_data_keys_lost_under_engine_leaves_engine_running(
    tmp_path: Path,
    place: str,
    how: str,
) -> None:
    """New openings are refused until the file is there again, and nothing is lost."""
    other = f"{place}-other"
    open_backend(with_key(other)).close()
    file = tmp_path / "store" / "keys"
    with closing(open_backend(with_key(place))) as backend:
        stored = {store_one(backend, 1)}
        kept = file.read_bytes()
        damaged = {
            "empty": b"",
            "half": kept[: len(kept) // 2],
            "of another store": (tmp_path / "store-other" / "keys").read_bytes(),
            "a flipped bit": with_flipped_bit(kept),
        }
        file.unlink()
        if how in damaged:
            file.write_bytes(damaged[how])
        elif how == "a link":
            file.symlink_to(tmp_path / "store-other" / "keys")
        elif how == "a directory":
            file.mkdir()
        stored.add(store_one(backend, 2))
        for read_only in (True, False):
            with pytest.raises(StoreError, match="keys"):
                open_backend(with_key(place), read_only=read_only)
        stored.add(store_one(backend, 3))
        name = sample_identity().digest
        for table in tables(backend, name).values():
            assert read_pack(backend, name, table) is not None
    before = snapshot(tmp_path / "store")
    with pytest.raises(StoreError, match="keys"):
        open_backend(with_key(place))
    assert snapshot(tmp_path / "store") == before
    if how == "a directory":
        file.rmdir()
    file.unlink(missing_ok=True)
    file.write_bytes(kept)
    found = content(with_key(place))
    assert set(found) == stored
    assert None not in found.values()


@pytest.mark.parametrize("how", ["removed", "of another store"])
def test_pack_of_new_tenant_without_file_of_data_keys_is_refused(
    tmp_path: Path,
    place: str,
    how: str,
) -> None:
    """Its key would be lost with the file that is put back later."""
    other = f"{place}-other"
    open_backend(with_key(other)).close()
    file = tmp_path / "store" / "keys"
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 0)
        kept = file.read_bytes()
        file.unlink()
        if how == "of another store":
            file.write_bytes((tmp_path / "store-other" / "keys").read_bytes())
        with pytest.raises(CorruptStoreError, match="keys"):
            store_of_tenant(backend, "anna", 1)
        stored = store_one(backend, 2)
        assert not file.exists() or file.read_bytes() != kept
        file.write_bytes(kept)
        store_of_tenant(backend, "anna", 3)
    found = content(with_key(place))
    assert stored in found
    assert len(found) == 3
    assert None not in found.values()


def test_engine_whose_segments_are_removed_stores_on_with_same_keys(
    tmp_path: Path,
    place: str,
) -> None:
    """The store is opened again, and a pack that was made before is committed."""
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 1)
        namespace = backend.open_namespace(sample_identity()).id
        pack = sample_pack(namespace, 2, seal=backend.seal)
        shutil.rmtree(tmp_path / "store" / "segments")
        (tmp_path / "store" / "lock.mdb").unlink()
        backend.commit(namespace, CommitBatch([pack]))
    with closing(open_backend(with_key(place), read_only=True)) as backend:
        (table,) = backend.tables(namespace, [pack.pack_id])
        assert read_pack(backend, namespace, table) == payload_of(pack)


def rotate_until_killed(place: str, rotated: Connection) -> None:
    """Replace the key of a store by the other one again and again."""
    for number in range(1_000_000):
        names = ["PERSISTKV_OLD_KEY", "PERSISTKV_NEW_KEY"]
        if number % 2:
            names.reverse()
        with closing(open_backend(with_key(place, names[0]))) as backend:
            backend.rotate_key(StoreKey(os.environ[names[1]].encode()))
        rotated.send(number)


def opens_with(place: str, key: str) -> bool:
    """Return whether a key opens the store; then its packs are readable."""
    try:
        found = content(with_key(place, key))
    except ConfigurationError:
        return False
    assert found
    assert None not in found.values()
    return True


def test_rotation_killed_at_any_time_leaves_store_to_one_key(
    tmp_path: Path,
    place: str,
) -> None:
    """Openings meanwhile find one of the two keys, too, never a damaged file."""
    with closing(open_backend(with_key(place))) as backend:
        store_one(backend, 1)
    draw = random.Random(1)
    context = multiprocessing.get_context("fork")
    for _ in range(10):
        rotated, theirs = context.Pipe()
        if not opens_with(place, "PERSISTKV_OLD_KEY"):
            with closing(open_backend(with_key(place, "PERSISTKV_NEW_KEY"))) as backend:
                backend.rotate_key(StoreKey(OLD.encode()))
        process = context.Process(target=rotate_until_killed, args=(place, theirs))
        process.start()
        theirs.close()
        rotated.recv()
        end = time.monotonic() + draw.uniform(0, 0.1)
        while time.monotonic() < end:
            for key in ("PERSISTKV_OLD_KEY", "PERSISTKV_NEW_KEY"):
                opens_with(place, key)
        process.kill()
        process.join()
        opened = [
            opens_with(place, "PERSISTKV_OLD_KEY"),
            opens_with(place, "PERSISTKV_NEW_KEY"),
        ]
        assert sorted(opened) == [False, True]


def test_engines_that_create_a_store_at_once_have_one_keyring(place: str) -> None:
    with ExitStack() as running:
        writers = []
        for first in range(0, 400, 100):
            numbers = range(first, first + 5)
            process = other_process(commit_all, with_key(place), numbers)
            writers.append((running.enter_context(process), numbers))
        for writer, numbers in writers:
            assert [writer.recv() for _ in numbers] == list(numbers)
            # it has closed the store
            with pytest.raises(EOFError):
                writer.recv()
    found = content(with_key(place))
    assert len(found) == 20
    assert None not in found.values()


@pytest.mark.parametrize("placement", ["extents", "inline"])
def test_commit_full_store_with_key_evicts_within_capacity(
    place: str,
    placement: str,
) -> None:
    url = with_key(place, capacity="16MiB", placement=placement)
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(sample_identity()).id
        for seed in range(200):
            pack = sample_pack(
                namespace, seed, seal=backend.seal, blocks=4, block_bytes=64 << 10
            )
            request = sample_manifest(f"r{seed}", seed, packs=[pack.pack_id])
            backend.commit(namespace, CommitBatch([pack], [request]))
            assert backend.stats().disk_bytes <= 16 << 20
        used = backend.stats().stored_bytes
        check_totals(backend)
    assert used > 0.8 * (16 << 20)
    found = content(url)
    assert None not in found.values()
    assert pack.pack_id in found


def test_salts_of_killed_and_restarted_engines_never_repeat(
    tmp_path: Path,
    place: str,
) -> None:
    """Engines that store the same content, are killed, and store it again."""
    numbers = range(1_000_000)
    for _ in range(2):
        with (
            other_process(commit_all, with_key(place), numbers) as first,
            other_process(commit_all, with_key(place), numbers) as second,
        ):
            for writer in (first, second):
                for number in range(10):
                    assert writer.recv() == number
    with closing(open_backend(with_key(place))) as backend:
        name = sample_identity().digest
        found = tables(backend, name)
        salts = [table.salt for table in found.values()]
        with backend.rows() as rows:  # type: ignore[attr-defined]
            for table in ("packs", "manifests", "manifest_keys", "log"):
                for _, value in rows.cursor(table).iternext():
                    salts.append(bytes(value[8:24]))
    assert len(found) >= 40
    assert len(salts) == len(set(salts))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_engine_of_store_with_key_restores_blocks_after_restart(
    place: str,
    codec: str,
) -> None:
    layout = RowLayout(4096, (GroupLayout(((0, 4096),)),))
    keys = [os.urandom(32) + bytes(4) for _ in range(8)]
    memory = bytearray(os.urandom(8 * 4096))
    expected = bytes(memory)
    for is_first in (True, False):
        rows = Rows(memoryview(memory), layout)
        backend = open_backend(with_key(place))
        store = BlockingStore(
            backend, sample_identity(), rows, StoreOptions(codec=codec), url=place
        )
        if is_first:
            store.put("r", keys, range(8), None)
            store.flush()
        else:
            assert store.read(keys, range(8)) == []
            assert memory == expected
        store.close()
        memory[:] = bytes(len(memory))


def store_of_tenant(backend: Backend, tenant: str, seed: int) -> PackTable:
    """Store a pack of a tenant; return its table."""
    namespace = backend.open_namespace(sample_identity()).id
    pack = sample_pack(namespace, seed, seal=backend.seal, tenant=tenant)
    backend.commit(namespace, CommitBatch([pack]))
    return pack.table


@pytest.mark.parametrize("placement", ["extents", "inline"])
def test_packs_of_tenants_have_keys_of_their_own_and_names_are_hidden(
    tmp_path: Path,
    place: str,
    placement: str,
) -> None:
    url = with_key(place, placement=placement)
    with (
        closing(open_backend(url)) as first,
        closing(open_backend(url)) as second,
    ):
        made: dict[str, set[bytes]] = {}
        for number, backend in enumerate((first, second, first)):
            for tenant in ("anna-the-tenant", "berta-the-tenant"):
                seed = 10 * number + len(made)
                table = store_of_tenant(backend, tenant, seed)
                assert table.tenant == tenant
                made.setdefault(tenant, set()).add(table.data_key)
        assert [len(keys) for keys in made.values()] == [1, 1]
        assert len(set.union(*made.values())) == 2
    assert None not in content(url).values()
    for file in (tmp_path / "store").rglob("*"):
        if file.is_file():
            assert b"-the-tenant" not in file.read_bytes(), file


def commit_tenants(url: str, first: int, done: Connection) -> None:
    with closing(open_backend(url)) as backend:
        done.recv()
        for number in range(20):
            store_of_tenant(backend, f"tenant {number}", 100 * first + number)
    done.send("done")


def test_processes_that_store_new_tenants_at_once_read_each_other(place: str) -> None:
    url = with_key(place)
    with closing(open_backend(url)) as reader:
        store_one(reader, 1)
        with (
            other_process(commit_tenants, url, 1) as first,
            other_process(commit_tenants, url, 2) as second,
        ):
            for writer in (first, second):
                writer.send("go")
            for writer in (first, second):
                assert writer.recv() == "done"
        # a handle that was opened before these keys were made
        namespace = sample_identity().digest
        found = tables(reader, namespace)
        assert len(found) == 41
        of_tenant: dict[str, set[bytes]] = {}
        for table in found.values():
            assert read_pack(reader, namespace, table) is not None
            of_tenant.setdefault(table.tenant, set()).add(table.data_key)
        assert {len(keys) for keys in of_tenant.values()} == {1}


def test_open_handles_make_and_read_keys_of_tenants_after_rotation(place: str) -> None:
    with (
        closing(open_backend(with_key(place))) as first,
        closing(open_backend(with_key(place))) as second,
    ):
        store_of_tenant(first, "anna", 1)
        first.rotate_key(StoreKey(NEW.encode()))
        store_of_tenant(first, "berta", 2)
        store_of_tenant(second, "cleo", 3)
        url = with_key(place, "PERSISTKV_NEW_KEY")
        with closing(open_backend(url)) as third:
            store_of_tenant(third, "dora", 4)
        for handle in (first, second):
            found = tables(handle, sample_identity().digest)
            assert len(found) == 4
            for table in found.values():
                assert read_pack(handle, sample_identity().digest, table) is not None
    found_later = content(url)
    assert len(found_later) == 4
    assert None not in found_later.values()


def test_key_that_is_made_while_another_thread_reads_the_file_is_kept(
    tmp_path: Path,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that has read the file before must not take the new key for a destroyed one."""
    file = tmp_path / "store" / "keys"
    with closing(open_backend(with_key(place))) as backend:
        store_of_tenant(backend, "anna", 1)
        inode = file.stat().st_ino
        has_read = threading.Event()

        def decode_late(data: bytes) -> StoredKeys:
            decoded = decode_keys(data)
            if threading.current_thread() is reader and not has_read.is_set():
                has_read.set()
                deadline = time.monotonic() + 3
                while file.stat().st_ino == inode and time.monotonic() < deadline:
                    time.sleep(0.01)
                # time for the other thread to note the key that it has made
                time.sleep(0.3)
            return decoded

        monkeypatch.setattr("persistkv_lmdb.keys.decode_keys", decode_late)
        reader = threading.Thread(target=backend.stats)
        # as if another engine had changed it
        os.utime(file)
        reader.start()
        assert has_read.wait(10)
        stored = [store_of_tenant(backend, "berta", 2)]
        reader.join()
        stored.append(store_of_tenant(backend, "berta", 3))
        assert stored[0].data_key == stored[1].data_key
    found = content(with_key(place))
    assert len(found) == 3
    assert None not in found.values()
