"""The GPU benchmarks, run with tiny sizes on the CPU; their records; the kit of wheels; the
script."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.gpu import kit
from benchmarks.gpu.kit import Package, check_size, problems, read_present, read_wheels
from benchmarks.gpu.results import FILE_NAME, Results

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.sh"


def read(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (directory / FILE_NAME).read_text().splitlines()
    ]


def run_smoke(module: str, directory: Path) -> dict[str, dict[str, Any]]:
    """Run a benchmark in its smallest size; return its records by figure."""
    arguments = [
        "--device",
        "cpu",
        "--smoke",
        "--out",
        str(directory / "out"),
        "--directory",
        str(directory),
    ]
    import_module(f"benchmarks.gpu.{module}").main(arguments)
    records = read(directory / "out")
    assert records[0]["figure"] == "machine"
    assert all(record["target"] is None for record in records)
    return {record["figure"]: record for record in records[1:]}


# Benchmarks


def test_worker_copies_measures_each_direction_size_and_order(tmp_path: Path) -> None:
    figures = run_smoke("worker_copies", tmp_path)
    assert set(figures) == {
        f"{way}, {page} KiB pages, {order}"
        for way in ("store", "load", "both")
        for page in (4, 16)
        for order in ("in order", "blocks shuffled", "both shuffled")
    }
    assert all(
        record["ratio"] > 0 and record["values"]["pinned_gb_s"] > 0
        for record in figures.values()
    )


def test_kernel_slowdown_measures_each_kernel_with_each_direction(
    tmp_path: Path,
) -> None:
    figures = run_smoke("kernel_slowdown", tmp_path)
    assert set(figures) == {
        f"{kernel} beside {way}, 16 KiB pages"
        for kernel in ("matrix product", "scaling")
        for way in ("stores", "loads", "both")
    }


def test_restore_ratio_uses_slower_of_disk_and_link(tmp_path: Path) -> None:
    ((name, record),) = run_smoke("restore", tmp_path).items()
    values = record["values"]
    assert name == "4 MiB"
    slower = min(values["disk_gb_s"], values["link_gb_s"])
    assert record["ratio"] == pytest.approx(values["gb_s"] / slower)


def test_ttft_restores_all_but_last_block_with_equal_answers(tmp_path: Path) -> None:
    figures = run_smoke("ttft", tmp_path)
    assert {
        name: record["values"]["restored_tokens"] for name, record in figures.items()
    } == {
        "96 tokens": [80],
        "160 tokens": [144],
    }
    for record in figures.values():
        values = record["values"]
        assert (
            values["equal_tokens"] == values["equal_logits"] == values["prompts"] == 1
        )
        assert record["ratio"] == pytest.approx(values["warm_ms"] / values["cold_ms"])


def test_persistence_cost_stores_every_full_block(tmp_path: Path) -> None:
    figures = run_smoke("persistence_cost", tmp_path)
    assert set(figures) == {"slowdown of answers", "slowdown of answers until durable"}
    for record in figures.values():
        assert record["values"]["dropped_blocks"] == 0
        assert record["values"]["stored_gb"] > 0


# Records


def make_results(directory: Path, smoke: bool = False) -> Results:
    return Results(
        "test",
        argparse.Namespace(device=torch.device("cpu"), smoke=smoke, out=directory),
    )


def test_results_add_writes_each_figure_at_once(tmp_path: Path) -> None:
    results = make_results(tmp_path)
    for number in range(3):
        results.add(f"figure {number}", 0.5, gb_s=1.25)
        assert [record["figure"] for record in read(tmp_path)] == [
            "machine",
            *(f"figure {n}" for n in range(number + 1)),
        ]
    assert (tmp_path / "results.txt").read_text().splitlines()[
        -1
    ] == "test: figure 2: ratio 0.500, gb_s 1.25"


@pytest.mark.parametrize(
    ("ratio", "target", "met", "smoke"),
    [
        (0.8, {"at_least": 0.8}, True, False),
        (0.79, {"at_least": 0.8}, False, False),
        (0.03, {"at_most": 0.03}, True, False),
        (0.04, {"at_most": 0.03}, False, False),
        (0.04, {"at_most": 0.03}, None, True),
        (0.04, {}, None, False),
    ],
)
def test_results_add_ratio_is_compared_with_target(
    tmp_path: Path,
    ratio: float,
    target: dict[str, float],
    met: bool | None,
    smoke: bool,
) -> None:
    make_results(tmp_path, smoke).add("figure", ratio, **target)
    assert read(tmp_path)[-1]["met"] is met


# The kit


def package(version: str, *requires: str) -> Package:
    return Package(Version(version), tuple(map(Requirement, requires)))


def test_problems_missing_or_old_requirements_are_reported() -> None:
    packages = {
        "engine": package(
            "1.0", "driver>=2", "old; python_version < '3.12'", "cloud; extra == 's3'"
        ),
        "driver": package("2.1", "hidden-thing"),
    }
    assert set(problems([Requirement("engine")], packages)) == {"hidden-thing"}
    assert set(problems([Requirement("engine[s3]")], packages)) == {
        "hidden-thing",
        "cloud",
    }
    packages["hidden-thing"] = Package(None)
    assert problems([Requirement("Engine")], packages) == {}
    assert problems(
        [Requirement("engine")], packages | {"driver": package("1.9", "engine")}
    ) == {"driver": "driver 1.9 is not driver>=2; required by engine"}


def test_read_present_packages_with_and_without_version_are_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "present.txt").write_text(
        "# machine\nNumPy==2.5.2\nprompt_toolkit  # any\n\n"
    )
    assert read_present(tmp_path / "present.txt") == {
        "numpy": Package(Version("2.5.2")),
        "prompt-toolkit": Package(None),
    }


def make_wheel(directory: Path, name: str, version: str, *requires: str) -> None:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    with zipfile.ZipFile(
        directory / f"{name}-{version}-py3-none-any.whl", "w"
    ) as wheel:
        wheel.writestr(
            f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n"
        )


def test_read_wheels_returns_requirements_and_rejects_two_versions(
    tmp_path: Path,
) -> None:
    make_wheel(tmp_path, "engine", "1.0", "driver>=2")
    assert read_wheels(tmp_path) == {"engine": package("1.0", "driver>=2")}
    make_wheel(tmp_path, "engine", "1.1")
    with pytest.raises(ValueError, match="two versions of engine"):
        read_wheels(tmp_path)


def test_check_size_kit_over_limit_exits_with_both_sizes(tmp_path: Path) -> None:
    with open(tmp_path / "large.whl", "wb") as file:
        os.truncate(file.fileno(), kit.MAX_BYTES)
    assert check_size(tmp_path) == kit.MAX_BYTES
    (tmp_path / "small.whl").write_bytes(b"\0" * (1 << 20))
    with pytest.raises(SystemExit, match=r"61\.0 MiB; the limit is 60 MiB"):
        check_size(tmp_path)


# The script


def test_script_step_limits_sum_below_ten_minutes() -> None:
    limits = {
        name: int(value)
        for name, value in re.findall(
            r"^readonly (\w+)=(\d+)", SCRIPT.read_text(), re.MULTILINE
        )
    }
    total = limits.pop("TOTAL")
    assert sum(limits.values()) == total < 590


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_script_smoke_run_completes_every_step(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "SMOKE": "cpu",
        "PYTHON": sys.executable,
        "KIT": str(tmp_path / "no kit"),
    }
    environment["STORES"] = str(tmp_path / "stores")
    ended = subprocess.run(
        [SCRIPT, tmp_path / "out"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    steps = (tmp_path / "out" / "steps.txt").read_text().splitlines()
    assert [line.split()[0] for line in steps] == [
        *(
            "install",
            "machine",
            "tests",
            "copies",
            "kernels",
            "ttft",
            "restore",
            "cost",
            "sanitizer",
        )
    ]
    assert all(line.endswith("ok") for line in steps)
    assert len({record["benchmark"] for record in read(tmp_path / "out")}) == 5
    assert list((tmp_path / "stores").iterdir()) == []
