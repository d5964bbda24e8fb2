"""Savings of a store as text and tables of several commands."""

from __future__ import annotations

import time
from collections.abc import Sequence

from persistkv.storage.backend import Backend
from persistkv.storage.inspection.savings import SavedTotals, saved_totals
from persistkv_tools import render

_KEPT_S = 60.0
"""For how long savings are shown before they are read again: engines write them at most once a
minute."""

COLUMNS = render.columns(
    "model namespace=short label requests restored prefill",
    short=lambda row: row.namespace[:8],
    model=lambda row: render.format_model(row.model),
    label=lambda row: "(all)" if row.label is None else row.label,
    restored=lambda row: f"{row.tokens:,} tokens",
    prefill=lambda row: format_seconds(row.seconds),
)


def format_seconds(seconds: float | None) -> str:
    """Return saved seconds of prefill as text: ``8.2 s``, ``12 min``, ``3.4 h``; ``-`` for None."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:,.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


def of_namespaces(rows: Sequence[SavedTotals]) -> list[SavedTotals]:
    """Return the rows of whole namespaces, without those of labels, which count the same tokens
    again."""
    return [row for row in rows if row.label is None]


def summary(rows: Sequence[SavedTotals]) -> str:
    """Return the savings of the whole store in words."""
    totals = of_namespaces(rows)
    requests = sum(row.requests for row in totals)
    if not requests:
        return "nothing yet: no request has restored tokens"
    tokens = sum(row.tokens for row in totals)
    text = f"{tokens:,} tokens in {render.count(requests, 'request')}"
    measured = [row.seconds for row in totals if row.seconds is not None]
    if measured:
        text += f", about {format_seconds(sum(measured))} of prefill"
    return text


class RecentSavings:
    """Savings of a store that is shown repeatedly; they are read once a minute."""

    def __init__(self) -> None:
        self._rows: list[SavedTotals] = []
        self._read_at: float | None = None
        """When ``_rows`` were read, on the monotonic clock; None: not yet."""

    def by_namespace(self, backend: Backend) -> list[SavedTotals]:
        """Return the totals of ``rows`` for each namespace; those of namespaces that have saved
        nothing yet are 0.

        :raises StoreError: the medium failed.
        """
        totals = of_namespaces(self.rows(backend))
        with_savings = {row.namespace for row in totals}
        for namespace in backend.namespaces():
            name = namespace.id.hex()
            if name in with_savings:
                continue
            nothing = SavedTotals(
                namespace=name,
                model=namespace.identity.model_name,
                label=None,
                requests=0,
                tokens=0,
                seconds=None,
            )
            totals.append(nothing)
        return totals

    def rows(self, backend: Backend) -> list[SavedTotals]:
        """Return savings that are at most a minute old.

        :raises StoreError: the medium failed.
        """
        now = time.monotonic()
        if self._read_at is None or now - self._read_at >= _KEPT_S:
            self._rows = saved_totals(backend)
            self._read_at = now
        return self._rows
