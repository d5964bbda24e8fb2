from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.conftest import Run

pytestmark = pytest.mark.slow

SIZE = 4 << 20
SMALL = ("--size", "4MiB", "--rounds", "2")


def test_bench_returns_figures_and_leaves_store_unchanged(
    run: Run, filled: str, tmp_path: Path
) -> None:
    before = run("ls", filled, "--json").stdout
    done = run("bench", filled, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [figure["name"] for figure in found["figures"]] == ["store", "load"]
    for figure in found["figures"]:
        assert figure["seconds"] > 0
        assert figure["bytes_per_s"] == pytest.approx(
            SIZE / figure["seconds"], rel=0.01
        )
        if figure["ratio"] is not None:  # None: the file system has no O_DIRECT
            assert figure["ratio"] == pytest.approx(
                figure["limit_seconds"] / figure["seconds"], rel=0.01, abs=0.001
            )
    assert run("ls", filled, "--json").stdout == before
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("store", ["absent", "absent/deeper/kv"])
def test_bench_text_has_ratios_and_leaves_no_files(
    run: Run, tmp_path: Path, store: str
) -> None:
    shown = run("bench", f"lmdb://{tmp_path}/{store}", *SMALL).stdout
    for part in ("store", "load", "ratio"):
        assert part in shown
    assert list(tmp_path.iterdir()) == []


def test_bench_medium_without_plain_access_has_figures_and_no_ratios(
    run: Run,
    plug_ins: None,
    tmp_path: Path,
) -> None:
    url = f"sqlite://{tmp_path}/kv.db?cache={tmp_path}/cache"
    found = json.loads(run("bench", url, *SMALL, "--json").stdout)
    assert [(figure["name"], figure["ratio"]) for figure in found["figures"]] == [
        ("store", None),
        ("load", None),
    ]
    assert run("bench", url, *SMALL).returncode == 0


def test_bench_capacity_below_one_pack_exits_3(run: Run, tmp_path: Path) -> None:
    done = run("bench", f"lmdb://{tmp_path}/new?capacity=2MiB", *SMALL)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ("--size", "100KB"),
        ("--size", "65MiB"),
        ("--size", "5000KB"),
        ("--size", "none"),
        ("--rounds", "0"),
    ],
)
def test_bench_bad_option_exits_2(
    run: Run, tmp_path: Path, options: tuple[str, str]
) -> None:
    done = run("bench", f"lmdb://{tmp_path}/new", *options)
    assert done.returncode == 2
    assert options[0] in done.stderr
    assert not list(tmp_path.iterdir())
