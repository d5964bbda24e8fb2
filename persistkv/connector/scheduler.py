"""The scheduler's side of the connector: plans loads and stores, and processes their results.

An engine calls, for each request: ``on_new_request``, ``update_keys``,
``get_num_new_matched_tokens`` (again in each step while it returns None),
``update_state_after_alloc``, ``update_computed_tokens`` as blocks fill, and ``request_finished``.
For each step, in this order: ``build_connector_meta``, ``update_connector_output`` with the
worker's results, ``take_events``.

Groups differ: full attention needs the whole prefix, a sliding window only its last blocks. A match
is a length that all groups can serve. All methods are called from one thread, and none of them
waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple

from persistkv.base import (
    GPULoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestDescription,
    Retention,
    TransferResult,
    TransferSpec,
)
from persistkv.connector.common import (
    ConnectorMetadata,
    ConnectorOutput,
    ConnectorStats,
    KVCacheGroupSpec,
    LoadProgress,
    TransferJob,
)
from persistkv.connector.matching import (
    GroupBlocks,
    GroupGeometry,
    longest_match,
    longest_that_fits,
)
from persistkv.errors import ConfigurationError

BlockTable = Sequence[int | None]
"""Device block numbers of one request and one KV cache group, from the request's first token on.
None: the engine has no block at this position, because it has left the sliding window."""
_Offer = dict[OffloadKey, int]
"""Full offloaded blocks of one KV cache group to store: key → index among the group's blocks of the
request."""


@dataclass
class _Request:
    """State of one request, from ``on_new_request`` until it is finished and its last transfer has
    ended."""

    geometries: Sequence[GroupGeometry]
    context: ReqContext
    description: RequestDescription
    """Keys and number of tokens; passed to the manager in ``context`` only if the request's blocks
    are stored."""
    policy: OffloadPolicy
    block_tables: Sequence[BlockTable]
    """For each group, the request's device blocks, as the engine last reported them."""
    next_store: list[int]
    """For each group, the index of the first offloaded block that was not offered to the manager
    yet."""
    num_local_tokens: int = 0
    """Leading tokens that were on the device at the last call of ``get_num_new_matched_tokens``."""
    num_external_tokens: int = 0
    """Tokens after the local ones that are being loaded or were loaded."""
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the device blocks."""
    promoted: set[OffloadKey] = field(default_factory=set)
    """Keys whose lookup returned None; rarely, such a block was being written instead of
    promoted."""
    jobs: set[int] = field(default_factory=set)
    """Transfers in flight."""
    refused_ends: list[int] = field(default_factory=list)
    """For each group, the end of the blocks that were offered and found no room; they are offered
    again."""
    gave_up_waiting: bool = False
    finished: bool = False
    store_until: float = math.inf
    """``time.monotonic`` time until which blocks that find no room are offered again."""

    @property
    def num_matched_tokens(self) -> int:
        """Number of leading tokens that are on the device once the load has ended."""
        return self.num_local_tokens + self.num_external_tokens

    def keys(self, start: int, stop: int) -> list[OffloadKey]:
        """Return the keys of the offloaded blocks that a load of tokens ``start`` to ``stop - 1``
        needs, by group."""
        needed: list[OffloadKey] = []
        for chain, geometry in zip(
            self.description.group_keys, self.geometries, strict=True
        ):
            blocks = geometry.offloaded_blocks(stop, start)
            needed += chain[blocks.start : blocks.stop]
        return needed

    def check_tables(self, tables: Sequence[BlockTable], num_tokens: int) -> None:
        """Raise ValueError unless there is one block table per group, and each covers
        ``num_tokens`` tokens."""
        if len(tables) != len(self.geometries):
            raise ValueError(
                f"{len(tables)} block tables for {len(self.geometries)} KV cache groups"
            )
        for group, (table, geometry) in enumerate(
            zip(tables, self.geometries, strict=True)
        ):
            if len(table) < num_tokens // geometry.block_size:
                raise ValueError(
                    f"group {group}: {len(table)} device blocks do not cover {num_tokens} tokens"
                )

    def check_load_target(self, tables: Sequence[BlockTable], stop: int) -> None:
        """Raise ValueError if ``stop`` is within a block, or a table lacks a block that a load up
        to ``stop`` fills."""
        if any(stop % geometry.block_size for geometry in self.geometries):
            raise ValueError(f"a load up to token {stop} ends within a block")
        for group, (table, geometry) in enumerate(
            zip(tables, self.geometries, strict=True)
        ):
            needed = geometry.device_blocks(stop, self.num_local_tokens)
            if None in table[needed.start : needed.stop]:
                raise ValueError(
                    f"group {group} has no device blocks for all that {stop} tokens need of it"
                )

    def skip_stores(self, num_held_tokens: int) -> None:
        """Do not offer blocks of the first ``num_held_tokens`` for storing, unless ``policy`` is
        request-level."""
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            self.next_store = [
                num_held_tokens // geometry.offloaded_tokens
                for geometry in self.geometries
            ]

    def load_target(self) -> GPULoadStoreSpec:
        """Return the device blocks to load into. A group's first one may be in the middle of an
        offloaded block."""
        matched, local = self.num_matched_tokens, self.num_local_tokens
        needed = [
            geometry.device_blocks(matched, local) for geometry in self.geometries
        ]
        tables = zip(self.block_tables, needed, strict=True)
        return _device_blocks(
            [table[blocks.start : blocks.stop] for table, blocks in tables],
            [blocks.start for blocks in needed],
        )

    def filled_blocks(self) -> list[_Offer]:
        """Return, by group, the blocks that became full since the last call, and that the group
        still has."""
        offers = []
        for group, geometry in enumerate(self.geometries):
            chain, table, factor = (
                self.description.group_keys[group],
                self.block_tables[group],
                geometry.factor,
            )
            computed = self.num_computed_tokens // geometry.offloaded_tokens
            first = self.next_store[group]
            filled = max(first, min(computed, len(chain), len(table) // factor))
            self.next_store[group] = filled
            held: Sequence[int] = range(first, filled)
            if None in table[first * factor : filled * factor]:
                held = [
                    at
                    for at in held
                    if None not in table[at * factor : (at + 1) * factor]
                ]
            offers.append({chain[at]: at for at in held})
        return offers

    def refuse(self, offers: Sequence[_Offer], num_accepted: Sequence[int]) -> None:
        """Offer the blocks of each group after its first ``num_accepted`` ones again later."""
        self.refused_ends = list(self.next_store)
        for group, (offer, accepted) in enumerate(
            zip(offers, num_accepted, strict=True)
        ):
            refused = list(offer.values())[accepted:]
            if refused:
                self.next_store[group] = refused[0]

    def num_lost(self, firsts: Sequence[int], offers: Sequence[_Offer]) -> int:
        """Return how many refused blocks are not in ``offers``, which begin at ``firsts``, because
        they have left the sliding window.
        """
        lost = 0
        for first, end, filled, offer in zip(
            firsts, self.refused_ends, self.next_store, offers, strict=False
        ):
            offered = sum(at < end for at in offer.values())
            lost += max(0, min(end, filled) - first) - offered
        return lost

    def store_source(self, offers: Sequence[_Offer]) -> GPULoadStoreSpec:
        """Return all device blocks of the offered blocks, as the source of a store."""
        blocks: list[BlockTable] = []
        starts = []
        for offer, table, geometry in zip(
            offers, self.block_tables, self.geometries, strict=True
        ):
            factor = geometry.factor
            blocks.append(
                [
                    block
                    for at in offer.values()
                    for block in table[at * factor : (at + 1) * factor]
                ]
            )
            starts.append(next(iter(offer.values()), 0) * factor)
        return _device_blocks(blocks, starts)


def _device_blocks(
    tables: Sequence[BlockTable], starts: Sequence[int]
) -> GPULoadStoreSpec:
    """Return a spec of these blocks of each KV cache group; ``starts`` are the indices of the first
    ones."""
    block_ids = [block for table in tables for block in table if block is not None]
    return GPULoadStoreSpec(block_ids, [len(table) for table in tables], starts)


class _Job(NamedTuple):
    state: _Request
    keys: Sequence[OffloadKey]
    is_load: bool


class OffloadingConnectorScheduler:
    """Plans transfers between the device and a manager's primary tier.

    Methods that take a ``req_id``, except ``on_new_request``, raise KeyError if there is no such
    request.

    :param manager: manager of the blocks; owned by the connector, which shuts it down.
    :param groups: the engine's KV cache groups in order.
    :param block_size_factor: device blocks in one offloaded block.
    :param max_load_blocks: most offloaded blocks that one load may need at once, such as all rows
        of the primary tier. Used only if there are sliding windows: then the match is limited to a
        prefix whose blocks fit. None: no limit.
    :param store_wait_s: seconds, 0 or more, that blocks of a finished request are offered again if
        the primary tier has no room for them and the manager needs every block of the request. They
        keep their device blocks meanwhile.
    :raises ConfigurationError: if there is no group, or a number is out of range.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        groups: Sequence[KVCacheGroupSpec],
        block_size_factor: int = 1,
        max_load_blocks: int | None = None,
        store_wait_s: float = 1.0,
    ) -> None:
        if not groups:
            raise ConfigurationError(
                "groups", list(groups), "at least one KV cache group"
            )
        if block_size_factor <= 0:
            raise ConfigurationError(
                "block_size_factor",
                block_size_factor,
                "a positive number of device blocks",
            )
        if max_load_blocks is not None and max_load_blocks <= 0:
            raise ConfigurationError(
                "max_load_blocks",
                max_load_blocks,
                "a positive number of offloaded blocks",
            )
        if store_wait_s < 0:
            raise ConfigurationError("store_wait_s", store_wait_s, "0 or more seconds")
        self.manager = manager
        self.stats = ConnectorStats()
        self._store_wait_s = store_wait_s
        self._geometries = [GroupGeometry(spec, block_size_factor) for spec in groups]
        self._match_unit = math.lcm(
            *(geometry.offloaded_tokens for geometry in self._geometries)
        )
        self._max_load_blocks = (
            max_load_blocks if any(spec.sliding_window for spec in groups) else None
        )
        self._requests: dict[str, _Request] = {}
        self._to_plan: dict[str, _Request] = {}
        self._jobs: dict[int, _Job] = {}
        self._job_ids = count()
        self._loads: list[TransferJob] = []
        self._released: list[str] = []

    def on_new_request(
        self,
        req_id: str,
        kv_transfer_params: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        store: bool = True,
        retention: Retention | None = None,
    ) -> ReqContext:
        """Announce a request, and return the context for calls of the manager. Must be the first
        call for each request.

        :param kv_transfer_params: parameters that the caller of the engine attached to the request.
        :param labels: name-value pairs that are stored with the request's manifest.
        :param store: False: the request's blocks are looked up and loaded, but not stored.
        :param retention: how long the stored context is kept; None: as long as there is room.
        :raises ValueError: a request of this id exists. A finished request exists until its
            transfers have ended.
        :raises ConfigurationError: a label is not text.
        """
        if req_id in self._requests:
            raise ValueError(f"request {req_id!r} already exists")
        description = RequestDescription(len(self._geometries), labels)
        description.retention = retention or description.retention
        context = ReqContext(
            req_id, kv_transfer_params, description if store else None, store
        )
        policy = self.manager.on_new_request(context).policy
        tables: list[BlockTable] = [[] for _ in self._geometries]
        self._requests[req_id] = _Request(
            self._geometries, context, description, policy, tables, [0] * len(tables)
        )
        return context

    def update_keys(
        self, req_id: str, group_idx: int, keys: Iterable[OffloadKey], num_tokens: int
    ) -> None:
        """Append the keys of a request's next offloaded blocks of one group. Their KV need not be
        computed yet. ``num_tokens`` counts all tokens of the request now, including those of an
        unfinished block.
        """
        description = self._requests[req_id].description
        description.extend(group_idx, keys)
        description.num_tokens = num_tokens

    def get_num_new_matched_tokens(
        self, req_id: str, num_computed_tokens: int
    ) -> int | None:
        """Return the number of tokens after those on the device that can be loaded. At least one
        token of the prompt is left for the engine to compute.

        :param num_computed_tokens: tokens on the device, a multiple of each group's device block.
        :returns: None while blocks of the prefix are being promoted or written: retry in a later
            step. Such a block does not end the search, so that the manager promotes all needed
            blocks in one job.
        """
        state = self._requests[req_id]
        state.num_local_tokens = state.num_computed_tokens = num_computed_tokens
        state.num_external_tokens = 0
        waiting = set[OffloadKey]()
        lookup, context, waits = (
            self.manager.lookup,
            state.context,
            not state.gave_up_waiting,
        )

        def is_available(key: OffloadKey) -> bool:
            answer = lookup(key, context)
            if answer is None and waits:
                waiting.add(key)
                return True
            return answer or False

        def prefix(keys: Sequence[OffloadKey]) -> int:
            answers = self.manager.lookup_prefix(keys, context)
            waiting.update(
                key
                for key, answer in zip(keys, answers, strict=False)
                if answer is None
            )
            return len(answers)

        chains, limit = (
            state.description.group_keys,
            max(state.description.num_tokens - 1, 0),
        )
        geometries, unit = self._geometries, self._match_unit
        probe = prefix if waits else None
        groups = [
            GroupBlocks(*pair, is_available, probe)
            for pair in zip(geometries, chains, strict=True)
        ]
        if self._max_load_blocks is not None:
            limit = longest_that_fits(
                geometries, unit, num_computed_tokens, limit, self._max_load_blocks
            )
        matched = longest_match(groups, unit, num_computed_tokens, limit)
        if not matched:
            return 0
        state.promoted |= waiting
        if waiting and not waiting.isdisjoint(state.keys(num_computed_tokens, matched)):
            return None
        self.manager.touch(state.keys(0, matched), context)
        return matched - num_computed_tokens

    def needed_device_blocks(
        self, req_id: str, num_external_tokens: int
    ) -> list[range]:
        """Return, by group, the indices of the request's device blocks that a load of so many
        tokens fills."""
        start = self._requests[req_id].num_local_tokens
        return [
            geometry.device_blocks(start + num_external_tokens, start)
            for geometry in self._geometries
        ]

    def give_up_waiting(self, req_id: str) -> None:
        """Stop waiting: later calls of ``get_num_new_matched_tokens`` for this request count only
        blocks that can be loaded now, and never return None.
        """
        state = self._requests[req_id]
        self.stats.late_lookups += not state.gave_up_waiting
        state.gave_up_waiting = True

    def num_promoted_tokens(self, req_id: str) -> int:
        """Return how many tokens of the request's last load were promoted from a secondary tier, or
        waited for while another request wrote them; 0 if the load failed. Counts the first
        full-attention group, else the first group: tokens before the window count like its first
        block.
        """
        state = self._requests[req_id]
        full = (
            group
            for group, geometry in enumerate(self._geometries)
            if geometry.spec.sliding_window is None
        )
        group = next(full, 0)
        size, chain = (
            self._geometries[group].offloaded_tokens,
            state.description.group_keys[group],
        )
        blocks = self._geometries[group].offloaded_blocks(
            state.num_matched_tokens, state.num_local_tokens
        )
        promoted = [
            position for position in blocks if chain[position] in state.promoted
        ]
        num_tokens = len(promoted) * size
        if promoted and promoted[0] == blocks.start:
            num_tokens += blocks.start * size - state.num_local_tokens
        return min(num_tokens, state.num_external_tokens)

    def update_state_after_alloc(
        self,
        req_id: str,
        device_block_ids: Sequence[BlockTable],
        num_external_tokens: int,
    ) -> int:
        """Plan the load of matched tokens into the device blocks that the engine allocated.

        :param device_block_ids: for each group, the request's device blocks from its first token
            on. A sliding window needs those of ``needed_device_blocks``; the others may be None.
        :param num_external_tokens: the result of ``get_num_new_matched_tokens``, or less.
        :returns: tokens that will be loaded: ``num_external_tokens``, or 0 if blocks were evicted
            since the match.
        :raises ValueError: the blocks do not cover the tokens, or the tokens end within a block;
            nothing is planned.
        """
        state = self._requests[req_id]
        end = state.num_local_tokens + num_external_tokens
        state.check_tables(device_block_ids, end)
        state.check_load_target(device_block_ids, end)
        state.block_tables = [list(table) for table in device_block_ids]
        state.num_external_tokens = num_external_tokens
        if num_external_tokens:
            keys = state.keys(state.num_local_tokens, end)
            try:
                source = self.manager.prepare_load(keys, state.context)
            except KeyError:
                self.stats.failed_loads += 1
                state.num_external_tokens = 0
            else:
                self._loads.append(
                    self._job(state, keys, (source, state.load_target()), is_load=True)
                )
        state.skip_stores(state.num_matched_tokens)
        return state.num_external_tokens

    def update_computed_tokens(
        self,
        req_id: str,
        num_computed_tokens: int,
        device_block_ids: Sequence[BlockTable],
    ) -> None:
        """Report that the KV of the first ``num_computed_tokens`` tokens is in the device blocks
        (loads have ended).

        :param device_block_ids: for each group, the request's device blocks from its first token
            on; None for blocks that the group no longer has or never had: they are not stored.
        An engine that takes the device blocks from a running request must report 0 tokens before it
        reuses them.
        :raises ValueError: if the blocks do not cover the tokens; nothing changed.
        """
        state = self._requests[req_id]
        state.check_tables(device_block_ids, num_computed_tokens)
        state.block_tables = [list(table) for table in device_block_ids]
        state.num_computed_tokens = num_computed_tokens
        self._to_plan[req_id] = state

    def request_finished(self, req_id: str) -> None:
        """End a request; the next ``build_connector_meta`` plans the store of its remaining full
        blocks. Its device blocks must not be reused until ``ConnectorOutput.released`` contains its
        id.
        """
        state = self._requests[req_id]
        state.finished = True
        state.store_until = time.monotonic() + self._store_wait_s
        self._to_plan[req_id] = state

    def build_connector_meta(self) -> ConnectorMetadata:
        """Return the transfers to start in this step: planned loads, and one store per request with
        new full blocks."""
        loads, self._loads = self._loads, []
        planned, self._to_plan = self._to_plan, {}
        stores = [
            job
            for state in planned.values()
            if (job := self._plan_store(state)) is not None
        ]
        for state in planned.values():
            self._release_if_done(state)
        return ConnectorMetadata(loads, stores)

    def update_connector_output(
        self, results: Iterable[TransferResult]
    ) -> ConnectorOutput:
        """Process the results of ended transfers, and return the ends of loads and of requests.

        :raises KeyError: a result names a job that is not in flight. The results before it were
            processed, and the ends of their loads are not returned.
        """
        output = ConnectorOutput()
        for result in results:
            state, keys, is_load = self._jobs.pop(result.job_id)
            state.jobs.discard(result.job_id)
            if is_load:
                output.loads[state.context.req_id] = self._end_load(state, keys, result)
            else:
                self.manager.complete_store(keys, state.context, result.success)
                self.stats.stored_blocks += len(keys) if result.success else 0
                self.stats.failed_stores += not result.success
            self._release_if_done(state)
        output.released, self._released = self._released, []
        return output

    def take_events(self) -> list[OffloadingEvent]:
        """Call ``take_events`` of the manager, and return the events. Must be called once per
        engine step."""
        return list(self.manager.take_events())

    def shutdown(self) -> None:
        """Shut the manager down; no transfer may be in flight. Idempotent."""
        self.manager.shutdown()

    def _plan_store(self, state: _Request) -> TransferJob | None:
        """Plan the store of the blocks that became full since the last call; None: there is nothing
        to store.

        If the primary tier lacks room, retry with the front half of each group's blocks, because a
        prefix is worth more than a suffix. The rest is dropped, or offered again later if the
        manager needs every block of the request.
        """
        if not state.context.store:
            return None
        firsts = list(state.next_store)
        filled, output = state.filled_blocks(), None
        self.stats.dropped_blocks += state.num_lost(firsts, filled)
        state.refused_ends = []
        offers = filled
        offered = asked = sum(map(len, offers))
        while asked:
            output = self.manager.prepare_store(
                [key for offer in offers for key in offer], state.context
            )
            if output is not None:
                break
            offers = [dict(islice(offer.items(), len(offer) // 2)) for offer in offers]
            asked = sum(map(len, offers))
        if asked < offered:
            self._refuse(state, filled, offers)
        if output is None or not output.keys_to_store:
            return None
        if len(output.keys_to_store) < asked:
            wanted = set(output.keys_to_store)
            offers = [
                {key: at for key, at in offer.items() if key in wanted}
                for offer in offers
            ]
        spec = (state.store_source(offers), output.store_spec)
        return self._job(state, output.keys_to_store, spec, is_load=False)

    def _refuse(
        self, state: _Request, filled: Sequence[_Offer], accepted: Sequence[_Offer]
    ) -> None:
        """Process the blocks that found no room, ``filled`` without ``accepted``."""
        if (
            state.policy is OffloadPolicy.BLOCK_LEVEL
            or time.monotonic() >= state.store_until
        ):
            self.stats.dropped_blocks += sum(map(len, filled)) - sum(map(len, accepted))
            return
        state.refuse(filled, [len(offer) for offer in accepted])
        # The block tables of a running request are current only when the engine reports them.
        if state.finished:
            self._to_plan[state.context.req_id] = state

    def _job(
        self,
        state: _Request,
        keys: Sequence[OffloadKey],
        spec: TransferSpec,
        *,
        is_load: bool,
    ) -> TransferJob:
        job_id = next(self._job_ids)
        self._jobs[job_id] = _Job(state, keys, is_load)
        state.jobs.add(job_id)
        return TransferJob(job_id, spec)

    def _end_load(
        self, state: _Request, keys: Sequence[OffloadKey], result: TransferResult
    ) -> LoadProgress:
        self.manager.complete_load(keys, state.context)
        num_tokens = state.num_external_tokens
        if not result.success:
            self.stats.failed_loads += 1
            state.num_external_tokens = 0
            state.skip_stores(state.num_local_tokens)
            return LoadProgress(False, num_tokens, 0)
        self.stats.loaded_blocks += len(keys)
        state.num_computed_tokens = state.num_matched_tokens
        self._to_plan[state.context.req_id] = state
        return LoadProgress(True, num_tokens, result.num_bytes)

    def _release_if_done(self, state: _Request) -> None:
        """End a request that is finished and has no transfer in flight or to plan; it is then
        reported as released."""
        req_id = state.context.req_id
        if state.finished and not state.jobs and req_id not in self._to_plan:
            del self._requests[req_id]
            self.manager.on_request_finished(state.context)
            self._released.append(req_id)
