"""Adoption of the namespace of another engine release, after comparisons have proven that its
blocks are valid.

1. A candidate differs from the engine's namespace in the release alone. One at a time is compared,
   and one adopted.
2. The engine's blocks are compared only if it computed them from blocks that it computed. A store
   job shows this: all blocks of its request from the first on were offered, and the store held none
   of them when they were offered. (A block that was loaded from this store is held; the engine
   reports keys that other tiers loaded.)
3. After the adoption, loaded prefixes are proven equal, so the engine may also compute from them.
   Blocks that are deeper in their context than all compared ones are compared if the store does not
   hold them; equal ones raise the depths up to which the candidate serves lookups. The rest of rule
   2 holds.
4. A block that differs refuses the candidate; after its adoption, it stops the growth of the
   depths. No differing block, but too few equal ones: undecided, nothing is recorded.
5. Verdicts are recorded in the store for each pair of namespaces. Adopted blocks that the engine
   uses are stored in its own namespace like computed ones.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Literal, NamedTuple

from persistkv.batches import batched
from persistkv.config import NumberLayout
from persistkv.errors import StoreError
from persistkv.memory.rows import BlockMemory, ByteArray, Rows
from persistkv.rounding import divide_up
from persistkv.storage.backend import Namespace
from persistkv.storage.format.pack import UNKNOWN_DEPTH
from persistkv.storage.identity import Identity
from persistkv.storage.identity.comparison import Agreement, compare, fits
from persistkv.storage.identity.other_namespace import OtherNamespace
from persistkv.storage.identity.verdict import (
    Verdict,
    candidates,
    read_verdict,
    write_verdict,
)
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.commit_pipeline import Blocks
from persistkv.storage.store.index import HeldPack
from persistkv.storage.store.load import PartRead, Scratch, plan_reads
from persistkv.storage.store.namespace_view import NamespaceView

logger = logging.getLogger(__name__)

_LEAST_REQUESTS = 2  # requests whose blocks must agree before an adoption
_LEAST_TOKENS = 128  # tokens that must agree in each KV cache group
_MOST_BLOCKS = 32  # blocks that are compared per store job, spread over its depths
_BATCH_BYTES = 4 << 20  # 4 MiB of blocks that are read for comparison at once
_MOST_REQUESTS = 4_096  # requests whose offered blocks are tracked
# keys that other tiers loaded; with more of them, nothing is compared any more
_MOST_LOADED = 65_536
# namespaces of a remote store that are read to find candidates
_MOST_REMOTE_NAMESPACES = 16
# seconds between extensions of the depths, each of which reads the other namespace's catalogue
_EXTEND_S = 30.0
_GROWTH = 1.25  # factor by which depths must grow to be extended earlier


class Block(NamedTuple):
    """One block of a store job. Its depth is the number of blocks of its group before it in the
    context."""

    key: bytes
    group: int
    row: int
    depth: int


@dataclass
class _Request:
    """Record of the blocks that a request has offered to the store. It decides whether the engine
    computed them all, so that they can be compared."""

    counts: list[int]
    """One more than the largest offered depth, by group. All blocks before it were offered, unless
    the group is in ``gaps``."""
    gaps: set[int] = field(default_factory=set)
    """Groups in which a block was offered and the one before it was not."""
    held: bool = False
    """Whether the store held any of the blocks when it was offered."""
    foreign: bool = False
    """Whether another tier had loaded any of the blocks, or the depth of any is unknown."""

    def offer(self, block: Block, *, is_held: bool) -> bool:
        """Record that a block was offered; return whether it is deeper than all earlier ones of its
        group.

        :param is_held: whether the engine's own namespace holds it already.
        """
        next_depth = self.counts[block.group]
        # offered before: the first offer counts, because the store may hold the block since then
        if block.depth < next_depth:
            return False
        if block.depth > next_depth:
            self.gaps.add(block.group)
        self.counts[block.group] = block.depth + 1
        self.held |= is_held
        return True

    @property
    def is_whole(self) -> bool:
        """Whether at least one group has offered all its blocks from the first one on. One is
        enough: groups with a sliding window skip blocks that have left it."""
        offered = [group for group, count in enumerate(self.counts) if count]
        return not self.gaps.issuperset(offered)


@dataclass
class _Evidence:
    """Totals of the comparisons with one candidate. Tokens, depths and requests are those of blocks
    that agreed."""

    tokens: list[int]
    """For each KV cache group, the number of compared tokens."""
    depths: list[int]
    """For each KV cache group, one more than the largest compared depth."""
    requests: set[str] = field(default_factory=set)
    """Requests with at least one compared block."""
    error: float = 0.0
    """Largest ``Agreement.error`` so far."""
    limit: float = 0.0
    """``Agreement.limit``; 0 before the first comparison."""

    def add(
        self,
        request: str,
        block: Block,
        agreement: Agreement,
    ) -> None:
        """Add the comparison of a block that a request has offered."""
        self.error = max(self.error, agreement.error)
        # the same in all comparisons: it depends on the dtype only
        self.limit = agreement.limit
        # without tokens, the blocks are mostly zeros, whose agreement proves nothing
        if not agreement.agrees or not agreement.tokens:
            return
        group = block.group
        usable_depths = block.depth + 1
        self.tokens[group] += agreement.tokens
        self.depths[group] = max(self.depths[group], usable_depths)
        self.requests.add(request)


class _HeldBlock(NamedTuple):
    """A block of a store job that the other namespace holds, too."""

    block: Block
    pack: HeldPack
    """Pack of the other namespace that holds it."""


class _BlockPair(NamedTuple):
    """Our block and their block of one key, each as a whole row."""

    group: int
    ours: ByteArray
    theirs: ByteArray


class Canary:
    """Compares the engine's blocks with those of a candidate, which is the namespace of another
    engine release, and serves the blocks of an adopted one.

    For the tasks of the store's event loop. Failures of the medium are logged and leave the
    candidate undecided.
    """

    def __init__(
        self,
        own: NamespaceView,
        identity: Identity,
        rows: BlockMemory,
        options: StoreOptions,
    ) -> None:
        """Find candidates, and open the adopted namespace if one is recorded. Runs on the caller's
        thread.

        :param own: view of the engine's own namespace.
        :param identity: that of the engine's own namespace.
        :param rows: the engine's memory, from which store jobs offer blocks.
        """
        self._own = own
        self._rows = rows
        self._options = options
        self.other: OtherNamespace | None = None
        """The adopted namespace, or the candidate that is being compared."""
        self.verdict: Verdict | None = None
        """The verdict about ``other``, which is adopted; None while ``other`` is a candidate."""
        self._candidates: list[Namespace] = []
        """Namespaces to compare with, one after the other."""
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        """Unfinished requests that have offered blocks, by id."""
        self._loaded: set[bytes] = set()
        """Keys of blocks that another tier than this store loaded for the engine, which therefore
        did not compute them."""
        self._has_unknown_loads = False
        """Whether other tiers loaded blocks that ``_loaded`` lacks: the engine may compute from
        them, so nothing can be compared any more."""
        self._evidence = self._no_evidence()
        """Totals of the comparisons with ``other``."""
        self._running = False
        """Whether a comparison is running."""
        self._unwritten: dict[bytes, Verdict] = {}
        """Verdicts that apply here, and that ``update`` will write to the store, by the id of the
        other namespace."""
        self._refused: list[OtherNamespace] = []
        """Refused namespaces that are still open; ``update`` closes them."""
        self._extended_at = time.monotonic()
        """Monotonic time of the adoption, or of the last increase of ``verdict.depths``: the limits
        up to which lookups use blocks of ``other``."""
        if self._may_compare():
            try:
                self._find_namespaces(identity)
            except StoreError as error:
                logger.info(
                    "namespaces of other releases cannot be read (%s): none is adopted",
                    str(error),
                )
        self.active = bool(self._candidates or self.other)
        """Whether anything can be compared or is adopted. The engine then offers all blocks of its
        requests, including those that a lookup finds."""

    @property
    def _num_groups(self) -> int:
        """Number of KV cache groups."""
        return len(self._rows.layout.groups)

    def _may_compare(self) -> bool:
        """Return whether the options allow comparisons, and the engine has described where the KV
        numbers of all groups are in its memory."""
        if self._options.adopt != "canary":
            return False
        # only rows can be described: other memory has a list of regions for each block
        if not isinstance(self._rows, Rows):
            return False
        numbers = self._rows.layout.numbers
        if numbers is None or len(numbers.groups) != self._num_groups:
            return False
        groups = range(self._num_groups)
        return all(self._fits_row(numbers, group) for group in groups)

    def _fits_row(self, numbers: NumberLayout, group: int) -> bool:
        """Return whether the described numbers of a group are within its blocks."""
        ranges = self._rows.layout.groups[group].ranges
        # the numbers' positions are counted from the start of the row, so a block must begin there,
        # and have no gaps
        if len(ranges) != 1:
            return False
        offset, block_bytes = ranges[0]
        return offset == 0 and fits(numbers, group, block_bytes)

    def _find_namespaces(self, identity: Identity) -> None:
        """Open the namespace of a recorded adoption, or else collect the candidates without a
        verdict."""
        backend = self._own.backend
        namespaces = backend.namespaces()
        if backend.capabilities.remote:
            # reading the identity of a namespace costs a request
            namespaces = islice(namespaces, _MOST_REMOTE_NAMESPACES)
        for namespace in candidates(backend, identity, list(namespaces)):
            verdict = read_verdict(backend, identity.digest, namespace.id)
            if verdict is None:
                # compare only if the verdict can be recorded
                if backend.capabilities.writable:
                    self._candidates.append(namespace)
                continue
            # a verdict about another number of KV cache groups is not about this layout
            is_of_layout = len(verdict.depths) == self._num_groups
            if verdict.verdict == "adopted" and is_of_layout:
                self._use_recorded(namespace, verdict)
                return

    def _use_recorded(self, namespace: Namespace, verdict: Verdict) -> None:
        """Use a namespace whose adoption is recorded. No other one is compared."""
        self.other = self._open(namespace.id, verdict.depths)
        self.verdict = verdict
        self._candidates = []
        logger.warning(
            "blocks of namespace %s are used, as recorded: %s",
            _name_text(namespace),
            _depths_text(verdict.depths),
        )

    def _open(
        self,
        namespace: bytes,
        depths: tuple[int, ...],
    ) -> OtherNamespace:
        """Read the catalogue of another namespace, on the caller's thread."""
        return OtherNamespace(
            self._own, namespace, self._rows.layout, self._options, depths
        )

    def _no_evidence(self) -> _Evidence:
        """Return the evidence before the first comparison with a candidate."""
        tokens = [0] * self._num_groups
        depths = [0] * self._num_groups
        return _Evidence(tokens, depths)

    def readable(self) -> list[NamespaceView]:
        """Return the namespaces that serve loads, in order: the own one, then an adopted one."""
        if self.other is None or self.verdict is None:
            return [self._own]
        return [self._own, self.other]

    # Offered blocks

    def loaded_elsewhere(self, keys: Iterable[bytes]) -> None:
        """Record that another tier loaded blocks, which the engine therefore did not compute. If no
        keys are given, the blocks are unknown. Unknown blocks, or too many known ones, end
        all comparisons.
        """
        if not self.active or self._has_unknown_loads:
            return
        known = list(keys)
        self._loaded.update(known)
        are_too_many = len(self._loaded) > _MOST_LOADED
        self._has_unknown_loads = not known or are_too_many

    def ended(self, request: str) -> None:
        """Forget which blocks a request offered, because it has ended."""
        self._requests.pop(request, None)

    def _record_offer(self, request: str, blocks: Blocks) -> list[Block]:
        """Record that a request offered blocks; return those that may be compared, sorted by depth:
        blocks that were not offered before, that the store does not hold, and that are beyond the
        adopted depths.

        Empty if the engine may have used loaded blocks to compute them: then they do not show what
        this release computes (``_is_evidence``).
        """
        state = self._state_of(request)
        # blocks below these depths need no comparison; before an adoption, all blocks need one
        adopted_depths = (0,) * self._num_groups
        if self.verdict is not None:
            adopted_depths = self.verdict.depths
        # a key that is not ``absent`` is held, or, rarely, has the fingerprint of a held one
        absent = set(self._own.index.absent(blocks.keys))
        comparable: list[Block] = []
        for block in _by_depth(blocks):
            is_held = block.key not in absent
            # Nothing is known of a block without a depth; from a loaded block, the engine may have
            # computed other blocks of the request.
            if block.depth == UNKNOWN_DEPTH or block.key in self._loaded:
                state.foreign = True
            is_new = state.offer(block, is_held=is_held)
            is_adopted = block.depth < adopted_depths[block.group]
            if is_new and not is_held and not is_adopted:
                comparable.append(block)
        # after the loop, because each of the blocks can show that the engine loaded a part
        if not self._is_evidence(state):
            return []
        return comparable

    def _state_of(self, request: str) -> _Request:
        """Return the state of a request, new if it has offered no blocks yet."""
        if request not in self._requests:
            counts = [0] * self._num_groups
            self._requests[request] = _Request(counts)
        state = self._requests[request]
        # Too many: forget the oldest one. If it offers more blocks, they begin within its context,
        # which is a gap, so they are not compared.
        if len(self._requests) > _MOST_REQUESTS:
            self._requests.popitem(last=False)
        return state

    def _is_evidence(self, request: _Request) -> bool:
        """Return whether the blocks of a request are evidence: the engine has computed all of them,
        or, after an adoption, loaded some from this store, whose blocks are proven equal."""
        if self._has_unknown_loads or request.foreign or not request.is_whole:
            return False
        is_adopted = self.verdict is not None
        return is_adopted or not request.held

    # Comparison

    async def examine(self, request: str, blocks: Blocks) -> None:
        """Compare blocks that a request offers, and decide about the candidate if there is enough
        evidence.

        Their rows must not change until the call returns. If the medium fails, logs it and decides
        nothing. Blocks that are offered during another call are recorded, but not compared.
        """
        is_final = self.verdict is not None and self.verdict.final
        if not self.active or is_final:
            return
        # recorded even while a comparison runs, because later decisions need all offered blocks
        comparable = self._record_offer(request, blocks)
        if not comparable or self._running:
            return
        self._running = True
        try:
            await self._compare_and_judge(request, comparable)
        except StoreError as error:
            logger.info(
                "no comparison with the namespace of another release: %s", str(error)
            )
        finally:
            self._running = False

    async def _compare_and_judge(
        self, request: str, comparable: Sequence[Block]
    ) -> None:
        """Compare those of the blocks that the other namespace holds, too, and decide about it. The
        first candidate is opened if none is open.

        :raises StoreError: the medium failed.
        """
        if self.other is None:
            if not self._candidates:
                return
            self.other = await self._open_candidate()
        keys = [block.key for block in comparable]
        holders = await self.other.all_holders(keys)
        in_both: list[_HeldBlock] = []
        for block, pack in zip(comparable, holders, strict=True):
            if pack is not None:
                in_both.append(_HeldBlock(block, pack))
        chosen = _spread(in_both)
        batch_blocks = max(1, _BATCH_BYTES // self._rows.layout.row_stride)
        for batch in batched(chosen, batch_blocks):
            all_agree = await self._compare(request, self.other, batch)
            # a block differs: ``_compare`` has refused the namespace, or ended its growth
            if not all_agree:
                return
        self._judge(self.other)

    async def _open_candidate(self) -> OtherNamespace:
        """Open the first candidate. Its limits of usable depths are 0, so that lookups find none of
        its blocks before the adoption."""
        candidate = self._candidates[0]
        no_depths = (0,) * self._num_groups
        open_candidate = partial(self._open, candidate.id, no_depths)
        return await self._own.call(open_candidate)

    async def _compare(
        self,
        request: str,
        other: OtherNamespace,
        batch: Sequence[_HeldBlock],
    ) -> bool:
        """Compare blocks with those of the other namespace, and add the result to the evidence.
        Return False if a block differs; then the candidate is refused, or, of an adopted namespace,
        no deeper blocks are used."""
        theirs, failed = await self._read_theirs(other, batch)
        rows = self._rows
        assert isinstance(rows, Rows)  # ``_may_compare`` allows no other memory
        readable: list[Block] = []
        pairs: list[_BlockPair] = []
        for number, held in enumerate(batch):
            block = held.block
            if block.key in failed:
                continue
            readable.append(block)
            our_row = rows.array[block.row]
            # ``theirs`` has the blocks in the order of the batch
            their_row = theirs.array[number]
            pairs.append(_BlockPair(block.group, our_row, their_row))
        # in a reading thread: megabytes of numbers would stop the event loop
        compare_all = partial(self._agreements, pairs)
        (agreements,) = await self._own.threads.read([compare_all])
        for block, agreement in zip(readable, agreements, strict=True):
            self._evidence.add(request, block, agreement)
            if not agreement.agrees:
                self._refuse(other, block, agreement)
                return False
        return True

    async def _read_theirs(
        self,
        other: OtherNamespace,
        batch: Sequence[_HeldBlock],
    ) -> tuple[Rows, set[bytes]]:
        """Read blocks of the other namespace; return rows with them, in order, and the keys that
        failed."""
        layout = self._rows.layout
        backend = self._own.backend
        row_numbers = range(len(batch))
        memory = bytearray(len(batch) * layout.row_stride)
        theirs = Rows(memoryview(memory), layout)
        keys = [held.block.key for held in batch]
        holders = [held.pack for held in batch]
        parts, missing = plan_reads(
            holders,
            theirs,
            keys,
            row_numbers,
            part_bytes=_BATCH_BYTES,
            scratch_bytes=_BATCH_BYTES,
            remote=backend.capabilities.remote,
        )
        scratch = Scratch(_BATCH_BYTES)
        read = partial(PartRead, backend, other.namespace, theirs, scratch)
        reads = [read(part) for part in parts]
        failed = set(missing)
        for outcome in await self._own.threads.read(reads):
            failed.update(outcome.failed)
        return theirs, failed

    def _agreements(
        self,
        pairs: Iterable[_BlockPair],
    ) -> list[Agreement]:
        """Compare blocks of two namespaces."""
        numbers = self._rows.layout.numbers
        # ``_may_compare`` allows no comparison otherwise
        assert numbers is not None
        agreements: list[Agreement] = []
        for pair in pairs:
            agreement = compare(numbers, pair.group, pair.ours, pair.theirs)
            agreements.append(agreement)
        return agreements

    # Verdicts

    def _judge(self, other: OtherNamespace) -> None:
        """Adopt the candidate, or extend the depths, if there is enough evidence."""
        if self.verdict is None:
            self._judge_candidate(other)
            return
        old_depths = self.verdict.depths
        both = zip(self._evidence.depths, old_depths, strict=True)
        depths = tuple(max(pair) for pair in both)
        if depths == old_depths:
            return
        # Each extension reads the catalogue of the other namespace: extend the depths only if they
        # grow much, or after some time.
        depth_pairs = zip(depths, old_depths, strict=True)
        has_grown_much = any(new > old * _GROWTH for new, old in depth_pairs)
        since_extension_s = time.monotonic() - self._extended_at
        if has_grown_much or since_extension_s >= _EXTEND_S:
            self._adopt(other, depths)

    def _judge_candidate(self, other: OtherNamespace) -> None:
        """Adopt the candidate if there is enough evidence. All of it agrees: one block that differs
        would have refused the candidate."""
        evidence = self._evidence
        num_requests = len(evidence.requests)
        # every group must have enough: take the one with the fewest
        num_tokens = min(evidence.tokens)
        if num_requests < _LEAST_REQUESTS or num_tokens < _LEAST_TOKENS:
            return
        self._adopt(other, tuple(evidence.depths))
        # ``other`` is the view of the first candidate, which has the release for the log line
        candidate = self._candidates[0]
        logger.warning(
            "adopted the blocks of namespace %s: %d tokens of %d requests agree %s; %s",
            _name_text(candidate),
            sum(evidence.tokens),
            num_requests,
            _error_text(evidence),
            _depths_text(evidence.depths),
        )

    def _adopt(
        self,
        other: OtherNamespace,
        depths: tuple[int, ...],
    ) -> None:
        """Adopt the namespace up to these depths, or extend them."""
        self._set_verdict(other, "adopted", depths)
        self._extended_at = time.monotonic()
        other.use(depths)

    def _refuse(
        self,
        other: OtherNamespace,
        block: Block,
        agreement: Agreement,
    ) -> None:
        """Refuse the candidate, and continue with the next one. After an adoption, keep it and end
        the growth of the depths."""
        name = other.namespace.hex()[:8]
        cause = (
            f"a block at depth {block.depth} of group {block.group} differs in cell "
            f"{agreement.cell} {_error_text(agreement)}"
        )
        if self.verdict is not None:
            logger.warning(
                "blocks of namespace %s beyond the adopted depths are not used: %s",
                name,
                cause,
            )
            self._set_verdict(other, "adopted", self.verdict.depths, final=True)
            return
        logger.warning("the blocks of namespace %s are not used: %s", name, cause)
        self._set_verdict(other, "refused", depths=())
        self._refused.append(other)
        self._await_next_candidate()

    def _await_next_candidate(self) -> None:
        """Drop the first candidate, which is refused. The next one is opened when blocks can be
        compared with it, and is undecided until then."""
        self.other = None
        self.verdict = None
        self._candidates = self._candidates[1:]
        self._evidence = self._no_evidence()

    def _set_verdict(
        self,
        other: OtherNamespace,
        verdict: Literal["adopted", "refused"],
        depths: tuple[int, ...],
        final: bool = False,
    ) -> None:
        """Set the verdict about the other namespace. It applies in this process at once; ``update``
        writes it to the store.

        :param depths: limits of usable depths, by KV cache group; empty if it is refused.
        :param final: whether the comparison is over, so that the depths never grow.
        """
        evidence = self._evidence
        self.verdict = Verdict(
            verdict=verdict,
            depths=depths,
            final=final,
            tokens=sum(evidence.tokens),
            error=evidence.error,
            limit=evidence.limit,
        )
        self._unwritten[other.namespace] = self.verdict

    @property
    def needs_update(self) -> bool:
        """Whether ``update`` has work to do."""
        if self._unwritten or self._refused:
            return True
        return self.other is not None and self.other.needs_repair

    async def update(self) -> None:
        """Close the views of refused candidates; record new verdicts; remove damaged packs of the
        candidate's view; and apply the verdicts. The task that changes the catalogue awaits it.
        Failures to record are logged, and the next start decides again."""
        while self._refused:
            refused = self._refused.pop()
            refused.close()
        # Take the verdicts before they are written: during the writes, a comparison may add others.
        unwritten = self._unwritten
        self._unwritten = {}
        for namespace, verdict in unwritten.items():
            await self._write_verdict(namespace, verdict)
        if self.other is not None:
            await self.other.repair()
        if unwritten:
            # adds the usable keys to the own index, so that lookups find them
            await self.refresh()

    async def _write_verdict(self, theirs: bytes, verdict: Verdict) -> None:
        """Record a verdict about namespace ``theirs``. Failures are logged: the verdict applies in
        this process, and the next start decides again."""
        own = self._own
        write = partial(write_verdict, own.backend, own.namespace, theirs, verdict)
        try:
            await own.call(write)
        except StoreError as error:
            logger.warning(
                "the verdict about namespace %s is not recorded: %s",
                theirs.hex()[:8],
                str(error),
            )

    # The adopted namespace

    async def refresh(self) -> None:
        """Apply the changes of the other namespace. The task that changes the catalogue awaits it.
        Failures are logged."""
        if self.other is not None:
            await self.other.refresh_or_log()

    def close(self) -> None:
        """Release the indexes of other namespaces. Idempotent."""
        while self._refused:
            refused = self._refused.pop()
            refused.close()
        if self.other is not None:
            self.other.close()


def _by_depth(blocks: Blocks) -> list[Block]:
    """Return the blocks of a store job one by one, sorted by depth."""
    # ``Blocks`` has the fields of ``Block``, in the same order, each as a column
    rows = zip(*blocks, strict=True)
    offered = map(Block._make, rows)
    return sorted(offered, key=attrgetter("depth"))


def _spread(blocks: Sequence[_HeldBlock]) -> list[_HeldBlock]:
    """Choose at most 32 blocks of each group to compare: evenly spaced, the deepest one included,
    because it limits the depths that can be adopted. The blocks are sorted by depth."""
    by_group: dict[int, list[_HeldBlock]] = {}
    for held in blocks:
        of_group = by_group.setdefault(held.block.group, [])
        of_group.append(held)
    chosen: list[_HeldBlock] = []
    for group in sorted(by_group):
        of_group = by_group[group]
        step = divide_up(len(of_group), _MOST_BLOCKS)
        # step from the end, so that the deepest block is among the chosen ones
        deepest_first = of_group[::-step]
        chosen += reversed(deepest_first)
    return chosen


def _depths_text(depths: Iterable[int]) -> str:
    """Return adopted depths in words, for log lines."""
    counts = " and ".join(map(str, depths))
    return f"the first {counts} blocks of a context"


def _error_text(found: _Evidence | Agreement) -> str:
    return f"(error {found.error:.2g}, limit {found.limit:.2g})"


def _name_text(namespace: Namespace) -> str:
    """Return the first digits of a namespace's id with its engine's release, for log lines."""
    release = "another release"
    engine = namespace.identity.fields.get("engine")
    if isinstance(engine, dict):
        release = f"release {engine.get('release')}"
    return f"{namespace.id.hex()[:8]} ({release})"
