"""The state machine of ``test_stateful`` detects plausible bugs in the manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase

from persistkv.base import (
    LoadStoreSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from persistkv.cpu.manager import CPUPrimaryTierOffloadingManager
from persistkv.tiering.manager import TieringOffloadingManager
from tests.tiering.test_stateful import TieringMachine, run


def publishes_failed_promotions(manager: TieringOffloadingManager) -> None:
    complete = manager.primary_tier.complete_write
    wrap_primary(
        manager, complete_write=lambda keys, req, success=True: complete(keys, req)
    )


def does_not_pin_cascades(manager: TieringOffloadingManager) -> None:
    primary = manager.primary_tier
    pin = primary.prepare_read

    def unpinned(keys: Sequence[OffloadKey], req: ReqContext) -> LoadStoreSpec:
        spec = pin(keys, req)
        primary.complete_read(keys, req)
        return spec

    wrap_primary(manager, prepare_read=unpinned, complete_read=lambda keys, req: None)


def cascades_failed_stores(manager: TieringOffloadingManager) -> None:
    complete = manager.complete_store

    def complete_as_stored(
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        complete(keys, req_context, True)

    manager.complete_store = complete_as_stored  # type: ignore[method-assign]


def tells_tiers_of_an_end_before_the_last_store(
    manager: TieringOffloadingManager,
) -> None:
    finish = manager.on_request_finished

    def early(req_context: ReqContext) -> None:
        storing = (
            manager.primary_tier.num_free_or_evictable()
            < manager.primary_tier.num_blocks
        )
        for tier in manager.secondary_tiers if storing else ():
            tier.on_request_finished(req_context)
        finish(req_context)

    manager.on_request_finished = early  # type: ignore[method-assign]


def never_releases_rows(manager: TieringOffloadingManager) -> None:
    wrap_primary(manager, complete_read=lambda keys, req: None)


def frees_rows_before_the_job_ends(manager: TieringOffloadingManager) -> None:
    primary = manager.primary_tier

    def early(
        keys: Sequence[OffloadKey],
        req: ReqContext,
    ) -> PrepareStoreOutput | None:
        output = primary.prepare_write(keys, req)
        if output is not None:
            primary.complete_write(output.keys_to_store, req)
        return output

    wrap_primary(
        manager,
        prepare_write=early,
        complete_write=lambda keys, req, success=True: None,
    )


def ignores_the_epoch(manager: TieringOffloadingManager) -> None:
    """Cascade all stored blocks, including those computed before a reset."""
    wrap_primary(manager, is_ready=lambda key: True)


def wrap_primary(
    manager: TieringOffloadingManager, **changed: Callable[..., object]
) -> None:
    manager.primary_tier = Wrapped(manager.primary_tier, **changed)  # type: ignore[assignment]


class Wrapped:
    """Primary tier with some methods replaced."""

    def __init__(
        self, primary: CPUPrimaryTierOffloadingManager, **changed: Callable[..., object]
    ) -> None:
        self.__dict__.update(changed)
        self._primary = primary

    def __getattr__(self, name: str) -> object:
        return getattr(self._primary, name)


@pytest.mark.parametrize(
    "bug",
    [
        publishes_failed_promotions,
        does_not_pin_cascades,
        cascades_failed_stores,
        tells_tiers_of_an_end_before_the_last_store,
        never_releases_rows,
        frees_rows_before_the_job_ends,
        ignores_the_epoch,
    ],
)
def test_tiering_machine_planted_bug_is_detected(
    bug: Callable[[TieringOffloadingManager], None],
) -> None:
    machine = type(bug.__name__, (TieringMachine,), {"sabotage": staticmethod(bug)})
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        run(machine, max_examples=100, phases=[Phase.generate])
    assert not isinstance(caught.value, KeyboardInterrupt)
