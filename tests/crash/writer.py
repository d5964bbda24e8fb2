"""Writer that other programs kill: commits random requests to a full LMDB store, and reports each
step. Sometimes it returns free space to the file system.

It prints one JSON line before each commit (``intent``) and one after the commit has returned
(``done``). If a commit failed, the next ``intent`` line says so, and the next ``done`` line lists
the packs in the store (``held``). With ``wait`` as the last argument, the writer opens the store,
reports this on standard error, and starts after it has read a line. Some commits are to a namespace
of their own, which ends with the next commit.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from persistkv.config import StoreUrl
from persistkv.errors import StoreError
from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_section
from persistkv_lmdb import LmdbBackend

IDENTITY = Identity.of({"test": "crash"})
BLOCK_BYTES = 16 << 10  # 16 KiB
PINNED = "pinned"
_ATTEMPTS = 10
_RELEASES = 0.125  # share of the commits after which the free space becomes holes
_USED_ONCE = 0.1  # share of commits before which another namespace begins and ends
_Result = TypeVar("_Result")


def make_pack(namespace: bytes, number: int) -> PackWriter:
    """Return the pack with a number: 1 to 60 blocks (16 KiB to 960 KiB)."""
    blocks = 1 + random.Random(number).randrange(60) ** 2 // 60
    segment = sample_section(
        number, blocks=blocks, block_bytes=BLOCK_BYTES, depth=16 * (number % 8)
    )
    return PackWriter(namespace, RawCodec(), [segment])


def make_manifest(name: str, packs: list[PackWriter]) -> ManifestWrite:
    """Return the manifest of a request whose context is in these packs."""
    keys = PackedKeys.of([key for pack in packs for key in pack.keys.unpack()])
    head = RequestManifest(
        id=name,
        created=0.0,
        tokens=len(keys),
        group_blocks=(len(keys),),
        raw_bytes=BLOCK_BYTES * len(keys),
    )
    return ManifestWrite(head, (keys,), [pack.pack_id for pack in packs])


def report(**line: object) -> None:
    """Print a JSON line in one write, so that a kill can truncate only the last line."""
    os.write(1, json.dumps(line).encode() + b"\n")


def with_retries(call: Callable[[], _Result]) -> _Result:
    """Call a function, and retry a few times if the disk fails.

    :raises StoreError: all attempts failed.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(StoreError):
            return call()
    return call()


def work(backend: Backend, first: int, seed: int, commits: int | None = None) -> None:
    """Commit until the process is killed, or ``commits`` times. Pack numbers start at ``first``."""
    draw = random.Random(seed)
    namespace = with_retries(lambda: backend.open_namespace(IDENTITY)).id
    seen, held = with_retries(lambda: _all_packs(backend, namespace))
    report(
        done=[], evicted=[], cursor=seen.hex(), held=[pack_id.hex() for pack_id in held]
    )
    was_empty, failures = not held, 0
    gone: set[bytes] = set()
    while commits is None or commits > 0:
        numbers = list(range(first, first + draw.randint(1, 4)))
        first += len(numbers)
        if draw.random() < _USED_ONCE:
            try:
                gone |= _use_once(backend, numbers[0])
            except StoreError:
                failures += 1
        packs = [make_pack(namespace, number) for number in numbers]
        pinned = was_empty and numbers[0] == 0
        name = PINNED if pinned else f"r{numbers[0]}"
        batch = CommitBatch(
            packs,
            [make_manifest(name, packs)],
            touches=draw.sample(held, min(len(held), draw.randint(0, 4))),
            pins=[(PINNED, True)] if pinned else (),
        )
        report(intent=numbers, manifest=name, failed=failures > 0)
        try:
            result = backend.commit(namespace, batch)
        except StoreError:
            failures += 1
            if failures >= _ATTEMPTS:
                raise
            continue
        commits = None if commits is None else commits - 1
        gone |= {table.pack_id for table in result.evicted}
        held = [
            pack_id
            for pack_id in [*held, *(pack.pack_id for pack in packs)]
            if pack_id not in gone
        ]
        found = {}
        if failures:  # failed commits may have been applied, and may have evicted packs
            gone |= with_retries(partial(_removed_since, backend, namespace, seen))
            _, held = with_retries(lambda: _all_packs(backend, namespace))
            found = {"held": [pack_id.hex() for pack_id in held]}
            failures = 0
        seen = result.cursor
        report(
            done=numbers,
            evicted=[pack_id.hex() for pack_id in gone],
            cursor=seen.hex(),
            **found,
        )
        gone.clear()
        if draw.random() < _RELEASES:
            with suppress(StoreError):
                backend.release_free()


def _use_once(backend: Backend, number: int) -> set[bytes]:
    """Store a request in a namespace of its own, and delete it; return the ids of the other packs
    that this evicted."""
    namespace = backend.open_namespace(
        Identity.of({"test": "crash", "number": number})
    ).id
    pack = make_pack(namespace, number)
    manifest = make_manifest("r", [pack])
    stored = backend.commit(namespace, CommitBatch([pack], [manifest]))
    deleted = backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
    removed = [*stored.evicted, *deleted.evicted]
    return {table.pack_id for table in removed if table.namespace != namespace}


def _removed_since(backend: Backend, namespace: bytes, cursor: bytes) -> set[bytes]:
    return set(backend.changes(namespace, cursor).removed)


def _all_packs(backend: Backend, namespace: bytes) -> tuple[bytes, list[bytes]]:
    changes = backend.changes(namespace, None)
    return changes.cursor, [table.pack_id for table in changes.added]


def _see(backend: LmdbBackend) -> None:
    """Begin a write transaction. All later reads see the commits of a killed writer."""
    with backend.rows(write=True):
        pass


if __name__ == "__main__":
    *numbers, last = sys.argv[2:]
    opened = with_retries(lambda: LmdbBackend.open(StoreUrl.parse(sys.argv[1])))
    if last == "wait":
        with_retries(lambda: opened.open_namespace(IDENTITY))
        os.write(2, b"open\n")
        sys.stdin.readline()
        with_retries(lambda: _see(opened))
    else:
        numbers.append(last)
    work(opened, *map(int, numbers))
    opened.close()
