"""Fixtures: a manager with a primary tier on a shared region, and secondary tiers; keys and
requests."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
import pytest

from persistkv.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestDescription,
    make_offload_key,
)
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.cpu.manager import CPULoadStoreSpec, CPUPrimaryTierOffloadingManager
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.tiering.base import SecondaryTierManager
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.persistent import PersistentTier
from persistkv.tiering.spec import TieringOffloadingOptions

T = TypeVar("T", bound=SecondaryTierManager)

STRIDE = 12288
GROUPS = (
    GroupLayout(((0, 4096),)),
    GroupLayout(((4096, 100), (8192, 4096))),
    GroupLayout(((0, 12288),)),
)


def content(key: OffloadKey) -> npt.NDArray[np.uint8]:
    """Return the content of a key's block, one whole row."""
    seed = int.from_bytes(key[:8], "little") * 8 + key[-1]
    return np.random.default_rng(seed).integers(0, 256, STRIDE, dtype=np.uint8)


def context(req_id: str, *chains: Sequence[OffloadKey]) -> ReqContext:
    """Return a request with a description of its chains, or without a description if there are
    none."""
    if not chains:
        return ReqContext(req_id)
    description = RequestDescription(len(GROUPS))
    for group, chain in enumerate(chains):
        description.extend(group, chain)
    description.num_tokens = 16 * max(map(len, chains))
    return ReqContext(req_id, None, description)


@dataclass
class Stack:
    """A manager with its tiers and the bytes of its rows."""

    manager: TieringOffloadingManager
    primary: CPUPrimaryTierOffloadingManager
    rows: npt.NDArray[np.uint8]
    tiers: list[SecondaryTierManager] = field(default_factory=list)

    def tiers_of(self, kind: type[T]) -> list[T]:
        """Return the secondary tiers, which are all of this kind."""
        found: list[T] = []
        for tier in self.tiers:
            assert isinstance(tier, kind)
            found.append(tier)
        return found

    def store(self, keys: Sequence[OffloadKey], req: ReqContext) -> None:
        """Store blocks as a worker does: write their rows, then complete the store."""
        output = self.manager.prepare_store(keys, req)
        assert output is not None
        self.fill(output.keys_to_store, output.store_spec)
        self.manager.complete_store(output.keys_to_store, req)

    def new_keys(
        self,
        keys: Sequence[OffloadKey],
        req: ReqContext,
    ) -> Sequence[OffloadKey]:
        """Prepare to store blocks; return the keys of those that the primary tier lacks."""
        output = self.manager.prepare_store(keys, req)
        assert output is not None
        return output.keys_to_store

    def fill(self, keys: Sequence[OffloadKey], spec: LoadStoreSpec) -> None:
        assert isinstance(spec, CPULoadStoreSpec)
        for key, row in zip(keys, spec.block_ids, strict=True):
            self.rows[row] = content(key)

    def check(self, keys: Sequence[OffloadKey], spec: LoadStoreSpec) -> None:
        """Check that each row holds the content that belongs to the group of its key."""
        assert isinstance(spec, CPULoadStoreSpec)
        for key, row in zip(keys, spec.block_ids, strict=True):
            for offset, size in GROUPS[key[-1]].ranges:
                assert (
                    self.rows[row, offset : offset + size]
                    == content(key)[offset : offset + size]
                ).all()

    def step(self, times: int = 1) -> list[OffloadingEvent]:
        return [event for _ in range(times) for event in self.manager.take_events()]

    def clear_primary(self) -> None:
        """Empty the primary tier, as a restart does; the secondary tiers keep their blocks."""
        self.primary.reset_cache()
        self.rows[:] = 0

    def promote(self, keys: Sequence[OffloadKey], req: ReqContext) -> list[bool]:
        """Look all keys up until no lookup is pending; return the results."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            answers = [self.manager.lookup(key, req) for key in keys]
            if None not in answers:
                return [bool(answer) for answer in answers]
            self.step()
        raise AssertionError("promotion does not end")


Keys = Callable[..., list[OffloadKey]]
"""Type of the fixture ``keys``."""
MakeTier = Callable[[OffloadingConfig, memoryview], SecondaryTierManager]


class ManagerOptions(TypedDict, total=False):
    """Options of the manager, see ``TieringOffloadingOptions``."""

    cascade_share: float
    hold_s: float
    room_wait_s: float
    prewarm_share: float
    prefill_tokens_per_s: float | None


def persistent(**options: object) -> Callable[..., PersistentTier]:
    """Return a function that opens a persistent tier with these options."""

    def make(config: OffloadingConfig, view: memoryview) -> PersistentTier:
        return PersistentTier(config, view, **options)

    return make


MakeStack = Callable[..., Stack]
Described = Callable[..., ReqContext]
"""Type of the fixture ``described``."""


@pytest.fixture
def make_stack() -> Iterator[MakeStack]:
    """Return a function that builds stacks of ``num_blocks`` rows; each tier is a function of
    (config, view)."""
    stacks: list[Stack] = []

    def make(
        num_blocks: int,
        *tiers: MakeTier,
        **options: Unpack[ManagerOptions],
    ) -> Stack:
        region = SharedOffloadRegion(uuid.uuid4().hex, num_blocks, 0, 1, STRIDE)
        primary = CPUPrimaryTierOffloadingManager(region, enable_events=True)
        view = primary.get_kv_memoryview()
        config = OffloadingConfig(
            {"weights": "w"},
            16,
            RowLayout(STRIDE, GROUPS),
            num_blocks,
            (region.fd,),
            True,
        )
        options.setdefault("cascade_share", 1.0)
        tiering_options = TieringOffloadingOptions(
            cpu_bytes_to_use=num_blocks * STRIDE, enable_events=True, **options
        )
        with ExitStack() as undo:
            undo.callback(primary.shutdown)
            made = [tier(config, view) for tier in tiers]
            manager = TieringOffloadingManager(primary, made, tiering_options)
            undo.pop_all()
        rows = np.frombuffer(view, dtype=np.uint8).reshape(num_blocks, STRIDE)
        stacks.append(Stack(manager, primary, rows, made))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.rows = np.empty((0, 0), np.uint8)
        stack.manager.shutdown()


@pytest.fixture
def keys() -> Callable[..., list[OffloadKey]]:
    """Return a function that makes keys, all of them different."""
    numbers = itertools.count(1)

    def make(count: int, group: int = 0) -> list[OffloadKey]:
        return [
            make_offload_key(next(numbers).to_bytes(32, "little"), group)
            for _ in range(count)
        ]

    return make


@pytest.fixture
def described() -> Callable[..., ReqContext]:
    return context
