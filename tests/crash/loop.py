"""Kill a writer repeatedly, and check the store after each kill: ``python -m tests.crash.loop --kills 200 --seed 1``.

Invariants of the reopened store:

1. Every acknowledged pack is present with the same bytes, unless a commit evicted it. Evictions are known from the
   result of the commit, or from the log of changes, which is written in the same transaction.
2. The commit in progress at the kill was applied completely or not at all.
3. Every manifest names present blocks, and the pinned manifest is present.
4. Totals equal a recount, free and used extents match the files, and the files are no larger than the capacity.
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
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from persistkv.config import StoreUrl
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.consistency import find_faults
from tests.crash.writer import IDENTITY, PINNED, make_pack

CAPACITY = 8 << 20  # 8 MiB: full within the first round, so that most commits evict
NUMBERS_A_ROUND = 100_000
FILLING_LINES = 100  # from the first writer, two per commit: the store is then full on any machine
PLACEMENTS = ("inline", "extents")


@dataclass
class Expected:
    """Content that must be present, according to the output of the writers."""

    namespace: bytes
    packs: dict[bytes, int] = field(default_factory=dict)
    """Acknowledged packs that were not evicted: pack id to number."""
    running: list[int] = field(default_factory=list)
    """Pack numbers of the commit that did not return."""
    failed: list[list[int]] = field(default_factory=list)
    """Pack numbers of failed commits since the last successful one. Each of them was applied, or was not."""
    manifest: str = ""
    pinned: bool = False
    """Whether the pinned request was acknowledged, or found by the next writer."""
    cursor: bytes | None = None
    """Cursor after the last acknowledged commit."""
    kills: int = 0
    acknowledged: int = 0
    evicted: int = 0

    def apply(self, line: dict[str, Any]) -> None:
        """Process one line of the writer's output."""
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
        """Return whether the running commit was applied. A writer killed in its first commit leaves no request."""
        return bool(self.running) and all(make_pack(self.namespace, one).pack_id in self.packs for one in self.running)


def kill_one(url: str, first: int, seed: int, lines: int, delay_s: float, expected: Expected) -> None:
    """Run a writer, kill it ``delay_s`` seconds after its first ``lines`` lines, and process all of its output."""
    command = [sys.executable, "-m", "tests.crash.writer", url, str(first), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = b"".join(process.stdout.readline() for _ in range(lines))
        time.sleep(delay_s)
        process.kill()
        output += process.stdout.read()
    for line in output.split(b"\n")[:-1]:
        expected.apply(json.loads(line))


@lru_cache(maxsize=256)
def payload(namespace: bytes, number: int) -> bytes:
    """Return the stored payload of a pack, by its number."""
    return payload_of(make_pack(namespace, number))


def check(backend: LmdbBackend, expected: Expected) -> None:
    """Compare the store with the expected content. Remove the packs that the commit in progress evicted from it."""
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
        assert all(name in held for name in names) or held.keys().isdisjoint(names), "a commit was applied in part"
        expected.packs.update({pack_id: number for pack_id, number in names.items() if pack_id in held})
    manifests = {manifest.id for manifest in backend.manifests(namespace)}
    if expected.running:
        present = make_pack(namespace, expected.running[0]).pack_id in held
        assert (expected.manifest in manifests) == present, "a commit was applied in part"
    assert set(held) == set(expected.packs), "packs are present that were evicted or never written"
    for pack_id, number in expected.packs.items():
        assert read_pack(backend, namespace, held[pack_id]) == payload(namespace, number), "wrong bytes"

    keys = {key for table in held.values() for key in table.keys.unpack()}
    for manifest_id in manifests:
        (chain,) = backend.manifest_keys(namespace, [manifest_id])[0] or ()
        assert keys.issuperset(chain.unpack()), f"{manifest_id} names missing blocks"
    assert PINNED in manifests or not expected.pinned, "the pinned request is missing"
    check_totals(backend)
    assert find_faults(backend) == []
    assert not backend.stats().quarantined, "the store was quarantined"


def run(kills: int, seed: int, directory: Path, seconds: float, placement: str) -> Expected:
    """Run and kill up to ``kills`` writers within the time limit, with a check after each.

    :raises AssertionError: an invariant is violated; the message has the seed and the number of the kill.
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
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit for each placement")
    arguments = parser.parse_args()
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as directory:
            found = run(arguments.kills, arguments.seed, Path(directory), arguments.seconds, placement)
        print(
            f"{placement}: {found.kills} kills, {found.acknowledged} packs acknowledged, {found.evicted} evicted, "
            f"{len(found.packs)} present: 0 lost, 0 wrong, 0 quarantined"
        )


if __name__ == "__main__":
    main()
