from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
import xxhash

from persistkv.errors import ConfigurationError
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.identity import Identity
from persistkv.testing import FaultyBackend
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_tools.options import FoundRequest, Selection
from persistkv_tools.transfer.archive import (
    ArchiveReader,
    ArchiveWriter,
    CorruptArchiveError,
)
from persistkv_tools.transfer.export import export_requests
from persistkv_tools.transfer.import_ import verify_archive
from persistkv_tools.transfer.push import Transfer
from tests.memory_store import flip
from tests.tools.contexts import Contexts, begin_namespace
from tests.tools.damage import store_with_a_bad_pack
from tests.tools.transfers import ignore, push


def import_archive(target, path, took, **options):
    with closing(ArchiveReader(path)) as archive:
        return Transfer(verify_archive(archive, took), target, "lmdb:///target").run(
            target, took, **options
        )


def verified(path):
    """Return the numbers of namespaces, packs and requests in a file."""
    with closing(ArchiveReader(path)) as archive:
        found = verify_archive(archive, ignore)
    return (
        len(found),
        sum(len(one.packs.tables) for one in found),
        sum(len(one.requests) for one in found),
    )


def catalogue(backend, namespace):
    return {table.pack_id: table for table in backend.changes(namespace, None).added}


def payload(backend, table):
    buffer = bytearray(table.payload_length)
    assert backend.read(
        table.namespace, [ReadSpan(table.pack_id, 0, [memoryview(buffer)])]
    ) == [True]
    return bytes(buffer)


def contents(backend):
    """Return the whole content of a store: packs byte by byte, manifests and keys of requests."""
    found = {}
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
        found[namespace.id] = (packs, heads, keys)
    return found


@pytest.fixture
def source(memory_store):
    backend = memory_store()
    writer = Contexts(backend, groups=2, codec=ZstdCodec(1))
    writer.add("anna-1", "s1 s2 a1", labels={"user": "anna"}, age_s=300.0)
    writer.add("anna-2", "s1 s2 a1 a2", labels={"user": "anna"}, age_s=200.0)
    writer.add("bert-1", "s1 b1", age_s=100.0)
    Contexts(backend, Identity.of({"weights": "checkpoint:2"})).add("other", "x y")
    return backend, writer


def all_requests(backend):
    return [
        FoundRequest(namespace, manifest)
        for namespace in backend.namespaces()
        for manifest in backend.catalogue(namespace.id).manifests()
    ]


def exported(backend, path, found=None):
    with ArchiveWriter(path) as writer:
        return export_requests(
            backend,
            all_requests(backend) if found is None else found,
            writer,
            lambda total: ignore,
        )


class TestArchive:
    def test_import_into_empty_store_reproduces_source(
        self, source, tmp_path, memory_store
    ):
        backend, _ = source
        sent = exported(backend, tmp_path / "a.pkv")
        assert (sent.namespaces, sent.requests, sent.packs, sent.incomplete) == (
            2,
            4,
            4,
            [],
        )
        assert verified(tmp_path / "a.pkv") == (2, 4, 4)
        target = memory_store()
        received = import_archive(target, tmp_path / "a.pkv", ignore)
        assert (received.packs, received.requests, received.incomplete) == (4, 4, [])
        assert contents(target) == contents(backend)
        again = import_archive(target, tmp_path / "a.pkv", ignore)
        assert (again.packs, again.requests, again.packs_held, again.requests_held) == (
            0,
            0,
            4,
            4,
        )

    def test_export_selection_contains_only_needed_packs(
        self, source, tmp_path, memory_store
    ):
        backend, writer = source
        found = [
            request
            for request in all_requests(backend)
            if request.manifest.id == "bert-1"
        ]
        exported(backend, tmp_path / "a.pkv", found)
        target = memory_store()
        import_archive(target, tmp_path / "a.pkv", ignore)
        assert catalogue(target, writer.namespace).keys() == {
            writer.packs["anna-1"],
            writer.packs["bert-1"],
        }
        assert [
            manifest.id for manifest in target.catalogue(writer.namespace).manifests()
        ] == ["bert-1"]

    def test_imported_request_is_deleted_with_its_pack(
        self, source, tmp_path, memory_store
    ):
        backend, writer = source
        exported(backend, tmp_path / "a.pkv")
        target = memory_store()
        import_archive(target, tmp_path / "a.pkv", ignore)
        target.commit(writer.namespace, CommitBatch(deletions=[writer.packs["anna-2"]]))
        assert {
            manifest.id for manifest in target.catalogue(writer.namespace).manifests()
        } == {
            "anna-1",
            "bert-1",
        }

    def test_verify_archive_flipped_bit_raises(self, source, tmp_path):
        backend, _ = source
        path = tmp_path / "a.pkv"
        exported(backend, path)
        good = path.read_bytes()
        rng = random.Random(3)
        for position in [
            *range(60),
            *range(len(good) - 60, len(good)),
            *rng.sample(range(len(good)), 150),
        ]:
            data = bytearray(good)
            data[position] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            with pytest.raises(CorruptArchiveError):
                verified(path)
        path.write_bytes(good)
        assert verified(path) == (2, 4, 4)

    def test_verify_archive_truncated_or_extended_file_raises(self, source, tmp_path):
        backend, _ = source
        path = tmp_path / "a.pkv"
        exported(backend, path)
        good = path.read_bytes()
        for length in [
            *range(0, 100, 7),
            *range(0, len(good), len(good) // 50),
            len(good) - 1,
        ]:
            path.write_bytes(good[:length])
            with pytest.raises(CorruptArchiveError):
                verified(path)
        path.write_bytes(good + b"x")
        with pytest.raises(CorruptArchiveError):
            verified(path)

    def test_verify_archive_missing_or_swapped_record_raises(self, source, tmp_path):
        backend, _ = source
        path = tmp_path / "a.pkv"
        exported(backend, path)
        good = path.read_bytes()
        records = split(good)
        for number in range(1, len(records) - 1):
            path.write_bytes(
                good[:8] + b"".join(records[:number] + records[number + 1 :])
            )
            with pytest.raises(CorruptArchiveError):
                verified(path)
        path.write_bytes(
            good[:8] + b"".join([records[0], records[2], records[1], *records[3:]])
        )
        with pytest.raises(CorruptArchiveError):
            verified(path)

    def test_verify_archive_wrong_content_with_valid_checksums_raises(
        self, source, tmp_path
    ):
        """A file of another writer may contain wrong content with valid checksums."""
        backend, writer = source
        other = next(
            space for space in backend.namespaces() if space.id != writer.namespace
        )
        table = catalogue(backend, writer.namespace)[writer.packs["anna-1"]]
        stored = payload(backend, table)
        damaged = bytearray(stored)
        damaged[0] ^= 1
        ghost = sample_manifest("ghost")
        wrong = {
            "belongs to another namespace": lambda archive: archive.pack(table, stored),
            "payload": lambda archive: archive.pack(
                sample_table(other.id), bytes(4096)
            ),
            "not in the file": lambda archive: archive.request(
                ghost.manifest, ghost.keys
            ),
            "other numbers of blocks": lambda archive: archive.request(
                ghost.manifest, (*ghost.keys, *ghost.keys)
            ),
        }
        for part, write in wrong.items():
            with ArchiveWriter(tmp_path / "a.pkv") as archive:
                archive.namespace(other.identity)
                write(archive)
            with pytest.raises(CorruptArchiveError, match=part):
                verified(tmp_path / "a.pkv")
        with ArchiveWriter(tmp_path / "a.pkv") as archive:
            archive.namespace(Identity.of({}))
            archive.namespace(
                next(
                    s.identity for s in backend.namespaces() if s.id == writer.namespace
                )
            )
            archive.pack(table, bytes(damaged))
        with pytest.raises(CorruptArchiveError, match="checksum"):
            verified(tmp_path / "a.pkv")


def sample_table(namespace):
    pack = sample_pack(namespace, 9)
    payload_of(pack)
    return pack.table


def split(data):
    """Split a file into its records by docs/format.md, without persistkv's reader."""
    records, at = [], 8
    while at < len(data):
        end = at + 24 + int.from_bytes(data[at + 8 : at + 16], "little")
        records.append(data[at:end])
        at = end
    return records


class TestPush:
    def test_second_push_copies_only_new_requests(self, source, memory_store):
        backend, writer = source
        writer.add("orphan", "o", manifest=False)
        target = memory_store()
        first = push(backend, target, backend.namespaces(), Selection(), ignore)
        assert (first.requests, first.packs, first.packs_held) == (4, 5, 0)
        assert contents(target) == contents(backend)
        writer.add("new", "s1 s2 n")
        second = push(backend, target, backend.namespaces(), Selection(), ignore)
        assert (second.requests, second.packs, second.requests_held) == (1, 1, 4)
        assert contents(target) == contents(backend)

    def test_interrupted_push_resumes_with_remaining_requests(
        self, source, memory_store
    ):
        backend, _ = source

        target = FaultyBackend.of(memory_store())

        def interrupt_the_third(*_):
            if target.calls.count("commit") == 3:
                raise KeyboardInterrupt

        target.before("commit", interrupt_the_third)
        with pytest.raises(KeyboardInterrupt):
            push(backend, target, backend.namespaces(), Selection(), ignore)
        rest = push(backend, target, backend.namespaces(), Selection(), ignore)
        assert rest.requests == 2
        assert contents(target) == contents(backend)

    def test_selection_copies_only_its_packs(self, source, memory_store):
        backend, writer = source
        target = memory_store()
        received = push(
            backend,
            target,
            backend.namespaces(),
            Selection(labels=(("user", "anna"),)),
            ignore,
        )
        assert (received.requests, received.packs) == (2, 2)
        assert catalogue(target, writer.namespace).keys() == {
            writer.packs["anna-1"],
            writer.packs["anna-2"],
        }

    def test_damaged_pack_and_its_request_are_not_copied(
        self, source, tmp_path, memory_store
    ):
        backend, writer = source
        flip(backend, writer.namespace, writer.packs["anna-2"], 0)
        target = memory_store()
        received = push(backend, target, backend.namespaces(), Selection(), ignore)
        assert received.incomplete == ["anna-2"]
        assert writer.packs["anna-2"] not in catalogue(target, writer.namespace)
        assert {
            manifest.id for manifest in target.catalogue(writer.namespace).manifests()
        } == {
            "anna-1",
            "bert-1",
        }
        sent = exported(backend, tmp_path / "a.pkv")
        assert (sent.requests, sent.incomplete) == (3, ["anna-2"])
        assert verified(tmp_path / "a.pkv")[2] == 3

    def test_requests_evicted_during_push_are_reported_as_lost(
        self, memory_store, tmp_path
    ):
        """The capacity of the target shrinks during the copy."""
        backend = memory_store()
        writer = Contexts(backend, block_bytes=32 << 10)
        for number in range(20):
            writer.add(f"r{number:02d}", f"shared r{number} a b c", age_s=90.0 - number)
        # needs a pack of r05, which is gone by then
        writer.add("again", "shared r5 a d", age_s=1.0)

        target = FaultyBackend.of(open_backend(f"lmdb://{tmp_path}/target"))

        def shrink(*_):
            if target.calls.count("commit") == 10:
                policy = target.inner.policy()
                target.inner.set_policy(replace(policy, capacity=1 << 20))

        target.before("commit", shrink)
        sent = list[bytes]()
        target.before(
            "commit", lambda _, batch: sent.extend(pack.pack_id for pack in batch.packs)
        )
        received = push(backend, target, backend.namespaces(), Selection(), ignore)
        left = {
            manifest.id
            for held in target.namespaces()
            for manifest in target.catalogue(held.id).manifests()
        }
        target.close()
        assert received.lost
        assert left.isdisjoint(received.lost)
        assert len(left) + len(received.lost) + len(received.incomplete) == 21
        assert "again" in received.incomplete
        assert received.lost_packs > 0
        assert not received.complete
        assert received.packs == len(sent) == len(set(sent)), (
            "evicted packs are not written again"
        )


class TestTransferCommands:
    @pytest.fixture
    def store(self, contexts):
        url, writer = contexts
        writer.add("anna-1", "s1 a1", labels={"user": "anna"})
        writer.add("bert-1", "s1 b1")
        return url, writer

    def test_export_then_import_reproduces_store(self, run, store, tmp_path):
        url, writer = store
        done = run("export", url, "anna", "bert-1", "-o", "out.pkv")
        assert done.returncode == 0, done.stderr
        assert "2 requests with 2 packs" in done.stdout
        assert (tmp_path / "out.pkv").stat().st_mode & 0o777 == 0o600
        assert not (tmp_path / "out.pkv.part").exists()
        target = f"lmdb://{tmp_path}/copy"
        found = json.loads(run("import", "out.pkv", target, "--json").stdout)
        assert found["received"]["requests"] == 2
        with closing(open_backend(target, read_only=True)) as backend:
            assert contents(backend) == contents(writer.backend)
        assert run("verify", target).returncode == 0
        assert (
            "not copied, because the store has them"
            in run("import", "out.pkv", target).stdout
        )

    @pytest.mark.parametrize(
        ("options", "count"), [(("--all",), 2), (("--label", "user"), 1)]
    )
    def test_export_selection_exports_matching_requests(
        self, run, store, options, count
    ):
        found = json.loads(
            run("export", store[0], *options, "-o", "o.pkv", "--json").stdout
        )
        assert found["exported"]["requests"] == count

    def test_export_existing_file_is_replaced_only_with_force(
        self, run, store, tmp_path
    ):
        (tmp_path / "out.pkv").write_text("mine")
        done = run("export", store[0], "--all", "-o", "out.pkv")
        assert (done.returncode, (tmp_path / "out.pkv").read_text()) == (2, "mine")
        assert (
            run("export", store[0], "nobody", "-o", "out.pkv", "--force").returncode
            == 2
        )
        assert (tmp_path / "out.pkv").read_text() == "mine"
        assert (
            run("export", store[0], "--all", "-o", "out.pkv", "--force").returncode == 0
        )

    def test_export_to_standard_output_is_importable(self, start, store, tmp_path):
        command = [
            sys.executable,
            "-m",
            "persistkv_tools",
            "export",
            store[0],
            "--all",
            "-o",
            "-",
        ]
        done = subprocess.run(command, capture_output=True, timeout=100, check=True)
        assert b"2 requests with 2 packs" in done.stderr
        (tmp_path / "piped.pkv").write_bytes(done.stdout)
        assert start("import", "piped.pkv", f"{tmp_path}/copy").returncode == 0
        assert start("verify", f"{tmp_path}/copy").returncode == 0
        assert start("export", store[0], "--all", "-o", "-", "--json").returncode == 2
        closed = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert closed.stdout is not None
        closed.stdout.close()
        assert closed.wait(100) == 141

    @pytest.mark.parametrize("target", ["absent", "present", "small"])
    def test_push_dry_run_predicts_result_and_writes_nothing(
        self, run, store, tmp_path, target
    ):
        url, writer = store
        writer.add("carl-1", "c1 c2", age_s=1.0)
        place = f"lmdb://{tmp_path}/target?capacity={'1MiB' if target == 'small' else '1GiB'}"
        if target == "present":
            assert run("push", url, place, "--label", "user").returncode == 0
        before = sorted(path.name for path in tmp_path.rglob("*"))
        planned = run("push", url, place, "--dry-run", "--json")
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        shown = run("push", url, place, "--dry-run")
        done = run("push", url, place, "--json")
        assert planned.returncode == shown.returncode == done.returncode
        if target == "small":
            assert planned.stderr == done.stderr
            return
        plan, outcome = json.loads(planned.stdout), json.loads(done.stdout)
        assert (plan["dry_run"], outcome["dry_run"]) == (True, False)
        assert plan["received"] == outcome["received"]
        assert plan["capacity"] == outcome["capacity"]
        assert (
            f"to copy to {place}: {outcome['received']['requests']} requests"
            in shown.stdout
        )
        again = run("push", url, place, "--dry-run")
        assert "0 requests" in again.stdout

    def test_export_full_disk_raises_and_leaves_no_file(self, store, tmp_path):
        """A limit on file sizes interrupts a write as a full disk does."""
        _, writer = store
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(
                ConfigurationError, match=r"cannot write .*o\.pkv: File too large"
            ):
                exported(writer.backend, tmp_path / "o.pkv")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handled)
        assert not list(tmp_path.glob("o.pkv*"))

    def test_import_bad_or_absent_file_exits_2_and_creates_nothing(self, run, tmp_path):
        (tmp_path / "bad.pkv").write_text("hello")
        for name in ("bad.pkv", "absent.pkv"):
            done = run("import", name, f"lmdb://{tmp_path}/new")
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert name in done.stderr
        assert not (tmp_path / "new").exists()

    def test_import_other_identity_is_reported_and_strict_exits_2(
        self, run, store, tmp_path
    ):
        url, _ = store
        assert run("export", url, "--all", "-o", "out.pkv").returncode == 0
        target = f"lmdb://{tmp_path}/other"
        with closing(open_backend(target)) as backend:
            theirs = {
                "weights": "checkpoint:1",
                "config": {"rope_theta": 5.0},
                "dtype": {"model": "bfloat16"},
            }
            begin_namespace(backend, Identity.of(theirs))
        done = run("import", "out.pkv", target, "--strict")
        assert done.returncode == 2
        assert "config.rope_theta: 10000.0 here, 5.0 stored" in done.stderr
        done = run("import", "out.pkv", target)
        assert done.returncode == 0
        assert "config.rope_theta: 10000.0 here, 5.0 stored" in done.stdout

    def test_push_copies_store_and_onto_itself_exits_2(self, run, store, tmp_path):
        url, writer = store
        target = f"lmdb://{tmp_path}/copy"
        assert "2 requests and 2 packs" in run("push", url, target).stdout
        assert (
            json.loads(run("push", url, target, "--json").stdout)["received"][
                "requests_held"
            ]
            == 2
        )
        with closing(open_backend(target, read_only=True)) as backend:
            assert contents(backend) == contents(writer.backend)
        done = run("push", url, url.partition("?")[0])
        assert done.returncode == 2
        assert "another store" in done.stderr

    def test_pull_copies_source_and_onto_itself_exits_2(self, run, store, tmp_path):
        url, writer = store
        target = f"lmdb://{tmp_path}/copy"
        found = json.loads(
            run("pull", target, url, "--label", "user=anna", "--json").stdout
        )
        assert (found["source"], found["target"]) == (url, target)
        assert (found["received"]["requests"], found["received"]["packs"]) == (1, 1)
        assert run("pull", target, url).returncode == 0
        with closing(open_backend(target, read_only=True)) as backend:
            assert contents(backend) == contents(writer.backend)
        assert run("pull", url, url).returncode == 2

    def test_export_and_push_damaged_pack_exit_1(self, run, url, tmp_path):
        store_with_a_bad_pack(url)
        for command in (
            ("export", url, "--all", "-o", "o.pkv"),
            ("push", url, f"lmdb://{tmp_path}/copy"),
        ):
            done = run(*command)
            assert done.returncode == 1
            assert "left out" in done.stdout
            assert "one" in done.stdout


def test_archive_writer_output_matches_documented_format(source, tmp_path):
    """Read the file by docs/format.md, without persistkv's reader."""
    backend, _ = source
    exported(backend, tmp_path / "a.pkv")
    data = (tmp_path / "a.pkv").read_bytes()
    assert data[:8] == b"PKVARCH1"
    records = split(data)
    kinds = [record[:4] for record in records]
    assert kinds[:3] == [b"HEAD", b"NSPC", b"PACK"]
    assert kinds[-1] == b"END "
    assert sorted(set(kinds)) == [b"END ", b"HEAD", b"NSPC", b"PACK", b"RQST"]
    heads = xxhash.xxh3_64()
    for record in records:
        assert record[4:8] == bytes(4)
        assert int.from_bytes(record[16:24], "little") == xxhash.xxh3_64_intdigest(
            record[24:]
        )
        if record is not records[-1]:
            heads.update(record[:24])
    assert json.loads(records[-1][24:]) == {
        "records": len(records) - 1,
        "heads": heads.hexdigest(),
    }
    assert json.loads(records[0][24:])["version"] == 1
    table = next(iter(catalogue(backend, next(iter(backend.namespaces())).id).values()))
    assert payload(backend, table) + table.encode() in [
        record[24:] for record in records
    ]
