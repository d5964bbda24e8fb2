"""``persistkv copy`` while stores fill, evict, fail or end, and from and to stores that cannot be
read or written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest
import xxhash

from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.identity import Identity
from persistkv.testing import FaultyBackend
from persistkv_tools.transfer.plan import StoreTooSmallError
from tests import forked
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.terminals import TESTED_CODE
from tests.tools.transfers import copy

BLOCK = 64 << 10  # 64 KiB
WORDS = 8  # blocks per request: 512 KiB
COUNT = 16  # requests of the source: 8 MiB
FILLED = 32  # requests of other processes: 16 MiB


def add_requests(writer: Contexts, prefix: str, count: int) -> None:
    for number in range(count):
        words = " ".join(f"{prefix}{number}-{word}" for word in range(WORDS))
        writer.add(f"{prefix}{number:02d}", words, age_s=100.0 - number)


def held(backend: Backend) -> set[str]:
    names = set()
    for space in backend.namespaces():
        for manifest in backend.catalogue(space.id).manifests():
            names.add(manifest.id)
    return names


@pytest.fixture
def source(tmp_path: Path) -> str:
    url = f"lmdb://{tmp_path}/source?capacity=64MiB"
    with closing(open_backend(url)) as backend:
        add_requests(Contexts(backend, block_bytes=BLOCK), "r", COUNT)
    return url


@pytest.fixture
def opened(source: str) -> Iterator[Backend]:
    with closing(open_backend(source, read_only=True)) as backend:
        yield backend


def fill(url: str) -> None:
    """Store more than the target's capacity under another identity, as an engine does."""
    with closing(open_backend(url)) as other:
        theirs = Identity.of({"weights": "theirs"})
        add_requests(Contexts(other, theirs, block_bytes=BLOCK), "t", FILLED)


class TestOtherProcesses:
    def test_target_filled_after_plan_refuses_and_writes_nothing(
        self,
        opened: Backend,
        tmp_path: Path,
    ) -> None:
        url = f"lmdb://{tmp_path}/target?capacity=16MiB"
        with closing(open_backend(url)) as target:
            faulty = FaultyBackend.of(target)
            # the plan reads the target's namespaces; the copy then asks for its room
            faulty.before("stats", lambda: fill(url))
            with pytest.raises(StoreTooSmallError):
                copy(opened, faulty)
            assert "commit" not in faulty.calls
            assert not any(name.startswith("r") for name in held(target))

    def test_target_filled_during_copy_reports_what_it_lost(
        self,
        opened: Backend,
        tmp_path: Path,
    ) -> None:
        url = f"lmdb://{tmp_path}/target?capacity=16MiB"
        with closing(open_backend(url)) as target:
            faulty = FaultyBackend.of(target)

            def fill_once(*_: object) -> None:
                if faulty.calls.count("commit") == COUNT // 2:
                    fill(url)

            faulty.before("commit", fill_once)
            copied = copy(opened, faulty)
            left = held(target)
        own = {name for name in left if name.startswith("r")}
        assert copied.requests == COUNT
        assert copied.lost
        assert own.isdisjoint(copied.lost)
        assert len(own) + len(copied.lost) == COUNT
        assert not copied.complete

    @pytest.mark.parametrize("place", ["lmdb", "file"])
    def test_source_evicting_during_copy_reports_left_out_requests(
        self,
        tmp_path: Path,
        run: Run,
        place: str,
    ) -> None:
        url = f"lmdb://{tmp_path}/small?capacity=12MiB"
        goal = f"{place}://{tmp_path}/goal"
        evicted = False
        with closing(open_backend(url)) as writing:
            add_requests(Contexts(writing, block_bytes=BLOCK), "r", COUNT)
            before = held(writing)

            def evict(_: int) -> None:
                nonlocal evicted
                if not evicted:
                    evicted = True
                    fill(url)

            with (
                closing(open_backend(url, read_only=True)) as reading,
                closing(open_backend(goal)) as target,
            ):
                copied = copy(reading, target, on_bytes=evict)
                assert copied.incomplete
                assert not copied.complete
                assert copied.requests + len(copied.incomplete) == len(before)
                assert held(target) == before - set(copied.incomplete)
        assert run("verify", goal).returncode == 0

    def test_killed_copy_resumes_without_copying_twice(
        self,
        source: str,
        tmp_path: Path,
        run: Run,
    ) -> None:
        goal = f"lmdb://{tmp_path}/goal?capacity=64MiB"
        arguments = ["copy", source, goal, "--rate", "1MiB"]
        command = [sys.executable, "-m", "persistkv_tools", *arguments]
        process = forked.Popen(command)
        deadline = time.monotonic() + 60
        listed: set[str] = set()
        try:
            while len(listed) < 3:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
                found = run("ls", goal, "--ids")
                listed = set(found.stdout.split())
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        done = run("copy", source, goal, "--json")
        assert done.returncode == 0, done.stderr
        copied = json.loads(done.stdout)["copied"]
        assert copied["requests"] + copied["requests_held"] == COUNT
        assert copied["requests_held"] >= len(listed)
        assert copied["packs"] <= COUNT - len(listed)
        assert len(run("ls", goal, "--ids").stdout.split()) == COUNT
        assert run("verify", goal).returncode == 0


class TestStoresThatCannotBeUsed:
    @pytest.mark.parametrize("side", ["source", "target"])
    @pytest.mark.parametrize("kind", ["absent", "directory", "short"])
    def test_unreadable_key_file_exits_2_naming_it(
        self,
        source: str,
        tmp_path: Path,
        run: Run,
        side: str,
        kind: str,
    ) -> None:
        key = tmp_path / "key"
        if kind == "directory":
            key.mkdir()
        elif kind == "short":
            key.write_text("short")
        shared = f"file://{tmp_path}/shared?key_file={key}"
        stores = (shared, source) if side == "source" else (source, shared)
        done = run("copy", *stores)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert str(key) in done.stderr or "32 bytes" in done.stderr
        assert not (tmp_path / "shared").exists()

    def test_shared_objects_of_newer_format_are_skipped_with_a_warning_and_stay(
        self,
        source: str,
        tmp_path: Path,
        run: Run,
        start: Run,
    ) -> None:
        """A shared store ignores objects of a newer release, and never deletes them."""
        other = f"file://{tmp_path}/shared?cache=no"
        assert run("copy", source, other, "--newest", "2").returncode == 0
        (space,) = json.loads(run("ls", source, "--json").stdout)["namespaces"]
        raise_versions(tmp_path / "shared", space["id"])
        before = files(tmp_path / "shared")

        done = start("copy", other, f"lmdb://{tmp_path}/goal", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["copied"]["requests"] == 0
        assert "format: version 9" in done.stderr

        done = start("copy", source, other, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["copied"]["requests"] == COUNT
        assert "format: version 9" in done.stderr
        after = files(tmp_path / "shared")
        assert {name: after.get(name) for name in before} == before

    @pytest.mark.parametrize("side", ["source", "target"])
    def test_local_store_of_newer_format_exits_3_and_is_not_changed(
        self,
        source: str,
        tmp_path: Path,
        run: Run,
        side: str,
    ) -> None:
        other = f"lmdb://{tmp_path}/newer"
        assert run("copy", source, other, "--newest", "2").returncode == 0
        set_version(tmp_path / "newer", 9)
        before = files(tmp_path / "newer")
        stores = (other, source) if side == "source" else (source, other)
        done = run("copy", *stores)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert "its format is 9" in done.stderr
        assert files(tmp_path / "newer") == before

    @pytest.mark.parametrize("place", ["lmdb", "file"])
    def test_full_disk_exits_3_and_next_run_resumes(
        self,
        source: str,
        tmp_path: Path,
        run: Run,
        place: str,
    ) -> None:
        """A limit on file sizes acts like a full disk: packs do not fit below it."""
        goal = f"{place}://{tmp_path}/goal"

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, 256 << 10))

        done = run_limited("copy", source, goal, before=limit)
        assert done.returncode == 3, done.stdout
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("persistkv: ")
        again = run("copy", source, goal)
        assert again.returncode == 0, again.stderr
        assert len(run("ls", goal, "--ids").stdout.split()) == COUNT


def run_limited(
    *arguments: str,
    before: Callable[[], None],
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process for which ``before`` sets limits."""
    return subprocess.run(
        [sys.executable, "-m", "persistkv_tools", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **TESTED_CODE},
        preexec_fn=before,
    )


def raise_versions(directory: Path, namespace: str) -> None:
    """Set the version of all index objects of a namespace to one that no release knows."""
    for path in directory.glob(f"{namespace}-*/i*/*"):
        content = bytearray(path.read_bytes())
        content[8:12] = (9).to_bytes(4, "little")
        name = str(path.relative_to(directory))
        sealed = bytes.fromhex(namespace) + name.encode() + b"\0" + content[:-16]
        content[-16:] = xxhash.xxh3_128_digest(bytes(sealed))
        path.write_bytes(bytes(content))


def set_version(directory: Path, version: int) -> None:
    """Set the version of the format of a local store."""
    with closing(
        lmdb.open(str(directory), max_dbs=64, map_size=1 << 30)
    ) as environment:
        meta = environment.open_db(b"meta", create=False)
        with environment.begin(write=True) as transaction:
            row = transaction.get(b"format", db=meta)
            assert row is not None
            changed = row[:8] + version.to_bytes(4, "little")
            transaction.put(b"format", changed, db=meta)


def files(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "lock.mdb":  # of readers
            found[str(path)] = path.read_bytes()
    return found


def test_only_target_with_store_variable_copies_from_it(
    source: str,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSISTKV_STORE", source)
    for number, chosen in enumerate((["r01", "r02"], ["--newest", "3"])):
        goal = f"lmdb://{tmp_path}/goal{number}"
        done = run("copy", goal, *chosen)
        assert done.returncode == 0, done.stderr
        assert f"copied to {goal}" in done.stdout
        assert len(run("ls", goal, "--ids").stdout.split()) == 2 + number
    done = run("copy", source)
    assert done.returncode == 2
    assert "another store than the source" in done.stderr
