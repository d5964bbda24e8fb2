"""Kill writers repeatedly, and check the store after each round: ``python -m tests.crash.loop
--kills 200 --seed 1``.

In each round one, two or four processes write the store at the same time. They are killed one after
the other, so that some write on while others are dead.

Invariants of the reopened store:

1. Every acknowledged pack is present with the same bytes, unless a commit evicted it. Evictions are
   known from the result of the commit, or from the log of changes, which is written in the same
   transaction.
2. The commits in progress at the kills were each applied completely or not at all.
3. Every manifest names present blocks, and the pinned manifest is present.
4. Totals equal a recount, free and used extents match the files, and the files are no larger than
   the capacity.
5. The store was not quarantined.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

from persistkv.config import StoreUrl
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.consistency import find_faults
from tests.crash.writer import IDENTITY, PINNED, make_pack

CAPACITY = 8 << 20  # 8 MiB: full within the first round, so that most commits evict
NUMBERS_A_ROUND = 100_000
MOST_WRITERS = 4
# from the first writer, two per commit: the store is then full on any machine
FILLING_LINES = 100
PLACEMENTS = ("inline", "extents")


@dataclass
class Writer:
    """What one writer of a round has reported."""

    running: list[int] = field(default_factory=list)
    """Pack numbers of the commit that did not return."""
    failed: list[list[int]] = field(default_factory=list)
    """Pack numbers of failed commits since the last successful one. Each of them was applied, or
    was not."""
    manifest: str = ""
    """Request of the commit that did not return."""
    cursor: bytes | None = None
    """Cursor after the last acknowledged commit."""


class Line(TypedDict, total=False):
    """A line of a writer's output."""

    intent: list[int]
    manifest: str
    failed: bool
    done: list[int]
    evicted: list[str]
    held: list[str]
    cursor: str


@dataclass
class Expected:
    """Content that must be present, according to the output of the writers."""

    namespace: bytes
    packs: dict[bytes, int] = field(default_factory=dict)
    """Acknowledged packs that were not evicted: pack id to number."""
    writers: list[Writer] = field(default_factory=list)
    """Of the last round."""
    pinned: bool = False
    """Whether the pinned request was acknowledged, or found by the next writer."""
    kills: int = 0
    acknowledged: int = 0
    evicted: int = 0

    def apply(self, line: Line, writer: Writer) -> set[bytes]:
        """Process one line of a writer's output; return the packs that its commit evicted."""
        if "intent" in line:
            if line["failed"]:
                writer.failed.append(writer.running)
            writer.running, writer.manifest = (
                list(line["intent"]),
                str(line["manifest"]),
            )
            return set()
        for number in line["done"]:
            self.packs[make_pack(self.namespace, number).pack_id] = number
        held = set(map(bytes.fromhex, line.get("held", ())))
        for number in (number for group in writer.failed for number in group):
            pack_id = make_pack(self.namespace, number).pack_id
            if pack_id in held:  # the commit was applied, although it failed
                self.packs[pack_id] = number
        self.acknowledged += len(line["done"])
        self.pinned = self.pinned or (writer.manifest == PINNED and self._ran(writer))
        writer.cursor = bytes.fromhex(str(line["cursor"]))
        writer.running, writer.failed = [], []
        return {bytes.fromhex(pack_id) for pack_id in line["evicted"]}

    def forget(self, pack_ids: Iterable[bytes]) -> None:
        """Remove evicted packs."""
        for pack_id in pack_ids:
            self.packs.pop(pack_id, None)
            self.evicted += 1

    def _ran(self, writer: Writer) -> bool:
        """Return whether the running commit was applied. A writer killed in its first commit leaves
        no request."""
        packs = [make_pack(self.namespace, number).pack_id for number in writer.running]
        return bool(packs) and all(pack_id in self.packs for pack_id in packs)


def kill_some(
    url: str,
    firsts: Sequence[int],
    lines: int,
    delays_s: Sequence[float],
    expected: Expected,
) -> None:
    """Run a writer for each number in ``firsts``, and kill them one after the other. Process all of
    their output.

    :param lines: the first kill waits for so many lines of each writer.
    :param delays_s: seconds before each kill.
    """
    processes = []
    for first in firsts:
        command = [
            sys.executable,
            "-m",
            "tests.crash.writer",
            url,
            str(first),
            str(first),
        ]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    outputs = []
    for process in processes:
        assert process.stdout is not None
        outputs.append(b"".join(process.stdout.readline() for _ in range(lines)))
    readers = [
        ThreadPoolExecutor(1).submit(process.stdout.read)
        for process in processes
        if process.stdout is not None
    ]
    for process, delay_s in zip(processes, delays_s, strict=True):
        time.sleep(delay_s)
        process.kill()
    expected.writers = []
    evicted: set[bytes] = set()
    for process, reader, output in zip(processes, readers, outputs, strict=True):
        whole = output + reader.result()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        expected.writers.append(Writer())
        for line in whole.split(b"\n")[:-1]:
            evicted |= expected.apply(json.loads(line), expected.writers[-1])
    # last: a pack may be evicted by another writer than its own
    expected.forget(evicted)


@lru_cache(maxsize=256)
def payload(namespace: bytes, number: int) -> bytes:
    """Return the stored payload of a pack, by its number."""
    return payload_of(make_pack(namespace, number))


def check(backend: LmdbBackend, expected: Expected) -> None:
    """Compare the store with the expected content. Remove the packs that the commit in progress
    evicted from it."""
    namespace = expected.namespace
    held = tables(backend, namespace)
    cursors = [
        writer.cursor for writer in expected.writers if writer.cursor is not None
    ]
    changes = backend.changes(namespace, min(cursors, default=None))
    if not changes.reset:
        expected.forget(expected.packs.keys() & changes.removed.keys())
    lost = set(expected.packs) - set(held)
    assert not lost, f"{len(lost)} acknowledged packs are lost"

    attempts = [
        group
        for writer in expected.writers
        for group in [*writer.failed, writer.running]
    ]
    for group in filter(None, attempts):
        names = {make_pack(namespace, number).pack_id: number for number in group}
        names = {
            pack_id: number
            for pack_id, number in names.items()
            if pack_id not in changes.removed
        }
        assert all(name in held for name in names) or held.keys().isdisjoint(names), (
            "a commit was applied in part"
        )
        expected.packs.update(
            {pack_id: number for pack_id, number in names.items() if pack_id in held}
        )
    manifests = {manifest.id for manifest in backend.catalogue(namespace).manifests()}
    for writer in expected.writers:
        if writer.running:
            pack_id = make_pack(namespace, writer.running[0]).pack_id
            if writer.manifest in manifests:
                assert pack_id in held, "a commit was applied in part"
            elif pack_id in held:  # eviction removes a manifest before its packs
                assert len(expected.writers) > 1, "a commit was applied in part"
    assert set(held) == set(expected.packs), (
        "packs are present that were evicted or never written"
    )
    for pack_id, number in expected.packs.items():
        assert read_pack(backend, namespace, held[pack_id]) == payload(
            namespace, number
        ), "wrong bytes"

    keys = {key for table in held.values() for key in table.keys.unpack()}
    for manifest_id in manifests:
        (chain,) = backend.manifest_keys(namespace, [manifest_id])[0] or ()
        assert keys.issuperset(chain.unpack()), f"{manifest_id} names missing blocks"
    assert PINNED in manifests or not expected.pinned, "the pinned request is missing"
    check_totals(backend)
    assert find_faults(backend) == []
    assert not backend.stats().quarantined, "the store was quarantined"


def run(
    kills: int,
    seed: int,
    directory: Path,
    seconds: float,
    placement: str,
) -> Expected:
    """Run and kill writers in ``kills`` rounds within the time limit, with a check after each.

    :raises AssertionError: an invariant is violated; the message has the seed and the number of the
        kill.
    """
    draw = random.Random(seed)
    url = f"lmdb://{directory}/store?capacity={CAPACITY}&placement={placement}"
    expected = Expected(IDENTITY.digest)
    deadline = time.monotonic() + seconds
    for number in range(kills):
        if time.monotonic() > deadline:
            break
        lines, writers = (
            (FILLING_LINES, 1) if number == 0 else (1, draw.choice((1, 1, 2, 4)))
        )
        firsts = [
            NUMBERS_A_ROUND * (MOST_WRITERS * number + writer)
            for writer in range(writers)
        ]
        kill_some(
            url,
            firsts,
            lines,
            [draw.uniform(0.0, 0.25) for _ in range(writers)],
            expected,
        )
        expected.kills += writers
        backend = LmdbBackend.open(StoreUrl.parse(url))
        try:
            check(backend, expected)
        except AssertionError as error:
            raise AssertionError(
                f"{placement}, seed {seed}, round {number}, {writers} writers: {error}"
            ) from error
        finally:
            backend.close()
    return expected


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=200, help="rounds of kills, for each placement"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="time limit for each placement"
    )
    arguments = parser.parse_args()
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as directory:
            found = run(
                arguments.kills,
                arguments.seed,
                Path(directory),
                arguments.seconds,
                placement,
            )
        print(
            f"{placement}: {found.kills} kills, {found.acknowledged} packs acknowledged, "
            f"{found.evicted} evicted, "
            f"{len(found.packs)} present: 0 lost, 0 wrong, 0 quarantined"
        )


if __name__ == "__main__":
    main()
