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


def test_own_commit_is_merged_when_it_has_waited(schedule: MergeSchedule) -> None:
    assert schedule.due_at(100.0, oldest_own=100.0) == 104.0


def test_own_commit_waits_while_another_engine_merges(schedule: MergeSchedule) -> None:
    schedule.note_latest(is_own=False, written=103.0)
    assert schedule.due_at(104.0, oldest_own=100.0) == pytest.approx(106.7)


def test_own_commit_waits_for_a_bounded_time(schedule: MergeSchedule) -> None:
    for announced in range(100, 120):
        schedule.note_latest(is_own=False, written=float(announced))
    assert schedule.due_at(120.0, oldest_own=100.0) == 110.5


def test_time_of_latest_that_is_not_credible_delays_nothing(
    schedule: MergeSchedule,
) -> None:
    schedule.note_latest(is_own=False, written=-math.inf)
    assert schedule.due_at(100.0, oldest_own=100.0) == 104.0


def test_old_commits_are_left_to_an_engine_that_merges_meanwhile(
    schedule: MergeSchedule,
) -> None:
    schedule.plan_merge(200.0)
    assert schedule.due_at(200.0, None) == 205.0
    schedule.note_latest(is_own=False, written=199.0)
    assert schedule.due_at(204.0, None) == 205.0
    schedule.note_latest(is_own=False, written=201.0)
    assert schedule.due_at(204.0, None) == math.inf


def test_old_commits_that_regular_merges_have_left_are_merged_anyway(
    schedule: MergeSchedule,
) -> None:
    schedule.plan_merge(200.0, anyway=True)
    schedule.note_latest(is_own=False, written=201.0)
    assert schedule.due_at(204.0, None) == 205.0
