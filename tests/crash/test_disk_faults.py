"""A sample of the disk faults; ``make diskfaults`` tries all of them."""

import re

import pytest

from tests.crash.running import run_module

pytestmark = pytest.mark.usefixtures("recorder")


def run_cases(cases: int, seconds: int, *arguments: object) -> None:
    lines = run_module(
        "disk_faults", "--cases", cases, "--seed", 5, "--seconds", seconds, *arguments
    )
    assert [line.split(":")[0] for line in lines] == ["inline", "extents"]
    for line in lines:
        numbers = re.fullmatch(
            r"\w+: (\d+) of (\d+) faults of the disk \(.+\): 0 lost, 0 wrong", line
        )
        assert numbers is not None, line
        done, possible = map(int, numbers.groups())
        assert 0 < done <= cases < possible


def test_disk_faults_one_failing_call_keeps_acknowledged_blocks() -> None:
    run_cases(3, 60, "--fault", "EIO")


@pytest.mark.slow
def test_disk_faults_failing_recovery_calls_keep_acknowledged_blocks() -> None:
    run_cases(4, 60, "--fault", "4 x EIO, first call executed")


@pytest.mark.slow
def test_disk_faults_in_host_process_keep_acknowledged_blocks() -> None:
    run_cases(2, 60, "--host", "process")
