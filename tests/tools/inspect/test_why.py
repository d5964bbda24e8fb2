from __future__ import annotations

import json
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from persistkv.storage import open_backend
from persistkv.storage.identity import Identity, fingerprint_checkpoint
from persistkv.storage.identity.verdict import Verdict, write_verdict
from tests.tools.conftest import Run
from tests.tools.contexts import begin_namespace
from tests.tools.json_fields import check_documented

CONFIG = {
    "rope_theta": 10000.0,
    "hidden_size": 64,
    "rope_scaling": {"factor": 2.0, "type": "linear"},
}


def write_weights(directory: Path, byte: int = 0) -> None:
    """Write a checkpoint of one tensor without safetensors, which may not be installed."""
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
    ).encode()
    directory.mkdir()
    data = struct.pack("<Q", len(header)) + header + bytes([byte] * 4)
    (directory / "model.safetensors").write_bytes(data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_weights(directory)
    config = CONFIG | {
        "torch_dtype": "bfloat16",
        "transformers_version": "5.0",
        "a_default_nobody_stored": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def store(url: str, model: Path) -> tuple[str, dict[str, Any]]:
    fields = {
        "weights": fingerprint_checkpoint(model),
        "config": CONFIG | {"vocab_size": 256},
        "dtype": {"model": "bfloat16", "kv": "bfloat16"},
        "block_size": 16,
    }
    with closing(open_backend(url)) as backend:
        begin_namespace(backend, Identity.of(fields))
        begin_namespace(
            backend,
            Identity.of(fields | {"block_size": 32, "weights": "checkpoint:other"}),
        )
    return url, fields


def compared(run: Run, url: str, against: Path | str, *options: str, code: int) -> Any:
    done = run("why", url, "--against", str(against), "--json", *options)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)["comparisons"]


def test_why_matching_model_exits_0(
    run: Run, store: tuple[str, dict[str, Any]], model: Path
) -> None:
    url, fields = store
    (found,) = compared(run, url, model, code=0)
    assert (found["matches"], found["differences"]) == (True, [])
    assert found["theirs"] == Identity.of(fields).digest.hex()
    assert found["not_compared"] == ["block_size"]
    assert found["compared"] == 6
    assert "matches" in run("why", url, "--against", str(model)).stdout


def test_why_model_path_as_long_as_id_prints_path(
    run: Run,
    store: tuple[str, dict[str, Any]],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, _ = store
    path = "model".ljust(32, "x")
    model.rename(model.with_name(path))
    monkeypatch.chdir(model.parent)
    shown = run("why", url, "--against", path).stdout
    assert shown.startswith(f"{path} matches namespace")


def test_why_differing_config_exits_1_listing_fields(
    run: Run, store: tuple[str, dict[str, Any]], model: Path
) -> None:
    url, _ = store
    config = json.loads((model / "config.json").read_text())
    config |= {"rope_theta": 500000.0, "torch_dtype": "float16"}
    config["rope_scaling"]["factor"] = 4.0
    (model / "config.json").write_text(json.dumps(config))
    (found,) = compared(run, url, model, code=1)
    assert found["differences"] == [
        {"field": "config.rope_scaling.factor", "ours": 4.0, "theirs": 2.0},
        {"field": "config.rope_theta", "ours": 500000.0, "theirs": 10000.0},
        {"field": "dtype.model", "ours": "float16", "theirs": "bfloat16"},
    ]
    done = run("why", url, "--against", str(model))
    assert done.returncode == 1
    for part in ("config.rope_theta", "500000.0", "10000.0", "block_size"):
        assert part in done.stdout


def test_why_other_weights_exits_1_listing_weights(
    run: Run, store: tuple[str, dict[str, Any]], tmp_path: Path, model: Path
) -> None:
    write_weights(tmp_path / "tuned", byte=1)
    (tmp_path / "tuned" / "config.json").write_bytes(
        (model / "config.json").read_bytes()
    )
    (found,) = compared(run, store[0], tmp_path / "tuned", code=1)
    assert [row["field"] for row in found["differences"]] == ["weights"]


def test_why_against_namespace_lists_differing_fields(
    run: Run, store: tuple[str, dict[str, Any]]
) -> None:
    url, fields = store
    ours = Identity.of(fields).digest.hex()
    (found,) = compared(run, url, ours[:6], code=1)
    assert found["ours"] == ours
    assert {
        row["field"]: (row["ours"], row["theirs"]) for row in found["differences"]
    } == {
        "block_size": (16, 32),
        "weights": (fields["weights"], "checkpoint:other"),
    }


def test_why_without_against_compares_nearest_namespaces(
    run: Run, store: tuple[str, dict[str, Any]]
) -> None:
    url, fields = store
    done = run("why", url, "--json")
    assert done.returncode == 0
    (found,) = json.loads(done.stdout)["comparisons"]
    assert {found["ours"], found["theirs"]} == {
        Identity.of(fields).digest.hex(),
        Identity.of(
            fields | {"block_size": 32, "weights": "checkpoint:other"}
        ).digest.hex(),
    }
    assert [row["field"] for row in found["differences"]] == ["block_size", "weights"]
    with closing(open_backend(url)) as backend:
        third = begin_namespace(backend, Identity.of(fields | {"block_size": 8})).hex()
    shown = run("why", url).stdout
    assert (
        f"{third[:8]} and its nearest namespace {Identity.of(fields).digest.hex()[:8]} differ "
        f"in 1 field" in shown
    )
    (found,) = json.loads(run("why", url, "--namespace", third[:8], "--json").stdout)[
        "comparisons"
    ]
    assert (found["ours"], found["theirs"]) == (third, Identity.of(fields).digest.hex())


@pytest.mark.parametrize("count", [0, 1])
def test_why_without_two_namespaces_says_so_and_exits_0(
    run: Run, url: str, count: int
) -> None:
    with closing(open_backend(url)) as backend:
        for number in range(count):
            begin_namespace(backend, Identity.of({"weights": f"checkpoint:{number}"}))
    done = run("why", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"has {count} namespace" in done.stdout
    assert (
        "nothing to compare. Name a model or another store with --against"
        in done.stdout
    )
    answer = json.loads(run("why", url, "--json").stdout)
    check_documented("why", answer)
    assert answer["comparisons"] == []


def test_why_against_store_path_compares_stores(
    run: Run, store: tuple[str, dict[str, Any]], url: str
) -> None:
    path = url.partition("?")[0].removeprefix("lmdb://")
    assert [found["matches"] for found in compared(run, url, path, code=0)] == [
        True,
        True,
    ]


def test_why_against_store_compares_nearest_namespaces(
    run: Run, store: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, fields = store
    other = f"lmdb://{tmp_path}/other"
    with closing(open_backend(other)) as backend:
        begin_namespace(backend, Identity.of(fields))
        begin_namespace(backend, Identity.of(fields | {"block_size": 64}))
    same, near = compared(run, url, other, code=0)
    assert same["matches"]
    assert [row["field"] for row in near["differences"]] == ["block_size"]
    theirs = Identity.of(
        fields | {"block_size": 32, "weights": "checkpoint:other"}
    ).digest.hex()
    far, _ = compared(run, url, other, "--namespace", theirs[:8], code=1)
    assert [row["field"] for row in far["differences"]] == ["block_size", "weights"]


def test_why_invalid_or_empty_target_exits_2(
    run: Run, store: tuple[str, dict[str, Any]], tmp_path: Path, url: str
) -> None:
    for against in ("nothing-there", str(tmp_path)):
        done = run("why", url, "--against", against)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert against in done.stderr
    write_weights(tmp_path / "bare")
    assert "config.json" in run("why", url, "--against", "bare").stderr
    for text in ("{", "[]"):
        (tmp_path / "bare" / "config.json").write_text(text)
        assert run("why", url, "--against", "bare").returncode == 2
    empty = f"lmdb://{tmp_path}/empty"
    open_backend(empty).close()
    for first, second in ((empty, url), (url, empty)):
        done = run("why", first, "--against", second)
        assert done.returncode == 2
        assert "holds no" in done.stderr


def test_why_shows_verdicts_about_other_releases(run: Run, url: str) -> None:
    first, second = (
        Identity.of({"engine": {"release": release}, "weights": "w"})
        for release in ("0.31", "0.32")
    )
    with closing(open_backend(url)) as backend:
        for identity in (first, second):
            begin_namespace(backend, identity)
        verdict = Verdict(
            verdict="adopted", depths=(24,), tokens=512, error=0.01, limit=0.125
        )
        write_verdict(backend, second.digest, first.digest, verdict)
    shown = run("why", url).stdout
    line = (
        f"namespace {second.digest.hex()[:8]} uses the first 24 blocks of the contexts in "
        f"namespace"
    )
    assert (
        f"{line} {first.digest.hex()[:8]}, of another release (error 0.01, limit 0.12)"
        in " ".join(shown.split())
    )
    assert line in " ".join(run("stat", url).stdout.split())
    for command in ("why", "stat"):
        answer = json.loads(run(command, url, "--json").stdout)
        check_documented(command, answer)
        (found,) = answer["adoptions"]
        assert (found["ours"], found["theirs"]) == (
            second.digest.hex(),
            first.digest.hex(),
        )
        assert (found["verdict"], found["depths"], found["tokens"]) == (
            "adopted",
            [24],
            512,
        )
