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
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, NamedTuple, cast

from persistkv.base import (
    GPULoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
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
from persistkv.tenants import engine_key, request_tenant, tenant_key

BlockTable = Sequence[int | None]
"""Device block numbers of one request and one KV cache group, from the request's first token on.
None: the engine has no block at this position, because it has left the sliding window."""
_Offer = dict[OffloadKey, int]
"""Full offloaded blocks of one KV cache group to store: key → index among the group's blocks of the
request."""


@dataclass
class _ScheduledRequest:
    """State of one request, from ``on_new_request`` until it is finished and its last transfer has
    ended."""

    geometries: Sequence[GroupGeometry]
    """One for each KV cache group, in the order that all sequences by group here have."""
    context: ReqContext
    description: RequestDescription
    """Keys and number of tokens; passed to the manager in ``context`` only if the request's blocks
    are stored."""
    policy: OffloadPolicy
    """Blocks that the manager wants to be offered: newly computed ones, or all of the request."""
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
    """Keys of blocks that a match had to wait for, because they were being promoted from a
    secondary tier or, rarely, written by another request."""
    transfers: set[int] = field(default_factory=set)
    """Job ids of transfers in flight."""
    refused: list[list[int]] = field(default_factory=list)
    """For each group, the indices of the offered blocks that found no room; they are offered again.
    Empty: all blocks of the last offer were accepted or dropped."""
    gave_up_waiting: bool = False
    """Whether blocks that are being promoted or written count as misses, from
    ``give_up_waiting`` on."""
    finished: bool = False
    """Whether the engine has ended the request; its last transfers may still run."""
    store_until: float = math.inf
    """``time.monotonic`` time until which blocks that find no room are offered again; set when the
    request is finished."""

    @property
    def num_matched_tokens(self) -> int:
        """Number of leading tokens that are on the device once the load has ended."""
        return self.num_local_tokens + self.num_external_tokens

    def needed_keys(self, start: int, stop: int) -> list[OffloadKey]:
        """Return the keys of the offloaded blocks that a load of tokens ``start`` to ``stop - 1``
        needs, by group."""
        needed: list[OffloadKey] = []
        groups = zip(self.description.group_keys, self.geometries, strict=True)
        for keys, geometry in groups:
            blocks = geometry.offloaded_blocks(stop, start=start)
            needed += keys[blocks.start : blocks.stop]
        return needed

    def check_tables(self, tables: Sequence[BlockTable], num_tokens: int) -> None:
        """Raise ValueError unless there is one block table per group, and each covers
        ``num_tokens`` tokens."""
        if len(tables) != len(self.geometries):
            raise ValueError(
                f"{len(tables)} block tables for {len(self.geometries)} KV cache groups"
            )
        for group, geometry in enumerate(self.geometries):
            table = tables[group]
            if len(table) < num_tokens // geometry.block_size:
                raise ValueError(
                    f"group {group}: {len(table)} device blocks do not cover {num_tokens} tokens"
                )

    def check_load_target(self, tables: Sequence[BlockTable], stop: int) -> None:
        """Raise ValueError if ``stop`` is within a block, or a table lacks a block that a load up
        to ``stop`` fills."""
        if any(stop % geometry.block_size for geometry in self.geometries):
            raise ValueError(f"a load up to token {stop} ends within a block")
        for group, geometry in enumerate(self.geometries):
            needed = geometry.device_blocks(stop, start=self.num_local_tokens)
            # ``check_tables`` has checked that the table is long enough
            targets = tables[group][needed.start : needed.stop]
            if None in targets:
                raise ValueError(
                    f"group {group} has no device blocks for all that {stop} tokens need of it"
                )

    def skip_stores(self, num_held_tokens: int) -> None:
        """Let the next offer to the manager begin after the first ``num_held_tokens`` tokens, whose
        blocks need no store. Fewer tokens than in an earlier call move it back.

        Without effect for a request-level policy: that manager is offered all blocks of a request.
        """
        # A request-level manager stores whole contexts. Without the blocks of a prefix hit, they
        # would have a gap.
        if self.policy is not OffloadPolicy.BLOCK_LEVEL:
            return
        self.next_store = []
        for geometry in self.geometries:
            num_blocks = num_held_tokens // geometry.offloaded_tokens
            self.next_store.append(num_blocks)

    def load_target(self) -> GPULoadStoreSpec:
        """Return the device blocks to load into. A group's first one may be in the middle of an
        offloaded block."""
        tables: list[BlockTable] = []
        starts = []
        groups = zip(self.block_tables, self.geometries, strict=True)
        for table, geometry in groups:
            needed = geometry.device_blocks(
                self.num_matched_tokens, start=self.num_local_tokens
            )
            tables.append(table[needed.start : needed.stop])
            starts.append(needed.start)
        return _device_blocks(tables, starts)

    def take_filled_blocks(self) -> list[_Offer]:
        """Return, by group, the blocks from ``next_store`` on that are full and that the group
        still has; move ``next_store`` after them, so that each block is returned once."""
        groups = range(len(self.geometries))
        return [self._take_filled_blocks_of(group) for group in groups]

    def _take_filled_blocks_of(self, group: int) -> _Offer:
        """Do the work of ``take_filled_blocks`` for one group."""
        geometry = self.geometries[group]
        keys = self.description.group_keys[group]
        table = self.block_tables[group]
        factor = geometry.block_size_factor
        # A block can be stored if its KV is computed, its key known and its device blocks reported.
        # The engine may report these three at different times.
        num_computed = self.num_computed_tokens // geometry.offloaded_tokens
        num_reported = len(table) // factor
        num_filled = min(num_computed, len(keys), num_reported)
        first = self.next_store[group]
        # end at ``first`` or later: an engine that took the device blocks away reports fewer tokens
        # than in its previous report
        end = max(first, num_filled)
        self.next_store[group] = end
        filled = range(first, end)
        # test all blocks at once, because only sliding windows lack any
        if None in table[first * factor : end * factor]:
            return _present_blocks(keys, table, factor, filled)
        return dict(zip(keys[first:end], filled, strict=True))

    def offer_again(
        self,
        offers: Sequence[_Offer],
        num_accepted: Sequence[int],
    ) -> None:
        """Move ``next_store`` back to the first refused block of each group, so that the next call
        of ``take_filled_blocks`` offers it again.

        :param num_accepted: for each group, the number of leading blocks of its offer that found
            room.
        """
        self.refused = []
        for group, offer in enumerate(offers):
            indices = list(offer.values())
            refused = indices[num_accepted[group] :]
            self.refused.append(refused)
            if refused:
                self.next_store[group] = refused[0]

    def num_lost(self, offers: Sequence[_Offer]) -> int:
        """Return how many refused blocks are not in the new offer, because they have left the
        sliding window meanwhile.

        :param offers: the new offer, from ``take_filled_blocks``.
        """
        num_lost = 0
        for group, refused in enumerate(self.refused):
            offered = set(offers[group].values())
            # the new offer ends here; later blocks may still be offered
            end = self.next_store[group]
            for index in refused:
                if index < end and index not in offered:
                    num_lost += 1
        return num_lost

    def store_source(self, offers: Sequence[_Offer]) -> GPULoadStoreSpec:
        """Return all device blocks of the offered blocks, as the source of a store."""
        tables: list[BlockTable] = []
        starts = []
        for group, offer in enumerate(offers):
            table = self.block_tables[group]
            factor = self.geometries[group].block_size_factor
            blocks: list[int | None] = []
            for index in offer.values():
                first = index * factor
                blocks += table[first : first + factor]
            tables.append(blocks)
            # From the start, the worker computes how many device blocks to skip in the first row.
            # An empty offer has no first row; 0 is a placeholder.
            first_offered = next(iter(offer.values()), 0)
            starts.append(first_offered * factor)
        return _device_blocks(tables, starts)


def _present_blocks(
    keys: Sequence[OffloadKey],
    table: BlockTable,
    block_size_factor: int,
    candidates: range,
) -> _Offer:
    """Return those of the offloaded blocks of which the group has all device blocks.

    :param table: device blocks of the request in the group; None: the block has left the window.
    :param candidates: indices of offloaded blocks whose device blocks are all in the table.
    """
    offer = {}
    for index in candidates:
        first = index * block_size_factor
        device_blocks = table[first : first + block_size_factor]
        if None not in device_blocks:
            offer[keys[index]] = index
    return offer


def _device_blocks(
    tables: Sequence[BlockTable],
    starts: Sequence[int],
) -> GPULoadStoreSpec:
    """Return a spec of device blocks.

    :param tables: for each KV cache group, the blocks to transfer, which the group has: no entry is
        None.
    :param starts: for each group, the index of the first of them among those of the request.
    """
    block_ids: list[int] = []
    for table in tables:
        block_ids += cast(Sequence[int], table)
    sizes = [len(table) for table in tables]
    return GPULoadStoreSpec(block_ids, sizes, starts)


class _PlannedTransfer(NamedTuple):
    """Transfer from its planning until its result."""

    request: _ScheduledRequest
    keys: Sequence[OffloadKey]
    """Keys of its offloaded blocks."""
    is_load: bool
    """False: it is a store."""


class _Lookups:
    """Lookups of one request's blocks in the manager, for one match."""

    def __init__(self, manager: OffloadingManager, request: _ScheduledRequest) -> None:
        self._manager = manager
        self._request = request
        self.waiting: set[OffloadKey] = set()
        """Keys of the blocks to wait for, which are being promoted or written. They count as
        available."""

    def groups(self) -> list[GroupBlocks]:
        """Return the request's blocks with the functions that look them up."""
        request = self._request
        # ``lookup_prefix`` counts blocks to wait for as hits. A request that waits for none looks
        # up each block by itself.
        prefix = None if request.gave_up_waiting else self._prefix
        blocks = []
        groups = zip(request.geometries, request.description.group_keys, strict=True)
        for geometry, keys in groups:
            blocks.append(GroupBlocks(geometry, keys, self._is_available, prefix))
        return blocks

    def _is_available(self, key: OffloadKey) -> bool:
        """Return whether the block can be loaded, now or in a later step."""
        answer = self._manager.lookup(key, self._request.context)
        if answer is None and not self._request.gave_up_waiting:
            self.waiting.add(key)
            return True
        # None is a miss for a request that waits for no block
        return answer is True

    def _prefix(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the keys, from the first on without a gap, have blocks that can be
        loaded, now or in a later step."""
        # There is one answer for each of these blocks, and none for the first miss: True if the
        # block can be loaded now, None if it is being promoted or written.
        answers = self._manager.lookup_prefix(keys, self._request.context)
        for key, answer in zip(keys, answers, strict=False):
            if answer is None:
                self.waiting.add(key)
        return len(answers)


class OffloadingConnectorScheduler:
    """Plans transfers between the device and a manager's primary tier: loads of matched prefixes,
    and stores of blocks that became full.

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
        _check_options(groups, block_size_factor, max_load_blocks, store_wait_s)
        self.manager = manager
        self.stats = ConnectorStats()
        self._store_wait_s = store_wait_s
        self._geometries = [GroupGeometry(spec, block_size_factor) for spec in groups]
        tokens_per_block = [geometry.offloaded_tokens for geometry in self._geometries]
        self._match_unit = math.lcm(*tokens_per_block)
        """Tokens; a match is a multiple of it, so that it ends with a whole offloaded block in
        every group."""
        # Without windows, no limit is needed: if a prefix does not fit, its first blocks are
        # promoted, which are a match of their own. With windows, they lack the last blocks, which a
        # match needs.
        has_windows = any(spec.sliding_window for spec in groups)
        self._max_load_blocks = max_load_blocks if has_windows else None
        self._requests: dict[str, _ScheduledRequest] = {}
        """By id, the requests that are not finished, or have transfers in flight or to plan."""
        self._to_plan: dict[str, _ScheduledRequest] = {}
        """By id: requests that may have new blocks to store; each ``build_connector_meta`` takes
        them all."""
        self._transfers: dict[int, _PlannedTransfer] = {}
        """By job id, each transfer from its planning until its result."""
        self._job_ids = count()
        self._loads: list[TransferJob] = []
        """Loads that were planned since the last ``build_connector_meta``."""
        self._released: list[str] = []
        """Ids of requests that have ended, for the next ``ConnectorOutput``."""
        self._key_bytes: int | None = None
        """Bytes of the engine's own keys, to which a tenant's keys add a tag; None: no key was seen
        yet."""

    def on_new_request(
        self,
        req_id: str,
        kv_transfer_params: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        store: bool = True,
        retention: Retention | None = None,
        tenant: str | None = None,
    ) -> ReqContext:
        """Announce a request, and return the context for calls of the manager. Must be the first
        call for each request.

        :param kv_transfer_params: parameters that the caller of the engine attached to the request.
        :param labels: name-value pairs that are stored with the request's manifest.
        :param store: False: the request's blocks are looked up and loaded, but not stored.
        :param retention: how long the stored context is kept; None: as long as there is room.
        :param tenant: name of the tenant whose request it is: no block of it is served to a request
            of another one. None: the one in ``kv_transfer_params``, ``{"persistkv": {"tenant":
            NAME}}``, else the default tenant.
        :raises ValueError: a request of this id exists. A finished request exists until its
            transfers have ended.
        :raises ConfigurationError: a label is not text, or the tenant is invalid; see
            ``request_tenant``.
        """
        if req_id in self._requests:
            raise ValueError(f"request {req_id!r} already exists")
        checked_tenant = request_tenant(tenant, kv_transfer_params)
        num_groups = len(self._geometries)
        description = RequestDescription(num_groups, labels)
        if retention is not None:
            description.retention = retention
        context = ReqContext(
            req_id,
            kv_transfer_params,
            # without a description, tiers cannot store the context as that of a request
            description=description if store else None,
            store=store,
            tenant=checked_tenant,
        )
        offloading = self.manager.on_new_request(context)
        self._requests[req_id] = _ScheduledRequest(
            self._geometries,
            context,
            description,
            policy=offloading.policy,
            block_tables=[()] * num_groups,
            next_store=[0] * num_groups,
        )
        return context

    def update_keys(
        self,
        req_id: str,
        group_idx: int,
        keys: Iterable[OffloadKey],
        num_tokens: int,
    ) -> None:
        """Append the keys of a request's next offloaded blocks of one group. Their KV need not be
        computed yet.

        :param keys: all keys of an engine have the same length.
        :param num_tokens: all tokens of the request now, including those of an unfinished block.
        """
        request = self._requests[req_id]
        # all keys have the length of the first one, which ``take_events`` needs
        if self._key_bytes is None:
            # a list, because an iterator can be read only once
            keys = list(keys)
            if keys:
                self._key_bytes = len(keys[0])
        tenant = request.context.tenant
        stored_keys = keys
        # all tiers, including the primary one, know the blocks by the tenant's keys only
        if tenant is not None:
            stored_keys = [tenant_key(tenant, key) for key in keys]
        description = request.description
        description.extend(group_idx, stored_keys)
        description.num_tokens = num_tokens

    def get_num_new_matched_tokens(
        self,
        req_id: str,
        num_computed_tokens: int,
    ) -> int | None:
        """Return the number of tokens after those on the device that can be loaded. At least one
        token of the prompt is left for the engine to compute.

        :param num_computed_tokens: tokens on the device, a multiple of each group's device block.
        :returns: None while blocks of the prefix are being promoted or written: retry in a later
            step. Such a block does not end the search, so that the manager promotes all needed
            blocks in one job.
        """
        request = self._requests[req_id]
        request.num_local_tokens = num_computed_tokens
        request.num_computed_tokens = num_computed_tokens
        request.num_external_tokens = 0
        lookups = _Lookups(self.manager, request)
        matched = longest_match(
            lookups.groups(),
            self._match_unit,
            start=num_computed_tokens,
            limit=self._match_limit(request),
        )
        # there is nothing to wait for either: blocks to wait for count as available in the match
        if not matched:
            return 0
        waiting = lookups.waiting
        # ``num_promoted_tokens`` counts these blocks
        request.promoted |= waiting
        if waiting:
            # The search also looked up blocks that the match does not need, and these may be the
            # ones that are being promoted: wait only for those that it needs.
            needed = request.needed_keys(num_computed_tokens, matched)
            if not waiting.isdisjoint(needed):
                return None
        self.manager.touch(request.needed_keys(0, matched), request.context)
        return matched - num_computed_tokens

    def _match_limit(self, request: _ScheduledRequest) -> int:
        """Return the most leading tokens that a match may have: the engine computes at least one
        token, and the blocks of a load fit in the primary tier."""
        limit = max(request.description.num_tokens - 1, 0)
        if self._max_load_blocks is None:
            return limit
        return longest_that_fits(
            self._geometries,
            self._match_unit,
            request.num_local_tokens,
            limit,
            self._max_load_blocks,
        )

    def needed_device_blocks(
        self,
        req_id: str,
        num_external_tokens: int,
    ) -> list[range]:
        """Return, by group, the indices of the request's device blocks that a load of so many
        tokens fills."""
        start = self._requests[req_id].num_local_tokens
        stop = start + num_external_tokens
        return [
            geometry.device_blocks(stop, start=start) for geometry in self._geometries
        ]

    def give_up_waiting(self, req_id: str) -> None:
        """Stop waiting: later calls of ``get_num_new_matched_tokens`` for this request count only
        blocks that can be loaded now, and never return None.
        """
        request = self._requests[req_id]
        # count each request once
        self.stats.late_lookups += not request.gave_up_waiting
        request.gave_up_waiting = True

    def num_promoted_tokens(self, req_id: str) -> int:
        """Return how many tokens of the request's last load were promoted from a secondary tier, or
        waited for while another request wrote them; 0 if the load failed.

        One group is counted: the first with full attention, or else the first one. A group with a
        window loads no blocks for the tokens before its window; they count as promoted if its first
        loaded block was promoted.
        """
        request = self._requests[req_id]
        group = self._first_full_attention()
        geometry = self._geometries[group]
        keys = request.description.group_keys[group]
        loaded = geometry.offloaded_blocks(
            request.num_matched_tokens, start=request.num_local_tokens
        )
        promoted = [index for index in loaded if keys[index] in request.promoted]
        num_tokens = len(promoted) * geometry.offloaded_tokens
        if promoted and promoted[0] == loaded.start:
            # Count from the end of the local tokens on. If the first loaded block begins before
            # this end, its local tokens do not count. If it begins after it, because of a window,
            # the tokens in between count, too.
            first_token = loaded.start * geometry.offloaded_tokens
            num_tokens += first_token - request.num_local_tokens
        # return at most the loaded tokens, because the load may end within the last block
        return min(num_tokens, request.num_external_tokens)

    def _first_full_attention(self) -> int:
        """Return the index of the first group with full attention; 0 if there is none."""
        for group, geometry in enumerate(self._geometries):
            if geometry.spec.sliding_window is None:
                return group
        return 0

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
        request = self._requests[req_id]
        end = request.num_local_tokens + num_external_tokens
        request.check_tables(device_block_ids, end)
        request.check_load_target(device_block_ids, end)
        request.block_tables = [list(table) for table in device_block_ids]
        request.num_external_tokens = num_external_tokens
        # If a block was evicted since the match, nothing is loaded and the engine computes the
        # tokens: a second match for this rare race would need rules of its own for windows.
        if num_external_tokens and not self._plan_load(request):
            self.stats.failed_loads += 1
            request.num_external_tokens = 0
        # Two kinds of blocks are not stored again: the loaded ones, which are in the primary tier,
        # and those of the local tokens, which the requests that computed these have offered.
        request.skip_stores(request.num_matched_tokens)
        return request.num_external_tokens

    def update_computed_tokens(
        self,
        req_id: str,
        num_computed_tokens: int,
        device_block_ids: Sequence[BlockTable],
    ) -> None:
        """Report that the KV of the first ``num_computed_tokens`` tokens is in the device blocks
        (loads have ended). An engine that takes the device blocks from a running request must
        report 0 tokens before it reuses them.

        :param device_block_ids: for each group, the request's device blocks from its first token
            on; None for blocks that the group no longer has or never had: they are not stored.
        :raises ValueError: if the blocks do not cover the tokens; nothing changed.
        """
        request = self._requests[req_id]
        request.check_tables(device_block_ids, num_computed_tokens)
        # copies, because the engine changes its tables before stores are planned
        request.block_tables = [list(table) for table in device_block_ids]
        request.num_computed_tokens = num_computed_tokens
        self._to_plan[req_id] = request

    def request_finished(self, req_id: str) -> None:
        """End a request; the next ``build_connector_meta`` plans the store of its remaining full
        blocks. Its device blocks must not be reused until ``ConnectorOutput.released`` contains its
        id.
        """
        request = self._requests[req_id]
        request.finished = True
        request.store_until = time.monotonic() + self._store_wait_s
        self._to_plan[req_id] = request

    def build_connector_meta(self) -> ConnectorMetadata:
        """Return the transfers to start in this step: planned loads, and one store per request with
        new full blocks."""
        loads = self._loads
        planned = self._to_plan
        self._loads = []
        self._to_plan = {}
        stores = []
        for request in planned.values():
            store = self._plan_store(request)
            if store is not None:
                stores.append(store)
        # Release requests after all stores are planned: a request that found no room may be in
        # ``_to_plan`` again (``_offer_again_or_drop``), and must not be released.
        for request in planned.values():
            self._release_if_done(request)
        return ConnectorMetadata(loads, stores)

    def update_connector_output(
        self,
        results: Iterable[TransferResult],
    ) -> ConnectorOutput:
        """Process the results of ended transfers, and return the ends of loads and of requests.

        :raises KeyError: a result names a job that is not in flight. The results before it were
            processed, and the ends of their loads are not returned.
        """
        output = ConnectorOutput()
        for result in results:
            transfer = self._transfers.pop(result.job_id)
            request = transfer.request
            request.transfers.discard(result.job_id)
            if transfer.is_load:
                progress = self._end_load(transfer, result)
                output.loads[request.context.req_id] = progress
            else:
                self._end_store(transfer, result)
            self._release_if_done(request)
        # include what ``build_connector_meta`` released, which has no output for it
        output.released = self._released
        self._released = []
        return output

    def take_events(self) -> list[OffloadingEvent]:
        """Call ``take_events`` of the manager, and return the events, with the engine's own keys in
        place of the tenants' keys. Blocks of different tenants may then have the same key. Must be
        called once per engine step."""
        events = list(self.manager.take_events())
        key_bytes = self._key_bytes
        # Before the first key, the length of the engine's keys is unknown, and with it the part of
        # a key that a tenant adds.
        if key_bytes is None:
            return events
        shown = []
        for event in events:
            keys = [engine_key(key, key_bytes) for key in event.keys]
            shown.append(replace(event, keys=keys))
        return shown

    def shutdown(self) -> None:
        """Shut the manager down; no transfer may be in flight. Idempotent."""
        self.manager.shutdown()

    def _plan_store(self, request: _ScheduledRequest) -> TransferJob | None:
        """Plan the store of the blocks that became full since the last call; None: there is nothing
        to store.

        If the primary tier lacks room, retry with the front half of each group's blocks, because a
        prefix is worth more than a suffix. The rest is dropped, or offered again later if the
        manager needs every block of the request.
        """
        if not request.context.store:
            return None
        filled = request.take_filled_blocks()
        # count refused blocks that have left the sliding window since: they are in no offer any
        # more
        self.stats.dropped_blocks += request.num_lost(filled)
        request.refused = []

        # The offer is halved until the manager accepts it: the manager reports that there is no
        # room, not how much room there is.
        offers = filled
        was_cut = False
        output = self._prepare_store(request, offers)
        while output is None and any(offers):
            offers = [_first_half(offer) for offer in offers]
            was_cut = True
            output = self._prepare_store(request, offers)
        if was_cut:
            self._offer_again_or_drop(request, filled, accepted=offers)
        if output is None or not output.keys_to_store:
            return None
        stored = _without_held(offers, output.keys_to_store)
        spec = (request.store_source(stored), output.store_spec)
        return self._add_transfer(request, output.keys_to_store, spec, is_load=False)

    def _prepare_store(
        self,
        request: _ScheduledRequest,
        offers: Sequence[_Offer],
    ) -> PrepareStoreOutput | None:
        """Reserve room for the offered blocks in the manager. Return None if there is no room, or
        no block is offered."""
        keys: list[OffloadKey] = []
        for offer in offers:
            keys += offer
        if not keys:
            return None
        return self.manager.prepare_store(keys, request.context)

    def _offer_again_or_drop(
        self,
        request: _ScheduledRequest,
        filled: Sequence[_Offer],
        accepted: Sequence[_Offer],
    ) -> None:
        """Process the blocks that found no room: offer them again later if the manager needs every
        block of the request, until ``store_until``; otherwise drop them.

        :param filled: for each group, the blocks that were offered first.
        :param accepted: for each group, the leading ones of them that found room.
        """
        num_accepted = [len(offer) for offer in accepted]
        needs_all_blocks = request.policy is OffloadPolicy.REQUEST_LEVEL
        may_retry = needs_all_blocks and time.monotonic() < request.store_until
        if not may_retry:
            num_filled = sum(map(len, filled))
            self.stats.dropped_blocks += num_filled - sum(num_accepted)
            return
        request.offer_again(filled, num_accepted)
        # A finished request gets no further report, so the next step plans it again. A running one
        # is planned at its next ``update_computed_tokens``, with current block tables.
        if request.finished:
            self._to_plan[request.context.req_id] = request

    def _plan_load(self, request: _ScheduledRequest) -> bool:
        """Plan the load of the request's external tokens; return False if a block was evicted since
        the match."""
        keys = request.needed_keys(request.num_local_tokens, request.num_matched_tokens)
        try:
            source = self.manager.prepare_load(keys, request.context)
        except KeyError:
            return False
        spec = (source, request.load_target())
        transfer = self._add_transfer(request, keys, spec, is_load=True)
        self._loads.append(transfer)
        return True

    def _add_transfer(
        self,
        request: _ScheduledRequest,
        keys: Sequence[OffloadKey],
        spec: TransferSpec,
        *,
        is_load: bool,
    ) -> TransferJob:
        """Register a planned transfer of the request, and return its job."""
        job_id = next(self._job_ids)
        self._transfers[job_id] = _PlannedTransfer(request, keys, is_load)
        request.transfers.add(job_id)
        return TransferJob(job_id, spec)

    def _end_store(self, transfer: _PlannedTransfer, result: TransferResult) -> None:
        """Process the result of a store: its blocks are readable now, or misses."""
        context = transfer.request.context
        self.manager.complete_store(transfer.keys, context, result.success)
        if result.success:
            self.stats.stored_blocks += len(transfer.keys)
        else:
            self.stats.failed_stores += 1

    def _end_load(
        self,
        transfer: _PlannedTransfer,
        result: TransferResult,
    ) -> LoadProgress:
        """Process the end of a load: release its blocks in the manager, update the request's tokens
        and next offer, and return the result for the engine."""
        request = transfer.request
        self.manager.complete_load(transfer.keys, request.context)
        num_tokens = request.num_external_tokens
        if not result.success:
            self.stats.failed_loads += 1
            request.num_external_tokens = 0
            # The engine computes the tokens that the load did not bring, so their blocks must be
            # offered to the manager. ``update_state_after_alloc`` had set the next offer to begin
            # after them: it begins after the local tokens again.
            request.skip_stores(request.num_local_tokens)
            return LoadProgress(success=False, num_tokens=num_tokens, num_bytes=0)

        self.stats.loaded_blocks += len(transfer.keys)
        # The KV of the loaded tokens is in the device blocks now. A manager with a request-level
        # policy, which stores whole contexts, is offered their blocks, too: a store is planned. For
        # another policy, this store is empty, because offers begin after the loaded blocks
        # (``skip_stores``).
        request.num_computed_tokens = request.num_matched_tokens
        self._to_plan[request.context.req_id] = request
        return LoadProgress(
            success=True,
            num_tokens=num_tokens,
            num_bytes=result.num_bytes,
        )

    def _release_if_done(self, request: _ScheduledRequest) -> None:
        """End a request that is finished and has no transfer in flight or to plan; it is then
        reported as released."""
        req_id = request.context.req_id
        is_busy = bool(request.transfers) or req_id in self._to_plan
        if request.finished and not is_busy:
            del self._requests[req_id]
            self.manager.on_request_finished(request.context)
            self._released.append(req_id)


def _first_half(offer: _Offer) -> _Offer:
    """Return the leading half of an offer, rounded down; empty for a single block."""
    half = len(offer) // 2
    return dict(islice(offer.items(), half))


def _without_held(
    offers: Sequence[_Offer],
    keys_to_store: Sequence[OffloadKey],
) -> Sequence[_Offer]:
    """Return the offered blocks that the manager wants, without those that it holds already."""
    num_offered = sum(map(len, offers))
    if len(keys_to_store) == num_offered:
        return offers
    wanted = set(keys_to_store)
    kept = []
    for offer in offers:
        kept_offer = {key: index for key, index in offer.items() if key in wanted}
        kept.append(kept_offer)
    return kept


def _check_options(
    groups: Sequence[KVCacheGroupSpec],
    block_size_factor: int,
    max_load_blocks: int | None,
    store_wait_s: float,
) -> None:
    """Raise ConfigurationError if there is no group, or a number is out of range."""
    if not groups:
        raise ConfigurationError("groups", list(groups), "at least one KV cache group")
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
