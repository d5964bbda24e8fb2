"""Simulate power losses: ``python -m tests.crash.power --cuts 300 --seed 1``.

Writers (``tests.crash.writer``) store requests, and a preloaded library (``record.c``) records
their calls to the disk. The writers are killed one after another, in a write of LMDB's meta page or
in any other call, and the next writer continues. Half of the next writers already had the store
open. For most writers, some calls to the disk fail for a while; data of a failed sync is not made
durable by later syncs. Then a simulated disk (``disk``), which loses data that was not synced,
rebuilds the files at many points of the record. Invariants of the store that is opened on them:

1. Every pack whose commit had returned, or that the next writer found, is present with the same
   bytes.
2. The commit in progress was applied completely or not at all. Totals equal a recount. Nothing was
   quarantined.
3. The store is writable.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import check_totals, read_pack
from persistkv.testing.samples import payload_of
from persistkv_lmdb import LmdbBackend
from tests.crash.disk import FAILED, Disk, Record, read_log
from tests.crash.forks import Outcome, run_in_fork
from tests.crash.loop import (
    CAPACITY,
    NUMBERS_A_ROUND,
    PLACEMENTS,
    Expected,
    Line,
    Writer,
    check,
    payload,
)
from tests.crash.recorder import build_recorder
from tests.crash.writer import IDENTITY, make_pack

OUTPUT = Path("output")
STORE = Path("new/store")
WRITERS = 6
COMMITS = 12
PATIENCE_S = 120.0
_UNDONE, _DONE, _DONE_ONCE = 1, 2, 4  # as in record.c


def record(directory: Path, seed: int, placement: str) -> list[Record]:
    """Run all writers. Return the record of their calls to the disk, which includes their
    output."""
    root, log = directory / "root", directory / "log"
    root.mkdir()
    environment = {
        **os.environ,
        "LD_PRELOAD": str(build_recorder(directory)),
        "PERSISTKV_RECORD_ROOT": str(root),
        "PERSISTKV_RECORD_LOG": str(log),
        "PERSISTKV_RECORD_SPARE": str(OUTPUT),
    }
    url = f"lmdb://{root / STORE}?capacity={CAPACITY}&placement={placement}"
    draw = random.Random(f"{seed} {placement}")
    with (root / OUTPUT).open("ab") as output:
        waiting: subprocess.Popen[bytes] | None = None
        for number in range(WRITERS):
            arguments = [url, NUMBERS_A_ROUND * number, seed + number, COMMITS]
            faults = _choose_kill(draw) if number < WRITERS - 1 else {}
            faults |= _choose_faults(draw) if number else {}
            writer = waiting or _start(arguments, {**environment, **faults}, output)
            waiting = None
            # this writer has the store open while the one before it is killed
            if number % 2 and number < WRITERS - 1:
                arguments = [
                    url,
                    NUMBERS_A_ROUND * (number + 1),
                    seed + number + 1,
                    COMMITS,
                    "wait",
                ]
                following = _choose_faults(draw) | (
                    _choose_kill(draw) if number < WRITERS - 2 else {}
                )
                waiting = _start(arguments, {**environment, **following}, output)
                _await_open(waiting)
            code = _end(writer)
            assert code in (0, -signal.SIGKILL), f"a writer ended with {code}"
    return list(read_log(log))


def _choose_kill(draw: random.Random) -> dict[str, str]:
    """Choose the call in which a writer is killed: a synchronous write (most critical in a commit)
    or any call."""
    if draw.random() < 0.6:
        return {"PERSISTKV_RECORD_DIE": str(draw.randint(2, COMMITS))}
    return {"PERSISTKV_RECORD_DIE_AT": str(draw.randint(1, 20 * COMMITS))}


def _choose_faults(draw: random.Random) -> dict[str, str]:
    """Choose calls of a writer that fail with EIO, or none."""
    kind = draw.random()
    if kind < 0.2:
        return {}
    if kind < 0.6:  # the last write of a commit, and the calls that undo it
        return {
            "PERSISTKV_RECORD_FAIL": f"{-draw.randint(1, COMMITS)} {draw.randint(2, 4)} "
            f"{errno.EIO} {_DONE_ONCE}"
        }
    how = draw.choice((_UNDONE, _DONE, _DONE_ONCE))
    return {
        "PERSISTKV_RECORD_FAIL": f"{draw.randint(1, 15 * COMMITS)} {draw.randint(1, 4)} "
        f"{errno.EIO} {how}"
    }


def _start(
    arguments: Sequence[object],
    environment: dict[str, str],
    output: BinaryIO,
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.crash.writer", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=output, stderr=pipe
    )


def _await_open(writer: subprocess.Popen[bytes]) -> None:
    """Wait until the writer has opened the store or is dead."""
    assert writer.stderr is not None
    writer.stderr.readline()


def _end(writer: subprocess.Popen[bytes]) -> int:
    """Start the writer if it waits for a command, and wait for its end."""
    try:
        _, errors = writer.communicate(b"go\n", timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        writer.kill()
        writer.communicate()
        raise
    assert writer.returncode <= 0, errors.decode()
    return writer.returncode


class _ExpectedWithHeld(Expected):
    """Content that must be present. It includes the packs that a new writer found in the store."""

    def __init__(self) -> None:
        super().__init__(IDENTITY.digest, writers=[Writer()])
        self.has_output = False

    def process(self, line: Line) -> None:
        """Process one line of the present writer's output."""
        self.has_output = True
        (writer,) = self.writers
        if "held" in line:
            unknown = [
                number for group in (*writer.failed, writer.running) for number in group
            ]
            names = {
                make_pack(self.namespace, number).pack_id: number for number in unknown
            } | self.packs
            held = {bytes.fromhex(str(pack_id)) for pack_id in line["held"]}
            assert held <= set(names), "a writer found packs that were never written"
            self.packs = {pack_id: names[pack_id] for pack_id in held}
        self.forget(self.apply(line, writer))


def open_and_check(url: str, store: Path, expected: _ExpectedWithHeld) -> Outcome:
    """Open, check and write the store, as the first process after a power loss would."""
    backend = LmdbBackend.open(StoreUrl.parse(url))
    has_output = expected.has_output
    assert not has_output or not list(store.glob("damaged-*")), (
        "the store was quarantined"
    )
    if has_output:
        check(backend, expected)
    _write_more(backend)
    check_totals(backend)
    backend.close()
    return Outcome("right", len(expected.packs))


def _write_more(backend: LmdbBackend) -> None:
    namespace = backend.open_namespace(IDENTITY).id
    pack = make_pack(namespace, 10 * NUMBERS_A_ROUND)
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack), (
        "a new pack cannot be read"
    )


def _choose_cuts(
    records: Sequence[Record],
    cuts: int,
    draw: random.Random,
) -> list[int]:
    """Choose numbers of records after which the power fails.

    Some are directly after a writer's output, when the guarantees cover most. Some are shortly
    after a writer reported the packs that it found: from then on the packs that the killed writer
    had not synced are guaranteed, and the first commits overwrite the space that it had freed. Some
    are shortly after a failed call, for the same reason.
    """
    output = [
        number + 1 for number, record in enumerate(records) if record.path == OUTPUT
    ]
    found = [
        number
        for number in output
        if any(line.get("held") for line in _lines(records[number - 1]))
    ]
    assert found, "no writer reported packs that it found"
    failed = [
        number + 1 for number, record in enumerate(records) if record.op == FAILED
    ]

    def moment() -> int:
        kind = draw.random()
        if kind < 0.25:
            return draw.choice(output)
        if kind < 0.75:
            return min(
                draw.choice(failed if failed and kind < 0.5 else found)
                + draw.randint(0, 80),
                len(records),
            )
        return draw.randint(1, len(records))

    return sorted(moment() for _ in range(cuts))


def _lines(record: Record) -> Iterator[Line]:
    for line in bytes(record.data).splitlines():
        yield json.loads(line)


def run(
    cuts: int,
    seed: int,
    directory: Path,
    seconds: float,
    placement: str,
) -> tuple[int, int]:
    """Simulate up to ``cuts`` power losses within the time limit.

    :returns: number of power losses, number of compared packs.
    :raises AssertionError: an invariant is violated; the message has the seed and the number of the
        record.
    """
    deadline = time.monotonic() + seconds
    records = record(directory, seed, placement)
    draw = random.Random(seed)
    disk, expected, done, cut, compared = Disk(), _ExpectedWithHeld(), 0, 0, 0
    gc.freeze()
    target = directory / "case"
    for moment in _choose_cuts(records, cuts, draw):
        if time.monotonic() > deadline:
            break
        cut += 1
        for step in records[done:moment]:
            if step.path != OUTPUT:
                disk.replay(step)
                continue
            for line in _lines(step):
                expected.process(line)
        done = moment
        disk.rebuild(target, draw)
        url = f"lmdb://{target / STORE}?capacity={CAPACITY}&placement={placement}"
        for pack in expected.packs.values():
            # computed here once instead of in each fork
            payload(expected.namespace, pack)
        outcome = run_in_fork(
            partial(open_and_check, url, target / STORE, expected), PATIENCE_S
        )
        assert outcome.kind == "right", (
            f"seed {seed}, {moment} of {len(records)}: {outcome.kind}: {outcome.detail}"
        )
        compared += outcome.total
        shutil.rmtree(target)
    return cut, compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=300, help="for each placement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="time limit for each placement"
    )
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as directory:
            cuts, compared = run(
                arguments.cuts,
                arguments.seed,
                Path(directory),
                arguments.seconds,
                placement,
            )
        if not compared:
            # The losses are simulated in the order of their moments, so a time limit that is too
            # short for so many leaves only those from before the first pack.
            raise SystemExit(
                f"{placement}: {cuts} power losses, and no pack to compare: more --seconds, or "
                "fewer --cuts"
            )
        print(
            f"{placement}: {cuts} power losses, {compared} packs compared: 0 lost, 0 wrong"
        )


if __name__ == "__main__":
    main()
