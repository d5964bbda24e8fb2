from __future__ import annotations

import json
from contextlib import closing

import pytest

from persistkv.storage.registry import open_backend
from tests.tools.contexts import Contexts


@pytest.fixture
def inline(tmp_path):
    url = f"lmdb://{tmp_path}/store"
    with closing(open_backend(f"{url}?capacity=64MiB&placement=inline")) as backend:
        Contexts(backend, block_bytes=65_536).add("one", "a b c d")
    return url


@pytest.mark.parametrize("placement", ["extents", "inline"])
def test_all_payloads_move_and_verify(run, inline, placement):
    before = json.loads(run("stat", inline, "--json").stdout)
    if placement == "inline":
        assert run("move", inline, "--to", "extents").returncode == 0
    moved = json.loads(run("move", inline, "--to", placement, "--json").stdout)
    assert moved == {"url": inline, "placement": placement, "moved_bytes": before["stored_bytes"]}
    assert run("verify", inline).returncode == 0
    after = json.loads(run("stat", inline, "--json").stdout)
    assert all(after[name] == before[name] for name in ("packs", "blocks", "stored_bytes"))
    assert json.loads(run("move", inline, "--to", placement, "--json").stdout)["moved_bytes"] == 0


def test_unknown_placement_names_those_there_are(run, inline):
    done = run("move", inline, "--to", "tape")
    assert (done.returncode, done.stdout) == (2, "")
    assert "placement" in done.stderr
    assert "extents" in done.stderr
    assert "inline" in done.stderr


def test_absent_store_is_not_made(run, tmp_path):
    done = run("move", f"lmdb://{tmp_path}/none", "--to", "inline")
    assert done.returncode == 3
    assert not (tmp_path / "none").exists()
