"""``engine_process`` for an engine with ``SwitchConnector``: it takes one command more."""

from __future__ import annotations

from benchmarks.vllm_switch import SwitchConnector
from tests.integrations.vllm.engine_process import Server, main


class SwitchServer(Server):
    """An engine that can be told which of its connectors to ask."""

    def use(self, tiered: bool) -> bool:
        """From now on, for the requests to come."""
        SwitchConnector.tiered = tiered
        return tiered


if __name__ == "__main__":
    main(SwitchServer)
