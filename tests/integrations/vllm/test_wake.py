"""Requests for steps of an idle engine."""

from __future__ import annotations

from persistkv.integrations.vllm.wake import StepRequests


def test_step_requests_wake_once_until_step() -> None:
    wakes: list[bool] = []
    requests = StepRequests(lambda: wakes.append(requests.is_waiting))
    for _ in range(3):
        requests.request()
    assert wakes == [True], "the engine finds pending work when it wakes"
    assert requests.is_waiting
    requests.note_step()
    assert not requests.is_waiting


def test_step_requests_within_5_s_after_step_are_ignored() -> None:
    wakes: list[bool] = []
    requests = StepRequests(lambda: wakes.append(True))
    requests.request()
    requests.note_step()
    requests.request()
    assert len(wakes) == 1
    assert not requests.is_waiting
