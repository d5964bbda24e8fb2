"""When an engine merges the index of a shared store."""

from __future__ import annotations

import math

import pytest

from persistkv.storage.shared.index.merge_schedule import Turns


@pytest.fixture
def turns() -> Turns:
    turns = Turns(lambda: 0.5)
    turns.committed(100.0)
    return turns


def test_own_commit_is_merged_when_it_has_waited(turns: Turns) -> None:
    assert turns.due_at(100.0, oldest_own=100.0) == 104.0


def test_own_commit_waits_while_another_engine_merges(turns: Turns) -> None:
    turns.followed(is_own=False, announced=103.0)
    assert turns.due_at(104.0, oldest_own=100.0) == pytest.approx(106.7)


def test_own_commit_waits_for_a_bounded_time(turns: Turns) -> None:
    for announced in range(100, 120):
        turns.followed(is_own=False, announced=float(announced))
    assert turns.due_at(120.0, oldest_own=100.0) == 110.5


def test_time_of_latest_that_is_not_credible_delays_nothing(turns: Turns) -> None:
    turns.followed(is_own=False, announced=-math.inf)
    assert turns.due_at(100.0, oldest_own=100.0) == 104.0


def test_old_commits_are_left_to_an_engine_that_merges_meanwhile(turns: Turns) -> None:
    turns.look_soon(200.0)
    assert turns.due_at(200.0, None) == 205.0
    turns.followed(is_own=False, announced=199.0)
    assert turns.due_at(204.0, None) == 205.0
    turns.followed(is_own=False, announced=201.0)
    assert turns.due_at(204.0, None) == math.inf
