"""Kill a writer again and again, and look at what it left: ``python -m tests.crash.loop --kills 200 --seed 1``.

After each kill, in the reopened store:

1. Every pack that was acknowledged is there, byte for byte, unless a commit evicted it: one that said so, or the one
   that was running, by the log of changes, which is written in the same transaction.
2. The commit that was running did all of its batch or nothing.
3. Every manifest names blocks that are there; the pinned one is.
4. Totals equal a recount, free and used extents the files, and the files are no larger than the capacity.
5. The store was not renamed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from persistkv.config import StoreUrl
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of
from persistkv_lmdb import LmdbBackend
from tests.crash.writer import IDENTITY, PINNED, make_pack

CAPACITY = 8 << 20  # 8 MiB: full within the first round, so that most commits evict
NUMBERS_A_ROUND = 100_000
FILLING_LINES = 100  # of the first writer, two a commit: the store is full then, however slow the machine
PLACEMENTS = ("inline", "extents")


@dataclass
class Expected:
    """What must be there, by what the writers said."""

    namespace: bytes
    packs: dict[bytes, int] = field(default_factory=dict)
    """Acknowledged and not evicted: pack id to number."""
    running: list[int] = field(default_factory=list)
    """Numbers of the commit that did not return."""
    failed: list[list[int]] = field(default_factory=list)
    """Those of commits before it that raised, since the last one that did not: each was done, or not."""
    manifest: str = ""
    pinned: bool = False
    """Whether the request that is pinned was acknowledged, or found by the next writer."""
    cursor: bytes | None = None
    """After the last acknowledged commit."""
    kills: int = 0
    acknowledged: int = 0
    evicted: int = 0

    def hear(self, line: dict[str, object]) -> None:
        """Take one line of the writer."""
        if "intent" in line:
            if line["failed"]:
                self.failed.append(self.running)
            self.running, self.manifest = list(line["intent"]), str(line["manifest"])
            return
        for number in line["done"]:
            self.packs[make_pack(self.namespace, number).pack_id] = number
        for pack_id in line["evicted"]:
            self.packs.pop(bytes.fromhex(pack_id), None)
            self.evicted += 1
        self.acknowledged += len(line["done"])
        self.pinned = self.pinned or (self.manifest == PINNED and self._ran())
        self.cursor = bytes.fromhex(str(line["cursor"]))
        self.running, self.failed = [], []

    def _ran(self) -> bool:
        """Whether the commit that was running is there: a writer that was killed in its first one leaves no request."""
        return bool(self.running) and all(make_pack(self.namespace, one).pack_id in self.packs for one in self.running)


def kill_one(url: str, first: int, seed: int, lines: int, delay_s: float, expected: Expected) -> None:
    """Run a writer, kill it some time after it has said so many lines, and hear all that it said."""
    command = [sys.executable, "-m", "tests.crash.writer", url, str(first), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = b"".join(process.stdout.readline() for _ in range(lines))
        time.sleep(delay_s)
        process.kill()
        said += process.stdout.read()
    for line in said.split(b"\n")[:-1]:
        expected.hear(json.loads(line))


@lru_cache(maxsize=256)
def payload(namespace: bytes, number: int) -> bytes:
    """What lies at rest of the pack of a number."""
    return payload_of(make_pack(namespace, number))


def check(backend: LmdbBackend, expected: Expected) -> None:
    """Compare the store with what must be there; what went with the running commit is forgotten."""
    namespace = expected.namespace
    held = tables(backend, namespace)
    changes = backend.changes(namespace, expected.cursor)
    if not changes.reset:
        for pack_id in changes.removed:
            expected.packs.pop(pack_id, None)
            expected.evicted += 1
    lost = set(expected.packs) - set(held)
    assert not lost, f"{len(lost)} acknowledged packs are lost"

    for group in filter(None, [*expected.failed, expected.running]):
        names = {make_pack(namespace, number).pack_id: number for number in group}
        names = {pack_id: number for pack_id, number in names.items() if pack_id not in changes.removed}
        assert all(name in held for name in names) or held.keys().isdisjoint(names), "a commit was done in part"
        expected.packs.update({pack_id: number for pack_id, number in names.items() if pack_id in held})
    manifests = {manifest.id for manifest in backend.manifests(namespace)}
    if expected.running:
        there = make_pack(namespace, expected.running[0]).pack_id in held
        assert (expected.manifest in manifests) == there, "a commit was done in part"
    assert set(held) == set(expected.packs), "packs that nobody wrote, or that were evicted, are there"
    for pack_id, number in expected.packs.items():
        assert read_pack(backend, namespace, held[pack_id]) == payload(namespace, number), "wrong bytes"

    keys = {key for table in held.values() for key in table.keys.unpack()}
    for manifest_id in manifests:
        (chain,) = backend.manifest_keys(namespace, [manifest_id])[0] or ()
        assert keys.issuperset(chain.unpack()), f"{manifest_id} names blocks that are gone"
    assert PINNED in manifests or not expected.pinned, "the pinned request went"
    check_totals(backend)
    assert backend.find_faults() == []
    assert not backend.stats().quarantined, "the store was renamed"


def run(kills: int, seed: int, directory: Path, seconds: float, placement: str) -> Expected:
    """Kill so many writers, or as many as the time allows, and check after each.

    :raises AssertionError: saying what is wrong; the seed and the number of the kill say where.
    """
    draw = random.Random(seed)
    url = f"lmdb://{directory}/store?capacity={CAPACITY}&placement={placement}"
    expected = Expected(IDENTITY.digest)
    deadline = time.monotonic() + seconds
    for number in range(kills):
        if time.monotonic() > deadline:
            break
        lines = FILLING_LINES if number == 0 else 1
        kill_one(url, NUMBERS_A_ROUND * number, seed + number, lines, draw.uniform(0.0, 0.25), expected)
        expected.kills += 1
        backend = LmdbBackend.open(StoreUrl.parse(url))
        try:
            check(backend, expected)
        except AssertionError as error:
            raise AssertionError(f"{placement}, seed {seed}, kill {number}: {error}") from error
        finally:
            backend.close()
    return expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="for each placement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long, for each placement")
    arguments = parser.parse_args()
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as directory:
            found = run(arguments.kills, arguments.seed, Path(directory), arguments.seconds, placement)
        print(
            f"{placement}: {found.kills} kills, {found.acknowledged} packs acknowledged, {found.evicted} evicted, "
            f"{len(found.packs)} there: 0 lost, 0 wrong, 0 renamed"
        )


if __name__ == "__main__":
    main()
