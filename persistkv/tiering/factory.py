"""Secondary tiers by type name: those that come with persistkv, and entry points of group ``persistkv.tiers``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any

from persistkv.config import OffloadingConfig
from persistkv.errors import ConfigurationError
from persistkv.tiering.base import SecondaryTierManager
from persistkv.tiering.example import ExampleSecondaryTier
from persistkv.tiering.persistent import PersistentTier

ENTRY_POINT_GROUP = "persistkv.tiers"

_BUILT_IN = MappingProxyType[str, type[SecondaryTierManager]](
    {tier.get_tier_type(): tier for tier in (ExampleSecondaryTier, PersistentTier)}
)


def create_secondary_tier(
    tier_config: Mapping[str, Any], primary_kv_view: memoryview, config: OffloadingConfig
) -> SecondaryTierManager:
    """Build the tier of one entry of ``secondary_tiers``: ``{"type": NAME, option: value, …}``.

    :param primary_kv_view: the primary tier's rows, (num_blocks, row_stride) bytes.
    :raises ConfigurationError: no type, an unknown one (the error names those there are), or an option that the tier
        does not know. Errors of the tier's construction come through.
    """
    options = dict(tier_config)
    kind = options.pop("type", None)
    if not isinstance(kind, str):
        raise ConfigurationError("secondary_tiers type", kind, f"one of {_names()}")
    tier = secondary_tier_class(kind)
    _check_options(kind, tier, options)
    return tier(config, primary_kv_view, **options)


def secondary_tier_class(kind: str) -> type[SecondaryTierManager]:
    """The tier of a type name; a built-in one cannot be replaced from outside.

    :raises ConfigurationError: there is none of that name, or it does not import.
    """
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if kind not in found:
        raise ConfigurationError("secondary_tiers type", kind, f"one of {_names()}")
    try:
        tier = found[kind].load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError("secondary_tiers type", kind, f"an installed tier ({error})") from error
    if not (isinstance(tier, type) and issubclass(tier, SecondaryTierManager)):
        raise ConfigurationError(
            "secondary_tiers type", kind, f"a tier; {found[kind].value} is no SecondaryTierManager"
        )
    return tier


def _names() -> str:
    return ", ".join(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def _check_options(kind: str, tier: type[SecondaryTierManager], options: Mapping[str, Any]) -> None:
    """A tier that takes named options gets no others; one that takes any checks them itself."""
    parameters = list(signature(tier).parameters.values())[2:]
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {parameter.name for parameter in parameters}
    for name, value in options.items():
        if name not in known:
            raise ConfigurationError(
                f"tier {kind} option {name}", value, f"one of {', '.join(sorted(known)) or 'none'}"
            )
