"""``engine_process`` for an engine with ``SwitchConnector``: it takes two commands more."""

from __future__ import annotations

from benchmarks.vllm_switch import SwitchConnector
from tests.integrations.vllm.engine_process import Server, main


class SwitchServer(Server):
    """An engine that can be told which of its connectors to ask."""

    def use(self, tiered: bool) -> bool:
        """From now on, for the requests to come."""
        SwitchConnector.tiered = tiered
        return tiered

    def seconds(self) -> list[float]:
        """That were spent in calls of the connector without secondary tiers so far, and of the one with them."""
        return [SwitchConnector.seconds[tiered] for tiered in (False, True)]


if __name__ == "__main__":
    main(SwitchServer)
