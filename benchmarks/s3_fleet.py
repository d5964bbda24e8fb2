"""Requests, cost and visibility of engines that share a bucket, on a simulated S3 server that counts requests.

    python -m benchmarks.s3_fleet [--engines 1 10 100 1000] [--minutes 10] [--packs 1000000]

Engines commit one pack per 10 s of simulated time, one after the other. Three of them are complete: they poll the head,
apply the feed, and one of them leads. The others only commit, and the table adds the polls of a complete engine that
does not lead to each of them. The requests of a process run one after the other here; the default is eight at a time,
so a request takes an eighth of the usual time. Prices: see ``simulation.PRICE_OF``; a month has 730 hours. Storage and
transfer are not included.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil

from benchmarks.rig import percentile, show
from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.rows import Rows, StagedBlocks
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import PackWriter, Segment
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.store import Store
from persistkv_s3 import S3Backend
from persistkv_s3.catalogue import Catalogue
from persistkv_s3.feed.format import (
    NONCE_BYTES,
    TERM_BYTES,
    WRITER_BYTES,
    Entry,
    Feed,
    Names,
    NamespaceHead,
    PackRow,
    Snapshot,
    decode_head,
    encode_head,
    frame_records,
    seal,
)
from persistkv_s3.options import Place, S3Options
from tests.backends.s3.simulation import PRICE_OF, START, Process, SimulatedTransport, World

IDENTITY = Identity.of({"benchmark": "fleet"})
PLACE = Place("bucket", "fleet/")
COMPLETE = 3
PERIOD_S = 10.0
WARM_UP_S = 60.0
HOURS_PER_MONTH = 730.0
BLOCKS = 16
PACKS_PER_FEED = 5000
PACKS_PER_ENTRY = 100
SEGMENT_BYTES = 32 << 20  # 32 MiB
ROWS = Rows(memoryview(bytearray(4096)), RowLayout(4096, (GroupLayout(((0, 4096),)),)))
KINDS = ("PUT", "LIST", "GET", "HEAD", "DELETE")
SPREAD = 0.10
MOST_IDLE_COST = 1.0
PERIODS_S = (1.0, PERIOD_S, PERIOD_S)  # of the engine whose packs are watched, and of those that watch
MOST_BYTES = 64
MOST_VISIBLE_S = 3.0
MOST_TAKEOVER_S = 20.0


def pack_of(draw: random.Random, blocks: int) -> PackWriter:
    """Return a pack of tiny blocks under new keys; only its table matters."""
    words = draw.randbytes(32 * blocks)
    keys = [words[start : start + 32] + bytes(4) for start in range(0, len(words), 32)]
    return PackWriter(
        IDENTITY.digest, RawCodec(), [Segment(0, 8, keys, StagedBlocks([np.zeros((blocks, 8), np.uint8)]), 0)]
    )


class Engine:
    """One simulated engine.

    :param complete: whether it does background work, besides commits.
    :param period_s: simulated time between commits; None: it commits once.
    :param phase: of the first commit, as a share of the period.
    """

    def __init__(
        self,
        world: World,
        name: str,
        directory: Path,
        *,
        complete: bool = True,
        period_s: float | None = PERIOD_S,
        phase: float = 0.0,
    ) -> None:
        self.background: Counter[str] = Counter()
        """Number of requests of background work by kind."""
        self.committed: Counter[str] = Counter()
        """Number of requests of commits by kind."""
        self.acknowledged: dict[bytes, float] = {}
        """Simulated time at which each pack was acknowledged."""
        self.visible: dict[bytes, float] = {}
        """Simulated time at which each pack became visible here."""
        self._directory = directory
        self._complete = complete
        self._period_s = period_s
        self._phase = phase
        self._cursor: bytes | None = None
        self.process = Process(world, name, self._run)

    def _run(self, process: Process) -> None:
        world, draw = process.world, process.random
        process.sleep(self._phase * (self._period_s or 0.0))
        backend = self._backend = open_backend(process, self._directory / process.name)
        due: float | None = world.now
        while True:
            if due is not None and world.now >= due:
                due = None if self._period_s is None else due + self._period_s
                self._counted(self.committed, lambda: self._commit(backend, world, draw))
            wait_s = float("inf") if due is None else due - world.now
            if self._complete:
                wait_s = min(wait_s, self._counted(self.background, lambda: self._work(backend, world)))
            process.sleep(max(wait_s, 0.001))

    def _commit(self, backend: S3Backend, world: World, draw: random.Random) -> float:
        pack = pack_of(draw, BLOCKS)
        backend.commit(IDENTITY.digest, CommitBatch([pack]))
        self.acknowledged[pack.pack_id] = world.now
        return 0.0

    def _work(self, backend: S3Backend, world: World) -> float:
        wait_s: float = backend.step()
        changes = backend.changes(IDENTITY.digest, self._cursor)
        self._cursor = changes.cursor
        for table in changes.added:
            self.visible.setdefault(table.pack_id, world.now)
        return wait_s

    def _counted(self, counts: Counter[str], call: Callable[[], float]) -> float:
        before = Counter(self._backend.requests)
        result = call()
        counts.update(Counter(self._backend.requests) - before)
        return result

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """Return the requests of background work and of commits since the last call."""
        taken = self.background, self.committed
        self.background, self.committed = Counter(), Counter()
        return taken


def new_world(seed: int = 0) -> World:
    """Return a world without faults whose steps are not recorded."""
    world = World(seed)
    world.steps = None
    return world


def dollars(requests: Counter[str]) -> float:
    """Return the price of requests in US dollars."""
    return sum(PRICE_OF[kind] * number / 1000 for kind, number in requests.items())


def count_fleet(engines: int, minutes: float, directory: Path) -> tuple[Counter[str], float]:
    """Return the requests per engine and hour by kind, and the cost of all engines per month."""
    world = new_world()
    world.latency_s = (0.01 / 8, 0.1 / 8)
    fleet = [
        Engine(world, f"engine{number}", directory, complete=number < COMPLETE, phase=number / engines)
        for number in range(engines)
    ]
    world.run(WARM_UP_S)
    for engine in fleet:
        engine.take()
    world.run(WARM_UP_S + 60.0 * minutes)
    taken = [engine.take() for engine in fleet]
    world.end()
    total: Counter[str] = Counter()
    for background, committed in taken:
        total.update(background)
        total.update(committed)
    polls = min((background for background, _ in taken[:COMPLETE]), key=lambda requests: requests.total())
    for _ in fleet[COMPLETE:]:
        total.update(polls)
    hours = minutes / 60
    each: Counter[str] = Counter()
    for kind, number in total.items():
        each[kind] = round(number / engines / hours)
    return each, dollars(total) / hours * HOURS_PER_MONTH


def show_fleet(sizes: Sequence[int], minutes: float, directory: Path) -> None:
    rows, totals = [], {}
    for engines in sizes:
        begin = time.perf_counter()
        each, cost = count_fleet(engines, minutes, directory / str(engines))
        totals[engines] = each.total()
        base = totals.get(10, each.total())
        held = engines < 10 or abs(each.total() / base - 1) <= SPREAD
        rows.append(
            [
                f"{engines:,}",
                *(f"{each[kind]:,}" for kind in KINDS),
                f"{each.total():,}",
                "yes" if held else "NO",
                f"${cost:,.2f}",
                f"${cost / engines:,.2f}",
                f"{time.perf_counter() - begin:.0f} s",
            ]
        )
    heads = ["engines", *KINDS, "all", "as of 10, ± 10 %", "a month", "an engine's month", "took"]
    show(f"Requests per engine and hour, one commit per {PERIOD_S:g} s, {minutes:g} min simulated", heads, rows)


def show_idle(directory: Path) -> None:
    rows = []
    for name, busy in (("alone", 0), ("while two engines commit", 2)):
        world = new_world()
        idle = Engine(world, "idle", directory / f"idle{busy}", period_s=None)
        for number in range(busy):
            Engine(world, f"busy{number}", directory / f"idle{busy}", phase=number / busy)
        world.run(600.0)
        idle.take()
        world.run(600.0 + 3600.0)
        background, committed = idle.take()
        world.end()
        cost = dollars(background + committed) * HOURS_PER_MONTH
        held = "yes" if cost <= MOST_IDLE_COST else "NO"
        rows.append([name, *(f"{background[kind]:,}" for kind in KINDS), f"${cost:.2f}", held])
    show("Requests per hour of an engine that does not commit", ["", *KINDS, "a month", "<= $1"], rows)


def visibility(seed: int, directory: Path, *, kill: bool) -> list[float]:
    """Return the times after which two other engines saw the packs of one engine.

    :param kill: kill the leader, and count the packs that were acknowledged in the 5 s after that.
    """
    world = new_world(seed)
    first = Engine(world, "first", directory)
    world.run(WARM_UP_S)
    others = [
        Engine(world, f"other{number}", directory, period_s=period_s) for number, period_s in enumerate(PERIODS_S)
    ]
    world.run(2 * WARM_UP_S + random.Random(seed).uniform(0, PERIOD_S))
    begin = world.now
    if kill:
        first.process.kill()
    world.run(begin + (90.0 if kill else 600.0))
    end = begin + 5.0 if kill else world.now - 30.0
    writer, *readers = others
    times = [
        reader.visible.get(name, float("inf")) - at
        for name, at in writer.acknowledged.items()
        if begin <= at <= end
        for reader in readers
    ]
    world.end()
    return times


def show_visibility(directory: Path) -> None:
    alive = [each for seed in range(5) for each in visibility(seed, directory / f"alive{seed}", kill=False)]
    killed = [each for seed in range(20) for each in visibility(seed, directory / f"killed{seed}", kill=True)]
    rows = []
    for name, times, most in (("leader alive", alive, MOST_VISIBLE_S), ("leader killed", killed, MOST_TAKEOVER_S)):
        worst = percentile(times, 0.99)
        held = "yes" if worst <= most else "NO"
        figures = [f"{percentile(times, 0.5):.2f} s", f"{worst:.2f} s", f"{max(times):.2f} s"]
        rows.append([name, f"{len(times)}", *figures, f"p99 <= {most:g} s: {held}"])
    show("Simulated time until another engine sees a pack", ["", "packs", "median", "p99", "max", "target"], rows)


def fill(world: World, packs: int, directory: Path) -> None:
    """Write a snapshot of many packs into a store, as a leader does."""
    generation, term, draw = bytes(NONCE_BYTES), bytes(TERM_BYTES), random.Random(0)
    run_process(world, lambda process: open_backend(process, directory / "creator").close())
    catalogue = Catalogue(directory / "source.db", IDENTITY.digest)
    for position in range(1, -(-packs // PACKS_PER_FEED) + 1):
        entries = []
        for number in range(0, PACKS_PER_FEED, PACKS_PER_ENTRY):
            some = [pack_of(draw, BLOCKS) for _ in range(PACKS_PER_ENTRY)]
            rows = [PackRow(pack.pack_id, draw.randbytes(NONCE_BYTES), table_of(pack)) for pack in some]
            entries.append(
                Entry(writer=bytes(WRITER_BYTES), number=position * PACKS_PER_FEED + number, time=START, packs=rows)
            )
        catalogue.apply_feed(
            Feed(
                generation=generation,
                position=position,
                term=term,
                previous=term,
                time=START,
                merged={},
                entries=entries,
            )
        )
    names = Names(PLACE.prefix, IDENTITY.digest)
    segments, total = [], 0
    for number, (_, dump) in enumerate(catalogue.dump(SEGMENT_BYTES)):
        data = b"".join(bytes(piece) for piece in frame_records([seal(dump)]))
        segments.append(f"segments/{number:04x}")
        world.server.put(names.base + segments[-1], data, None)
        total += len(data)
    name = f"snapshots/{position:012x}-{term.hex()}"
    snapshot = Snapshot(
        generation=generation, position=position, term=term, time=START, base=segments, base_bytes=total
    )
    world.server.put(names.base + name, seal(snapshot), None)
    head = decode_head(world.server.get(names.head).data, "the store")
    head.namespaces[IDENTITY.digest] = NamespaceHead(
        generation=generation,
        position=position,
        spans=[(position, position, term)],
        snapshot=name,
        snapshot_position=position,
        num_bytes=catalogue.disk_bytes(),
        oldest=catalogue.retention()[1],
        swept=START,
    )
    world.server.put(names.head, encode_head(head), None)
    catalogue.close()


def table_of(pack: PackWriter) -> bytes:
    """Return the table of a pack, which is known once the pack was streamed."""
    for _ in pack.stream():
        pass
    return pack.table.encode()


def open_backend(process: Process, directory: Path) -> S3Backend:
    """Open a handle of a process, and the namespace."""
    options = S3Options(cache=str(directory), connections=1, refresh_s=1.0)
    backend = S3Backend(PLACE, options, SimulatedTransport(process), clock=process, background=False)
    backend.open_namespace(IDENTITY)
    return backend


def run_process(world: World, program: Callable[[Process], None]) -> Counter[str]:
    """Run a process to its end; return its requests by kind."""
    process = Process(world, f"process{len(world.processes)}", program)
    while not process.ended:
        world.run(world.now + 1.0)
    return Counter({kind: number for (name, kind), number in world.requests.items() if name == process.name})


def open_large(world: World, packs: int, directory: Path) -> tuple[int, float, int]:
    """Open a store as an engine does; return the number of requests, the time in seconds, and the memory in bytes."""
    found: list[tuple[float, int]] = []

    def look(process: Process) -> None:
        gc.collect()
        before, begin = psutil.Process().memory_info().rss, time.perf_counter()
        backend = open_backend(process, directory)
        store = Store(backend, IDENTITY, ROWS, StoreOptions(), url="s3://fleet")
        seconds = time.perf_counter() - begin
        gc.collect()
        found.append((seconds, psutil.Process().memory_info().rss - before))
        assert backend.stats().blocks == packs * BLOCKS
        store.close()

    return run_process(world, look).total(), *found[0]


def show_large(packs: int, directory: Path) -> None:
    world = new_world()
    begin = time.perf_counter()
    fill(world, packs, directory)
    print(f"wrote a snapshot of {packs:,} packs of {BLOCKS} blocks in {time.perf_counter() - begin:.0f} s")
    show_openings(world, packs, directory)


def show_openings(world: World, packs: int, directory: Path) -> None:
    rows = []
    for name, most_requests, most_s in (("empty cache", 200, 60.0), ("local catalogue present", 10, 8.0)):
        requests, seconds, memory = open_large(world, packs, directory / "reader")
        each = memory / packs / BLOCKS
        held = requests <= most_requests and seconds <= most_s and each <= MOST_BYTES
        target = f"<= {most_requests}, <= {most_s:g} s, <= {MOST_BYTES} B: {'yes' if held else 'NO'}"
        rows.append([name, f"{requests}", f"{seconds:.1f} s", f"{each:.0f} B", target])
    world.end()
    heads = ["a fresh reader", "requests", "took", "memory per block", "target"]
    show(f"Opening {packs:,} packs of {BLOCKS} blocks; the server answers at once", heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 10, 100, 1000])
    parser.add_argument("--minutes", type=float, default=10.0, help="simulated")
    parser.add_argument("--packs", type=int, default=1_000_000, help="of the large store; 0: skip it")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = Path(name)
        show_idle(directory)
        show_visibility(directory)
        show_fleet(arguments.engines, arguments.minutes, directory)
        if arguments.packs:
            show_large(arguments.packs, directory)


if __name__ == "__main__":
    main()
