"""Builds the primary tier and the secondary tiers behind it from one configuration dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from persistkv.base import OffloadingManager
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.cpu.manager import CPUPrimaryTierOffloadingManager
from persistkv.cpu.spec import CPUOffloadingOptions, CPUOffloadingSpec
from persistkv.tiering.base import SecondaryTierManager
from persistkv.tiering.factory import SECONDARY_TIERS, create_secondary_tier
from persistkv.tiering.manager import TieringOffloadingManager


class TieringOffloadingOptions(CPUOffloadingOptions, frozen=True, kw_only=True):
    """Options of the tiers, in addition to those of the primary tier."""

    secondary_tiers: tuple[dict[str, Any], ...] = ()
    """One ``{"type": NAME, option: value, …}`` per tier, in the order of lookups; none by default."""
    cascade_share: float = 0.5
    """Part of the primary tier's rows that cascades may keep from eviction."""
    hold_s: float = 30.0
    """Seconds that promoted rows wait for their request."""
    prewarm_share: float = 0.0
    """Part of the primary tier's rows to fill, in the first steps, with the most recently used contexts."""


@dataclass(kw_only=True)
class TieringOffloadingSpec(CPUOffloadingSpec):
    """Manager, region, handlers and tiers that fit each other, each created on first use.

    :raises ConfigurationError: at construction, naming the invalid field of ``extra_config``.
    """

    options_type: ClassVar[type[CPUOffloadingOptions]] = TieringOffloadingOptions

    options: TieringOffloadingOptions = field(init=False)
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Everything that must match for KV bytes to be valid. A tier that outlives the process needs it."""
    group_layouts: tuple[GroupLayout, ...] = ()
    """The bytes of each group in a row; by default one group, which uses the whole row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for tier in self.options.secondary_tiers:
            SECONDARY_TIERS.get(tier.get("type"))

    def make_manager(self) -> OffloadingManager:
        options = self.options
        primary = CPUPrimaryTierOffloadingManager(
            self.num_blocks, self.get_region(), options.eviction_policy, options.enable_events
        )
        with ExitStack() as undo:
            undo.callback(primary.shutdown)
            tiers: list[SecondaryTierManager] = []
            for tier_config in options.secondary_tiers:
                tiers.append(create_secondary_tier(tier_config, primary.get_kv_memoryview(), self._tier_config()))
                undo.callback(tiers[-1].shutdown)
            manager = TieringOffloadingManager(
                primary,
                tiers,
                options.enable_events,
                cascade_share=options.cascade_share,
                hold_s=options.hold_s,
                prewarm_share=options.prewarm_share,
            )
            undo.pop_all()
        return manager

    def _tier_config(self) -> OffloadingConfig:
        groups = self.group_layouts or (GroupLayout(((0, self.cpu_page_size * self.geometry.num_workers),)),)
        return OffloadingConfig(
            self.identity,
            self.geometry.gpu_block_size * self.block_size_factor,
            RowLayout(self.row_stride, groups),
            self.num_blocks,
            self.get_region().fd,
        )
