"""When an engine merges the index of a shared store."""

from __future__ import annotations

import math

import pytest

from persistkv.storage.shared.index.merge_schedule import MergeSchedule


@pytest.fixture
def schedule() -> MergeSchedule:
    schedule = MergeSchedule(lambda: 0.5)
    schedule.note_commit(100.0)
    return schedule


def note_latest(
    schedule: MergeSchedule,
    written: float,
    *,
    is_own: bool = False,
    age_s: float = 0.0,
) -> None:
    """Let the engine read ``latest``."""
    schedule.note_latest(
        written + age_s,
        is_own=is_own,
        written=written,
        time=written,
    )


def test_own_commit_is_merged_when_it_has_waited(schedule: MergeSchedule) -> None:
    assert schedule.due_at(100.0, oldest_own=100.0) == 104.0


def test_own_commit_waits_while_another_engine_merges(schedule: MergeSchedule) -> None:
    note_latest(schedule, 103.0)
    assert schedule.due_at(104.0, oldest_own=100.0) == pytest.approx(106.7)


def test_own_commit_waits_for_a_bounded_time(schedule: MergeSchedule) -> None:
    for announced in range(100, 120):
        note_latest(schedule, float(announced))
    assert schedule.due_at(120.0, oldest_own=100.0) == 110.5


def test_time_of_latest_that_is_not_credible_delays_nothing(
    schedule: MergeSchedule,
) -> None:
    note_latest(schedule, -math.inf)
    assert schedule.due_at(100.0, oldest_own=100.0) == 104.0


def test_old_commits_are_left_to_an_engine_that_merges_meanwhile(
    schedule: MergeSchedule,
) -> None:
    schedule.plan_merge(200.0)
    assert schedule.due_at(200.0, None) == 205.0
    note_latest(schedule, 195.0)
    assert schedule.due_at(204.0, None) == 205.0
    note_latest(schedule, 201.0)
    assert schedule.due_at(204.0, None) == math.inf


def test_old_commits_that_regular_merges_have_left_are_merged_anyway(
    schedule: MergeSchedule,
) -> None:
    schedule.plan_merge(200.0, anyway=True)
    note_latest(schedule, 201.0)
    assert schedule.due_at(204.0, None) == 205.0


def test_regular_merges_of_another_engine_that_stop_are_followed_by_one(
    schedule: MergeSchedule,
) -> None:
    note_latest(schedule, 200.0)
    note_latest(schedule, 202.7)
    assert schedule.due_at(203.0, None) == pytest.approx(207.7)
    # the same version, read again
    note_latest(schedule, 202.7, age_s=1.3)
    assert schedule.due_at(204.0, None) == pytest.approx(207.7)
    schedule.begin_merge(207.7)
    schedule.end_merge(found=False, found_others=False, incomplete=False)
    note_latest(schedule, 202.7, age_s=5.3)
    assert schedule.due_at(208.0, None) == math.inf


def test_rare_merges_of_another_engine_are_followed_by_none(
    schedule: MergeSchedule,
) -> None:
    for written in (200.0, 202.7, 212.7):
        note_latest(schedule, written)
    assert schedule.due_at(213.0, None) == math.inf


def test_own_merges_are_followed_by_none(schedule: MergeSchedule) -> None:
    note_latest(schedule, 200.0)
    note_latest(schedule, 202.7)
    note_latest(schedule, 205.3, is_own=True)
    assert schedule.due_at(206.0, None) == math.inf
