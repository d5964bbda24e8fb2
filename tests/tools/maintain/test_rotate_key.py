"""``persistkv rotate-key`` replaces the key of a store, and commands need the present one."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest, sample_pack
from tests.tools.conftest import Run
from tests.tools.json_fields import check_documented


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "old").write_text("0123456789abcdef" * 4)
    (tmp_path / "new").write_text("fedcba9876543210" * 4)
    return tmp_path


@pytest.fixture(params=["lmdb", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL, without options, of a closed store with the key ``old``."""
    return f"{request.param}://{tmp_path}/store"


def fill(url: str) -> None:
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(Identity.of({"architecture": "Llama"})).id
        pack = sample_pack(namespace, 1, seal=backend.seal, blocks=3)
        request = sample_manifest("request", 1, packs=[pack.pack_id])
        backend.commit(namespace, CommitBatch([pack], [request]))


def test_rotate_key_new_key_opens_store_and_old_one_does_not(
    run: Run, keys: Path, store: str
) -> None:
    old, new = f"{store}?key_file={keys}/old", f"{store}?key_file={keys}/new"
    fill(old)
    done = run("rotate-key", old, "--new-key-file", str(keys / "new"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    check_documented("rotate-key", found, complete=True)
    assert found["before"] != found["after"]
    verified = json.loads(run("verify", new, "--json").stdout)
    assert (verified["packs"], verified["problems"]) == (1, 0)
    refused = run("ls", old)
    assert refused.returncode == 2
    assert found["after"] in refused.stderr
    # and once more, as a repeated command
    again = run("rotate-key", old, "--new-key-file", str(keys / "new"))
    assert again.returncode == 2
    assert "0123456789" not in done.stdout + refused.stderr + again.stderr


def test_rotate_key_without_new_key_or_for_plain_store_exits_2(
    run: Run, keys: Path, store: str
) -> None:
    old = f"{store}?key_file={keys}/old"
    fill(old)
    done = run("rotate-key", old)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--new-key-file" in done.stderr
    plain = f"{store}-plain"
    fill(plain)
    done = run("rotate-key", plain, "--new-key-file", str(keys / "new"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "a store with" in done.stderr or "one with a key" in done.stderr
    assert run("ls", plain).returncode == 0


def test_rotate_key_absent_store_exits_3_and_creates_none(
    run: Run, keys: Path, tmp_path: Path
) -> None:
    url = f"lmdb://{tmp_path}/absent?key_file={keys}/old"
    done = run("rotate-key", url, "--new-key-file", str(keys / "new"))
    assert (done.returncode, done.stdout) == (3, "")
    assert not (tmp_path / "absent").exists()


def test_commands_without_the_key_say_so(run: Run, keys: Path, store: str) -> None:
    fill(f"{store}?key_file={keys}/old")
    for name in ("ls", "stat", "verify"):
        done = run(name, store)
        assert done.returncode in (2, 3)
        assert "key_file" in done.stderr
        assert done.stderr.count("\n") == 1
