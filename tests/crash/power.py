"""Cut the power, in a simulation: ``python -m tests.crash.power --cuts 500 --seed 1``.

A writer (``tests.crash.writer``) stores requests under a library that records what it asks of the disk (``record.c``).
It is killed in a write of LMDB's meta page, and a second one goes on. Then, for many moments of that record, a disk
that forgets what was not synced (``disk``) gives back the files, and in the store that is opened on them:

1. Every pack whose commit had returned, or that the second writer found, is there, byte for byte.
2. The commit that was running did all of its batch or nothing; totals equal a recount; nothing was moved aside.
3. It can be written.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.registry import open_backend
from persistkv.testing.conformance.suite import check_totals, read_pack
from persistkv.testing.samples import payload_of
from tests.crash.disk import Disk, Record, read_log
from tests.crash.forks import Outcome, run_in_fork
from tests.crash.loop import CAPACITY, NUMBERS_A_ROUND, Expected, check, payload
from tests.crash.writer import IDENTITY, make_pack

SAID = Path("said")
STORE = Path("new/store")
COMMITS = 25
PATIENCE_S = 120.0
_SOURCE = Path(__file__).with_name("record.c")


def find_compiler() -> str | None:
    """A C compiler; None where there is none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build_recorder(directory: Path) -> Path:
    """Compile the library that records.

    :raises subprocess.CalledProcessError: it does not compile; the compiler said why on standard error.
    """
    library = directory / "record.so"
    command = [str(find_compiler()), "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def record(directory: Path, seed: int, options: str) -> list[Record]:
    """What two writers asked of the disk, the first of which was killed; what they said is among it."""
    root, log = directory / "root", directory / "log"
    root.mkdir()
    environment = {
        **os.environ,
        "LD_PRELOAD": str(build_recorder(directory)),
        "PERSISTKV_RECORD_ROOT": str(root),
        "PERSISTKV_RECORD_LOG": str(log),
    }
    url = f"lmdb://{root / STORE}?capacity={CAPACITY}{options}"
    _write(root, url, 0, seed, {**environment, "PERSISTKV_RECORD_DIE": str(COMMITS)}, killed=True)
    _write(root, url, NUMBERS_A_ROUND, seed + 1, environment, killed=False)
    return list(read_log(log))


def _write(root: Path, url: str, first: int, seed: int, environment: dict[str, str], *, killed: bool) -> None:
    command = [sys.executable, "-m", "tests.crash.writer", url, str(first), str(seed), str(COMMITS)]
    with (root / SAID).open("ab") as said:
        done = subprocess.run(command, env=environment, stdout=said, check=False, timeout=PATIENCE_S)
    assert (done.returncode < 0) == killed, f"the writer ended with {done.returncode}"


class _Heard(Expected):
    """Follows two writers: what the second one finds is promised, too."""

    def __init__(self) -> None:
        super().__init__(IDENTITY.digest)
        self.namespace_promised = False

    def hear(self, line: dict[str, object]) -> None:
        self.namespace_promised = True
        if "held" in line:
            names = {make_pack(self.namespace, number).pack_id: number for number in self.running} | self.packs
            held = {bytes.fromhex(str(pack_id)) for pack_id in list(line["held"])}  # type: ignore[call-overload]
            assert held <= set(names), "the second writer found packs that nobody wrote"
            self.packs = {pack_id: names[pack_id] for pack_id in held}
        super().hear(line)


def open_and_check(url: str, store: Path, expected: _Heard) -> Outcome:
    """What the next process does after the power is back."""
    backend = open_backend(url)
    promised = expected.namespace_promised
    assert not promised or not list(store.glob("damaged-*")), "the store was moved aside"
    if promised:
        check(backend, expected)
    _write_more(backend)
    check_totals(backend)
    backend.close()
    return Outcome("right", len(expected.packs))


def _write_more(backend: Backend) -> None:
    namespace = backend.open_namespace(IDENTITY).id
    pack = make_pack(namespace, 10 * NUMBERS_A_ROUND)
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack), "what is written now does not read"


def _moments(records: Sequence[Record], cuts: int, draw: random.Random) -> list[int]:
    """Counts of records after which the power goes. Some are right behind what a writer said, where most is promised;
    one in ten behind what the second one found: what a killed writer had not synced is promised from then on."""
    said = [number + 1 for number, record in enumerate(records) if record.path == SAID]
    (found,) = [number for number in said if any(line.get("held") for line in _lines(records[number - 1]))]
    others = [draw.choice(said) if draw.random() < 0.3 else draw.randint(1, len(records)) for _ in range(cuts)]
    return sorted([found] * (cuts // 10) + others[cuts // 10 :])


def _lines(record: Record) -> Iterator[dict[str, object]]:
    for line in bytes(record.data).splitlines():
        yield json.loads(line)


def run(cuts: int, seed: int, directory: Path, seconds: float, options: str = "") -> int:
    """Cut the power so many times.

    :param options: of the store's URL, ``&`` first.
    :returns: packs that were compared.
    :raises AssertionError: saying what is wrong; the seed and the moment say where.
    """
    deadline = time.monotonic() + seconds
    records = record(directory, seed, options)
    draw = random.Random(seed)
    disk, expected, done, compared = Disk(), _Heard(), 0, 0
    gc.freeze()
    target = directory / "case"
    for number, moment in enumerate(_moments(records, cuts, draw)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{number} of {cuts} cuts in {seconds} s")
        for step in records[done:moment]:
            if step.path != SAID:
                disk.replay(step)
                continue
            for line in _lines(step):
                expected.hear(line)
        done = moment
        disk.rebuild(target, draw)
        url = f"lmdb://{target / STORE}?capacity={CAPACITY}{options}"
        for pack in expected.packs.values():
            payload(expected.namespace, pack)  # once, here, instead of in each fork
        outcome = run_in_fork(lambda url=url: open_and_check(url, target / STORE, expected), PATIENCE_S)
        assert outcome.kind == "right", f"seed {seed}, {moment} of {len(records)}: {outcome.kind}: {outcome.detail}"
        compared += outcome.count
        shutil.rmtree(target)
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="give up after so long")
    parser.add_argument("--options", default="", help="of the store's URL, such as '&placement=extents'")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        compared = run(arguments.cuts, arguments.seed, Path(directory), arguments.seconds, arguments.options)
    print(f"{arguments.cuts} power losses, {compared} packs compared: 0 lost, 0 wrong")


if __name__ == "__main__":
    main()
