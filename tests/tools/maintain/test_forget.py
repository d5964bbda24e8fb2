"""``persistkv forget`` destroys the content and the keys of a tenant, and writes a receipt."""

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
def key(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("0123456789abcdef" * 4)
    (tmp_path / "other").write_text("fedcba9876543210" * 4)
    return tmp_path / "key"


@pytest.fixture(params=["lmdb-key", "lmdb-plain", "file-key", "file-plain"])
def store(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    key: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """URL of a store with content of two tenants."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scheme, _, seal = request.param.partition("-")
    url = f"{scheme}://{tmp_path}/store"
    if seal == "key":
        url += f"?key_file={key}"
    fill(url)
    return url


def fill(url: str) -> None:
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(Identity.of({"architecture": "Llama"})).id
        for seed, tenant in enumerate(("anna", "anna", "berta")):
            pack = sample_pack(
                namespace, seed, seal=backend.seal, blocks=3, tenant=tenant
            )
            request = sample_manifest(
                f"{tenant}-{seed}", seed, packs=[pack.pack_id], tenant=tenant
            )
            backend.commit(namespace, CommitBatch([pack], [request]))


def test_forget_removes_content_of_tenant_and_signs_receipt(
    run: Run, store: str, tmp_path: Path
) -> None:
    receipt = tmp_path / "receipt.json"
    done = run("forget", store, "anna", "--yes", "--receipt", str(receipt), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    check_documented("forget", found, left_out={"url", "genuine"})
    assert (found["tenant"], found["packs"], found["requests"]) == ("anna", 2, 2)
    assert found["store"] == store.partition("?")[0]
    assert json.loads(receipt.read_text()) == found
    has_key = "key_file" in store
    assert len(found["key_ids"]) == has_key
    assert bool(found["signature"]) == has_key
    names = {
        row["id"] for row in json.loads(run("ls", store, "--json").stdout)["requests"]
    }
    assert names == {"berta-2"}
    verified = json.loads(run("verify", store, "--json").stdout)
    assert (verified["packs"], verified["problems"]) == (1, 0)

    checked = run("forget", store, "--verify-receipt", str(receipt), "--json")
    assert json.loads(checked.stdout)["genuine"] == has_key
    assert checked.returncode == (0 if has_key else 1)
    changed = {**found, "packs": 3}
    receipt.write_text(json.dumps(changed))
    assert run("forget", store, "--verify-receipt", str(receipt)).returncode == 1


def test_forget_receipt_is_genuine_only_for_its_store_and_after_rotation(
    run: Run,
    key: Path,
    tmp_path: Path,
) -> None:
    url, other = (f"lmdb://{tmp_path}/{name}?key_file={key}" for name in "ab")
    receipt = tmp_path / "receipt.json"
    for place in (url, other):
        fill(place)
    assert (
        run("forget", url, "anna", "--yes", "--receipt", str(receipt)).returncode == 0
    )
    assert run("forget", other, "--verify-receipt", str(receipt)).returncode == 1
    rotated = run("rotate-key", url, "--new-key-file", str(tmp_path / "other"))
    assert rotated.returncode == 0
    url = url.replace("/key", "/other")
    assert run("forget", url, "--verify-receipt", str(receipt)).returncode == 0


def test_forget_wrong_input_exits_2_and_changes_nothing(
    run: Run, store: str, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("kept")
    for arguments in (
        [store],
        [store, "anna"],
        [store, "", "--yes"],
        [store, "anna", "--yes", "--receipt", str(taken)],
        [store, "--verify-receipt", str(taken)],
        [store, "--verify-receipt", str(tmp_path / "absent")],
    ):
        done = run("forget", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert done.stderr.count("\n") == 1
    assert taken.read_text() == "kept"
    assert len(json.loads(run("ls", store, "--json").stdout)["requests"]) == 3
