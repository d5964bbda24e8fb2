"""The state machine of ``test_stateful`` notices bugs that once seemed plausible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase

from persistkv.base import (
    OffloadKey,
    ReqContext,
)
from persistkv.tiering.manager import TieringOffloadingManager
from tests.tiering.test_stateful import TieringMachine, run


def publishes_failed_promotions(manager: TieringOffloadingManager) -> None:
    finish = manager._finish_promotion
    manager._finish_promotion = lambda job, failed: finish(job, set())  # type: ignore[method-assign]


def does_not_pin_cascades(manager: TieringOffloadingManager) -> None:
    primary = manager.primary_tier
    pin = primary.prepare_read

    def unpinned(keys: Sequence[OffloadKey], req: ReqContext) -> Any:
        spec = pin(keys, req)
        primary.complete_read(keys, req)
        return spec

    manager.primary_tier = Wrapped(primary, prepare_read=unpinned, complete_read=lambda keys, req: None)  # type: ignore[assignment]


def cascades_failed_stores(manager: TieringOffloadingManager) -> None:
    complete = manager.complete_store
    manager.complete_store = lambda keys, req_context, success=True: complete(keys, req_context, True)  # type: ignore[method-assign]


def tells_tiers_of_an_end_before_the_last_store(manager: TieringOffloadingManager) -> None:
    end = manager._end_if_done

    def early(request: Any) -> None:
        if request.finished and request.storing:
            for tier in manager.secondary_tiers:
                tier.on_request_finished(request.context)
        end(request)

    manager._end_if_done = early  # type: ignore[method-assign]


def never_lets_go_of_promoted_rows(manager: TieringOffloadingManager) -> None:
    manager._let_go = lambda request, keys: None  # type: ignore[method-assign]


def frees_rows_before_the_job_ends(manager: TieringOffloadingManager) -> None:
    submit = manager._submit_promotion

    def early(promotion: Any, keys: list[OffloadKey], resident: list[OffloadKey]) -> None:
        submit(promotion, keys, resident)
        for job in list(manager._jobs.values()):
            if job.is_promotion and not getattr(job, "freed", False):
                job.freed = True  # type: ignore[attr-defined]
                manager.primary_tier.complete_write(job.keys, job.req_context)

    manager._submit_promotion = early  # type: ignore[method-assign]
    manager._finish_promotion = lambda job, failed: manager._hold([])  # type: ignore[method-assign]


def ignores_the_epoch(manager: TieringOffloadingManager) -> None:
    """Cascades whatever was stored, also what a reset has orphaned."""
    manager.primary_tier = Wrapped(manager.primary_tier, is_ready=lambda key: True)  # type: ignore[assignment]


class Wrapped:
    """A primary tier with some methods exchanged."""

    def __init__(self, primary: Any, **changed: Any) -> None:
        self.__dict__.update(changed)
        self._primary = primary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._primary, name)


@pytest.mark.parametrize(
    "bug",
    [
        publishes_failed_promotions,
        does_not_pin_cascades,
        cascades_failed_stores,
        tells_tiers_of_an_end_before_the_last_store,
        never_lets_go_of_promoted_rows,
        frees_rows_before_the_job_ends,
        ignores_the_epoch,
    ],
)
def test_planted_bugs_are_caught(bug: Callable[[TieringOffloadingManager], None]) -> None:
    machine = type(bug.__name__, (TieringMachine,), {"sabotage": staticmethod(bug)})
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        run(machine, max_examples=100, phases=[Phase.generate])
    assert not isinstance(caught.value, KeyboardInterrupt)
