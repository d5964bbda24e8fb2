"""A sample of the disk faults; ``make diskfaults`` tries all of them."""

import re

import pytest

from tests.crash.running import run_module

pytestmark = pytest.mark.usefixtures("recorder")


def tried(cases: int, seconds: int, *arguments: object) -> None:
    lines = run_module("disk_faults", "--cases", cases, "--seed", 5, "--seconds", seconds, *arguments)
    assert [line.split(":")[0] for line in lines] == ["inline", "extents"]
    for line in lines:
        numbers = re.fullmatch(r"\w+: (\d+) of (\d+) faults of the disk \(.+\): 0 lost, 0 wrong", line)
        assert numbers is not None, line
        done, possible = map(int, numbers.groups())
        assert 0 < done <= cases < possible


def test_one_failing_call_costs_nothing_that_was_acknowledged() -> None:
    tried(6, 60)


def test_what_makes_up_for_a_failing_call_may_fail_too() -> None:
    tried(10, 60, "--fault", "four errors, and all of the first was done")


def test_store_in_a_process_of_its_own_meets_a_failing_disk() -> None:
    tried(4, 60, "--host", "process")


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_many_failing_calls_one_at_a_time() -> None:
    tried(100, 60)
