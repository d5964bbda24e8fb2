"""How the engine's side learns what the store holds, in bounded memory.

What came and went is told as it happens. While the engine takes nothing (it may idle for hours, and other processes
write to the same store) news waits; where too much waits it is let go of, and once the engine takes messages again it
is told all that the store holds: a listing, which replaces what it knew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from persistkv.storage.host import protocol
from persistkv.storage.keys import PackedKeys
from persistkv.storage.store import Store

_KEYS_A_MESSAGE = 4_096  # the other side takes about a millisecond for them
_MOST_WAITING = 65_536  # keys; a listing costs as much where the store holds no more


class NewsTeller:
    """Tells one engine."""

    def __init__(self, store: Store, send: Callable[[protocol.ToEngine], None], congested: Callable[[], bool]) -> None:
        """Begin with a listing, at whose end the store is open.

        :param congested: whether the engine's side has much to take.
        """
        self._store = store
        self._send = send
        self._congested = congested
        self._listing: Iterator[bytes] | None = None
        self._behind = False
        self._most_waiting = _MOST_WAITING
        self._begin_listing(protocol.Opened(store.namespace, store.notice))

    def _begin_listing(self, last: protocol.ToEngine) -> None:
        self._behind = False
        self._listing = iter(list(self._store.index))
        self._last = last
        self._send(protocol.Listing())

    @property
    def up_to_date(self) -> bool:
        """Whether all was told."""
        news = self._store.news
        return not (self._listing or self._behind or news.stored or news.removed or news.persisted)

    def tell(self) -> None:
        """Tell what there is to tell, as far as the engine takes it."""
        if self._listing is None and self._behind and not self._congested():
            self._begin_listing(protocol.Listed())
        while self._listing is not None and not self._congested():
            keys = list(islice(self._listing, _KEYS_A_MESSAGE))
            if keys:
                self._send(protocol.Stored(PackedKeys.of(keys)))
            else:
                self._listing = None
                self._send(self._last)
        if self._listing is not None or self._congested():
            self._let_wait()
        else:
            self._tell_new()

    def _let_wait(self) -> None:
        news = self._store.news
        if len(news.stored) + len(news.removed) > self._most_waiting:
            self._behind = True
        if self._behind:
            news.stored, news.removed = [], []

    def _tell_new(self) -> None:
        news = self._store.take_news()
        for chunk in _chunks(news.removed):
            self._send(protocol.Removed(PackedKeys.of(chunk)))
        for chunk in _chunks(news.stored):
            self._send(protocol.Stored(PackedKeys.of(chunk)))
        for request, whole in news.persisted:
            self._send(protocol.Persisted(request, whole))


def _chunks(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[start : start + _KEYS_A_MESSAGE] for start in range(0, len(keys), _KEYS_A_MESSAGE)]
