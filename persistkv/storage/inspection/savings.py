"""Savings of a store in rows: for each model, and for each label of its requests."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from persistkv.storage.backend import Backend
from persistkv.storage.store.savings import Savings, read_savings


class SavedTotals(msgspec.Struct, frozen=True):
    """Tokens that requests of one namespace, or those with one label, restored from the store."""

    namespace: str
    """Id of the namespace, hexadecimal. It may hold nothing any more."""
    model: str
    """Name or path of the model; may be empty."""
    label: str | None
    """Label of the requests as ``name=value``; None: all requests of the namespace, with labels or
    without."""
    requests: int
    """Requests that restored tokens from the store."""
    tokens: int
    """Prompt tokens that they restored instead of computing them."""
    seconds: float | None
    """Seconds that prefills of these tokens would have taken at the measured speed of this model;
    None: it was not measured."""


def saved_totals(backend: Backend) -> list[SavedTotals]:
    """Return the savings of a store: for each namespace, the one with the most restored tokens
    first, its total and then its labels in the same order.

    :raises StoreError: the medium failed.
    """
    rows = []
    for total in read_savings(backend):
        whole = _saved(total, label=None, requests=total.requests, tokens=total.tokens)
        rows.append(whole)
        labels = [
            _saved(total, label, restored.requests, restored.tokens)
            for label, restored in total.labels.items()
        ]
        labels.sort(key=attrgetter("tokens"), reverse=True)
        rows += labels
    return rows


def _saved(
    total: Savings,
    label: str | None,
    requests: int,
    tokens: int,
) -> SavedTotals:
    """Return the savings of the requests with a label, or of all requests of a namespace if
    ``label`` is None.

    :param total: savings of the whole namespace.
    """
    return SavedTotals(
        namespace=total.namespace,
        model=total.model,
        label=label,
        requests=requests,
        tokens=tokens,
        seconds=total.seconds(tokens),
    )
