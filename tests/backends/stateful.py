"""Runs of machines that compare a local store with a model, in both placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from persistkv.storage import open_backend
from persistkv.storage.backend import Backend


class StoreMachine(RuleBasedStateMachine):
    """A machine on a store of its own."""

    open_store: Callable[[str], Backend]
    """Open the store in a directory."""


Machine = TypeVar("Machine", bound=StoreMachine)


def both_placements(examples: int) -> pytest.MarkDecorator:
    """Run a test with ``placement`` and ``examples``: this number, and 150 as a slow test."""
    params = []
    for placement in ("inline", "extents"):
        params.append(pytest.param(placement, examples, id=placement))
        slow = pytest.param(
            placement, 150, id=f"{placement}, long", marks=pytest.mark.slow
        )
        params.append(slow)
    return pytest.mark.parametrize(("placement", "examples"), params)


def run_machine(
    machine: type[Machine],
    options: str,
    examples: int,
    *,
    shrinks: bool = True,
) -> type[Machine]:
    """Run a machine on stores with these options of their URL; return its class in this run, with
    the counters."""

    def open_store(directory: str) -> Backend:
        return open_backend(f"lmdb://{directory}/store?{options}")

    of_run = type("Machine", (machine,), {"open_store": staticmethod(open_store)})
    limits = settings(
        max_examples=examples,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
    )
    run_state_machine_as_test(of_run, settings=limits)
    return of_run
