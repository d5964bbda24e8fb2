"""Quotas of tenants in the commands: ``set`` changes them, ``stat``, ``report`` and
``serve-metrics`` show them, ``verify`` checks the totals, ``copy`` follows those of its target."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue.quotas import Quotas
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, tables
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.tools.conftest import Run

MODEL = Identity.of({"weights": "checkpoint:1"})
PACK = 64 << 10  # 64 KiB
ODD = "a/b=c & d"  # a name of a tenant may contain what separates names and values


def fill(url: str, count: int = 4, tenants: tuple[str, ...] = ("anna", ODD)) -> None:
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(MODEL).id
        for seed in range(count):
            for tenant in tenants:
                pack = sample_pack(
                    namespace,
                    # tenants have keys of their own
                    crc32(tenant.encode()) + seed,
                    blocks=1,
                    block_bytes=PACK,
                    tenant=tenant,
                )
                backend.commit(namespace, CommitBatch([pack]))


def held(url: str) -> dict[str, int]:
    """Return the number of packs of each tenant, after a check of all totals."""
    with closing(open_backend(url)) as backend:
        check_totals(backend)
        return {totals.tenant: totals.packs for totals in backend.tenants()}


@pytest.fixture(params=["lmdb", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"{request.param}://{tmp_path}/quotas"
    fill(url)
    return url


def test_set_quota_shows_what_is_evicted_and_applies_it(run: Run, store: str) -> None:
    done = run("set", store, "quota.anna=128KiB", f"quota.{ODD}=1GiB", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "none → 128.0 KiB" in done.stdout
    assert "128.0 KiB of the tenant anna will be evicted" in done.stdout
    assert "changed" not in done.stdout
    done = run(
        "set", store, "quota.anna=128KiB", f"quota.{ODD}=1GiB", "--yes", "--json"
    )
    found = json.loads(done.stdout)
    assert found["changed"]
    assert found["before"]["quotas"] == {}
    assert found["after"]["quotas"] == {"anna": 128 << 10, ODD: 1 << 30}
    assert found["consequences"]["quota_bytes"] == {"anna": 2 * PACK}
    shown = run("set", store).stdout
    assert "quota.anna" in shown
    assert f"quota.{ODD}" in shown
    if store.startswith("lmdb"):
        assert held(store) == {"anna": 2, ODD: 4}
    done = run("set", store, f"quota.{ODD}=none", "capacity=2GiB", "--yes", "--json")
    assert json.loads(done.stdout)["after"]["quotas"] == {"anna": 128 << 10}


def test_set_keeps_quotas_that_were_set_while_it_asked(
    run: Run, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)

    def answer_later(question: str) -> str:
        with closing(open_backend(store)) as backend:
            policy = backend.policy()
            backend.set_policy(replace(policy, quotas={"berta": 1 << 30}))
        return "y"

    monkeypatch.setattr("builtins.input", answer_later)
    done = run("set", store, "quota.anna=1MiB", "capacity=2GiB")
    assert done.returncode == 0, done.stderr
    found = json.loads(run("set", store, "--json").stdout)["before"]
    assert found["quotas"] == {"anna": 1 << 20, "berta": 1 << 30}
    assert found["capacity"] == 2 << 30


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("quota.anna=much", "quota.anna"),
        ("quota.anna=0", "quota.anna"),
        ("quota.=1GiB", "1 to 128 characters"),
        ("quota.default=1GiB", "capacity bounds the default"),
        ("quota.default=none", "capacity bounds the default"),
        ("quota=1GiB", "quota.TENANT=SIZE"),
    ],
)
def test_set_impossible_quota_is_refused(
    run: Run, store: str, value: str, message: str
) -> None:
    done = run("set", store, value, "--yes")
    assert done.returncode == 2
    assert message in done.stderr
    assert json.loads(run("set", store, "--json").stdout)["before"]["quotas"] == {}


def test_stat_and_report_show_tenants_and_quotas(
    run: Run, store: str, tmp_path: Path
) -> None:
    run("set", store, "quota.anna=1MiB", "--yes")
    found = json.loads(run("stat", store, "--json").stdout)["tenants"]
    assert sorted(found, key=lambda one: one["tenant"]) == [
        {"tenant": ODD, "packs": 4, "stored_bytes": 4 * PACK, "quota": None},
        {"tenant": "anna", "packs": 4, "stored_bytes": 4 * PACK, "quota": 1 << 20},
    ]
    shown = run("stat", store).stdout
    assert "25.0%" in shown
    assert ODD in shown
    run("report", store, "-o", "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Tenants</h2>" in page
    assert "a/b=c &amp; d" in page
    assert "25.0%" in page


def test_stat_and_report_of_store_without_tenants_show_none(
    run: Run, tmp_path: Path
) -> None:
    url = f"lmdb://{tmp_path}/plain"
    fill(url, tenants=("default",))
    assert "tenant" not in run("stat", url).stdout
    run("report", url, "-o", "report.html")
    assert "Tenants" not in (tmp_path / "report.html").read_text()
    (only,) = json.loads(run("stat", url, "--json").stdout)["tenants"]
    assert only["tenant"] == "default"
    assert only["packs"] == 4


def test_serve_metrics_exports_tenants_with_quotas(run: Run, store: str) -> None:
    pytest.importorskip("prometheus_client")
    run("set", store, "quota.anna=1MiB", "--yes")
    done = run("serve-metrics", store, "--once", "--json")
    samples = json.loads(done.stdout)["metrics"]
    found = {
        one["name"]: (one["labels"]["tenant"], one["value"])
        for one in samples
        if "_tenant_" in one["name"]
    }
    assert found == {
        "persistkv_tenant_packs": ("anna", 4),
        "persistkv_tenant_stored_bytes": ("anna", 4 * PACK),
        "persistkv_tenant_quota_bytes": ("anna", 1 << 20),
    }
    assert ODD not in done.stdout


def test_verify_finds_wrong_totals_of_a_tenant(run: Run, tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/wrong"
    fill(url)
    assert run("verify", url).returncode == 0
    with closing(open_backend(url)) as backend:
        assert isinstance(backend, LmdbBackend)
        with backend.rows(write=True) as rows:
            quotas = Quotas(rows)
            quotas.of("anna").stored_bytes += 1
            quotas.finish()
    done = run("verify", url, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["by_problem"] == {"tenant totals": 1}
    assert "anna" in found["findings"][0]["detail"]


def test_copy_follows_quotas_of_its_target(run: Run, tmp_path: Path) -> None:
    source, target = f"lmdb://{tmp_path}/source", f"lmdb://{tmp_path}/target"
    fill(source)
    run("set", source, "quota.anna=1GiB", "--yes")
    fill(target, count=1, tenants=("default",))
    run("set", target, "quota.anna=128KiB", "--yes")
    done = run("copy", source, target, "--json")
    assert done.returncode == 1, done.stderr
    copied = json.loads(done.stdout)["copied"]
    assert copied["lost_packs"] + copied["refused_packs"] > 0
    found = held(target)
    assert found[ODD] == 4
    assert found.get("anna", 0) <= 2
    assert found["default"] == 1


def test_copy_leaves_out_what_a_quota_refuses(run: Run, tmp_path: Path) -> None:
    source, target = f"lmdb://{tmp_path}/source", f"lmdb://{tmp_path}/target"
    fill(source, tenants=("berta",))
    with closing(open_backend(source)) as backend:
        namespace = backend.open_namespace(MODEL).id
        for tenant, seed in (("anna", 1000), ("carla", 2000)):
            pack = sample_pack(
                namespace, seed, blocks=3, block_bytes=PACK, tenant=tenant
            )
            manifest = sample_manifest(
                f"of {tenant}", seed, packs=[pack.pack_id], tenant=tenant
            )
            backend.commit(namespace, CommitBatch([pack], [manifest]))
    fill(target, count=1, tenants=("default",))
    run("set", target, "quota.anna=128KiB", "--yes")
    done = run("copy", source, target, "--json")
    assert done.returncode == 1, done.stderr
    copied = json.loads(done.stdout)["copied"]
    assert copied["refused_packs"] == 1
    assert copied["incomplete"] == ["of anna"]
    assert copied["requests"] == 1
    assert held(target) == {"anna": 0, "berta": 4, "carla": 1, "default": 1}
    with closing(open_backend(target)) as backend:
        namespace = backend.open_namespace(MODEL).id
        assert len(tables(backend, namespace)) == 6
