from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import persistkv
from persistkv import (
    ConfigurationError,
    Selection,
    StoreError,
    StoreUnavailableError,
    open_store,
)
from persistkv.storage import open_backend
from persistkv.storage.inspection.handle import StoreHandle
from persistkv.storage.inspection.requests import NotFoundError
from persistkv_tools.maintain.deletion import plan_prune
from persistkv_tools.maintain.verify import (
    Repaired,
    check_store,
    plan_repair,
    repair_packs,
)
from persistkv_tools.transfer.copy import copy_content
from tests.tools.conftest import Run
from tests.tools.contexts import BLOCK_BYTES, Contexts
from tests.tools.damage import Damage


@pytest.fixture
def filled(url: str) -> str:
    """Return the URL of a store with four requests, of which two share a prefix."""
    with closing(open_backend(url)) as backend:
        contexts = Contexts(backend)
        contexts.add("anna-1", "a b c", labels={"user": "anna"}, age_s=3600)
        contexts.add("anna-2", "a b d", labels={"user": "anna"}, age_s=60)
        contexts.add("bert-1", "x y", labels={"user": "bert"}, age_s=7200)
        contexts.add("carl", "m n o p", age_s=10)
    return url


def ids(
    store: persistkv.StoreHandle,
    selection: Selection = Selection(),  # noqa: B008 - immutable
    *,
    namespace: str | None = None,
    sort: str = "created",
    offset: int = 0,
    limit: int | None = None,
) -> list[str]:
    page = store.requests(
        selection, namespace=namespace, sort=sort, offset=offset, limit=limit
    )
    return [request.id for request in page.requests]


def test_open_store_absent_store_raises_and_creates_nothing(tmp_path: Path) -> None:
    for read_only in (True, False):
        with pytest.raises(StoreUnavailableError):
            open_store(tmp_path / "absent", read_only=read_only)
    assert not (tmp_path / "absent").exists()


def test_open_store_path_opens_the_same_store(filled: str) -> None:
    path = Path(filled.partition("://")[2].partition("?")[0])
    with open_store(path) as store:
        assert len(ids(store)) == 4


def test_requests_selection_returns_matches_in_order(filled: str) -> None:
    with open_store(filled) as store:
        assert ids(store) == ["carl", "anna-2", "anna-1", "bert-1"]
        assert ids(store, Selection.parse(["user=anna"])) == ["anna-2", "anna-1"]
        assert ids(
            store, Selection.parse(older_than="30m"), sort="tokens", limit=1
        ) == ["anna-1"]
        assert ids(store, namespace=store.namespaces()[0].id[:4], offset=3) == [
            "bert-1"
        ]
        with pytest.raises(ValueError, match="colour"):
            store.requests(sort="colour")


def test_store_handle_bad_argument_raises_naming_python_parameter(filled: str) -> None:
    with open_store(filled) as store:
        with pytest.raises(ConfigurationError, match=r"^rate"):
            check_store(store, rate="fast")
        with pytest.raises(ConfigurationError, match=r"^keep_size"):
            plan_prune(store, keep_size="small")
        with pytest.raises(NotFoundError, match=r"^namespace 'zz'"):
            store.requests(namespace="zz")


def test_stats_and_namespaces_return_totals(filled: str) -> None:
    with open_store(filled) as store:
        totals, (namespace,) = store.stats(), store.namespaces()
    assert (totals.requests, totals.packs, totals.raw_bytes) == (4, 4, 10 * BLOCK_BYTES)
    assert (totals.namespaces[0].id, namespace.identity["weights"]) == (
        namespace.id,
        "checkpoint:1",
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.pin("carl"),
        lambda store: store.label("carl", {"a": "b"}),
        lambda store: plan_prune(store, Selection()).run(),
    ],
)
def test_read_only_store_refuses_changes(
    filled: str, change: Callable[[StoreHandle], object]
) -> None:
    with open_store(filled) as store:
        with pytest.raises(StoreError, match="read_only=False"):
            change(store)
        assert len(ids(store)) == 4


def test_pin_and_label_return_the_changed_request(filled: str) -> None:
    with open_store(filled, read_only=False) as store:
        assert store.pin("carl").pinned
        assert not store.pin("carl", pinned=False).pinned
        assert store.label("anna-1", {"draft": "1"}, remove=["user"]).labels == {
            "draft": "1"
        }
        assert ids(store, Selection.parse(["draft"])) == ["anna-1"]
        with pytest.raises(NotFoundError, match="2 requests"):
            store.pin("anna")


def test_prune_plan_run_deletes_planned_requests(filled: str) -> None:
    with open_store(filled, read_only=False) as store:
        planned = plan_prune(store, Selection.parse(["user=anna"]))
        assert [request.id for request in planned.plan.requests] == ["anna-1", "anna-2"]
        assert len(ids(store)) == 4, "a plan deletes nothing"
        assert plan_prune(store).run().requests == 0, "no selection chooses nothing"
        assert plan_prune(store, requests=["bert"]).run().requests == 1
        assert planned.run().requests == 2
        assert ids(store) == ["carl"]


def test_verify_and_repair_delete_bad_packs(filled: str, tmp_path: Path) -> None:
    with open_store(filled) as store:
        (namespace,) = store.backend.namespaces()
        (pack,) = store.backend.catalogue(namespace.id).chain("carl") or []
    with Damage(filled, namespace.id) as damage:
        damage.flip_payload(pack, 10)
    with open_store(filled, read_only=False) as store:
        found = check_store(store)
        assert (found.problems, found.packs) == (1, 4)
        assert [
            row.request for row in plan_repair(store.backend, found.findings).requests
        ] == ["carl"]
        repaired = Repaired()
        repair_packs(store.writable(), found.findings, repaired)
        assert len(repaired.packs) == 1
        assert check_store(store, resume=tmp_path / "progress").problems == 0
        with pytest.raises(ConfigurationError, match="share"):
            check_store(store, sample=2)


def test_copy_content_copies_the_selected_requests(filled: str, tmp_path: Path) -> None:
    anna = Selection.parse(["user=anna"])
    target = f"lmdb://{tmp_path}/copy"
    with open_store(filled) as store:
        outcome = copy_content(store.backend, store.url, target, anna)
        assert (outcome.copied.requests, outcome.copied.complete) == (2, True)
        with pytest.raises(ConfigurationError, match="another store"):
            copy_content(store.backend, store.url, filled)
    with open_store(tmp_path / "copy") as store:
        assert ids(store) == ["anna-2", "anna-1"]


def test_requests_match_ls_command(filled: str, run: Run) -> None:
    with open_store(filled) as store:
        listed = json.loads(run("ls", filled, "--json").stdout)["requests"]
        assert [request["id"] for request in listed] == ids(store)
