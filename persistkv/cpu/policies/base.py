"""The interface of a cache policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from persistkv.base import OffloadKey


class CachePolicy(ABC):
    """Decides the order in which blocks are evicted from the primary tier.

    It knows every block that has a row, from the allocation of the row on. If a call passes several keys, the first is
    the start of a prefix and must be evicted after the last. The amortised cost of a call must be proportional to its
    number of keys. Not thread-safe. After a call that raised, the policy is unusable, because its state may differ from
    its manager's.

    :param num_blocks: rows of the primary tier.
    :param refs: one number per row, kept by the manager: 0 if the row can be evicted, any other value if it cannot.
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        self._num_blocks = num_blocks
        self._refs = refs

    @abstractmethod
    def insert(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Add blocks that the policy does not know, with their rows, as the most recently used ones."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of each of these blocks; unknown keys are ignored."""

    @abstractmethod
    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Note that jobs which used these blocks have ended; blocks with ``refs`` 0 can be evicted again. Not a use.

        Unknown keys are ignored.
        """

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks whose write failed; unknown keys are ignored."""

    @abstractmethod
    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Choose ``count`` blocks to evict and forget them.

        :returns: key and row of each, in eviction order; fewer than ``count`` only if fewer can be evicted.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks and all statistics of their use."""
