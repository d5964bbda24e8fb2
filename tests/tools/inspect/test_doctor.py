from __future__ import annotations

import fcntl
import json
import os
import resource
import time
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.cpu.region_file import RegionFile, region_path
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest
from persistkv_tools.inspect import doctor
from persistkv_tools.inspect.doctor import Level, examine


def by_check(findings):
    return {finding.check: finding for finding in findings}


def examined(url=None, environment=None, shared_memory=doctor.SHARED_MEMORY):
    return by_check(examine(url, environment or {}, shared_memory))


@pytest.fixture
def store(url):
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(Identity.of({})).id
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("one")]))
    return url


def test_a_good_store(store):
    found = examined(store)
    assert found["store"].found.startswith("can be opened: 1 request, 0 packs")
    assert found["store's clock"].level is Level.OK
    assert found["package lmdb"].level is Level.OK
    assert found["clock"].level is Level.OK
    assert {"shared memory", "leftover regions", "open files", "locked memory", "free disk", "O_DIRECT"} <= found.keys()
    assert "PID namespace" in found


def test_whatever_is_not_right_says_what_to_do(store):
    for finding in examined(store).values():
        assert bool(finding.todo) == (finding.level is not Level.OK) or "could not be tried" in finding.found


def test_damaged_files_are_shown_until_prune_deletes_them(store, run):
    location = Path(store.removeprefix("lmdb://").partition("?")[0])
    damaged = location / "damaged-20260101T000000Z"
    damaged.mkdir()
    (damaged / "data.mdb").write_bytes(bytes(1 << 20))
    (finding,) = [found for found in examine(store, {}) if found.check == "damaged files"]
    assert finding.level is Level.WARNING
    assert str(damaged) in finding.found
    assert "--quarantined" in finding.todo
    found = json.loads(run("stat", store, "--json").stdout)
    assert found["quarantined"] == [str(damaged)]
    assert 1 << 20 <= found["quarantined_bytes"] < 2 << 20
    assert "damaged-20260101" in "".join(run("stat", store).stdout.split())
    planned = json.loads(run("prune", store, "--quarantined", "--dry-run", "--json").stdout)
    assert planned["quarantined"]["directories"] == [str(damaged)]
    assert damaged.exists()
    refused = run("prune", store, "--quarantined")
    assert (refused.returncode, damaged.exists()) == (2, True)
    done = json.loads(run("prune", store, "--quarantined", "--yes", "--json").stdout)
    assert done["quarantined"]["deleted_bytes"] == found["quarantined_bytes"]
    assert (done["done"]["requests"], damaged.exists()) == (0, False)
    assert not [found for found in examine(store, {}) if found.check == "damaged files"]


def test_without_a_store(run):
    done = run("doctor", "--json")
    assert done.returncode in (0, 1), done.stderr
    names = {finding["check"] for finding in json.loads(done.stdout)["findings"]}
    assert "clock" in names
    assert "store" not in names


def test_a_store_that_does_not_open_is_a_problem(run, tmp_path):
    done = run("doctor", f"lmdb://{tmp_path}/absent")
    assert done.returncode == 1
    assert "problem" in done.stdout
    assert "absent" in done.stdout
    assert not (tmp_path / "absent").exists()
    assert examined("no url")["store"].level is Level.PROBLEM


def test_leftovers_are_told_from_regions_in_use(tmp_path):
    assert examined(shared_memory=tmp_path)["leftover regions"].level is Level.OK
    used = RegionFile.open(region_path("used", str(tmp_path)), 4096, 10)
    left = tmp_path / os.path.basename(region_path("left"))
    left.write_bytes(bytes(8192))
    (tmp_path / "something_else.mmap").write_bytes(bytes(10))
    found = examined(shared_memory=tmp_path)["leftover regions"]
    used.close()
    assert (found.level, found.found.partition(":")[0]) == (Level.WARNING, "1 region of killed engines, 8.0 KiB")
    assert str(left) in found.found
    assert left.exists()


def test_looking_does_not_take_a_lock_away(tmp_path):
    path = tmp_path / os.path.basename(region_path("engine"))
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert examined(shared_memory=tmp_path)["leftover regions"].level is Level.OK
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_shared_memory(tmp_path):
    found = examined(shared_memory=tmp_path / "absent")
    assert found["shared memory"].level is Level.PROBLEM
    assert "leftover regions" not in found


@pytest.mark.parametrize(("seed", "level"), [("0", Level.OK), ("random", Level.NOTE), (None, Level.NOTE)])
def test_the_hash_seed(seed, level):
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    assert examined(environment=environment)["PYTHONHASHSEED"].level is level


@pytest.mark.parametrize(("limit", "level"), [(256, Level.WARNING), (4096, Level.OK), (-1, Level.OK)])
def test_open_files(monkeypatch, limit, level):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert examined()["open files"].level is level


@pytest.mark.parametrize(("limit", "level"), [(8 << 20, Level.NOTE), (resource.RLIM_INFINITY, Level.OK)])
def test_locked_memory(monkeypatch, limit, level):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert examined()["locked memory"].level is level


def test_a_clock_that_is_wrong(monkeypatch, store):
    monkeypatch.setattr(time, "time", lambda: 1_000.0)
    found = examined(store)
    assert found["clock"].level is Level.WARNING
    assert found["store's clock"].level is Level.WARNING


def test_less_disk_than_the_store_may_take(tmp_path):
    url = f"lmdb://{tmp_path}/large?capacity=60TiB"
    open_backend(url).close()
    found = examined(url)["free disk"]
    assert found.level is Level.WARNING
    assert "capacity" in found.todo


def test_o_direct_leaves_nothing_behind(store, tmp_path):
    before = sorted(path.name for path in (tmp_path / "store").iterdir())
    assert examined(store)["O_DIRECT"].level in Level
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == before


def test_missing_packages(monkeypatch):
    def absent(name):
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    found = examined()
    assert found["package lmdb"].level is Level.PROBLEM
    assert found["package torch"].level is Level.NOTE
    assert "persistkv[s3]" in found["package boto3"].todo


def test_imports_no_torch(start, store):
    done = start("doctor", store, python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "transformers", "boto3"} & imported
