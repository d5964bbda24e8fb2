"""Division of items into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def batched(
    items: Iterable[T],
    size: int,
) -> Iterator[list[T]]:
    """Yield the items in lists of ``size``, of which the last one may be shorter."""
    waiting = iter(items)
    while batch := list(islice(waiting, size)):
        yield batch
