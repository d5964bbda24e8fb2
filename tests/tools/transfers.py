"""Copies from one open store to another, as ``persistkv copy`` makes them."""

from __future__ import annotations

from persistkv.storage.inspection.selection import Selection
from persistkv_tools.transfer.plan import CopyPlan, Source
from persistkv_tools.transfer.writer import run_plan


def ignore(num_bytes) -> None:
    pass


def copy(source, target, selection=None, on_bytes=ignore):
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
