"""The counts of ``benchmarks.trips`` refer to the product's code, and are complete and
plausible."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import trips

CORE = "persistkv/"
DRIVER = "persistkv_lmdb/"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, trips.Trip]:
    return trips.measure(str(tmp_path_factory.mktemp("stores")))


def test_measure_three_trips_have_plausible_counts(
    measured: dict[str, trips.Trip],
) -> None:
    assert list(measured) == ["store", "promote", "open"]
    for trip in measured.values():
        files = list(trip.files)
        assert files[0] == "persistkv/tiering/persistent.py", (
            "a trip begins with a call of the tier"
        )
        assert all(file.startswith((CORE, DRIVER)) for file in files)
        assert {file.split("/")[0] + "/" for file in files} == {CORE, DRIVER}
        assert len(files) <= trip.functions
        assert len(files) - 1 <= trip.switches <= 10_000
        assert 3 <= trip.frames <= 50


def test_measure_routes_stay_within_bounds(measured: dict[str, trips.Trip]) -> None:
    for name, trip in measured.items():
        assert len(trip.files) <= trips.MOST_FILES[name], (
            f"{name} passes through {list(trip.files)}"
        )
        assert trip.functions <= trips.MOST_FUNCTIONS[name], (
            f"{name} passes through {trip.files}"
        )
        assert trip.frames <= trips.TARGET_FRAMES, (
            f"{name}: {max(trip.device.values(), key=len)}"
        )


def test_measure_stacks_lead_from_thread_to_driver(
    measured: dict[str, trips.Trip],
) -> None:
    store = measured["store"]
    assert "pwritev" in store.device, "the blocks are written"
    deepest = max(store.device.values(), key=len)
    assert deepest[0] == "persistkv/storage/threads.py:run"
    assert deepest[-1].startswith(DRIVER)
    assert store.frames == len(deepest)


def test_measure_restores_profiler(tmp_path: Path) -> None:
    before = sys.getprofile()
    trips.measure(str(tmp_path))
    assert sys.getprofile() is before


def test_main_json_prints_counts_and_routes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["trips", "--json", "--directory", str(tmp_path)])
    trips.main()
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"store", "promote", "open"}
    for trip in printed.values():
        assert trip["num_files"] == len(trip["files"])
        assert trip["functions"] == sum(trip["files"].values())
        assert trip["frames"] == max(map(len, trip["device"].values()))


def test_main_no_options_prints_route_of_each_trip(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["trips", "--directory", str(tmp_path)])
    trips.main()
    printed = capsys.readouterr().out
    assert "One job of 256 blocks" in printed
    for name in ("store", "promote", "open"):
        assert f"\n{name}: functions of each file" in printed
    assert "persistkv_lmdb/backend.py" in printed
