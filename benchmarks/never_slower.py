"""Whether loading KV ever makes a request slower than computing it: ``python -m
benchmarks.never_slower``.

A simulation of one engine and one store on a clock of its own. The decisions are those of
``persistkv.tiering.load_cost``; the engine computes at the speeds of GPUs, and the medium delays.
Each run also serves the same requests, with the same noise, by always loading and by always
computing. Printed: the time to the first token, divided by that of the references.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from persistkv.base import make_offload_key
from persistkv.integrations.vllm.loading import StoreLoads
from persistkv.storage.store.index import Index
from persistkv.storage.store.lookup_table import LookupTable
from persistkv.tiering.load_cost import (
    LoadChooser,
    LoadRun,
    LoadTimes,
    PrefillSpeed,
    Reason,
)
from persistkv.tiering.probing import PROBE_S, ProbeTimer

TOKEN_BYTES = 128 << 10  # KV of one token of a model of 8B parameters
PART_BYTES = 16 << 20  # of a load: what a deadline does not interrupt
PROBE_BYTES = 8 << 20
CHUNK_TOKENS = 16
BLOCK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
PREFIXES = [256 << step for step in range(8)]  # 256 to 32,768 tokens
LONGEST_CHUNKS = PREFIXES[-1] // CHUNK_TOKENS
SUFFIX_TOKENS = 64  # not stored
HALF_SPEED_DEPTH = 16_384  # tokens before those that are computed half as fast
PREFILL_SPEEDS = (2_000, 10_000, 50_000)
REQUESTS = 600
GAP_S = 0.5  # mean time between two requests
LOAD_NOISE, COMPUTE_NOISE = 0.15, 0.03  # standard deviations of the logarithms
ALL_RUN = (0.0, math.inf)


@dataclass(frozen=True)
class Medium:
    """A medium, and what happens to it between two times."""

    name: str
    latency_s: float
    bandwidth: float
    """Bytes per second."""
    slowed: float = 1.0
    """Factor of both times between the two times below."""
    between: tuple[float, float] = ALL_RUN
    stalls: bool = False
    """Whether no load ends between the two times."""


def static_media() -> Iterator[Medium]:
    """Yield disks that are slowed 1 to 100 times, and buckets."""
    for slowed in (1, 3, 10, 30, 100):
        yield Medium(f"disk / {slowed}", 0.0005 * slowed, 5e9 / slowed)
    for latency_s in (0.005, 0.05, 0.5, 2.0):
        for bandwidth in (10e6, 100e6, 1e9, 10e9):
            name = f"bucket {1000 * latency_s:.0f} ms {bandwidth / 1e6:.0f} MB/s"
            yield Medium(name, latency_s, bandwidth)


def changing_media() -> Iterator[Medium]:
    """Yield media that slow down by 10, or stall, in the middle of a run."""
    middle = (100.0, 200.0)
    fast = {"disk": (0.0005, 5e9), "bucket": (0.05, 2e9), "slow bucket": (0.3, 3e8)}
    for name, (latency_s, bandwidth) in fast.items():
        yield Medium(f"{name}, slowed by 10", latency_s, bandwidth, 10.0, middle)
        yield Medium(f"{name}, stalls", latency_s, bandwidth, 1.0, middle, True)


class Simulation:
    """One engine and one store on a clock."""

    def __init__(self, medium: Medium, tokens_per_s: float) -> None:
        self.now = 0.0
        self.times = LoadTimes()
        self.prefill = PrefillSpeed()
        self.reasons: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.last_mistake = 0.0
        """Time of the last request that was computed although loading takes less than 0.8 of that
        time."""
        self._medium = medium
        self._token_s = 1 / tokens_per_s
        self._probes = ProbeTimer(lambda: self.now)
        self._probe_end = math.inf
        self._probe_s = 0.0
        self._probe_bytes = 0
        self._chooser = LoadChooser(self.prefill)

    def compute_s(self, start: int, stop: int, noise: float) -> float:
        squares = (stop * stop - start * start) / 2
        growth = squares / HALF_SPEED_DEPTH
        return noise * self._token_s * (stop - start + growth)

    def transfer_s(
        self,
        num_bytes: int,
        noise: float,
        now: float,
    ) -> tuple[float, float]:
        """Return the latency and the time of the bytes of a load that begins now."""
        medium = self._medium
        begin, end = medium.between
        factor = noise
        if begin <= now < end:
            factor *= medium.slowed
        latency_s = factor * medium.latency_s
        if medium.stalls and begin <= now < end:
            latency_s += end - now
        return latency_s, factor * num_bytes / medium.bandwidth

    def serve(
        self,
        prefix: int,
        load_noise: float,
        compute_noise: float,
        load_s: float,
    ) -> float:
        """Serve one request by the decision; return its time to the first token."""
        self._end_probe()
        num_bytes = prefix * TOKEN_BYTES
        run = LoadRun(self, prefix, num_bytes)
        decision = self._chooser.choose([run], 0)
        if not decision.num_runs:
            self.reasons[decision.reason] += 1
            if load_s < 0.8 * self.compute_s(0, prefix, 1.0):
                self.last_mistake = self.now
            self._probe(num_bytes)
            return self._compute(0, prefix, compute_noise)
        latency_s, bytes_s = self.transfer_s(num_bytes, load_noise, self.now)
        took_s = latency_s + bytes_s
        if took_s <= decision.deadline_s:
            self.reasons[Reason.LOADED] += 1
            self.times.observe(num_bytes, took_s)
            return took_s + self._compute(prefix, prefix, compute_noise)
        self.reasons[Reason.DEADLINE] += 1
        # the part in progress is read to its end
        share = max(0.0, decision.deadline_s - latency_s) / bytes_s
        parts = math.ceil(share * num_bytes / PART_BYTES) if share else 0
        loaded = min(num_bytes, parts * PART_BYTES)
        waited_s = decision.deadline_s
        if loaded:
            waited_s = latency_s + bytes_s * loaded / num_bytes
        self.times.abandon(num_bytes, loaded, waited_s)
        tokens = loaded // TOKEN_BYTES
        return waited_s + self._compute(tokens, prefix, compute_noise)

    def expected_load_s(self, num_bytes: int) -> float:
        return self.times.expected_s(num_bytes)

    def _compute(self, start: int, prefix: int, noise: float) -> float:
        stop = prefix + SUFFIX_TOKENS
        seconds = self.compute_s(start, stop, noise)
        self.prefill.observe(start, stop, seconds)
        return seconds

    def _probe(self, num_bytes: int) -> None:
        num_blocks = self._probes.begin()
        if not num_blocks:
            return
        most = BLOCK_BYTES if num_blocks == 1 else PROBE_BYTES
        probe_bytes = min(num_bytes, most)
        took_s = sum(self.transfer_s(probe_bytes, 1.0, self.now))
        self._probe_end = self.now + min(took_s, PROBE_S)
        self._probe_s = took_s
        self._probe_bytes = probe_bytes

    def _end_probe(self) -> None:
        if self.now < self._probe_end:
            return
        self._probe_end = math.inf
        self._probes.end()
        if self._probe_s > PROBE_S:
            self.times.abandon(self._probe_bytes, 0, PROBE_S)
        else:
            self.times.observe(self._probe_bytes, self._probe_s)


@dataclass
class Served:
    """Times to the first token of the same requests, by way of serving."""

    prefixes: list[int] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)


def serve_all(medium: Medium, tokens_per_s: float, seed: int) -> tuple[Served, float]:
    """Serve the requests of a run; return their times, and the time of the last request that was
    computed by mistake."""
    chance = random.Random(seed)
    simulation = Simulation(medium, tokens_per_s)
    served = Served()
    for _ in range(REQUESTS):
        simulation.now += chance.expovariate(1 / GAP_S)
        prefix = chance.choice(PREFIXES)
        load_noise = chance.lognormvariate(0.0, LOAD_NOISE)
        compute_noise = chance.lognormvariate(0.0, COMPUTE_NOISE)
        num_bytes = prefix * TOKEN_BYTES
        load_s = sum(simulation.transfer_s(num_bytes, load_noise, simulation.now))
        stop = prefix + SUFFIX_TOKENS
        suffix_s = simulation.compute_s(prefix, stop, compute_noise)
        served.prefixes.append(prefix)
        served.loaded.append(load_s + suffix_s)
        served.computed.append(simulation.compute_s(0, stop, compute_noise))
        usual_s = load_s / load_noise
        decided = simulation.serve(prefix, load_noise, compute_noise, usual_s)
        served.decided.append(decided)
    return served, simulation.last_mistake


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def p50_ratios(served: Served) -> Iterator[tuple[int, float]]:
    """Yield each length of a prefix with the median time, divided by the smaller median of the two
    references."""
    for prefix in PREFIXES:
        places = [at for at, found in enumerate(served.prefixes) if found == prefix]
        medians = []
        for times in (served.decided, served.loaded, served.computed):
            medians.append(statistics.median(times[at] for at in places))
        yield prefix, medians[0] / min(medians[1:])


def decision_us() -> float:
    """Return the microseconds of a decision with 11 known sizes: the median of 2,000."""
    times, prefill = LoadTimes(), PrefillSpeed(10_000)
    for power in range(11):
        times.observe(1 << (20 + power), 0.01 * 1.5**power)

    class Store:
        def expected_load_s(self, num_bytes: int) -> float:
            return times.expected_s(num_bytes)

    chooser = LoadChooser(prefill)
    run = LoadRun(Store(), 8_192, 8_192 * TOKEN_BYTES)
    taken = []
    for _ in range(2_000):
        begin = time.perf_counter()
        chooser.choose([run], 0)
        taken.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(taken)


class _HeldContext:
    """A store as vLLM's tier sees it, which holds a context of 32,768 tokens in 2,048 chunks."""

    def __init__(self) -> None:
        hashes = [number.to_bytes(32, "little") for number in range(LONGEST_CHUNKS)]
        keys = [make_offload_key(name, 0) for name in hashes]
        self._index = Index()
        self._index.add_adopted(keys)
        self._table = LookupTable()
        self._table.map(*self._index.share())
        self.holds = self._table.contains
        group = SimpleNamespace(block_bytes=BLOCK_BYTES)
        self.config = SimpleNamespace(
            layout=SimpleNamespace(groups=[group]), windows=()
        )
        self.request = SimpleNamespace(
            block_hashes=hashes, num_tokens=LONGEST_CHUNKS * CHUNK_TOKENS
        )
        self.first = keys[0]

    def expected_load_s(self, num_bytes: int) -> float:
        return num_bytes / 1e9

    def close(self) -> None:
        self._index.close()


def vllm_decision_us() -> float:
    """Return the microseconds of a decision of the tier for vLLM, with the search for the end of
    the prefix that a store holds: the median of 2,000."""
    offloading = SimpleNamespace(
        cache=SimpleNamespace(tokens_per_hash=CHUNK_TOKENS),
        groups=[SimpleNamespace(group_id=0)],
    )
    loads = StoreLoads(offloading, [CHUNK_TOKENS], PrefillSpeed(10_000))
    store: Any = _HeldContext()
    taken = []
    for _ in range(2_000):
        begin = time.perf_counter()
        chunks = loads.chunks(store.request, None, store.first, CHUNK_TOKENS)
        loads.decide([store], store, chunks)
        taken.append(time.perf_counter() - begin)
    store.close()
    return 1e6 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(1, parser.parse_args().seeds + 1)

    ratios: list[tuple[float, str]] = []
    for seed, medium, speed in itertools.product(seeds, static_media(), PREFILL_SPEEDS):
        served, _ = serve_all(medium, speed, seed)
        for prefix, ratio in p50_ratios(served):
            ratios.append((ratio, f"{medium.name}, {speed} tokens/s, {prefix} tokens"))
    ratios.sort(reverse=True)
    good = sum(1 for ratio, _ in ratios if ratio <= 1.05)
    worst, where = ratios[0]
    median = statistics.median(ratio for ratio, _ in ratios)
    print("p50 of TTFT / min(p50 always load, p50 always compute):")
    print(f"  {good} of {len(ratios)} cases <= 1.05; median {median:.3f}")
    print(f"  worst {worst:.3f} ({where})")

    print()
    print(
        "| medium changes for 100 s | tokens/s | p99 / p99 always compute | always load |"
    )
    print("|---|---|---|---|")
    late: list[float] = []
    for medium, speed in itertools.product(changing_media(), PREFILL_SPEEDS):
        worst_p99 = worst_load = 0.0
        for seed in seeds:
            served, last_mistake = serve_all(medium, speed, seed)
            computed = percentile(served.computed, 0.99)
            worst_p99 = max(worst_p99, percentile(served.decided, 0.99) / computed)
            worst_load = max(worst_load, percentile(served.loaded, 0.99) / computed)
            late.append(last_mistake - medium.between[1])
        print(f"| {medium.name} | {speed:,} | {worst_p99:.2f} | {worst_load:.2f} |")
    print()
    print(f"recovery after the change: {max(0.0, *late):.1f} s at most")
    print(f"decision: {decision_us():.1f} us; in vLLM: {vllm_decision_us():.1f} us")


if __name__ == "__main__":
    main()
