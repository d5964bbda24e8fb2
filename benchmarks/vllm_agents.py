"""Agent loops in vLLM: TTFT of the turn after a tool call, with and without hints.

    python -m benchmarks.vllm_agents --vllm-python .venv-vllm-0.32.0/bin/python

Ten sessions alternate between turns and tool calls of five seconds, while other users send requests
that never return. Neither the device's cache nor the CPU tier holds all sessions, and the store
holds the sessions, but not also what the others send between two turns of a session. Therefore,
without hints, least recently used contexts are evicted before they return. The table compares:

1. no store behind the CPU tier,
2. a store without hints,
3. ``prefetch``: a request 0.3 s before the end of a tool call carries the hint
   ``persistkv.prefetch`` with the session's token ids,
4. ``retain``: the sessions' turns are pinned with a ttl of ten minutes,
5. ``low``: the other users' requests have low priority,
6. ``retain`` and ``prefetch``.

Each run has an engine and a store of its own. The first turns of the sessions are not part of the
table.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.vllm_rig import Field, add_options, field_of

_PROGRAM = "benchmarks.vllm_agents_engine"
_RETAIN = {"pin": True, "ttl": "10m"}
_RUNS: dict[str, dict[str, Any]] = {
    "CPU tier alone": {},
    "store, no hints": {},
    "prefetch": {"prefetch": True},
    "retain": {"retention": _RETAIN},
    "low": {"batch_retention": {"priority": "low"}},
    "retain and prefetch": {"prefetch": True, "retention": _RETAIN},
}
_ALONE = "CPU tier alone"


def main() -> None:
    """Run the loops one after the other, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument(
        "--turns",
        type=int,
        default=5,
        help="of each session; the first one is not measured",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=5.0,
        help="seconds of a tool call; less for a smoke test",
    )
    parser.add_argument(
        "--lead",
        type=float,
        default=0.3,
        help="seconds from the hint to the end of the tool call",
    )
    parser.add_argument(
        "--tokens", type=int, default=480, help="of a session's first prompt"
    )
    parser.add_argument(
        "--tool-tokens", type=int, default=24, help="that a tool call adds to a session"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=12,
        help="requests of others in the time of a tool call",
    )
    parser.add_argument("--batch-tokens", type=int, default=160, help="of one of them")
    parser.add_argument("--capacity", default="15MiB", help="of the store")
    parser.add_argument("--cpu-tier-mib", type=int, default=4)
    parser.add_argument(
        "--device-blocks", type=int, default=96, help="of 32 tokens each"
    )
    parser.add_argument("--runs", nargs="*", default=list(_RUNS), choices=list(_RUNS))
    arguments = parser.parse_args()
    print(f"{'':22}{'median ms':>10}{'p90 ms':>9}{'reused':>9}{'÷ no hints':>12}")
    base = None
    with field_of(arguments) as field:
        for name in arguments.runs:
            rows = _run(field, name, arguments)
            ttft = sorted(1e3 * row["ttft"] for row in rows)
            median, p90 = statistics.median(ttft), ttft[int(0.9 * (len(ttft) - 1))]
            reused = sum(row["cached"] for row in rows) / sum(
                row["tokens"] for row in rows
            )
            base = median if name == "store, no hints" else base
            ratio = f"{median / base:12.2f}" if base else f"{'':12}"
            print(f"{name:22}{median:10.0f}{p90:9.0f}{reused:9.0%}{ratio}", flush=True)


def _run(
    field: Field,
    name: str,
    arguments: argparse.Namespace,
) -> list[dict[str, float]]:
    """Return the measurements of all turns except the first ones."""
    url = f"lmdb://{field.store(name.replace(' ', '-'))}?capacity={arguments.capacity}"
    tiers: list[dict[str, Any]] = [
        {"type": "persistkv", "url": url},
        {"type": "persistkv-prewarm", "share": 0.5},
    ]
    engine = field.start_engine(
        name,
        [] if name == _ALONE else tiers,
        cpu_bytes=arguments.cpu_tier_mib << 20,
        program=_PROGRAM,
        max_model_len=1024,
        num_gpu_blocks_override=arguments.device_blocks,
    )
    try:
        engine.generate([5] * 100)
        rows: list[dict[str, float]] = engine.ask(
            do="agents",
            sessions=arguments.sessions,
            turns=arguments.turns,
            tokens=arguments.tokens,
            tool_tokens=arguments.tool_tokens,
            pause_s=arguments.pause,
            lead_s=arguments.lead,
            batch=arguments.batch,
            batch_tokens=arguments.batch_tokens,
            **_RUNS[name],
        )
        engine.close()
    finally:
        engine.release()
    return [row for row in rows if row["turn"]]


if __name__ == "__main__":
    main()
