"""``persistkv copy``: what is copied, what is left out, and what a second run does."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch, ReadSpan
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import PackedKeys, PackTable
from persistkv.storage.identity import Identity
from persistkv.storage.inspection.selection import Selection
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.conformance.suite import read_pack
from tests.memory_store import flip
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.damage import store_with_a_bad_pack
from tests.tools.transfers import copy

KEYS = {"one": b"1" * 32, "two": b"2" * 32}


def catalogue(backend: Backend, namespace: bytes) -> dict[bytes, PackTable]:
    return {table.pack_id: table for table in backend.changes(namespace, None).added}


def payload(backend: Backend, table: PackTable) -> bytes:
    buffer = bytearray(table.payload_length)
    assert backend.read(
        table.namespace, [ReadSpan(table.pack_id, 0, [memoryview(buffer)])]
    ) == [True]
    return bytes(buffer)


class Content(NamedTuple):
    """Content of a namespace."""

    packs: dict[bytes, tuple[PackTable, bytes]]
    """Tables and payloads."""
    heads: dict[str, RequestManifest]
    keys: dict[str, ManifestKeys | None]


def contents(backend: Backend) -> dict[bytes, Content]:
    """Return the whole content of a store: packs byte by byte, manifests and keys of requests."""
    found: dict[bytes, Content] = {}
    for namespace in backend.namespaces():
        packs = {
            name: (table, payload(backend, table))
            for name, table in catalogue(backend, namespace.id).items()
        }
        heads = {
            manifest.id: manifest
            for manifest in backend.catalogue(namespace.id).manifests()
        }
        keys = {name: backend.manifest_keys(namespace.id, [name])[0] for name in heads}
        found[namespace.id] = Content(packs, heads, keys)
    return found


def contents_at(url: str) -> dict[bytes, Content]:
    with closing(open_backend(url, read_only=True)) as backend:
        return contents(backend)


class Opened(NamedTuple):
    """Content of a namespace without what its seal decides: ids and tags of packs."""

    blocks: dict[PackedKeys, bytes | None]
    """Keys and bytes of the packs."""
    heads: dict[str, RequestManifest]
    keys: dict[str, ManifestKeys | None]


def opened(backend: Backend) -> dict[bytes, Opened]:
    found: dict[bytes, Opened] = {}
    for name, (packs, heads, keys) in contents(backend).items():
        blocks = {}
        for table, _ in packs.values():
            blocks[table.keys] = read_pack(backend, name, table)
        found[name] = Opened(blocks, heads, keys)
    return found


def opened_at(url: str) -> dict[bytes, Opened]:
    with closing(open_backend(url, read_only=True)) as backend:
        return opened(backend)


def ids(run: Run, url: str) -> set[str]:
    listed = json.loads(run("ls", url, "--json").stdout)
    return {request["id"] for request in listed["requests"]}


@pytest.fixture
def source(memory_store: Callable[[], MemoryBackend]) -> tuple[MemoryBackend, Contexts]:
    backend = memory_store()
    writer = Contexts(backend, groups=2, codec=ZstdCodec(1))
    writer.add("anna-1", "s1 s2 a1", labels={"user": "anna"}, age_s=300.0)
    writer.add("anna-2", "s1 s2 a1 a2", labels={"user": "anna"}, age_s=200.0)
    writer.add("bert-1", "s1 b1", age_s=100.0)
    Contexts(backend, Identity.of({"weights": "checkpoint:2"})).add("other", "x y")
    return backend, writer


class TestCopyContent:
    def test_second_copy_copies_only_new_requests(
        self,
        source: tuple[MemoryBackend, Contexts],
        memory_store: Callable[[], MemoryBackend],
    ) -> None:
        backend, writer = source
        writer.add("orphan", "o", manifest=False)
        target = memory_store()
        first = copy(backend, target)
        assert (first.requests, first.packs, first.packs_held) == (4, 5, 0)
        assert contents(target) == contents(backend)
        writer.add("new", "s1 s2 n")
        second = copy(backend, target)
        assert (second.requests, second.packs, second.requests_held) == (1, 1, 4)
        assert contents(target) == contents(backend)

    def test_copied_request_is_deleted_with_its_pack(
        self,
        source: tuple[MemoryBackend, Contexts],
        memory_store: Callable[[], MemoryBackend],
    ) -> None:
        backend, writer = source
        target = memory_store()
        copy(backend, target)
        target.commit(writer.namespace, CommitBatch(deletions=[writer.packs["anna-2"]]))
        assert {
            manifest.id for manifest in target.catalogue(writer.namespace).manifests()
        } == {
            "anna-1",
            "bert-1",
        }

    def test_interrupted_copy_resumes_with_remaining_requests(
        self,
        source: tuple[MemoryBackend, Contexts],
        memory_store: Callable[[], MemoryBackend],
    ) -> None:
        backend, _ = source
        target = FaultyBackend.of(memory_store())

        def interrupt_the_third(*_: object) -> None:
            if target.calls.count("commit") == 3:
                raise KeyboardInterrupt

        target.before("commit", interrupt_the_third)
        with pytest.raises(KeyboardInterrupt):
            copy(backend, target)
        rest = copy(backend, target)
        assert rest.requests == 2
        assert contents(target) == contents(backend)

    def test_selection_copies_only_its_packs(
        self,
        source: tuple[MemoryBackend, Contexts],
        memory_store: Callable[[], MemoryBackend],
    ) -> None:
        backend, writer = source
        target = memory_store()
        copied = copy(backend, target, Selection(labels=(("user", "anna"),)))
        assert (copied.requests, copied.packs) == (2, 2)
        assert catalogue(target, writer.namespace).keys() == {
            writer.packs["anna-1"],
            writer.packs["anna-2"],
        }

    def test_damaged_pack_and_its_request_are_counted_and_not_copied(
        self,
        source: tuple[MemoryBackend, Contexts],
        memory_store: Callable[[], MemoryBackend],
    ) -> None:
        backend, writer = source
        flip(backend, writer.namespace, writer.packs["anna-2"], 0)
        target = memory_store()
        copied = copy(backend, target)
        assert (copied.incomplete, copied.damaged_packs) == (["anna-2"], 1)
        assert not copied.complete
        assert writer.packs["anna-2"] not in catalogue(target, writer.namespace)
        assert {
            manifest.id for manifest in target.catalogue(writer.namespace).manifests()
        } == {
            "anna-1",
            "bert-1",
        }

    def test_damaged_pack_without_request_is_counted(
        self,
        source: tuple[MemoryBackend, Contexts],
        memory_store: Callable[[], MemoryBackend],
    ) -> None:
        backend, writer = source
        writer.add("orphan", "o", manifest=False)
        flip(backend, writer.namespace, writer.packs["orphan"], 0)
        copied = copy(backend, memory_store())
        assert (copied.incomplete, copied.damaged_packs) == ([], 1)
        assert not copied.complete

    def test_requests_evicted_during_copy_are_reported_as_lost(
        self,
        memory_store: Callable[[], MemoryBackend],
        tmp_path: Path,
    ) -> None:
        """The capacity of the target shrinks during the copy."""
        backend = memory_store()
        writer = Contexts(backend, block_bytes=32 << 10)
        for number in range(20):
            writer.add(f"r{number:02d}", f"shared r{number} a b c", age_s=90.0 - number)
        # needs a pack of r05, which is gone by then
        writer.add("again", "shared r5 a d", age_s=1.0)

        target = FaultyBackend.of(open_backend(f"lmdb://{tmp_path}/target"))

        def shrink(*_: object) -> None:
            if target.calls.count("commit") == 10:
                policy = target.inner.policy()
                target.inner.set_policy(replace(policy, capacity=1 << 20))

        target.before("commit", shrink)
        sent = list[bytes]()
        target.before(
            "commit", lambda _, batch: sent.extend(pack.pack_id for pack in batch.packs)
        )
        copied = copy(backend, target)
        left = {
            manifest.id
            for held in target.namespaces()
            for manifest in target.catalogue(held.id).manifests()
        }
        target.close()
        assert copied.lost
        assert left.isdisjoint(copied.lost)
        assert len(left) + len(copied.lost) + len(copied.incomplete) == 21
        assert "again" in copied.incomplete
        assert copied.lost_packs > 0
        assert not copied.complete
        assert copied.packs == len(sent) == len(set(sent)), (
            "evicted packs are not written again"
        )


class TestCopyCommand:
    @pytest.fixture
    def store(self, contexts: tuple[str, Contexts]) -> tuple[str, Contexts]:
        url, writer = contexts
        writer.add("anna-1", "s1 a1", labels={"user": "anna"}, age_s=90.0)
        writer.add("bert-1", "s1 b1", age_s=60.0)
        return url, writer

    def test_copy_reproduces_store_and_onto_itself_exits_2(
        self, run: Run, store: tuple[str, Contexts], tmp_path: Path
    ) -> None:
        url, writer = store
        target = f"lmdb://{tmp_path}/copy"
        assert "2 requests and 2 packs" in run("copy", url, target).stdout
        again = run("copy", url, target)
        assert "not copied, because the store has them" in again.stdout
        found = json.loads(run("copy", url, target, "--json").stdout)
        assert found["copied"]["requests_held"] == 2
        assert contents_at(target) == contents(writer.backend)
        assert run("verify", target).returncode == 0
        done = run("copy", url, url.partition("?")[0])
        assert done.returncode == 2
        assert "another store" in done.stderr

    @pytest.mark.parametrize(
        ("chosen", "names"),
        [
            (("anna",), ("anna-1",)),
            (("anna", "bert-1"), ("anna-1", "bert-1")),
            (("--label", "user=anna"), ("anna-1",)),
            (("--older-than", "75s"), ("anna-1",)),
            (("--newest", "1"), ("bert-1",)),
            (("--label", "user", "--newest", "1"), ("anna-1",)),
            (("--newest", "9"), ("anna-1", "bert-1")),
        ],
        ids=" ".join,
    )
    def test_copy_selection_copies_matching_requests(
        self,
        run: Run,
        store: tuple[str, Contexts],
        tmp_path: Path,
        chosen: tuple[str, ...],
        names: tuple[str, ...],
    ) -> None:
        target = f"lmdb://{tmp_path}/copy"
        done = run("copy", store[0], target, *chosen)
        assert done.returncode == 0, done.stderr
        assert ids(run, target) == set(names)

    @pytest.mark.parametrize("target", ["absent", "present", "small"])
    def test_copy_dry_run_predicts_result_and_writes_nothing(
        self,
        run: Run,
        store: tuple[str, Contexts],
        tmp_path: Path,
        target: str,
    ) -> None:
        url, writer = store
        writer.add("carl-1", "c1 c2", age_s=1.0)
        place = f"lmdb://{tmp_path}/target?capacity={'1MiB' if target == 'small' else '1GiB'}"
        if target == "present":
            assert run("copy", url, place, "--label", "user").returncode == 0
        before = sorted(path.name for path in tmp_path.rglob("*"))
        planned = run("copy", url, place, "--dry-run", "--json")
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        shown = run("copy", url, place, "--dry-run")
        done = run("copy", url, place, "--json")
        assert planned.returncode == shown.returncode == done.returncode
        if target == "small":
            assert planned.stderr == done.stderr
            return
        plan, outcome = json.loads(planned.stdout), json.loads(done.stdout)
        assert (plan["dry_run"], outcome["dry_run"]) == (True, False)
        assert plan["copied"] == outcome["copied"]
        assert plan["capacity"] == outcome["capacity"]
        assert (
            f"to copy to {place}: {outcome['copied']['requests']} requests"
            in shown.stdout
        )
        again = run("copy", url, place, "--dry-run")
        assert "0 requests" in again.stdout

    def test_copy_damaged_pack_is_reported_and_exits_1(
        self, run: Run, url: str, tmp_path: Path
    ) -> None:
        store_with_a_bad_pack(url)
        target = f"lmdb://{tmp_path}/copy"
        done = run("copy", url, target)
        assert done.returncode == 1
        assert "damaged or missing, and not copied: 1 pack" in done.stdout
        assert "left out" in done.stdout
        assert "one" in done.stdout
        assert run("verify", target).returncode == 0

    def test_copy_directory_packed_and_unpacked_elsewhere_reproduces_store(
        self,
        run: Run,
        store: tuple[str, Contexts],
        tmp_path: Path,
    ) -> None:
        """A directory is the portable form of a store."""
        url, writer = store
        assert run("copy", url, f"file://{tmp_path}/portable").returncode == 0
        archive = shutil.make_archive(
            str(tmp_path / "packed"), "tar", tmp_path / "portable"
        )
        shutil.rmtree(tmp_path / "portable")
        (tmp_path / "elsewhere").mkdir()
        subprocess.run(["tar", "xf", archive, "-C", tmp_path / "elsewhere"], check=True)
        moved = f"file://{tmp_path}/elsewhere"
        assert ids(run, moved) == {"anna-1", "bert-1"}
        back = f"lmdb://{tmp_path}/back"
        assert run("copy", moved, back).returncode == 0
        assert contents_at(back) == contents(writer.backend)

    @pytest.mark.parametrize(
        ("first", "second"), [("", "one"), ("one", "two"), ("two", "")]
    )
    @pytest.mark.parametrize("medium", ["file", "lmdb"])
    def test_copy_to_store_with_another_key_reproduces_content(
        self,
        run: Run,
        store: tuple[str, Contexts],
        tmp_path: Path,
        medium: str,
        first: str,
        second: str,
    ) -> None:
        """Shared stores are in the same directory: content under another key is another store."""
        url, writer = store

        def keyed(key: str) -> str:
            place = f"{medium}://{tmp_path}/keyed"
            if medium == "lmdb":
                place += f"-{key}"
            if not key:
                return place
            (tmp_path / key).write_bytes(KEYS[key])
            return f"{place}?key_file={tmp_path}/{key}"

        assert run("copy", url, keyed(first)).returncode == 0
        done = run("copy", keyed(first), keyed(second), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["copied"]["requests"] == 2
        assert opened_at(keyed(second)) == opened(writer.backend)
        assert run("verify", keyed(second)).returncode == 0
        assert run("copy", keyed(second), keyed(second)).returncode == 2
