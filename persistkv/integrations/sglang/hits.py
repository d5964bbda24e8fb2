"""Which prefixes of a request can be restored from several pools: SGLang's hit policies."""

from __future__ import annotations

from collections.abc import Sequence


def leading(held: Sequence[bool]) -> int:
    """Return the length of the run of held pages at the start."""
    for place, is_held in enumerate(held):
        if not is_held:
            return place
    return len(held)


def all_pages(held: Sequence[bool]) -> set[int]:
    """Return the lengths of the prefixes of which every page is held."""
    return set(range(1, leading(held) + 1))


def trailing_pages(
    held: Sequence[bool],
    count: int,
) -> set[int]:
    """Return the lengths of the prefixes whose last ``count`` pages are held, or all pages if the
    prefix has fewer."""
    lengths = set()
    run = 0  # number of held pages in a row up to the end of the prefix
    for length, is_held in enumerate(held, 1):
        run = run + 1 if is_held else 0
        if run >= min(count, length):
            lengths.add(length)
    return lengths


def block_groups(
    held: Sequence[bool],
    block_pages: int,
    group_pages: int,
) -> int:
    """Return how many pages the leading complete groups cover.

    :param held: for each key of the pool, whether it is held: ``group_pages`` keys for each group.
    :param block_pages: pages that a group covers.
    """
    if group_pages <= 0:
        return 0
    # round down to complete groups
    return leading(held) // group_pages * block_pages
