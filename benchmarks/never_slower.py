"""Whether loading KV ever makes a request slower than computing it: ``python -m
benchmarks.never_slower``.

A simulation of one engine and one store on a clock of its own. The decisions are those of
``persistkv.tiering.load_cost``; the engine computes at the speeds of GPUs, and the medium delays.
Each run also serves the same requests, with the same noise, by always loading and by always
computing. Printed: the time to the first token, divided by that of the references.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

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
PREFIXES = [256 << step for step in range(8)]  # 256 to 32,768 tokens
SUFFIX_TOKENS = 64  # not stored
HALF_SPEED_DEPTH = (
    16_384  # tokens at which the engine computes half as fast as at the start
)
PREFILL_SPEEDS = (2_000, 10_000, 50_000)
REQUESTS = 600
GAP_S = 0.5  # mean time between two requests
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

    def __init__(self, medium: Medium, tokens_per_s: float, seed: int) -> None:
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
        self._random = random.Random(seed)

    def compute_s(self, start: int, stop: int, noise: float) -> float:
        squares = (stop * stop - start * start) / 2
        growth = squares / HALF_SPEED_DEPTH
        return noise * self._token_s * (stop - start + growth)

    def transfer_s(
        self, num_bytes: int, noise: float, now: float
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
        self, prefix: int, load_noise: float, compute_noise: float, load_s: float
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
        if not self._probes.begin():
            return
        probe_bytes = min(num_bytes, PROBE_BYTES)
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
            self.times.observe(self._probe_bytes, self._probe_s, is_probe=True)


@dataclass
class Served:
    """Times to the first token of the same requests, by way of serving."""

    prefixes: list[int] = field(default_factory=list)
    decided: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)


def run(medium: Medium, tokens_per_s: float, seed: int) -> tuple[Served, Simulation]:
    chance = random.Random(seed)
    simulation = Simulation(medium, tokens_per_s, seed)
    served = Served()
    for _ in range(REQUESTS):
        simulation.now += chance.expovariate(1 / GAP_S)
        prefix = chance.choice(PREFIXES)
        load_noise = chance.lognormvariate(0.0, 0.15)
        compute_noise = chance.lognormvariate(0.0, 0.03)
        stop = prefix + SUFFIX_TOKENS
        load_s = sum(
            simulation.transfer_s(prefix * TOKEN_BYTES, load_noise, simulation.now)
        )
        usual_s = load_s / load_noise
        load_s += simulation.compute_s(prefix, stop, compute_noise)
        served.prefixes.append(prefix)
        served.loaded.append(load_s)
        served.computed.append(simulation.compute_s(0, stop, compute_noise))
        served.decided.append(
            simulation.serve(prefix, load_noise, compute_noise, usual_s)
        )
    return served, simulation
