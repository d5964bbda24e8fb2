"""Retention policy of a store: capacity, ttl and placement."""

from __future__ import annotations

from dataclasses import dataclass

from persistkv.errors import ConfigurationError


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

    def __post_init__(self) -> None:
        """:raises ConfigurationError: capacity or ttl is not positive."""
        if self.capacity is not None and self.capacity <= 0:
            raise ConfigurationError("capacity", self.capacity, "a positive size")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigurationError(
                "ttl", self.ttl_s, "a positive duration such as 7d, or none"
            )

    def contradictions(self, given: Policy) -> str:
        """Describe the values of a URL (None if left out) that differ from this recorded policy;
        empty if none does."""
        found = []
        for name, ours, theirs, unit in (
            ("capacity", self.capacity, given.capacity, " bytes"),
            ("ttl", self.ttl_s, given.ttl_s, " s"),
            ("placement", self.placement, given.placement, ""),
        ):
            if theirs not in (None, ours):
                found.append(
                    f"{name}={theirs}{unit} (recorded: "
                    f"{'none' if ours is None else f'{ours}{unit}'})"
                )
        return " and ".join(found)
