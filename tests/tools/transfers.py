"""Copies from one open store to another, as ``persistkv copy`` makes them."""

from __future__ import annotations

from collections.abc import Callable

from persistkv.storage.backend import Backend
from persistkv.storage.inspection.selection import Selection
from persistkv_tools.transfer.plan import Copied, CopyPlan, Source
from persistkv_tools.transfer.writer import run_plan


def ignore(num_bytes: int) -> None:
    pass


def copy(
    source: Backend,
    target: Backend,
    selection: Selection | None = None,
    on_bytes: Callable[[int], None] = ignore,
) -> Copied:
    """Copy everything, or the selected requests; return the outcome."""
    chosen = selection or Selection()
    sources = [
        Source(
            source, space, filter(chosen.takes, source.catalogue(space.id).manifests())
        )
        for space in source.namespaces()
    ]
    plan = CopyPlan(sources, target, everything=selection is None)
    return run_plan(plan, target, "lmdb:///target", on_bytes)
