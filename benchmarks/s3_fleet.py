"""Requests, cost and visibility of engines that share a bucket, on a simulated bucket that counts
requests.

    python -m benchmarks.s3_fleet [--engines 1 2 10 100] [--minutes 10] [--seeds 1]
        [--backlog 10000] [--openings 1000] [--blocks 16] [--no-idle] [--no-kill]

All engines run the real code of the shared store in simulated time (``s3_simulation``); each
commits one pack per 10 s. Prices: see ``s3_simulation.PRICE_OF``; a month has 730 hours. Storage
and transfer are not included. The uploads of the packs are shown apart: they are requests of any
store without a catalogue, too.

The work grows with the square of the number of engines, since each reads the commits of all: 100
engines run for a third of the time, 1,000 for a minute. Only 20 engines are asked which packs they
hold, and have a replica each. The others have a common one (``CommonReplica``), and each object of
the index is decoded once for all. This changes no request. ``--engines 1000 --blocks 1`` takes
minutes instead of hours, and 3 instead of 10 GB of memory.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np

from benchmarks.rig import percentile, show
from benchmarks.s3_simulation import START, CountingBlobs, Process, World, dollars
from persistkv.memory.rows import StagedBlocks
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.format.seal import Seal
from persistkv.storage.identity import Identity
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.storage.shared.forgetting.records import ForgottenTenants
from persistkv.storage.shared.format import BASE_LEVEL, Delta, Names, decode_delta
from persistkv.storage.shared.index import objects as objects_module
from persistkv.storage.shared.replica import Replica
from persistkv.storage.shared.replica import folder as folder_module

IDENTITY = Identity.of({"benchmark": "fleet"})
NAMES = Names(IDENTITY.digest)
PERIOD_S = 10.0
WARM_UP_S = 60.0
SHORT_WARM_UP_S = 30.0  # of more than 100 engines
KILL_EVERY_S = 60.0
RESTART_S = 15.0
FIRST_S = 20.0  # until the other engines follow the first one
START_S = 15.0  # until a new engine counts as a reader
SETTLE_S = 30.0  # commits at the end of a run that others need not see
HOURS_PER_MONTH = 730.0
BLOCKS = 16
WATCHERS = 20
ENGINE_MINUTES = 333.0  # simulated, at most, if that is a minute or more
LEAST_MINUTES = 1.0
KINDS = ("PUT", "LIST", "GET", "DELETE")
MOST_COST = {1: 11.0, 2: 11.0, 10: 5.5, 100: 4.0, 1000: 4.0}
MOST_IDLE_COST = 0.25
MOST_SEEN_S, MOST_KILLED_S, MOST_TWO_S = 4.0, 6.0, 6.0
MOST_BACKLOG_S = 120.0
DECODED = 256  # objects of the index that are kept for all engines


def pack_of(draw: random.Random, blocks: int = BLOCKS) -> PackWriter:
    """Return a pack of tiny blocks under new keys; only its table matters."""
    words = draw.randbytes(32 * blocks)
    keys = [words[start : start + 32] + bytes(4) for start in range(0, len(words), 32)]
    staged = StagedBlocks([np.zeros((blocks, 8), np.uint8)])
    return PackWriter(IDENTITY.digest, RawCodec(), [Section(0, 8, keys, staged, 0)])


class Engine:
    """One simulated engine.

    :param period_s: between commits, ± 20 %; None: it commits nothing.
    :param watches: whether it records when it sees packs.
    :param steps: whether it does background work: reads what others commit, and merges.
    """

    def __init__(
        self,
        world: World,
        name: str,
        directory: Path,
        *,
        period_s: float | None = PERIOD_S,
        watches: bool = True,
        steps: bool = True,
        blocks: int = BLOCKS,
    ) -> None:
        self.committed: dict[bytes, float] = {}
        """Simulated time at which each own pack was acknowledged."""
        self.watches = watches
        self.started_at = world.now
        self.seen: dict[bytes, float] = {}
        """Simulated time at which each pack was seen here."""
        self._world = world
        self._directory = directory / name
        self._period_s = period_s
        self._steps = steps
        self._blocks = blocks
        self._cursor: bytes | None = None
        self._taken: Counter[str] = Counter()
        self._blobs: CountingBlobs | None = None
        self.process = Process(world, name, self._run)

    def _run(self, process: Process) -> None:
        draw = process.random
        self._blobs = CountingBlobs(process)
        process.sleep(draw.random() * (self._period_s or 1.0))
        options = SharedOptions(cache=str(self._directory))
        backend = SharedBackend(self._blobs, options, clock=process, background=False)
        try:
            self._work(backend, draw)
        finally:
            # only a kill ends it: no request is made any more, but the memory is released
            self._blobs.close()
            backend.close()

    def _work(self, backend: SharedBackend, draw: random.Random) -> None:
        backend.open_namespace(IDENTITY)
        commit_at = float("inf")
        if self._period_s is not None:
            commit_at = self._world.now + self._period_s
        while True:
            if self._world.now >= commit_at:
                commit_at += draw.uniform(0.8, 1.2) * (self._period_s or 0.0)
                self._commit(backend, draw)
            pause_s = backend.step() if self._steps else float("inf")
            if self.watches:
                self._look(backend)
            self.process.sleep(max(0.001, min(pause_s, commit_at - self._world.now)))

    def _commit(self, backend: SharedBackend, draw: random.Random) -> None:
        pack = pack_of(draw, self._blocks)
        backend.commit(IDENTITY.digest, CommitBatch([pack]))
        self.committed[pack.pack_id] = self._world.now

    def _look(self, backend: SharedBackend) -> None:
        changes = backend.changes(IDENTITY.digest, self._cursor)
        self._cursor = changes.cursor
        for table in changes.added:
            self.seen.setdefault(table.pack_id, self._world.now)

    def take(self) -> Counter[str]:
        """Return the requests since the last call, by kind."""
        total = Counter(self._blobs.requests() if self._blobs is not None else {})
        found = total - self._taken
        self._taken = total
        return found


class CommonReplica(Replica):
    """Replica of an engine that nobody asks which packs it holds.

    All such engines have the same rows: what any of them has read. Each knows which objects it has
    read itself, which decides what it requests and merges. Bases contain the rows, so they may
    contain packs that their writer has not read yet.

    :param common: has the rows.
    :param applied: names of the objects whose content is in the rows.
    """

    def __init__(self, common: Replica, applied: set[str]) -> None:
        self.__dict__.update(common.__dict__)
        self.contained: dict[str, str] = {}
        self._applied = applied

    def apply(self, objects: Iterable[tuple[str, Delta]]) -> tuple[bytes, bytes]:
        new: list[tuple[str, Delta]] = []
        includers: dict[str, str] = {}
        for name, delta in objects:
            if name not in self._applied:
                new.append((name, delta))
                continue
            includers.setdefault(name, self.contained.get(name, ""))
            includers.update(dict.fromkeys(delta.includes, name))
        cursors = super().apply(new)
        self._applied.update(name for name, _ in new)
        self.contained.update(includers)
        return cursors

    def close(self, *, keep: bool = False) -> None:
        """The rows belong to all engines."""


class Fleet:
    """Engines on one bucket. A context manager: it ends them."""

    def __init__(self, engines: int, directory: Path, blocks: int, seed: int) -> None:
        self.world = World(seed)
        self._directory = directory
        self._blocks = blocks
        self._every = max(1, engines // WATCHERS)
        self._number = 0
        self._watching: set[str] = set()
        self._common: Replica | None = None
        self._applied: set[str] = set()
        self._patches = ExitStack()
        self._patch(folder_module, "Replica", self._open_replica)
        decode = lru_cache(maxsize=DECODED)(decode_delta)
        self._patch(objects_module, "decode_delta", decode)
        self.dead: list[Engine] = []
        self.alive = [self._start()]
        # It merges when the others start. If a thousand start before anyone merges, hundreds of
        # them merge at the same time, for half a minute.
        self.run(FIRST_S)
        self.alive += [self._start() for _ in range(1, engines)]

    def _patch(self, module: ModuleType, name: str, value: object) -> None:
        patch = mock.patch.object(module, name, value)
        self._patches.enter_context(patch)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.world.end()
        self._patches.close()
        if self._common is not None:
            self._common.close()

    def _open_replica(
        self,
        path: Path,
        namespace: bytes,
        seal: Seal,
        forgotten: ForgottenTenants,
    ) -> Replica:
        """Return the replica of an engine.

        :param path: below the engine's directory.
        """
        engine = path.relative_to(self._directory).parts[0]
        if engine in self._watching:
            return Replica(path, namespace, seal, forgotten)
        if self._common is None:
            self._common = Replica(path, namespace, seal, forgotten)
        return CommonReplica(self._common, self._applied)

    def _start(self) -> Engine:
        number = self._number
        self._number += 1
        name = f"engine{number}"
        watches = number % self._every == 0
        if watches:
            self._watching.add(name)
        return Engine(
            self.world,
            name,
            self._directory,
            watches=watches,
            blocks=self._blocks,
        )

    def take(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for engine in [*self.alive, *self.dead]:
            total.update(engine.take())
        return total

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def replace_merger(self) -> None:
        """Kill the engine that merged last, and start another one after a while."""
        for engine in list(self.alive):
            if engine.process is self.world.merger:
                engine.process.kill()
                self.alive.remove(engine)
                self.dead.append(engine)
        self.run(RESTART_S)
        self.alive.append(self._start())

    def delays(self, begin: float, end: float) -> list[float]:
        """Return the times after which engines that watch saw the packs that others committed
        between two moments; infinity: never.
        """
        found: list[float] = []
        readers = [engine for engine in self.alive if engine.watches]
        for writer in [*self.alive, *self.dead]:
            for pack, committed in writer.committed.items():
                if not begin <= committed <= end:
                    continue
                for reader in readers:
                    if reader is not writer and reader.started_at + START_S < committed:
                        found.append(reader.seen.get(pack, float("inf")) - committed)
        return found


def run_fleet(
    engines: int,
    minutes: float,
    directory: Path,
    *,
    blocks: int,
    kill: bool,
    seed: int,
) -> tuple[Counter[str], list[float]]:
    """Return the requests of all engines in that time by kind, and the times until others saw their
    packs."""
    with Fleet(engines, directory, blocks, seed) as fleet:
        fleet.run(WARM_UP_S if engines <= 100 else SHORT_WARM_UP_S)
        fleet.take()
        begin = fleet.world.now
        end = begin + 60.0 * minutes
        while kill and fleet.world.now + KILL_EVERY_S < end:
            fleet.run(KILL_EVERY_S - RESTART_S)
            fleet.replace_merger()
        fleet.run(end - fleet.world.now)
        requests = fleet.take()
        delays = fleet.delays(begin, end - SETTLE_S)
    return requests, delays


def row_of_fleet(
    engines: int,
    minutes: float,
    directory: Path,
    *,
    blocks: int,
    kill: bool,
    seeds: int,
) -> list[str]:
    started = time.perf_counter()
    requests: Counter[str] = Counter()
    delays: list[float] = []
    for seed in range(seeds):
        # the replicas of a thousand engines are large: each run removes its own
        with tempfile.TemporaryDirectory(dir=directory) as name:
            sent, seen = run_fleet(
                engines, minutes, Path(name), blocks=blocks, kill=kill, seed=seed
            )
        requests += sent
        delays += seen
    hours = minutes / 60 * engines * seeds
    each = {kind: requests[kind] / hours for kind in KINDS}
    cost = dollars(each) * HOURS_PER_MONTH
    uploads = dollars({"PUT": 3600 / PERIOD_S}) * HOURS_PER_MONTH
    most_s = MOST_KILLED_S if kill else MOST_TWO_S if engines == 2 else MOST_SEEN_S
    p50, p99 = (percentile(delays, share) if delays else 0.0 for share in (0.5, 0.99))
    most_cost = MOST_COST.get(engines)
    return [
        f"{engines:,}{', merger killed each minute' if kill else ''}",
        *(f"{each[kind]:,.0f}" for kind in KINDS),
        f"${cost:.2f}",
        f"${cost - uploads:.2f}",
        "" if kill or most_cost is None else verdict(cost, most_cost, "$"),
        f"{p50:.2f} / {p99:.2f} / {max(delays, default=0.0):.2f} s",
        verdict(p99, most_s, "s") if delays else "",
        f"{time.perf_counter() - started:.0f} s",
    ]


def verdict(value: float, most: float, unit: str) -> str:
    return f"<= {most:g} {unit}: {'yes' if value <= most else 'NO'}"


def show_fleet(
    sizes: Sequence[int],
    minutes: float,
    directory: Path,
    *,
    blocks: int,
    kills: bool,
    seeds: int,
) -> None:
    rows: list[list[str]] = []
    for engines in sizes:
        shorter = min(minutes, max(LEAST_MINUTES, ENGINE_MINUTES / engines))
        for kill in (False, True) if kills and engines > 1 else (False,):
            row = row_of_fleet(
                engines, shorter, directory, blocks=blocks, kill=kill, seeds=seeds
            )
            rows.append(row)
            sys.stderr.write(" · ".join(row) + "\n")
    heads = ["engines", *KINDS, "a month", "without packs", "target"]
    heads += ["others see a pack: p50 / p99 / most", "target", "took"]
    show(
        f"Requests per engine and hour, up to {minutes:g} minutes simulated",
        heads,
        rows,
    )


def show_idle(directory: Path) -> None:
    rows: list[list[str]] = []
    for busy in (0, 2, 10):
        world = World()
        idle = Engine(world, "idle", directory / f"idle{busy}", period_s=None)
        for number in range(busy):
            Engine(world, f"busy{number}", directory / f"idle{busy}", watches=False)
        world.run(600.0)
        idle.take()
        world.run(600.0 + 3600.0)
        requests = idle.take()
        world.end()
        cost = dollars(requests) * HOURS_PER_MONTH
        figures = [f"{requests[kind]:,}" for kind in KINDS]
        name = f"while {busy} others commit" if busy else "alone"
        rows.append(
            [name, *figures, f"${cost:.2f}", verdict(cost, MOST_IDLE_COST, "$")]
        )
        sys.stderr.write(" · ".join(rows[-1]) + "\n")
    show(
        "Requests per hour of an engine that is idle",
        ["", *KINDS, "a month", "target"],
        rows,
    )


def show_backlog(commits: int, directory: Path) -> None:
    """Let three engines merge commits that nobody has merged."""
    world = World(latency=lambda _: 0.0)
    writer = Engine(world, "writer", directory, period_s=0.01, steps=False)
    world.run(1.0 + 0.01 * commits)
    writer.process.kill()
    world.run(world.now + 1.0)
    waiting = len(backlog(world))
    world.latency = lambda _: 0.05
    begin = world.now
    engines = [
        Engine(world, f"engine{number}", directory, watches=False)
        for number in range(3)
    ]
    while backlog(world, until=begin) and world.now < begin + 600.0:
        world.run(world.now + 1.0)
    took = world.now - begin
    requests: Counter[str] = Counter()
    for engine in engines:
        requests.update(engine.take())
    world.end()
    figures = [f"{requests[kind]:,}" for kind in KINDS]
    row = [
        f"{waiting:,}",
        *figures,
        f"{took:.0f} s",
        verdict(took, MOST_BACKLOG_S, "s"),
    ]
    show(
        "A backlog, merged by three engines; 50 ms a request",
        ["commits", *KINDS, "took", "target"],
        [row],
    )


def show_openings(engines: int, directory: Path) -> None:
    """Open a store at once that an engine has left with commits that nobody has merged."""
    world = World()
    writer = Engine(world, "writer", directory, period_s=0.1)
    world.run(60.0)
    writer.process.kill()
    world.run(world.now + 1.0)
    waiting = len(backlog(world))
    before = set(world.blobs)
    opened = [
        Engine(world, f"engine{number}", directory, period_s=None, watches=False)
        for number in range(engines)
    ]
    world.run(world.now + 120.0)
    new = [NAMES.level(name) for name in set(world.blobs) - before]
    objects = [level for level in new if level]
    bases = sum(level >= BASE_LEVEL for level in objects)
    requests: Counter[str] = Counter()
    for engine in opened:
        requests.update(engine.take())
    left = len(backlog(world))
    world.end()
    figures = [f"{requests[kind] / engines:,.1f}" for kind in KINDS]
    row = [f"{engines:,}", f"{waiting} → {left}"]
    row += [str(len(objects) - bases), str(bases), *figures]
    heads = ["engines", "commits in the inbox", "segments", "bases", *KINDS]
    show("Openings within a second: two minutes, requests per engine", heads, [row])


def backlog(world: World, until: float = float("inf")) -> list[str]:
    """Return the names of commits that are not merged and were written before a moment."""
    return [
        name
        for name, (_, at) in world.blobs.items()
        if NAMES.is_commit(name) and at - START < until
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2, 10, 100])
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="simulated; fewer for many engines"
    )
    parser.add_argument(
        "--backlog", type=int, default=10_000, help="commits; 0: skip it"
    )
    parser.add_argument(
        "--openings", type=int, default=1000, help="engines that open at once; 0: skip"
    )
    parser.add_argument("--no-idle", action="store_true", help="skip the idle engine")
    parser.add_argument(
        "--no-kill", action="store_true", help="skip the fleets whose merger is killed"
    )
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of each pack")
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each fleet, shown together"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = Path(name)
        if not arguments.no_idle:
            show_idle(directory)
        if arguments.openings:
            show_openings(arguments.openings, directory / "openings")
        if arguments.backlog:
            show_backlog(arguments.backlog, directory / "backlog")
        if arguments.engines:
            kills = not arguments.no_kill
            show_fleet(
                arguments.engines,
                arguments.minutes,
                directory,
                blocks=arguments.blocks,
                kills=kills,
                seeds=arguments.seeds,
            )


if __name__ == "__main__":
    main()
