"""From packs that wait to transactions: together where they fit, one by one where they do not.

A pack's blocks are read until it has ended, which ``ended`` tells exactly once for each, whatever happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from persistkv.config import RowLayout
from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue import Catalogue
from persistkv.storage.ending import ManifestMaker
from persistkv.storage.pack_writer import PackWriter
from persistkv.storage.records import RequestEnd
from persistkv.storage.staging import StagedPack

_STALE_RETRIES = 2
_LENT_SHARE = 16  # a transaction is not to take for ever, either


@dataclass(eq=False)
class Outgoing:
    """A pack on its way."""

    writer: PackWriter
    staged: StagedPack | None = None
    """The copies that it is written from; None: it is written from rows."""


class Writing:
    """What waited at one moment, on its way into a namespace. Used once."""

    def __init__(
        self,
        catalogue: Catalogue,
        layout: RowLayout,
        uses: list[bytes],
        memory: int,
        ended: Callable[[Outgoing, bool], None],
    ) -> None:
        """Nothing is written yet.

        :param uses: packs that were used; told with the first transaction.
        :param memory: as in ``CommitBatch``.
        :param ended: called with each pack, and whether it is durable, as soon as that is known.
        """
        self._catalogue = catalogue
        self._block_bytes = [group.block_bytes for group in layout.groups]
        self._uses = uses
        self._memory = memory
        self._ended = ended

    async def run(self, slices: deque[list[Outgoing]], ends: Sequence[RequestEnd]) -> None:
        """Write each slice in one transaction; the ends of requests go with the last one.

        Failure costs what is in a transaction: it is dropped, and told. Slices are taken off as they end, because their
        copies are not to outlive that.
        """
        while len(slices) > 1:
            await self._write(slices.popleft(), ())
        await self._write(slices.popleft() if slices else (), ends)

    async def _write(self, outgoing: Sequence[Outgoing], ends: Sequence[RequestEnd]) -> None:
        """Together; where that does not fit, one by one, so that one pack too many costs only itself."""
        if await self._try_commit(outgoing, ends):
            return
        for one in outgoing:
            if (len(outgoing) == 1 and not ends) or not await self._try_commit([one], ()):
                self._ended(one, False)
        for end in ends:
            if not await self._try_commit((), [end]):
                self._catalogue.news.persisted.append((end.request, False))

    async def _try_commit(self, outgoing: Sequence[Outgoing], ends: Sequence[RequestEnd]) -> bool:
        catalogue = self._catalogue
        try:
            for retries_left in reversed(range(_STALE_RETRIES + 1)):
                writers = [one.writer for one in outgoing if not self._holds_all(one.writer)]
                maker = ManifestMaker(catalogue.index, self._block_bytes, writers)
                manifests = [maker.make(end) for end in ends]
                seen = catalogue.cursor if retries_left else None
                written = [manifest for manifest, _ in manifests if manifest is not None]
                batch = CommitBatch(writers, written, touches=self._uses, seen=seen, memory=self._memory)
                result = await catalogue.commit(batch)
                if not result.stale:
                    break
                await catalogue.refresh()
        except StoreError as error:
            catalogue.complain(error)
            await catalogue.refresh_or_complain()  # room may have been made although it was not enough
            return False
        await catalogue.committed(writers, result, followed=seen is not None)
        offered = set(map(id, writers))
        catalogue.count_held([one.writer for one in outgoing if id(one.writer) not in offered])
        self._uses = []
        for one in outgoing:
            self._ended(one, True)
        catalogue.news.persisted += [(end.request, whole) for end, (_, whole) in zip(ends, manifests, strict=True)]
        return True

    def _holds_all(self, writer: PackWriter) -> bool:
        index = self._catalogue.index
        return all(key in index for segment in writer.segments for key in segment.keys)


def slices_of(outgoing: Iterable[Outgoing], max_bytes: int, *, lends: bool = False) -> deque[list[Outgoing]]:
    """Packs that are written in one transaction each, as few as its bound allows.

    :param max_bytes: raw bytes of one transaction: what it writes may be in memory until it ends.
    :param lends: no more is in memory at once than its driver is allowed (``CommitBatch.memory``): more of it fits.
    """
    slices: deque[list[Outgoing]] = deque()
    most = max_bytes * (_LENT_SHARE if lends else 1)
    size = 0
    for one in outgoing:
        if not slices or size + one.writer.raw_length > most:
            slices.append([])
            size = 0
        slices[-1].append(one)
        size += one.writer.raw_length
    return slices
