from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import sample_manifest
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts, chain


@pytest.fixture
def shared(url: str) -> Iterator[tuple[str, Contexts]]:
    backend = open_backend(url)
    writer = Contexts(backend, groups=2)
    writer.add("anna-1", "s1 s2 a1 a2", labels={"user": "anna"})
    writer.add("anna-2", "s1 s2 a1 a3 a4")
    writer.add("bert-1", "s1 s2 b1")
    writer.add("lone-1", "x y")
    yield url, writer
    backend.close()


def test_show_json_has_packs_keys_and_sharers(
    run: Run, shared: tuple[str, Contexts]
) -> None:
    url, writer = shared
    context = json.loads(run("show", url, "anna-2", "--json", "--keys", "2").stdout)[
        "context"
    ]
    first, second = context["packs"]
    assert (first["id"], second["id"]) == (
        writer.packs["anna-1"].hex(),
        writer.packs["anna-2"].hex(),
    )
    assert (first["blocks"], first["pack_blocks"], first["sharers"]) == (
        6,
        8,
        ["anna-1", "bert-1"],
    )
    assert (second["blocks"], second["pack_blocks"], second["shared_with"]) == (4, 4, 0)
    assert context["shared_blocks"] == 6
    assert [(group["blocks"], group["missing"]) for group in context["groups"]] == [
        (5, 0),
        (5, 0),
    ]
    assert [group["raw_bytes"] for group in context["groups"]] == [5 * 4096] * 2
    keys = chain(["s1", "s2", "a1", "a3", "a4"])
    assert [key["key"] for key in context["groups"][0]["keys"]] == [
        key.hex()[:12] for key in keys[:2]
    ]
    assert context["groups"][1]["keys"][0] == {
        "depth": 0,
        "key": chain(["s1"], 1)[0].hex()[:12],
        "pack": first["id"],
        "offset": 16_384,
    }


def test_show_text_has_labels_sharing_and_keys(
    run: Run, shared: tuple[str, Contexts]
) -> None:
    url, writer = shared
    shown = run("show", url, "anna-1").stdout
    for part in (
        "user=anna",
        "6 of 8 blocks are also in other requests",
        chain(["s1"])[0].hex()[:12],
    ):
        assert part in shown
    (row,) = [
        line.split()
        for line in shown.splitlines()
        if line.strip().startswith(writer.packs["anna-1"].hex()[:8])
    ]
    assert (row[1], row[2], row[-1]) == ("8", "8", "2"), (
        "own blocks, blocks of the pack, sharers"
    )
    assert "prefix tree" not in shown


def test_show_tree_merges_shared_prefixes(
    run: Run, shared: tuple[str, Contexts]
) -> None:
    url, _ = shared
    top = json.loads(run("show", url, "anna-2", "--tree", "--json").stdout)["tree"]
    assert (top["requests"], top["blocks"]) == (4, 0)
    common, lone = top["children"]
    assert (
        common["start"],
        common["blocks"],
        common["requests"],
        common["chosen"],
    ) == (0, 2, 3, True)
    assert (lone["blocks"], lone["names"], lone["chosen"]) == (2, ["lone-1"], False)
    annas, bert = common["children"]
    assert (annas["start"], annas["blocks"], annas["requests"]) == (2, 1, 2)
    assert (bert["names"], bert["blocks"]) == (["bert-1"], 1)
    assert [
        (node["names"], node["start"], node["blocks"]) for node in annas["children"]
    ] == [
        (["anna-2"], 3, 2),
        (["anna-1"], 3, 1),
    ]
    drawn = run("show", url, "anna-2", "--tree").stdout
    assert "prefix tree of 4 requests" in drawn
    assert "blocks 0 to 2, 3 requests" in drawn


def test_show_tree_request_that_is_prefix_ends_at_inner_node(
    run: Run, contexts: tuple[str, Contexts]
) -> None:
    url, writer = contexts
    writer.add("short", "a b")
    writer.add("long", "a b c")
    writer.add("same", "a b")
    top = json.loads(run("show", url, "long", "--tree", "--json").stdout)["tree"]
    (node,) = top["children"]
    assert (node["blocks"], node["requests"], node["ends"], node["names"]) == (
        2,
        3,
        2,
        ["same", "short"],
    )
    assert node["children"][0]["names"] == ["long"]


def count(node: dict[str, Any]) -> int:
    return len(node["children"]) + sum(map(count, node["children"]))


def test_show_tree_node_limit_keeps_path_of_chosen_request(
    run: Run, contexts: tuple[str, Contexts]
) -> None:
    url, writer = contexts
    for number in range(30):
        writer.add(f"r{number}", f"a b{number} c d{number}")
    for limit in (1, 2, 12):
        top = json.loads(
            run("show", url, "r7", "--tree", "--nodes", str(limit), "--json").stdout
        )["tree"]
        assert count(top) == min(limit, 9)
        node = top["children"][0]
        assert node["hidden"] == 30 - len(node["children"])
        assert not node["children"] or node["children"][0]["names"] == ["r7"]
    assert "22 more, not drawn" in run("show", url, "r7", "--tree").stdout


def test_show_blocks_without_pack_are_counted_as_missing(
    run: Run, contexts: tuple[str, Contexts]
) -> None:
    url, writer = contexts
    writer.backend.commit(
        writer.namespace, CommitBatch(manifests=[sample_manifest("ghost", blocks=3)])
    )
    context = json.loads(run("show", url, "ghost", "--json").stdout)["context"]
    assert context["groups"][0]["missing"] == 3
    assert context["packs"] == []
    assert "(none)" in run("show", url, "ghost").stdout


def test_show_ambiguous_or_unknown_id_prefix_exits_2(
    run: Run, shared: tuple[str, Contexts]
) -> None:
    url, writer = shared
    assert run("show", url, "lone").returncode == 0
    done = run("show", url, "anna")
    assert done.returncode == 2
    assert "anna-1" in done.stderr
    assert "anna-2" in done.stderr
    writer.add("anna", "z")
    assert ["tokens", "16"] in map(
        str.split, run("show", url, "anna").stdout.splitlines()
    )
    done = run("show", url, "nobody")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nobody" in done.stderr


def test_show_request_with_ttl_and_priority_prints_both(run: Run, url: str) -> None:
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend)
        writer.add("kept", "s1 s2")
        writer.add("batch", "t1")
        packs = [writer.packs["batch"]]
        batch = sample_manifest("batch", packs=packs, ttl_s=90.0, priority="low")
        backend.commit(writer.namespace, CommitBatch(manifests=[batch]))
    request = json.loads(run("show", url, "batch", "--json").stdout)["context"][
        "request"
    ]
    assert (request["ttl_s"], request["priority"]) == (90.0, "low")
    assert "90 s after its last use" in run("show", url, "batch").stdout
    assert "priority" not in run("show", url, "kept").stdout
