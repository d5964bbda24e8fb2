"""``engine_process`` for an engine with ``SwitchConnector``, with two additional commands."""

from __future__ import annotations

from benchmarks.vllm_switch import SwitchConnector
from tests.integrations.vllm.engine_process import Server, main


class SwitchServer(Server):
    """Server of an engine whose active connector can be switched."""

    def use(self, tiered: bool) -> bool:
        """Select the connector for all following requests."""
        SwitchConnector.tiered = tiered
        return tiered

    def seconds(self) -> list[float]:
        """Return the seconds so far in calls of the connector without secondary tiers, and of the
        one with them."""
        return [SwitchConnector.seconds[tiered] for tiered in (False, True)]


if __name__ == "__main__":
    main(SwitchServer)
