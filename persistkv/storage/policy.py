"""Retention policy of a store: capacity, ttl, quotas and placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from persistkv.config import exact_duration, exact_size
from persistkv.errors import ConfigurationError
from persistkv.tenants import DEFAULT_TENANT, check_tenant

_NONE = "none"
_MOST_QUOTA = 1 << 62  # bytes


@dataclass(frozen=True)
class Policy:
    """Retention policy of a store. Recorded when the store is created; options in a URL do not
    change it later."""

    capacity: int | None
    """Bound on ``BackendStats.disk_bytes``; None: unbounded."""
    ttl_s: float | None
    """Seconds from their last use until packs and requests expire; None: they never expire."""
    placement: str | None = None
    """How the store keeps payloads; ``set_policy`` cannot change it. None: the driver has only one
    way."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Tenant → bound on the bytes of its payloads over all namespaces; tenants that are not named
    have none. The default tenant has none either: the capacity bounds it."""

    def __post_init__(self) -> None:
        """:raises ConfigurationError: capacity, ttl or a quota is not positive, or a quota is of no
        valid tenant, or of the default one."""
        if self.capacity is not None and self.capacity <= 0:
            raise ConfigurationError("capacity", self.capacity, "a positive size")
        # ``not … > 0``, because this refuses NaN, too
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigurationError(
                "ttl", self.ttl_s, "a positive duration such as 7d, or none"
            )
        for tenant, quota in self.quotas.items():
            check_quota(tenant, quota)

    def contradictions(self, given: Policy) -> str:
        """Describe the values of a URL (None if left out) that differ from this recorded policy;
        empty if none does."""
        differing = []
        recorded = self._texts()
        for name, value in given._texts().items():
            # "none" means that the URL leaves the option out
            if value not in (_NONE, recorded[name]):
                differing.append(f"{name}={value} (recorded: {recorded[name]})")
        return " and ".join(differing)

    def _texts(self) -> dict[str, str]:
        """Return capacity, ttl and placement as a URL gives them, by name; "none" for None."""
        texts = {"capacity": _NONE, "ttl": _NONE, "placement": self.placement or _NONE}
        if self.capacity is not None:
            texts["capacity"] = exact_size(self.capacity)
        if self.ttl_s is not None:
            texts["ttl"] = exact_duration(self.ttl_s)
        return texts


def check_quota(tenant: str, quota: int) -> None:
    """Raise a ConfigurationError unless ``quota``, in bytes, is a possible quota of a tenant."""
    check_tenant("quota", tenant)
    if tenant == DEFAULT_TENANT:
        expected = "a tenant that requests name: the capacity bounds the default one"
        raise ConfigurationError("quota", tenant, expected)
    if not 0 < quota <= _MOST_QUOTA:
        raise ConfigurationError(f"quota.{tenant}", quota, "a positive size")
