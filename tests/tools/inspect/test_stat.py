from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.identity import Identity
from persistkv.storage.store.savings import SavingsRecorder
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts


@pytest.fixture
def known(url: str) -> Iterator[str]:
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend, groups=2, codec=ZstdCodec(1), block_bytes=65_536)
        writer.add("one", "a b c d", age_s=60.0)
        writer.add("two", "a b c e", age_s=2 * 86_400.0)
        Contexts(backend, Identity.of({"weights": "checkpoint:2"})).add("other", "a b")
        yield url


def test_stat_json_totals_are_exact(run: Run, known: str) -> None:
    found = json.loads(run("stat", known, "--json").stdout)
    assert (found["requests"], found["packs"], found["blocks"]) == (3, 3, 12)
    assert found["raw_bytes"] == 10 * 65_536 + 2 * 4096
    assert found["referenced_blocks"] == 18
    assert found["dedup_ratio"] == 1.5
    assert found["codec_ratio"] == round(found["raw_bytes"] / found["stored_bytes"], 4)
    assert found["capacity"] == 1 << 30
    assert found["fill"] == round(found["disk_bytes"] / (1 << 30), 4)


def test_stat_json_namespaces_and_groups_are_exact(run: Run, known: str) -> None:
    first, second = json.loads(run("stat", known, "--json").stdout)["namespaces"]
    assert (
        first["requests"],
        first["packs"],
        first["blocks"],
        first["referenced_blocks"],
    ) == (2, 2, 10, 16)
    assert first["dedup_ratio"] == 1.6
    assert [
        (group["group"], group["blocks"], group["codecs"]) for group in first["groups"]
    ] == [
        (0, 5, ["zstd:1"]),
        (1, 5, ["zstd:1"]),
    ]
    for group in first["groups"]:
        assert group["raw_bytes"] == 5 * 65_536
        assert 1.5 < group["codec_ratio"] < 2.1  # half of each block is compressible
    assert [group["codecs"] for group in second["groups"]] == [["raw"]]
    assert second["groups"][0]["codec_ratio"] == 1.0


def test_stat_histograms_count_each_request_once(run: Run, known: str) -> None:
    found = json.loads(run("stat", known, "--json").stdout)
    assert {
        row["below"]: row["requests"] for row in found["ages"] if row["requests"]
    } == {"1h": 2, "7d": 1}
    assert {
        row["below"]: row["requests"] for row in found["sizes"] if row["requests"]
    } == {"1MiB": 3}
    assert sum(row["raw_bytes"] for row in found["sizes"]) == 16 * 65_536 + 2 * 4096
    assert found["ages"][-1]["below"] is None


def test_stat_text_has_ratios_codecs_and_histograms(run: Run, known: str) -> None:
    shown = run("stat", known).stdout
    for part in (
        "dedup ratio",
        "1.50",
        "1.0 GiB",
        "zstd:1",
        "age of requests",
        "raw size of requests",
        "█",
    ):
        assert part in shown


def test_stat_empty_store_has_no_ratios_and_histograms(run: Run, url: str) -> None:
    open_backend(url).close()
    found = json.loads(run("stat", url, "--json").stdout)
    assert (
        found["requests"],
        found["dedup_ratio"],
        found["codec_ratio"],
        found["namespaces"],
    ) == (0, None, None, [])
    done = run("stat", url)
    assert done.returncode == 0, done.stderr
    assert "dedup ratio" in done.stdout
    assert "age of requests" not in done.stdout
    assert "raw size of requests" not in done.stdout


def test_stat_deleted_packs_count_as_free_space(run: Run, tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/extents?capacity=64MiB&placement=extents"
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend)
        for number in range(20):
            writer.add(f"r{number}", " ".join(f"{number}-{word}" for word in range(16)))
        before = json.loads(run("stat", url, "--json").stdout)["free"]
        for number in range(0, 20, 2):
            backend.commit(
                writer.namespace, CommitBatch(deletions=[writer.packs[f"r{number}"]])
            )
        after = json.loads(run("stat", url, "--json").stdout)["free"]
    # the blocks of each pack, and the page of its table and trailer
    gone = 10 * (16 + 1) * 4096
    assert after["payload_bytes"] - before["payload_bytes"] == gone
    assert after["pieces"] > before["pieces"]
    assert after["largest_bytes"] <= after["payload_bytes"]
    assert (
        after["fragmentation"]
        == round(1 - after["largest_bytes"] / after["payload_bytes"], 4)
        > 0
    )
    shown = run("stat", url).stdout
    assert "fragmentation" in shown
    assert f"{after['pieces']} pieces" in shown


def test_stat_shows_savings_by_model_and_label(run: Run, known: str) -> None:
    assert "nothing yet: no request has restored" in run("stat", known).stdout
    with closing(open_backend(known)) as backend:
        recorder = SavingsRecorder(backend, Identity.of({"model_name": "/m/gpt2"}))
        recorder.add(4000, {"user": "anna"}, 1000, 2.0)
        recorder.add(1000, {"user": "ben"}, 1000, 2.0)
        recorder.write()
    shown = run("stat", known).stdout
    assert "5,000 tokens in 2 requests, about 10.0 s of prefill" in shown
    rows = [line.split() for line in shown.splitlines()]
    (anna,) = [row for row in rows if "user=anna" in row]
    assert "gpt2" in anna[0]
    assert anna[2:] == ["user=anna", "1", "4,000", "tokens", "8.0", "s"]
    found = json.loads(run("stat", known, "--json").stdout)["savings"]
    assert [(row["label"], row["tokens"], row["seconds"]) for row in found] == [
        (None, 5000, 10.0),
        ("user=anna", 4000, 8.0),
        ("user=ben", 1000, 2.0),
    ]


def test_stat_of_local_store_shows_no_commits_to_merge(run: Run, known: str) -> None:
    assert "merged" not in run("stat", known).stdout
