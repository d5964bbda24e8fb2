"""Truncate a file of a store or flip one of its bits, then use the store.

    python -m tests.crash.damage --cases 400 --seed 1

Each case is a copy of a real store, with alternating placement. One file is damaged once:
``data.mdb``, or in one of 16 cases a segment. A process in the role of the host process opens all
namespaces, reads every block, writes a request, and closes. If it dies, hangs, or cannot use the
store, it is restarted, as an engine would do. Invariants:

1. The parent process survives, and waits for each child no longer than ``PATIENCE_S``.
2. Every block that is served equals the block that was stored under its key.
3. After at most ``STARTS`` starts the store accepts new content and returns it: it was opened with
   its valid content, or it was quarantined and replaced by an empty store.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from persistkv.config import PAGE_BYTES, GroupLayout, RowLayout
from persistkv.errors import StoreError
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.samples import (
    sample_blocks,
    sample_keys,
    sample_manifest,
    sample_pack,
)
from tests.crash.forks import Outcome, run_in_fork
from tests.crash.loop import PLACEMENTS

IDENTITIES = [Identity.of({"test": "damage", "number": number}) for number in range(3)]
BLOCK_BYTES = 4 << 10  # 4 KiB
PACKS = 90  # in each namespace
STARTS = 6
PATIENCE_S = 90.0
_OPTIONS = "capacity=16MiB"
_PAGE_FLAGS = slice(10, 12)
_OVERFLOW = 0x04
_STRUCTURE_BYTES = 64  # of a page: its header and the offsets of its first rows
_WRONG_BYTES = "wrong bytes"


def blocks_of(seed: int) -> int:
    """Return the number of blocks in a pack."""
    return 1 + random.Random(seed).randrange(12)


def seeds_of(number: int) -> range:
    """Return the seeds of a namespace's packs. The packs of the first third are deleted again."""
    return range(1000 * number, 1000 * number + PACKS)


def expected() -> dict[bytes, bytes]:
    """Return every block that was ever stored, by key."""
    found: dict[bytes, bytes] = {}
    for number in range(len(IDENTITIES)):
        for seed in seeds_of(number):
            blocks = sample_blocks(seed, blocks_of(seed), BLOCK_BYTES)
            found.update(
                zip(sample_keys(seed, len(blocks)), map(bytes, blocks), strict=True)
            )
    return found


def make_store(url: str) -> Outcome:
    """Create a store with packs, manifests, pins, touches, and space that was used and freed."""
    backend = open_backend(url)
    for number, identity in enumerate(IDENTITIES):
        namespace = backend.open_namespace(identity).id
        packs = [
            sample_pack(namespace, seed, blocks=blocks_of(seed))
            for seed in seeds_of(number)
        ]
        for start in range(0, PACKS, 6):
            some = packs[start : start + 6]
            ids = [pack.pack_id for pack in some]
            name = f"request {start}"
            pins = [(name, True)] if start % 4 == 2 else []
            backend.commit(
                namespace,
                CommitBatch(some, [sample_manifest(name, start, packs=ids)], pins=pins),
            )
        gone = [pack.pack_id for pack in packs[: PACKS // 3]]
        backend.commit(
            namespace, CommitBatch(deletions=gone, touches=[packs[-1].pack_id])
        )
    backend.close()
    return Outcome("used")


def damage(data: bytearray, draw: random.Random, case: int) -> str:
    """Damage the bytes of a file. Return a description of the damage.

    Half of the cases truncate the file. Of the others, half flip any bit, a quarter flip a bit of a
    catalogue page, and a quarter flip a bit in the structure of such a page.
    """
    if case % 2 == 0:
        length = draw.randrange(len(data))
        del data[length:]
        return f"cut to {length} bytes"
    within = {1: PAGE_BYTES, 5: _STRUCTURE_BYTES}.get(case % 8)
    offset = draw.randrange(len(data))
    while within and (offset % PAGE_BYTES >= within or _is_payload(data, offset)):
        offset = draw.randrange(len(data))
    bit = draw.randrange(8)
    data[offset] ^= 1 << bit
    return f"bit {bit} of byte {offset} flipped"


def _is_payload(data: bytearray, offset: int) -> bool:
    """Return whether the page holds payload: an overflow page, or a page that continues one and has
    no header."""
    page = data[offset // PAGE_BYTES * PAGE_BYTES :][:PAGE_BYTES]
    number = int.from_bytes(page[:8], "little")
    return number != offset // PAGE_BYTES or bool(
        int.from_bytes(page[_PAGE_FLAGS], "little") & _OVERFLOW
    )


def use(url: str, right: dict[bytes, bytes]) -> Outcome:
    """Open, read, write and close the store, as a host process does."""
    rows = Rows(
        memoryview(bytearray(len(right) * PAGE_BYTES)),
        RowLayout(PAGE_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),)),
    )
    served, written = 0, True
    for number, identity in enumerate(IDENTITIES):
        try:
            store = BlockingStore(
                open_backend(url), identity, rows, StoreOptions(), url=url
            )
        except StoreError as error:
            return Outcome("refused", detail=str(error))
        keys = [
            key
            for seed in seeds_of(number)
            for key in sample_keys(seed, blocks_of(seed))
        ]
        held = [key for key in keys if store.contains(key)]
        failed = set(store.read(held, list(range(len(held)))))
        for row, key in enumerate(held):
            if key not in failed and bytes(rows.places(0, row)[0]) != right[key]:
                return Outcome(_WRONG_BYTES, detail=f"block {key.hex()}")
        served += len(held) - len(failed)
        new = sample_keys(1_000_000 + time.monotonic_ns() % 1_000_000, 4)
        store.put("new", new, range(4), range(4))
        store.end_request(RequestEnd("new", "new", (new,), 64, 16))
        store.flush()
        written = (
            written and all(map(store.contains, new)) and not store.read(new, range(4))
        )
        store.close()
    return Outcome("used" if written else "unwritten", served)


def damage_copy(original: Path, store: Path, draw: random.Random, case: int) -> str:
    """Copy the store and damage the copy. Return a description of the damage."""
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(original, store)
    in_segment = case % 16 == 15
    file = next(store.glob("segments/*.seg")) if in_segment else store / "data.mdb"
    data = bytearray(file.read_bytes())
    how = damage(data, draw, case)
    file.write_bytes(data)
    return f"{original.name}, {file.name}: {how}"


def run_case(url: str, store: Path, right: dict[bytes, bytes]) -> Counter[str]:
    """Use a damaged copy until a use succeeds. Return how often each outcome occurred.

    :raises AssertionError: an invariant is violated; the message describes the violation.
    """
    seen: Counter[str] = Counter()
    for _ in range(STARTS):
        outcome = run_in_fork(lambda: use(url, right), PATIENCE_S)
        seen[outcome.kind] += 1
        assert outcome.kind not in (_WRONG_BYTES, "raised"), (
            f"{outcome.kind}: {outcome.detail}"
        )
        if outcome.kind == "used":
            quarantined = any(
                entry.name.startswith("damaged-") for entry in store.iterdir()
            )
            seen["quarantined" if quarantined else "opened with valid content"] += 1
            seen["blocks served"] += outcome.total
            return seen
    raise AssertionError(
        f"not usable after {STARTS} starts: {dict(seen)}, {outcome.detail}"
    )


def run(cases: int, seed: int, directory: Path, seconds: float) -> Counter[str]:
    """Run up to ``cases`` cases within the time limit. Return how often each outcome occurred.

    :raises AssertionError: an invariant is violated; the message has the seed and the number of the
        case.
    """
    for placement in PLACEMENTS:
        url = f"lmdb://{directory / placement}?{_OPTIONS}&placement={placement}"
        made = run_in_fork(partial(make_store, url), PATIENCE_S)
        assert made.kind == "used", made.detail
    right = expected()
    gc.freeze()
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    store = directory / "case"
    for case in range(cases):
        if time.monotonic() > deadline:
            break
        placement = PLACEMENTS[case // 8 % 2]
        how = damage_copy(
            directory / placement, store, random.Random(f"{seed} {case}"), case
        )
        seen["damaged stores"] += 1
        try:
            seen += run_case(
                f"lmdb://{store}?{_OPTIONS}&placement={placement}", store, right
            )
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {case}, {how}: {error}") from error
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        seen = run(arguments.cases, arguments.seed, Path(directory), arguments.seconds)
    damaged = seen.pop("damaged stores")
    print(
        f"{damaged} damaged stores: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(seen.items()))
    )


if __name__ == "__main__":
    main()
