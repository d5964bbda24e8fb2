"""The demo in examples/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
from examples.demo.demo import main
sys.modules.update(dict.fromkeys(("torch", "transformers", "safetensors")))
main()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?capacity=256MiB"


def run_demo(
    environment: dict[str, str],
    directory: Path,
    *arguments: str,
    python: tuple[str, ...] = ("-m", "examples.demo.demo"),
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--codec", "brotli"), "codec"),
        (("--tokens", "3"), "tokens"),
        (("--store", "tape:///kv"), "tape"),
        (("--store", "lmdb://{tmp}/store?capacity=-5"), "capacity"),
    ],
)
def test_demo_bad_option_exits_2_before_creating_model(
    environment: dict[str, str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    part: str,
) -> None:
    done = run_demo(
        environment,
        tmp_path,
        *(argument.format(tmp=tmp_path) for argument in arguments),
    )
    assert done.returncode == 2
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / ".persistkv-demo" / "model").exists()


def test_demo_help_imports_no_torch(
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    done = run_demo(
        environment,
        tmp_path,
        "--help",
        python=("-X", "importtime", "-m", "examples.demo.demo"),
    )
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "persistkv.storage" in imported
    assert not {"torch", "transformers"} & imported


def test_demo_without_torch_exits_2_and_names_missing_extra(
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    done = run_demo(environment, tmp_path, python=("-c", WITHOUT_TORCH))
    assert done.returncode == 2
    assert 'pip install "persistkv[transformers]"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_demo_json_reports_identical_warm_restart(
    environment: dict[str, str],
    checkpoint: Path,
    tmp_path: Path,
    url: str,
) -> None:
    done = run_demo(
        environment,
        tmp_path,
        "--json",
        "--tokens",
        "600",
        "--model",
        str(checkpoint),
        "--store",
        url,
        "--codec",
        "zstd",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["prompt_tokens"] == 664
    assert report["restored_tokens"] == 656
    assert report["restored_shared_share"] == 1.0
    assert report["tokens_identical"]
    assert report["logits_identical"]
    assert report["pages_identical"]
    assert report["pages_compared"] >= 41
    assert 0 < report["stored_bytes"] < report["raw_bytes"]
    assert report["cold_ttft_s"] > 0
    assert report["warm_ttft_s"] > 0
    assert isinstance(report["agrees_with_cold"], bool)
    assert [request["same_split"] for request in report["requests"]] == [True] * 5
    assert "SIGKILL" in done.stderr


@pytest.mark.slow
def test_demo_text_reports_identical_pages(
    environment: dict[str, str],
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    done = run_demo(
        environment, tmp_path, "--tokens", "600", "--model", str(checkpoint)
    )
    assert done.returncode == 0, done.stderr
    assert "restored pages bit-identical" in done.stdout
    assert "8 requests in 1 namespace" in done.stdout
    assert (tmp_path / ".persistkv-demo" / "store").is_dir()
