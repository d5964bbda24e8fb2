from __future__ import annotations

import fcntl
import json
import mmap
import os
import resource
import time
from collections.abc import Iterable
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest

from persistkv.cpu.region_file import RegionFile, region_path
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.checks import Check, Level
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest
from persistkv_tools.inspect import doctor
from persistkv_tools.inspect.doctor import examine
from tests.tools.conftest import Run


def by_check(findings: Iterable[Check]) -> dict[str, Check]:
    return {finding.check: finding for finding in findings}


def examined(
    url: str | None = None,
    environment: dict[str, str] | None = None,
    shared_memory: Path = doctor.SHARED_MEMORY,
) -> dict[str, Check]:
    return by_check(examine(url, environment or {}, shared_memory))


@pytest.fixture
def store(url: str) -> str:
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(Identity.of({})).id
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("one")]))
    return url


def test_examine_intact_store_is_ok(store: str) -> None:
    found = examined(store)
    assert found["store"].found.startswith("can be opened: 1 request, 0 packs")
    assert found["store's clock"].level is Level.OK
    assert found["package lmdb"].level is Level.OK
    assert found["clock"].level is Level.OK
    assert {
        "shared memory",
        "leftover regions",
        "open files",
        "locked memory",
        "free disk",
        "O_DIRECT",
    } <= found.keys()
    assert "PID namespace" in found


def test_examine_finding_that_is_not_ok_has_remedy(store: str) -> None:
    for finding in examined(store).values():
        assert (
            bool(finding.todo) == (finding.level is not Level.OK)
            or "could not be tried" in finding.found
        )


@pytest.mark.parametrize("release", ["2.9.9", "99.0"])
def test_examine_untested_release_is_warning_with_tested_ones(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    installed = metadata.version
    monkeypatch.setattr(
        doctor, "version", lambda name: release if name == "lmdb" else installed(name)
    )
    finding = examined()["package lmdb"]
    assert (finding.level, finding.found) == (
        Level.WARNING,
        f"{release}, which is not tested",
    )
    assert "tested with lmdb 3.0" in finding.todo


def test_examine_quarantined_files_are_reported_until_pruned(
    store: str, run: Run
) -> None:
    location = Path(store.removeprefix("lmdb://").partition("?")[0])
    damaged = location / "damaged-20260101T000000Z"
    damaged.mkdir()
    (damaged / "data.mdb").write_bytes(bytes(1 << 20))
    (finding,) = [
        found for found in examine(store, {}) if found.check == "damaged files"
    ]
    assert finding.level is Level.WARNING
    assert str(damaged) in finding.found
    assert "--quarantined" in finding.todo
    found = json.loads(run("stat", store, "--json").stdout)
    assert found["quarantined"] == [str(damaged)]
    assert 1 << 20 <= found["quarantined_bytes"] < 2 << 20
    assert "damaged-20260101" in "".join(run("stat", store).stdout.split())
    planned = json.loads(
        run("prune", store, "--quarantined", "--dry-run", "--json").stdout
    )
    assert planned["quarantined"]["directories"] == [str(damaged)]
    assert damaged.exists()
    refused = run("prune", store, "--quarantined")
    assert (refused.returncode, damaged.exists()) == (2, True)
    done = json.loads(run("prune", store, "--quarantined", "--yes", "--json").stdout)
    assert done["quarantined"]["deleted_bytes"] == found["quarantined_bytes"]
    assert (done["done"]["requests"], damaged.exists()) == (0, False)
    assert not [found for found in examine(store, {}) if found.check == "damaged files"]


def test_examine_shared_directory_checks_its_medium_and_nothing_of_lmdb(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}/shared?cache=no"
    found = examined(url)
    assert found["directory"].level is Level.NOTE
    assert found["store"].level is Level.PROBLEM
    assert not (tmp_path / "shared").exists()
    with closing(open_backend(url)) as backend:
        backend.open_namespace(Identity.of({}))
    before = sorted((tmp_path / "shared").rglob("*"))
    found = examined(url)
    assert {
        found[name].level
        for name in ("store", "list", "put", "read", "delete", "directory")
    } == {Level.OK}
    assert "free disk" in found
    assert not {"O_DIRECT", "PID namespace"} & found.keys()
    assert sorted((tmp_path / "shared").rglob("*")) == before


def test_examine_shared_store_with_invalid_option_is_problem(tmp_path: Path) -> None:
    found = examined(f"file://{tmp_path}/shared?capcity=1GiB")["store"]
    assert (found.level, "capcity" in found.found) == (Level.PROBLEM, True)


def test_doctor_without_store_checks_only_machine(run: Run) -> None:
    done = run("doctor", "--json")
    assert done.returncode in (0, 1), done.stderr
    names = {finding["check"] for finding in json.loads(done.stdout)["findings"]}
    assert "clock" in names
    assert "store" not in names


def test_doctor_absent_store_exits_1_with_problem(run: Run, tmp_path: Path) -> None:
    done = run("doctor", f"lmdb://{tmp_path}/absent")
    assert done.returncode == 1
    assert "problem" in done.stdout
    assert "absent" in done.stdout
    assert not (tmp_path / "absent").exists()
    assert examined("no url")["store"].level is Level.PROBLEM


def test_examine_leftover_region_is_reported_and_used_one_is_not(
    tmp_path: Path,
) -> None:
    assert examined(shared_memory=tmp_path)["leftover regions"].level is Level.OK
    used = RegionFile.open(region_path("used", str(tmp_path)), 4096, 10)
    left = tmp_path / os.path.basename(region_path("left"))
    left.write_bytes(bytes(8192))
    (tmp_path / "something_else.mmap").write_bytes(bytes(10))
    found = examined(shared_memory=tmp_path)["leftover regions"]
    used.close()
    assert (found.level, found.found.partition(":")[0]) == (
        Level.WARNING,
        "1 region of killed engines, 8.0 KiB",
    )
    assert str(left) in found.found
    assert left.exists()


def test_examine_locked_region_stays_locked(tmp_path: Path) -> None:
    path = tmp_path / os.path.basename(region_path("engine"))
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert examined(shared_memory=tmp_path)["leftover regions"].level is Level.OK
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_examine_absent_shared_memory_is_problem(tmp_path: Path) -> None:
    found = examined(shared_memory=tmp_path / "absent")
    assert found["shared memory"].level is Level.PROBLEM
    assert "leftover regions" not in found


@pytest.mark.parametrize(
    ("seed", "level"), [("0", Level.OK), ("random", Level.NOTE), (None, Level.NOTE)]
)
def test_examine_hash_seed_not_fixed_is_note(seed: str | None, level: Level) -> None:
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    assert examined(environment=environment)["PYTHONHASHSEED"].level is level


@pytest.mark.parametrize(
    ("limit", "level"), [(256, Level.WARNING), (4096, Level.OK), (-1, Level.OK)]
)
def test_examine_low_open_files_limit_is_warning(
    monkeypatch: pytest.MonkeyPatch, limit: int, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert examined()["open files"].level is level


@pytest.mark.parametrize(
    ("limit", "level"), [(8 << 20, Level.NOTE), (resource.RLIM_INFINITY, Level.OK)]
)
def test_examine_limited_locked_memory_is_note(
    monkeypatch: pytest.MonkeyPatch, limit: int, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert examined()["locked memory"].level is level


def test_examine_wrong_clock_is_warning(
    monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000.0)
    found = examined(store)
    assert found["clock"].level is Level.WARNING
    assert found["store's clock"].level is Level.WARNING


def test_examine_capacity_beyond_free_disk_is_warning(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/large?capacity=60TiB"
    open_backend(url).close()
    found = examined(url)["free disk"]
    assert found.level is Level.WARNING
    assert "capacity" in found.todo


def writes_past_page_cache(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            return os.write(descriptor, page) == mmap.PAGESIZE
    except OSError:
        return False
    finally:
        os.close(descriptor)


def test_examine_o_direct_matches_file_system_and_leaves_no_files(
    store: str, tmp_path: Path
) -> None:
    before = sorted(path.name for path in (tmp_path / "store").iterdir())
    found = examined(store)["O_DIRECT"]
    if "could not be tried" in found.found:
        pytest.skip(f"the file system has no files without a name: {found.found}")
    works = writes_past_page_cache(tmp_path / "probe")
    assert (found.level, found.found.startswith("works")) == (
        (Level.OK, True) if works else (Level.WARNING, False)
    )
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == before


def test_examine_missing_required_package_is_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    found = examined()
    assert found["package lmdb"].level is Level.PROBLEM
    assert found["package torch"].level is Level.NOTE
    assert "persistkv[s3]" in found["package boto3"].todo


def test_doctor_imports_no_torch(start: Run, store: str) -> None:
    done = start("doctor", store, python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "transformers", "boto3"} & imported
