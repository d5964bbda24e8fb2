"""Kill engines of several tenants while their quotas are lowered and raised, and check the store
after each round: ``python -m tests.crash.quotas --kills 200 --seed 1``.

In each round, engines of the tenants and, in every other round, a process that changes quotas use
the store at the same time, and are killed one after the other.

Invariants:

1. After each commit of an engine, its tenant is not above its quota, unless the quota was lowered
   meanwhile.
2. In the reopened store, the totals of each tenant are those of its packs, which are whole on the
   disk. A tenant that is above its quota, because the process that lowered it was killed, is not
   after the next commit of its own.
3. A tenant without a quota loses nothing to those that have one: the store is never full.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from persistkv.config import StoreUrl
from persistkv.errors import QuotaExceededError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend, commit
from tests.backends.lmdb.consistency import find_faults

CAPACITY = 64 << 20  # 64 MiB: more than all quotas together, and the content of FREE
TENANTS = ("anna", "berta")
FREE = "default"
"""Tenant without a quota: it stores a few packs, which must stay."""
FREE_PACKS = 40
BLOCK = 4 << 10  # 4 KiB
QUOTAS = (256 << 10, 1 << 20, 4 << 20)
LOWERING_S = 5.0  # wait for a quota that is lowered
COMMITS_A_ROUND = 6
"""Before the first kill, by all engines together."""
MOST_PACKS = 64
"""Packs of a commit: many small ones, so that a lower quota takes many transactions."""
PLACEMENTS = ("inline", "extents")
_FAILED = 3  # exit status of a process that has found a fault


class Result(NamedTuple):
    """What a run has done."""

    kills: int
    commits: int
    lowered: int
    """Rounds after which a tenant was above its quota: the process that lowered it was killed."""


def make(namespace: bytes, tenant: str, seed: int) -> PackWriter:
    blocks = random.Random(seed).choice((1, 1, 2, 3, 20))
    return sample_pack(namespace, seed, blocks=blocks, block_bytes=BLOCK, tenant=tenant)


def open_store(url: str) -> LmdbBackend:
    return LmdbBackend.open(StoreUrl.parse(url))


def totals_of(backend: LmdbBackend, tenant: str) -> TenantTotals:
    found = {totals.tenant: totals for totals in backend.tenants()}
    return found.get(tenant, TenantTotals(tenant))


def write(url: str, tenant: str, seed: int, *, strict: bool, done: int) -> None:
    """Commit packs of a tenant until killed; write a byte to ``done`` after each commit.

    :param strict: nobody changes the quotas: check them after each commit.
    """
    draw = random.Random(seed)
    backend = open_store(url)
    namespace = backend.open_namespace(Identity.of({"test": draw.choice("ab")})).id
    while True:
        packs: list[PackWriter] = []
        for _ in range(draw.choice((1, 4, MOST_PACKS))):
            packs.append(make(namespace, tenant, draw.randrange(1 << 40)))
        name = f"{tenant} {draw.randrange(4)}"
        manifest = sample_manifest(name, packs=[pack.pack_id for pack in packs])
        pins = [(name, draw.random() < 0.3)]
        try:
            backend.commit(namespace, CommitBatch(packs, [manifest], pins=pins))
        except QuotaExceededError:
            # its pins fill the quota
            unpins = [(f"{tenant} {number}", False) for number in range(4)]
            backend.commit(namespace, CommitBatch(pins=unpins))
            continue
        os.write(done, b".")
        totals = totals_of(backend, tenant)
        if strict and totals.is_above():
            raise AssertionError(f"above the quota after a commit: {totals}")


def change(url: str, seed: int, began: int) -> None:
    """Raise and lower quotas until killed; write a byte to ``began`` when a lower quota is recorded
    and one transaction has evicted, and more must follow."""
    draw = random.Random(seed)
    let_others_run = commit.let_others_run

    def noted() -> None:
        os.write(began, b".")
        time.sleep(0.05)
        let_others_run()

    commit.let_others_run = noted
    backend = open_store(url)
    while True:
        for sizes in (QUOTAS[1:], QUOTAS[:2]):
            quotas = {tenant: draw.choice(sizes) for tenant in TENANTS}
            backend.set_policy(replace(backend.policy(), quotas=quotas))
            time.sleep(draw.uniform(0, 0.1))


def start(work: Callable[[], None]) -> int:
    """Run a function in a fork; return its process id."""
    process = os.fork()
    if not process:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(_FAILED)
    return process


def run_round(url: str, number: int, draw: random.Random) -> tuple[int, int]:
    """Run processes, and kill them one after the other; return the numbers of kills and of
    commits."""
    changes = number % 2 == 1
    reading, writing = os.pipe()
    lowering, began = os.pipe()
    processes: list[int] = []
    for writer in range(draw.choice((2, 3, 4))):
        tenant = TENANTS[writer % len(TENANTS)]
        seed = draw.randrange(1 << 40)
        processes.append(
            start(
                lambda tenant=tenant, seed=seed: write(  # type: ignore[misc]
                    url, tenant, seed, strict=not changes, done=writing
                )
            )
        )
    if changes:
        seed = draw.randrange(1 << 40)
        changer = start(lambda: change(url, seed, began))
    os.close(writing)
    os.close(began)
    commits = 0
    while commits < COMMITS_A_ROUND:
        commits += len(os.read(reading, 1))
    draw.shuffle(processes)
    if changes:
        # while it lowers quotas
        processes.insert(0, changer)
        select.select([lowering], [], [], LOWERING_S)
    os.close(lowering)
    # all at once: the excess is left to the next engine; else the others evict it
    is_sudden = changes and draw.random() < 0.5
    for process in processes:
        if not is_sudden:
            time.sleep(draw.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert not os.WIFEXITED(status), "a process has failed; its error is above"
    with os.fdopen(reading, "rb") as pipe:
        commits += len(pipe.read())
    return len(processes), commits


def check(url: str, draw: random.Random) -> bool:
    """Check the store; return whether a tenant was above its quota."""
    with closing(open_store(url)) as backend:
        check_totals(backend)
        assert find_faults(backend) == []
        found_above = False
        namespaces = [space.id for space in backend.namespaces()]
        free = 0
        for namespace in namespaces:
            for table in tables(backend, namespace).values():
                assert read_pack(backend, namespace, table) is not None
                free += table.tenant == FREE
        assert free == FREE_PACKS, f"{free} packs of a tenant without a quota"
        for tenant in TENANTS:
            above = totals_of(backend, tenant).is_above()
            found_above = found_above or above
            pack = make(namespaces[0], tenant, draw.randrange(1 << 40))
            try:
                backend.commit(namespaces[0], CommitBatch([pack]))
            except QuotaExceededError:
                # pins: what may be evicted is gone, or is not enough
                continue
            totals = totals_of(backend, tenant)
            assert not totals.is_above(), f"after a commit: {totals}"
            found = read_pack(backend, namespaces[0], pack.table)
            assert found == payload_of(pack)
        assert find_faults(backend) == []
        # so that the next round has much to evict
        quotas = dict.fromkeys(TENANTS, QUOTAS[-1])
        backend.set_policy(replace(backend.policy(), quotas=quotas))
        return found_above


def run(
    kills: int,
    seed: int,
    directory: Path,
    seconds: float,
    placement: str,
) -> Result:
    """Kill processes until ``kills`` are dead or the time is up; check the store after each
    round.

    :raises AssertionError: an invariant is violated; the message has the round.
    """
    draw = random.Random(seed)
    url = f"lmdb://{directory}/store?capacity={CAPACITY}&placement={placement}"
    with closing(open_store(url)) as backend:
        namespace = backend.open_namespace(Identity.of({"test": "a"})).id
        for number in range(FREE_PACKS):
            pack = make(namespace, FREE, number)
            backend.commit(namespace, CommitBatch([pack]))
        quotas = dict.fromkeys(TENANTS, QUOTAS[-1])
        backend.set_policy(replace(backend.policy(), quotas=quotas))
    killed = commits = lowered = number = 0
    deadline = time.monotonic() + seconds
    while killed < kills and time.monotonic() < deadline:
        dead, done = run_round(url, number, draw)
        killed += dead
        commits += done
        try:
            lowered += check(url, draw)
        except AssertionError as error:
            place = f"{placement}, seed {seed}, round {number}"
            raise AssertionError(f"{place}: {error}") from error
        number += 1
    return Result(killed, commits, lowered)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="for each placement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="time limit of each"
    )
    parser.add_argument("--placement", choices=PLACEMENTS, action="append")
    given = parser.parse_args()
    for placement in given.placement or PLACEMENTS:
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            found = run(given.kills, given.seed, place, given.seconds, placement)
        print(
            f"{placement}: {found.kills} kills, {found.commits} commits, {found.lowered} rounds "
            f"with lowered quotas left: totals exact, no tenant above its quota after a commit"
        )


if __name__ == "__main__":
    main()
