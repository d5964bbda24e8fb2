"""Cache policies by name: those that come with persistkv, and entry points of group ``persistkv.cache_policies``."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import MappingProxyType

from persistkv.cpu.policies.arc import ARCCachePolicy
from persistkv.cpu.policies.base import CachePolicy
from persistkv.cpu.policies.lru import LRUCachePolicy
from persistkv.errors import ConfigurationError

ENTRY_POINT_GROUP = "persistkv.cache_policies"

_BUILT_IN = MappingProxyType[str, type[CachePolicy]]({"lru": LRUCachePolicy, "arc": ARCCachePolicy})


def cache_policy_class(name: str, *, option: str = "cache_policy") -> type[CachePolicy]:
    """The policy of that name; a built-in one cannot be replaced from outside.

    :param option: what the user calls the setting, for errors.
    :raises ConfigurationError: where there is none (the error names those there are), or it does not import.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        raise ConfigurationError(option, name, f"one of {', '.join(sorted({*_BUILT_IN, *found}))}")
    try:
        policy = found[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(option, name, f"an installed policy ({error})") from error
    if not (isinstance(policy, type) and issubclass(policy, CachePolicy)):
        raise ConfigurationError(option, name, f"a policy; {found[name].value} is no CachePolicy")
    return policy
