"""Builds the primary tier and the secondary tiers behind it from one configuration dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Annotated, Any, ClassVar

import msgspec

from persistkv.base import OffloadingManager
from persistkv.config import GroupLayout, OffloadingConfig, Registry, RowLayout
from persistkv.cpu.manager import CPUPrimaryTierOffloadingManager
from persistkv.cpu.spec import CPUOffloadingOptions, CPUOffloadingSpec
from persistkv.errors import ConfigurationError
from persistkv.tiering.base import SecondaryTierManager
from persistkv.tiering.example import ExampleSecondaryTier
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.persistent import PersistentTier

SECONDARY_TIERS = Registry[SecondaryTierManager](
    "persistkv.tiers",
    "secondary_tiers type",
    SecondaryTierManager,
    {tier.get_tier_type(): tier for tier in (ExampleSecondaryTier, PersistentTier)},
)


def create_secondary_tier(
    tier_config: Mapping[str, Any],
    primary_kv_view: memoryview,
    config: OffloadingConfig,
) -> SecondaryTierManager:
    """Build the tier of one entry of ``secondary_tiers``: ``{"type": NAME, option: value, …}``.

    :param primary_kv_view: the primary tier's rows, (num_blocks, row_stride) bytes, writable.
    :raises ConfigurationError: no type, an unknown one (the error lists the known ones), or an
        option that the tier does not know. Errors of the tier's constructor are raised unchanged.
    """
    options = dict(tier_config)
    kind = options.pop("type", None)
    tier = SECONDARY_TIERS.get(kind)  # this raises if there is no such type
    parameters = list(signature(tier).parameters.values())
    # leave out the two that every tier has: the configuration and the view of the rows
    parameters_of_options = parameters[2:]
    kinds = [parameter.kind for parameter in parameters_of_options]
    # a tier that takes any options checks their names itself
    if Parameter.VAR_KEYWORD not in kinds:
        known = [parameter.name for parameter in parameters_of_options]
        _check_option_names(f"tier {kind}", options, known)
    return tier(config, primary_kv_view, **options)


def _check_option_names(
    where: str,
    options: Mapping[str, Any],
    known: Sequence[str],
) -> None:
    """Raise ConfigurationError if an option is not one of the known ones."""
    for name, value in options.items():
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            expected = f"one of {names}"
            raise ConfigurationError(f"{where} option {name}", value, expected)


class TieringOffloadingOptions(CPUOffloadingOptions, frozen=True, kw_only=True):
    """Options of the tiers, in addition to those of the primary tier."""

    secondary_tiers: tuple[dict[str, Any], ...] = ()
    """One ``{"type": NAME, option: value, …}`` per tier, in the order of lookups; none by
    default."""
    cascade_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """Fraction, above 0 and at most 1, of the primary tier's rows that running store jobs of the
    secondary tiers may keep from eviction, divided evenly among the tiers. A job that would exceed
    it waits, unless its tier has no other store job. Blocks that are evicted while their job waits
    are not stored."""
    hold_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Seconds, above 0, that blocks loaded from a secondary tier stay in the primary tier until
    their request loads them."""
    room_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    """Seconds, 0 or more, that a request waits for the load of blocks from a secondary tier to
    begin while all rows of the primary tier are in use. Then the blocks are misses, and the engine
    computes them. Should not exceed the time that the engine needs for this."""
    prewarm_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Fraction, 0 to 1, of the primary tier's rows to fill, in the first steps, with the most
    recently used contexts of the first tier that lists them; 0: none."""
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    """Tokens per second, above 0, that the engine computes: blocks of secondary tiers are loaded if
    that is expected to be faster. None: as the engine reports it; until it has
    reported any, every block is loaded."""


@dataclass(kw_only=True)
class TieringOffloadingSpec(CPUOffloadingSpec):
    """A ``CPUOffloadingSpec`` with secondary tiers."""

    options_type: ClassVar[type[CPUOffloadingOptions]] = TieringOffloadingOptions

    options: TieringOffloadingOptions = field(init=False)
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Everything that must match for KV bytes to be valid, such as model and weights, as JSON
    values. Tiers that outlive the process need it; empty: unknown. The layout of rows is added if
    they depend on the number of workers."""
    group_layouts: tuple[GroupLayout, ...] = ()
    """For each KV cache group, the bytes of a row that its blocks use. Empty: one group, which uses
    the cells of all workers."""
    windows: tuple[int | None, ...] = ()
    """See ``OffloadingConfig.windows``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # this raises if there is no such type, before memory is allocated
        for tier in self.options.secondary_tiers:
            SECONDARY_TIERS.get(tier.get("type"))

    def _identity_of_rows(self) -> Mapping[str, Any]:
        """Return the identity, with all on which the order of bytes in a row depends."""
        row_layout = self._row_layout()
        # an unknown identity stays empty
        if row_layout is None or not self.identity:
            return self.identity
        return {**self.identity, "row_layout": row_layout}

    def _row_layout(self) -> str | None:
        """Return the name of the order of bytes in a row; None: that of a single worker, which has
        all heads."""
        if self.geometry.head_sharded:
            # with one GPU block per row, the layout is the same as that of a single worker
            return "head_sharded" if self.block_size_factor > 1 else None
        if self.geometry.num_workers > 1:
            return f"{self.geometry.num_workers} workers"
        return None

    def _tier_config(self) -> OffloadingConfig:
        """Return the configuration of all secondary tiers."""
        groups = self.group_layouts
        if not groups:
            # one group, whose blocks use the cells of all workers
            used_bytes = self.cpu_page_size * self.geometry.num_workers
            groups = (GroupLayout.of_bytes(used_bytes),)
        return OffloadingConfig(
            identity=self._identity_of_rows(),
            block_size=self.geometry.gpu_block_size * self.block_size_factor,
            layout=RowLayout(self.row_stride, groups),
            num_blocks=self.num_blocks,
            region_fds=(self.get_region().fd,),
            enable_events=self.options.enable_events,
            windows=self.windows,
        )

    def make_manager(self) -> OffloadingManager:
        """Open the secondary tiers, and return the manager that owns them and the primary tier. If
        one cannot be opened, those before it are shut down."""
        options = self.options
        primary = CPUPrimaryTierOffloadingManager(
            self.get_region(),
            options.eviction_policy,
            options.enable_events,
        )
        # if a tier cannot be opened, shut the earlier ones down: they must not keep views of the
        # rows
        with ExitStack() as undo:
            undo.callback(primary.shutdown)
            config = self._tier_config()
            rows = primary.get_kv_memoryview()
            tiers: list[SecondaryTierManager] = []
            for tier_config in options.secondary_tiers:
                tier = create_secondary_tier(tier_config, rows, config)
                undo.callback(tier.shutdown)
                tiers.append(tier)
            manager = TieringOffloadingManager(primary, tiers, options)
            # all tiers are open, so nothing must be undone
            undo.pop_all()
        return manager
