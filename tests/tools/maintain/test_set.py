"""``persistkv set`` shows a store's policy; no other command changes the policy."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts

GIB = 1 << 30
DAY_S = 86_400


@pytest.fixture
def store(contexts: tuple[str, Contexts]) -> str:
    """URL, without options, of a store of 1 GiB with two requests."""
    url, writer = contexts
    writer.add("one", "a b c")
    writer.add("two", "a b d")
    return url.partition("?")[0]


def policy(run: Run, store: str) -> Any:
    return json.loads(run("set", store, "--json").stdout)["before"]


def test_set_without_values_shows_the_policy(run: Run, store: str) -> None:
    done = run("set", store)
    assert done.returncode == 0, done.stderr
    assert "1.0 GiB" in done.stdout
    assert "inline" in done.stdout
    assert policy(run, store) == {
        "capacity": GIB,
        "ttl_s": None,
        "placement": "inline",
        "quotas": {},
    }


def test_set_changes_capacity_and_ttl_of_an_open_store(run: Run, store: str) -> None:
    done = run("set", store, "capacity=2GiB", "ttl=7d", "--yes")
    assert done.returncode == 0, done.stderr
    assert "1.0 GiB → 2.0 GiB" in done.stdout
    assert policy(run, store) == {
        "capacity": 2 * GIB,
        "ttl_s": 7 * DAY_S,
        "placement": "inline",
        "quotas": {},
    }
    assert run("set", store, "ttl=none", "--yes").returncode == 0
    assert policy(run, store)["ttl_s"] is None
    assert json.loads(run("stat", store, "--json").stdout)["requests"] == 2


def test_set_lower_capacity_shows_bytes_to_evict(run: Run, store: str) -> None:
    found = json.loads(run("set", store, "capacity=1MiB", "--dry-run", "--json").stdout)
    assert not found["changed"]
    disk = found["consequences"]["disk_bytes"]
    assert found["consequences"]["evicted_bytes"] == max(0, disk - (1 << 20))
    assert policy(run, store)["capacity"] == GIB


def test_set_lower_capacity_frees_disk_of_local_store_at_once(
    run: Run, tmp_path: Path
) -> None:
    url, store = f"lmdb://{tmp_path}/local", tmp_path / "local"
    with closing(open_backend(f"{url}?capacity=1GiB")) as backend:
        writer = Contexts(backend, block_bytes=1 << 20)
        for name in range(24):
            writer.add(str(name), f"{name}")
    before = sum(file.stat().st_blocks for file in store.rglob("*")) * 512
    assert before > 24 << 20
    done = run("set", url, "capacity=16MiB", "--yes")
    assert done.returncode == 0, done.stderr
    assert "will be evicted at once" in done.stdout
    assert done.stdout.endswith("changed\n")
    after = sum(file.stat().st_blocks for file in store.rglob("*")) * 512
    assert after <= 16 << 20


def test_set_lower_capacity_of_shared_store_says_what_evicts(
    run: Run, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/shared"
    with closing(open_backend(url)) as backend:
        Contexts(backend, block_bytes=1 << 20).add("one", "a b c")
    done = run("set", url, "capacity=1MiB", "--yes")
    assert done.returncode == 0, done.stderr
    assert "by the next commit of an engine, or by persistkv prune" in done.stdout
    assert "freed an hour later, or by the daily sweep" in done.stdout
    assert "engines apply it with their next commit" in done.stdout


def test_set_shorter_ttl_counts_expiring_requests(
    run: Run, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("pin", store, "one")
    now, since_boot = time.time, time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: now() + 2 * DAY_S)
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: since_boot(clock) + 2 * DAY_S
    )
    done = run("set", store, "ttl=1d", "--dry-run")
    assert "1 of 2 requests will expire" in done.stdout
    assert "will expire" not in run("set", store, "ttl=3d", "--dry-run").stdout


def test_set_ttl_counts_requests_that_the_next_commit_deletes(
    run: Run,
    contexts: tuple[str, Contexts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The use of a block delays its own expiry, and not that of a request."""
    url, writer = contexts
    writer.add("old", "a b")
    now, since_boot = time.time, time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: now() + 2 * DAY_S)
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: since_boot(clock) + 2 * DAY_S
    )
    touch = CommitBatch(touches=[writer.packs["old"]])
    writer.backend.commit(writer.namespace, touch)
    done = run("set", url, "ttl=1d", "--yes")
    assert "1 of 1 request will expire" in done.stdout
    writer.add("new", "c d")
    listed = json.loads(run("ls", url, "--json").stdout)["requests"]
    assert [request["id"] for request in listed] == ["new"]
    assert json.loads(run("stat", url, "--json").stdout)["packs"] == 2


def test_set_capacity_beyond_disk_prints_missing_space(run: Run, store: str) -> None:
    assert (
        "more than the disk has free"
        in run("set", store, "capacity=64TiB", "--dry-run").stdout
    )


def test_set_without_consent_changes_nothing(run: Run, store: str) -> None:
    done = run("set", store, "capacity=2GiB")
    assert done.returncode == 2
    assert "--yes or --dry-run" in done.stderr
    assert policy(run, store)["capacity"] == GIB


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("capacity", "NAME=VALUE"),
        ("capacity=lots", "capacity"),
        ("capacity=0", "capacity"),
        ("ttl=7", "none, or a positive duration with its unit (s, m, h or d)"),
        ("placement=extents", "placement"),
        ("size=1GiB", "one of capacity"),
    ],
)
def test_set_bad_value_exits_2_naming_it(
    run: Run, store: str, value: str, named: str
) -> None:
    done = run("set", store, value, "--yes")
    assert done.returncode == 2
    assert named in done.stderr
    assert policy(run, store) == {
        "capacity": GIB,
        "ttl_s": None,
        "placement": "inline",
        "quotas": {},
    }


@pytest.mark.parametrize(
    "command", ["label one a=b", "pin one", "prune --older-than 30d --yes"]
)
def test_writing_command_url_with_other_capacity_keeps_recorded_one(
    run: Run,
    store: str,
    command: str,
) -> None:
    name, *rest = command.split()
    done = run(name, f"{store}?capacity=2MiB&ttl=1m", *rest)
    assert done.returncode == 0, done.stderr
    with closing(open_backend(store)) as backend:
        assert backend.stats().capacity == GIB
        assert backend.stats().requests == 2
