"""Policies are found by name, from here and from outside."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from persistkv.cpu.manager import CPUOffloadingManager
from persistkv.cpu.policies import registry
from persistkv.cpu.policies.arc import ARCCachePolicy
from persistkv.cpu.policies.lru import LRUCachePolicy
from persistkv.errors import ConfigurationError


class OutsidePolicy(LRUCachePolicy):
    """A policy that is not persistkv's."""


def test_the_built_in_ones() -> None:
    assert registry.cache_policy_class("lru") is LRUCachePolicy
    assert registry.cache_policy_class("arc") is ARCCachePolicy


def test_an_unknown_one_names_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"cache_policy: 'fifo'.*arc, lru"):
        CPUOffloadingManager(4, "fifo")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (f"{OutsidePolicy.__module__}:OutsidePolicy", None),
        ("nowhere.to.be.found:Policy", "an installed policy"),
        ("persistkv.errors:ConfigurationError", "is no CachePolicy"),
    ],
)
def test_one_from_outside(target: str, problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("outside", target, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: OutsidePolicy if problem is None else real_load(self))
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    if problem is None:
        assert registry.cache_policy_class("outside") is OutsidePolicy
    else:
        with pytest.raises(ConfigurationError, match=problem):
            registry.cache_policy_class("outside")


real_load = EntryPoint.load
