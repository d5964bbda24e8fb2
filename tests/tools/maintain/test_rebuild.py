"""``persistkv rebuild`` builds a catalogue from a store's packs after damage."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest, sample_pack
from tests.tools.conftest import Run
from tests.tools.json_fields import check_documented

CAPACITY = 64 << 20


@pytest.fixture
def store(tmp_path: Path) -> str:
    """URL, without options, of a closed store with ten packs and a request, and payloads in segment
    files."""
    url = f"lmdb://{tmp_path}/store"
    with closing(open_backend(f"{url}?capacity={CAPACITY}")) as backend:
        namespace = backend.open_namespace(Identity.of({"architecture": "Llama"})).id
        packs = [sample_pack(namespace, seed) for seed in range(10)]
        request = sample_manifest("request", 0, packs=[packs[0].pack_id])
        backend.commit(namespace, CommitBatch(packs, [request]))
    return url


def path_of(url: str) -> Path:
    return Path(url.partition("://")[2])


def test_rebuild_lost_catalogue_finds_packs_that_verify(run: Run, store: str) -> None:
    (path_of(store) / "data.mdb").unlink()
    done = run("rebuild", f"{store}?capacity=64MiB")
    assert done.returncode == 0, done.stderr
    assert "found 10 packs (40 blocks, 160.0 KiB) in 1 namespace" in done.stdout
    assert "requests, labels and pins are lost" in done.stdout
    verified = json.loads(run("verify", store, "--json").stdout)
    assert (verified["packs"], verified["problems"]) == (10, 0)
    stat = json.loads(run("stat", store, "--json").stdout)
    assert (stat["blocks"], stat["requests"], stat["capacity"]) == (40, 0, CAPACITY)


def test_rebuild_json_has_the_documented_fields(run: Run, store: str) -> None:
    data = path_of(store) / "data.mdb"
    data.write_bytes(os.urandom(data.stat().st_size))
    done = run("rebuild", store, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check_documented("rebuild", found, complete=True)
    assert (found["rebuilt"], found["intact"], found["packs"]) == (True, False, 10)
    assert Path(found["damaged"], "data.mdb").exists()


def test_rebuild_intact_store_changes_nothing(run: Run, store: str) -> None:
    before = (path_of(store) / "data.mdb").read_bytes()
    done = run("rebuild", store)
    assert done.returncode == 0, done.stderr
    assert "nothing to rebuild" in done.stdout
    assert json.loads(run("rebuild", store, "--json").stdout)["intact"] is True
    assert (path_of(store) / "data.mdb").read_bytes() == before


def test_rebuild_without_any_pack_exits_with_1(run: Run, store: str) -> None:
    (path_of(store) / "data.mdb").unlink()
    os.truncate(path_of(store) / "segments" / "00000000.seg", 4096)
    done = run("rebuild", store)
    assert done.returncode == 1
    assert "nothing was changed" in done.stdout


def test_rebuild_store_in_use_exits_with_3(run: Run, store: str) -> None:
    with closing(open_backend(store)):
        done = run("rebuild", store)
    assert done.returncode == 3
    assert "open for writing" in done.stderr


def test_rebuild_renamed_store_can_be_copied_to_the_present_one(
    run: Run, store: str
) -> None:
    path = path_of(store)
    (path / "data.mdb").write_bytes(os.urandom((path / "data.mdb").stat().st_size))
    (path / "guard").write_text("open".ljust(31) + "\n")
    open_backend(store).close()  # renames the damaged files
    (renamed,) = path.glob("damaged-*")
    assert run("rebuild", str(renamed)).returncode == 0
    done = run("copy", str(renamed), store)
    assert done.returncode == 0, done.stderr
    assert json.loads(run("stat", store, "--json").stdout)["packs"] == 10
