"""Forgetting of a tenant in LMDB stores: what can be found and read afterwards."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.errors import (
    ConfigurationError,
    StoreError,
    TenantForgottenError,
)
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.blocks import BlockIdentity, BlockStore, CompletionQueue
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.keys import StoreKey, decode_keys
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack_writer import NewPack
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing import FaultyBackend
from persistkv.testing.conformance.suite import (
    other_process,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import (
    payload_of,
    sample_manifest,
    sample_pack,
)
from persistkv_lmdb.files import WriterLock
from tests.storage.stores import end

P = ParamSpec("P")
T = TypeVar("T")
NAMESPACE = sample_identity().digest
PLANTED = "planted-by-"
BLOCK = 2048  # bytes


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "0123456789abcdef" * 4)


@pytest.fixture(params=["extents", "inline"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = f"lmdb://{tmp_path}/store?placement={request.param}"
    return f"{place}&key_env=PERSISTKV_TEST_KEY"


@pytest.fixture
def plain_url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store"


def store_one(backend: Backend, tenant: str, seed: int) -> set[bytes]:
    """Store a pack and a request of a tenant; return plaintexts in them."""
    backend.open_namespace(sample_identity())
    pack = sample_pack(
        NAMESPACE, seed, seal=backend.seal, blocks=4, block_bytes=BLOCK, tenant=tenant
    )
    name = f"{PLANTED}{tenant}-{seed}"
    request = sample_manifest(
        name, seed, labels={"user": name}, packs=[pack.pack_id], tenant=tenant
    )
    backend.commit(NAMESPACE, CommitBatch([pack], [request]))
    payload = payload_of(pack)
    planted = {payload[BLOCK * block : BLOCK * block + 24] for block in range(4)}
    return {*planted, *pack.keys.unpack(), name.encode()}


def found_in_files(directory: Path, planted: set[bytes]) -> int:
    """Return how many of these byte strings any file has."""
    by_end: dict[bytes, list[bytes]] = defaultdict(list)
    for text in planted:
        by_end[text[-8:]].append(text)
    ends = np.sort(np.frombuffer(b"".join(by_end), "<u8"))
    found: set[bytes] = set()
    for file in directory.rglob("*"):
        if file.is_file():
            data = file.read_bytes() + bytes(16)
            for stop in stops_of(ends, data):
                texts = by_end[data[stop - 8 : stop]]
                found.update(text for text in texts if data.endswith(text, 0, stop))
    return len(found)


def stops_of(ends: npt.NDArray[np.uint64], data: bytes) -> Iterator[int]:
    """Yield where in the data one of these words of 8 bytes, in ascending order, ends."""
    for shift in range(8):
        words = np.frombuffer(data, "<u8", (len(data) - shift) // 8, shift)
        nearest = np.searchsorted(ends, words).clip(max=len(ends) - 1)
        for number in np.flatnonzero(ends[nearest] == words):
            yield shift + 8 * int(number) + 8


def wrapped_keys(file: Path) -> dict[str, bytes]:
    """Return the wrapped data keys of tenants in a file, by their ids."""
    stored = decode_keys(file.read_bytes())
    return {key.id.hex(): key.sealed for key in stored.tenants}


def content_of(backend: Backend, tenant: str) -> tuple[set[bytes], list[str]]:
    """Return the ids of the packs and of the requests of a tenant, after reading all packs."""
    packs: set[bytes] = set()
    for pack_id, table in tables(backend, NAMESPACE).items():
        assert read_pack(backend, NAMESPACE, table) is not None
        if table.tenant == tenant:
            packs.add(pack_id)
    heads = backend.catalogue(NAMESPACE).manifests()
    return packs, [head.id for head in heads if head.tenant == tenant]


def recount(backend: Backend) -> None:
    """Check that the totals are exact."""
    held = tables(backend, NAMESPACE)
    stats = backend.stats()
    assert stats.packs == len(held)
    assert stats.blocks == sum(len(table.keys) for table in held.values())
    assert stats.requests == len(list(backend.catalogue(NAMESPACE).manifests()))


def fill(url: str, requests: int = 10) -> dict[str, set[bytes]]:
    """Store requests of two tenants; return their plaintexts."""
    planted: dict[str, set[bytes]] = {"anna": set(), "berta": set()}
    with closing(open_backend(url)) as backend:
        for number in range(requests):
            planted["anna"] |= store_one(backend, "anna", number)
            planted["berta"] |= store_one(backend, "berta", 1000 + number)
    return planted


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[], str]:
    """Return a function that copies the store, and returns the URL of the copy."""

    def copy() -> str:
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        return f"lmdb://{tmp_path}/copy?key_env=PERSISTKV_TEST_KEY"

    return copy


def test_forget_leaves_nothing_of_1000_plaintexts_to_find_or_decrypt(
    tmp_path: Path,
    url: str,
    copy_of: Callable[[], str],
) -> None:
    """All files from before open nothing with the keys of afterwards."""
    planted = fill(url, requests=112)
    assert len(planted["anna"]) >= 1000
    copy = copy_of()
    wrapped = wrapped_keys(tmp_path / "store" / "keys")
    with closing(open_backend(url)) as backend:
        done = backend.forget("anna")
        assert (done.packs, done.requests) == (112, 112)
        assert len(done.key_ids) == 1
        assert content_of(backend, "anna") == (set(), [])
        packs, requests = content_of(backend, "berta")
        assert (len(packs), len(requests)) == (112, 112)
        recount(backend)
    assert found_in_files(tmp_path / "store", planted["anna"]) == 0
    # the wrapped key was in the file, and is in none
    assert found_in_files(tmp_path / "store", {wrapped[done.key_ids[0]]}) == 0

    # a backup, with the keys that are left
    shutil.copy(tmp_path / "store" / "keys", tmp_path / "copy" / "keys")
    with closing(open_backend(copy)) as backend:
        opened: set[bytes] = set()
        seal = backend.seal
        with backend.rows() as rows:  # type: ignore[attr-defined]
            for table in ("packs", "log", "manifests", "manifest_keys", "meta"):
                for key, value in rows.range(table, b""):
                    opened.add(bytes(key) + bytes(value))
        assert sum(b"berta" in row for row in opened) >= 112
        assert not [row for row in opened if any(p in row for p in planted["anna"])]
        held = tables(backend, NAMESPACE)
        assert {table.tenant for table in held.values()} == {"berta"}
        assert seal.encrypts
    # a rebuild of it, too
    if "extents" in url:
        (tmp_path / "copy" / "data.mdb").unlink()
        found = type(backend).rebuild(StoreUrl.parse(copy), lambda done, of: None)
        assert found is not None
        assert found.packs == 112
        with closing(open_backend(copy)) as backend:
            assert content_of(backend, "anna")[0] == set()


def test_forget_is_repeatable_and_absent_tenant_has_nothing(url: str) -> None:
    fill(url)
    with closing(open_backend(url)) as backend:
        assert backend.forget("anna").packs == 10
        for tenant in ("anna", "nobody"):
            again = backend.forget(tenant)
            assert (again.packs, again.requests, again.key_ids) == (0, 0, ())
        assert len(content_of(backend, "berta")[0]) == 10


def test_forget_invalid_name_or_read_only_store_raises(url: str) -> None:
    fill(url, 1)
    with closing(open_backend(url)) as backend:
        with pytest.raises(ConfigurationError, match="tenant"):
            backend.forget("")
        assert len(content_of(backend, "anna")[0]) == 1
    with (
        closing(open_backend(url, read_only=True)) as backend,
        pytest.raises(StoreError, match="read-only"),
    ):
        backend.forget("anna")


def test_forget_without_key_deletes_content_and_frees_its_space(
    tmp_path: Path,
    plain_url: str,
) -> None:
    planted = fill(plain_url)
    blocks = {text for text in planted["anna"] if len(text) == 24}
    assert found_in_files(tmp_path / "store" / "segments", blocks) == len(blocks)
    with closing(open_backend(plain_url)) as backend:
        done = backend.forget("anna")
        assert (done.packs, done.requests, done.key_ids) == (10, 10, ())
        assert content_of(backend, "anna") == (set(), [])
        assert len(content_of(backend, "berta")[0]) == 10
        recount(backend)
    assert found_in_files(tmp_path / "store" / "segments", blocks) == 0
    (tmp_path / "store" / "data.mdb").unlink()
    type(backend).rebuild(StoreUrl.parse(plain_url), lambda done, of: None)
    with closing(open_backend(plain_url)) as backend:
        assert content_of(backend, "anna")[0] == set()


def test_tenant_stores_again_under_another_key(url: str) -> None:
    with (
        closing(open_backend(url)) as engine,
        closing(open_backend(url)) as operator,
    ):
        store_one(engine, "anna", 1)
        (first,) = tables(engine, NAMESPACE).values()
        done = operator.forget("anna")
        assert done.key_ids == (first.data_key.hex(),)
        # the first commit drops the content that was accepted before
        with pytest.raises(TenantForgottenError) as caught:
            store_one(engine, "anna", 2)
        assert caught.value.tenants == {"anna"}
        store_one(engine, "anna", 3)
        (second,) = tables(engine, NAMESPACE).values()
        assert second.data_key != first.data_key
        assert operator.forget("anna").key_ids == (second.data_key.hex(),)


def test_readers_learn_that_packs_are_gone(url: str) -> None:
    with (
        closing(open_backend(url)) as reader,
        closing(open_backend(url)) as operator,
    ):
        store_one(reader, "anna", 1)
        store_one(reader, "berta", 2)
        before = reader.changes(NAMESPACE, None)
        operator.forget("anna")
        changes = reader.changes(NAMESPACE, before.cursor)
        assert changes.reset
        assert {table.tenant for table in changes.added} == {"berta"}


def test_commit_that_is_late_raises_and_stores_nothing(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that is paused while it writes a pack, until the tenant is forgotten."""
    with (
        closing(open_backend(url)) as engine,
        closing(open_backend(url)) as operator,
    ):
        if "inline" in url:
            pytest.skip("holds the writer lock while it writes the pack")
        store_one(engine, "anna", 1)
        pack = sample_pack(NAMESPACE, 2, seal=engine.seal, tenant="anna")
        stream = pack.stream

        def late() -> Iterator[Buffer]:
            yield from stream()
            operator.forget("anna")

        monkeypatch.setattr(pack, "stream", late)
        with pytest.raises(TenantForgottenError):
            engine.commit(NAMESPACE, CommitBatch([pack]))
        assert content_of(engine, "anna") == (set(), [])
        store_one(engine, "berta", 3)
        recount(engine)


def test_store_drops_staged_blocks_of_forgotten_tenant_and_keeps_others(
    url: str,
) -> None:
    layout = RowLayout(4096, (GroupLayout(((0, 4096),)),))
    rows = Rows(memoryview(bytearray(os.urandom(16 * 4096))), layout)
    names = [os.urandom(32) + bytes(4) for _ in range(16)]
    options = StoreOptions(max_age_s=1000.0)
    store = BlockingStore(open_backend(url), sample_identity(), rows, options, url=url)
    store.put("r", names[:1], [0], [0], "anna")
    store.flush()
    store.put("r", names[1:4], [1, 2, 3], [1, 2, 3], "anna")
    store.end_request(end("r", names[:4], tenant="anna"))
    store.put("s", names[4:8], [4, 5, 6, 7], range(4), "berta")
    store.end_request(end("s", names[4:8], tenant="berta"))
    with closing(open_backend(url)) as operator:
        operator.forget("anna")
    store.flush()
    backend = store.view.backend
    assert content_of(backend, "anna") == (set(), [])
    packs, requests = content_of(backend, "berta")
    assert (len(packs), requests) == (1, ["manifest-s"])
    assert store.counters.dropped_blocks == 3
    assert store.store.queue.is_empty
    assert dict(store.take_report().persisted) == {"r": False, "s": True}
    # later content of the tenant is stored
    store.put("t", names[8:12], [8, 9, 10, 11], range(4), "anna")
    store.flush()
    assert len(content_of(backend, "anna")[0]) == 1
    store.close()


def test_block_store_drops_blocks_of_tenant_that_is_forgotten_during_a_deletion(
    url: str,
) -> None:
    """The deletion learns of it first. What was accepted before must not be stored after it."""
    identity = BlockIdentity(
        model_name="m",
        weights="name:w",
        engine="e",
        release="1",
        dtype="uint8",
        shapes=((4096,),),
        layout="l",
        rank="0",
    )
    backend = FaultyBackend.of(open_backend(url))
    completions = CompletionQueue()
    block = os.urandom(4096)
    with (
        closing(open_backend(url)) as operator,
        BlockStore(
            backend,
            identity,
            [4096],
            StoreOptions(),
            url=url,
            tenant_of=lambda key: key.split(b"/")[0].decode(),
        ) as store,
    ):
        assert all(store.put([b"anna/1", b"anna/2"], [block, block]))
        assert store.put([b"berta/1"], [block]) == [True]

        def forget(namespace: bytes, batch: CommitBatch) -> None:
            backend.clear_faults()
            store.submit_put(completions, [b"anna/3"], [block])
            # time for the store to accept it
            time.sleep(0.5)
            assert operator.forget("anna").packs == 1

        backend.before("commit", forget)
        with pytest.raises(StoreError, match="forgotten"):
            store.delete([b"anna/1"])
        deadline = time.monotonic() + 30
        while not (ended := completions.take()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [one.results for one in ended] == [[False]]
        keys = [b"anna/1", b"anna/2", b"anna/3", b"berta/1"]
        # the next refresh
        while store.contains(keys) != [False, False, False, True]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert store.usage().tenants.keys() == {"berta"}
        # later content of the tenant is stored
        assert store.put([b"anna/3"], [block]) == [True]
    completions.close()


def engine_of_two_tenants(url: str, numbers: range, done: Connection) -> None:
    with closing(open_backend(url)) as backend:
        for number in numbers:
            for tenant in ("anna", "berta"):
                try:
                    store_one(backend, tenant, number + 500_000 * (tenant == "anna"))
                except TenantForgottenError:
                    done.send("dropped")
            done.send(number)


@pytest.fixture
def engine(url: str) -> Iterator[Connection]:
    """A process that stores content of both tenants until it is killed."""
    with other_process(engine_of_two_tenants, url, range(1_000_000)) as engine:
        yield engine


def forget_in_process(url: str, done: Connection) -> None:
    with closing(open_backend(url)) as backend:
        done.recv()
        forgotten = backend.forget("anna").packs
    done.send(forgotten)


def test_two_operators_forget_while_engine_runs(
    tmp_path: Path,
    url: str,
    engine: Connection,
) -> None:
    while engine.recv() != 10:
        pass
    with closing(open_backend(url)) as backend:
        old = {
            table.data_key
            for table in tables(backend, NAMESPACE).values()
            if table.tenant == "anna"
        }
    with (
        other_process(forget_in_process, url) as first,
        other_process(forget_in_process, url) as second,
    ):
        for operator in (first, second):
            operator.send("go")
        forgotten = [first.recv(), second.recv()]
    assert sum(forgotten) >= 11
    last = 0
    heard: list[int | str] = []
    while "dropped" not in heard or len(heard) < 30:
        heard.append(engine.recv())
    last = max(number for number in heard if isinstance(number, int))
    with closing(open_backend(url)) as backend:
        held = tables(backend, NAMESPACE)
        for table in held.values():
            assert read_pack(backend, NAMESPACE, table) is not None
            assert table.data_key not in old
        berta = [table for table in held.values() if table.tenant == "berta"]
        assert len(berta) >= last + 1
    with closing(open_backend(url)) as backend:
        for head in backend.catalogue(NAMESPACE).manifests():
            assert isinstance(head, RequestManifest)
    (tmp_path / "store" / "keys").read_bytes()


def forget_and_die(url: str, deaths: int) -> None:
    """Forget, and die at a system call that changes a file."""
    left = deaths

    def counted(call: Callable[P, T]) -> Callable[P, T]:
        def die_or_call(*arguments: P.args, **options: P.kwargs) -> T:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return call(*arguments, **options)

        return die_or_call

    with closing(open_backend(url)) as backend:
        for name in ("fsync", "fdatasync", "pwrite", "rename", "write", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        backend.forget("anna")
    os._exit(0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("url", ["extents"], indirect=True)
def test_forget_killed_in_each_step_is_completed_by_the_next_one(
    tmp_path: Path,
    url: str,
) -> None:
    planted = fill(url, 3)
    shutil.copytree(tmp_path / "store", tmp_path / "original")
    context = multiprocessing.get_context("spawn")
    for deaths in range(100):
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(tmp_path / "original", tmp_path / "store")
        process = context.Process(target=forget_and_die, args=(url, deaths))
        process.start()
        process.join()
        with closing(open_backend(url)) as backend:
            assert len(content_of(backend, "berta")[0]) == 3
            recount(backend)
            backend.forget("anna")
            assert content_of(backend, "anna") == (set(), [])
            recount(backend)
        assert found_in_files(tmp_path / "store", planted["anna"]) == 0
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert deaths > 5


def test_forget_destroys_keys_in_damaged_stores_too(tmp_path: Path, url: str) -> None:
    fill(url, 2)
    store = tmp_path / "store"
    with (store / "data.mdb").open("r+b") as file:
        file.truncate(5000)
    (store / "guard").write_text("open".ljust(31) + "\n")
    with closing(open_backend(url)) as backend:
        (damaged,) = store.glob("damaged-*")
        wrapped = wrapped_keys(damaged / "keys")
        done = backend.forget("anna")
    (key_id,) = done.key_ids
    assert found_in_files(store, {wrapped[key_id]}) == 0
    assert found_in_files(store, set(wrapped.values())) == len(wrapped) - 1


def test_forget_leaves_no_key_in_files_that_were_replaced_before(
    tmp_path: Path,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their blocks are free space of the disk: open descriptors show what these hold."""
    monkeypatch.setenv("PERSISTKV_NEW_KEY", "fedcba9876543210" * 4)
    file = tmp_path / "store" / "keys"
    with closing(open_backend(url)) as backend:
        store_one(backend, "anna", 1)
        wrapped = wrapped_keys(file)
        replaced = [file.open("rb")]
        store_one(backend, "berta", 2)
        replaced.append(file.open("rb"))
        backend.rotate_key(StoreKey(os.environ["PERSISTKV_NEW_KEY"].encode()))
        replaced.append(file.open("rb"))
        (key_id,) = backend.forget("anna").key_ids
    for before in replaced:
        with before:
            assert wrapped[key_id] not in before.read()


def test_reader_during_destruction_of_key_learns_of_all_deletions(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The key has gone, and the entries of the log that it seals are still there."""
    with closing(open_backend(url)) as engine, closing(open_backend(url)) as operator:
        for number in range(3):
            store_one(engine, "anna", number)
            store_one(engine, "berta", 100 + number)
        before = engine.changes(NAMESPACE, None)
        known = {table.pack_id for table in before.added}
        cursor = before.cursor

        def follow() -> None:
            nonlocal cursor
            changes = engine.changes(NAMESPACE, cursor)
            if changes.reset:
                known.clear()
            known.difference_update(changes.removed)
            known.update(table.pack_id for table in changes.added)
            cursor = changes.cursor

        keys = operator.environment.database.keys  # type: ignore[attr-defined]
        destroy = keys.destroy

        def destroy_and_follow(tenant: str) -> list[bytes]:
            destroyed: list[bytes] = destroy(tenant)
            follow()
            return destroyed

        monkeypatch.setattr(keys, "destroy", destroy_and_follow)
        assert operator.forget("anna").packs == 3
        follow()
        assert known == set(tables(engine, NAMESPACE))
        assert len(known) == 3


@pytest.mark.parametrize("has_key", [True, False])
def test_content_of_tenant_is_refused_until_forget_ends(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    has_key: bool,
) -> None:
    """The engine commits after the deletion, and before the key is destroyed."""
    if not has_key:
        url = url.partition("&")[0]
    with (
        closing(open_backend(url)) as engine,
        closing(open_backend(url)) as operator,
    ):
        store_one(engine, "anna", 1)
        store_one(engine, "berta", 2)
        environment = operator.environment  # type: ignore[attr-defined]
        after_deletion = environment.delete_files_of
        calls: list[str] = []

        def store_others(ended: list[bytes]) -> None:
            after_deletion(ended)
            # once: these commits call it, too
            if calls:
                return
            calls.append("deleting")
            with pytest.raises(TenantForgottenError) as caught:
                store_one(engine, "anna", 3)
            assert caught.value.tenants == {"anna"}
            store_one(engine, "berta", 3)
            # another operator, and a tenant whose name is not in the keys
            operator.forget("carla")

        monkeypatch.setattr(environment, "delete_files_of", store_others)
        done = operator.forget("anna")
        assert calls
        assert (done.packs, done.requests, len(done.key_ids)) == (1, 1, has_key)
        assert content_of(engine, "anna") == (set(), [])
        assert len(content_of(engine, "berta")[0]) == 2
        if has_key:
            # content that was accepted before is dropped once
            with pytest.raises(TenantForgottenError):
                store_one(engine, "anna", 3)
        store_one(engine, "anna", 3)
        assert len(content_of(engine, "anna")[0]) == 1
        recount(engine)


def forget_until_killed(url: str, ready: Connection) -> None:
    with closing(open_backend(url)) as backend:
        environment = backend.environment  # type: ignore[attr-defined]

        def wait(ended: list[bytes]) -> None:
            ready.send("deleting")
            time.sleep(600)

        environment.delete_files_of = wait
        backend.forget("anna")


def test_killed_forget_refuses_content_no_longer(url: str) -> None:
    fill(url, 2)
    with closing(open_backend(url)) as backend:
        with other_process(forget_until_killed, url) as operator:
            assert operator.recv() == "deleting"
            with pytest.raises(TenantForgottenError):
                store_one(backend, "anna", 50)
        # a process that gets the number of the dead one does not seem to forget
        environment = backend.environment  # type: ignore[attr-defined]
        with suppress(KeyError), environment.transaction(write=True) as rows:
            environment.release_reserved(rows)
            environment.claim_writer(rows)
            raise KeyError
        store_one(backend, "anna", 50)
        assert len(content_of(backend, "anna")[0]) == 3
        done = backend.forget("anna")
        assert len(done.key_ids) == 1
        assert content_of(backend, "anna") == (set(), [])
        recount(backend)
        with backend.rows() as rows:  # type: ignore[attr-defined]
            assert not rows.has_prefix("meta", b"refused")


def test_forget_holds_lock_for_milliseconds_whatever_others_store(
    plain_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(open_backend(plain_url)) as backend:
        namespace = backend.open_namespace(sample_identity()).id
        number = itertools.count()

        def packs(tenant: str, count: int) -> list[NewPack]:
            return [
                sample_pack(
                    namespace,
                    next(number),
                    seal=backend.seal,
                    blocks=1,
                    block_bytes=512,
                    tenant=tenant,
                )
                for _ in range(count)
            ]

        backend.commit(namespace, CommitBatch(packs("anna", 100)))
        for _ in range(5):
            backend.commit(namespace, CommitBatch(packs("berta", 1000)))
        held_s: list[float] = []
        hold = WriterLock.held

        @contextmanager
        def timed(
            lock: WriterLock,
            patience_s: float | None = None,
            *,
            recover: Callable[[], None] | None = None,
        ) -> Iterator[None]:
            with hold(lock, patience_s, recover=recover):
                # of this thread: other processes do not count
                begin = time.thread_time()
                yield
                held_s.append(time.thread_time() - begin)

        monkeypatch.setattr(WriterLock, "held", timed)
        assert backend.forget("anna").packs == 100
        assert len(held_s) >= 4
        assert max(held_s) < 0.01
