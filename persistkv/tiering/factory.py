"""Secondary tiers by type name."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from persistkv.config import OffloadingConfig
from persistkv.errors import ConfigurationError
from persistkv.registry import Registry
from persistkv.tiering.base import SecondaryTierManager
from persistkv.tiering.example import ExampleSecondaryTier
from persistkv.tiering.persistent import PersistentTier

SECONDARY_TIERS = Registry[SecondaryTierManager](
    "persistkv.tiers",
    "secondary_tiers type",
    SecondaryTierManager,
    {tier.get_tier_type(): tier for tier in (ExampleSecondaryTier, PersistentTier)},
)


def create_secondary_tier(
    tier_config: Mapping[str, Any], primary_kv_view: memoryview, config: OffloadingConfig
) -> SecondaryTierManager:
    """Build the tier of one entry of ``secondary_tiers``: ``{"type": NAME, option: value, …}``.

    :param primary_kv_view: the primary tier's rows, (num_blocks, row_stride) bytes.
    :raises ConfigurationError: no type, an unknown one (the error lists the known ones), or an option that the tier
        does not know. Errors of the tier's constructor are raised unchanged.
    """
    options = dict(tier_config)
    kind = options.pop("type", None)
    tier = SECONDARY_TIERS.get(kind)
    _check_options(kind, tier, options)
    return tier(config, primary_kv_view, **options)


def _check_options(kind: str, tier: type[SecondaryTierManager], options: Mapping[str, Any]) -> None:
    """Reject options that the tier's constructor does not name. A tier with ``**options`` checks them itself."""
    parameters = list(signature(tier).parameters.values())[2:]
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {parameter.name for parameter in parameters}
    for name, value in options.items():
        if name not in known:
            raise ConfigurationError(
                f"tier {kind} option {name}", value, f"one of {', '.join(sorted(known)) or 'none'}"
            )
