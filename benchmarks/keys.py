"""Nonces of engines that are killed, and the replacement of the key of a large store.

    python -m benchmarks.keys [--packs 1000000] [--engines 10] [--kill-s 1] [--directory DIR]

Engines commit packs of one small block to one LMDB store with a key. One after the other is killed
and started again. Before each encryption, an engine appends a digest of AES key and nonce to a
file, so the encryptions of killed engines count, too, whatever the store holds of them. Then the
key of the store is replaced while the engines run, and the store is opened with the new one.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives import ciphers
from cryptography.hazmat.primitives.ciphers import aead

from benchmarks.rig import show
from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, StoreBusyError
from persistkv.memory.rows import StagedBlocks
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.format.seal import Seal
from persistkv.storage.identity import Identity
from persistkv_lmdb import LmdbBackend

OLD, NEW = "PERSISTKV_BENCHMARK_KEY", "PERSISTKV_BENCHMARK_NEW_KEY"
TARGET_S = 10.0  # of a rotation, at 10⁶ packs
_BLOCK_BYTES = 64
_MOST_PACKS = 400  # of a commit
_POLL_S = 0.05
_WATCH_S = 10.0
# 64 bits: two of ten million digests of different pairs are equal in one of 400,000 runs
_DIGEST_BYTES = 8


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Append a digest of AES key and nonce to a file before each encryption of this process, by
    whichever class of the library."""
    record = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(key: bytes, nonce: bytes) -> None:
        digest = hashlib.blake2b(key + nonce, digest_size=_DIGEST_BYTES)
        os.write(record, digest.digest())

    class RecordedAead:
        def __init__(self, key: bytes) -> None:
            self._key = bytes(key)
            self._aead = original_aead(key)

        def encrypt(self, nonce: bytes, *arguments: Any) -> bytes:
            add(self._key, bytes(nonce))
            return self._aead.encrypt(nonce, *arguments)

        def encrypt_into(self, nonce: bytes, *arguments: Any) -> int:
            add(self._key, bytes(nonce))
            return self._aead.encrypt_into(nonce, *arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._aead, name)

    class RecordedCipher(ciphers.Cipher):  # type: ignore[type-arg]
        def encryptor(self) -> Any:
            key = self.algorithm.key  # type: ignore[attr-defined]
            add(bytes(key), bytes(self.mode.initialization_vector))
            return super().encryptor()

    original_aead = aead.AESGCM
    try:
        with (
            patch.object(aead, "AESGCM", RecordedAead),
            patch.object(ciphers, "Cipher", RecordedCipher),
        ):
            yield
    finally:
        os.close(record)


def count_recorded(directory: Path) -> tuple[int, int]:
    """Return the number of encryptions in all records of a directory, and of those with an AES key
    and nonce of an earlier one."""
    records = [np.fromfile(path, np.uint64) for path in directory.iterdir()]
    digests = np.concatenate(records)
    return len(digests), len(digests) - len(np.unique(digests))


def new_pack(namespace: bytes, seal: Seal) -> PackWriter:
    """Return a pack of one block with a random key."""
    block = np.zeros((1, _BLOCK_BYTES), np.uint8)
    key = os.urandom(32) + bytes(4)
    section = Section(0, _BLOCK_BYTES, [key], StagedBlocks([block]), 0)
    return PackWriter(namespace, RawCodec(), [section], seal=seal)


class Commit(NamedTuple):
    """A commit of an engine."""

    packs: int
    seconds: float


def run_engine(url: str, record: Path, reports: Connection) -> None:
    """Commit packs until the process is killed."""
    draw = random.Random()
    # the class, which the parent has imported: the imports would take longer than a short life
    parsed = StoreUrl.parse(url)
    with recorded(record), closing(LmdbBackend.open(parsed)) as backend:
        namespace = backend.open_namespace(Identity.of({"benchmark": "keys"})).id
        while True:
            num_packs = draw.randint(1, _MOST_PACKS)
            packs = [new_pack(namespace, backend.seal) for _ in range(num_packs)]
            begin = time.perf_counter()
            try:
                backend.commit(namespace, CommitBatch(packs))
            except StoreBusyError:
                # a machine with other work: as an engine does, drop the packs
                continue
            reports.send(Commit(num_packs, time.perf_counter() - begin))


class Engines:
    """Processes that commit to one store.

    :param records: directory for a file of each process.
    """

    def __init__(self, url: str, records: Path, count: int) -> None:
        # not spawned, for the same reason
        self._context = multiprocessing.get_context("fork")
        self._url = url
        self._records = records
        self.num_kills = 0
        self._engines = [self._start(number) for number in range(count)]
        # to be killed: engines that have committed, the oldest first
        self._busy: dict[int, None] = {}

    def _start(self, number: int) -> tuple[Any, Connection]:
        reports, theirs = self._context.Pipe(duplex=False)
        record = self._records / f"{number}-{self.num_kills}"
        arguments = (self._url, record, theirs)
        process = self._context.Process(target=run_engine, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, reports

    def commits(self) -> list[Commit]:
        """Return the commits that were reported since the last call.

        :raises SystemExit: an engine has ended by itself.
        """
        found: list[Commit] = []
        for number, (process, reports) in enumerate(self._engines):
            if process.exitcode is not None:
                raise SystemExit(f"an engine ended with code {process.exitcode}")
            while reports.poll():
                found.append(reports.recv())
                self._busy[number] = None
        return found

    def all_commit(self) -> bool:
        """Return whether each engine has committed since it was started."""
        self.commits()
        return len(self._busy) == len(self._engines)

    def kill_one(self) -> list[Commit]:
        """Kill an engine that has committed, and start another one in its place; return its last
        commits."""
        number = next(iter(self._busy), None)
        if number is None:
            return []
        del self._busy[number]
        found = self._end(number)
        self.num_kills += 1
        self._engines[number] = self._start(number)
        return found

    def end(self) -> list[Commit]:
        """Kill all engines; return their last commits."""
        found: list[Commit] = []
        for number in range(len(self._engines)):
            found += self._end(number)
        return found

    def _end(self, number: int) -> list[Commit]:
        process, reports = self._engines[number]
        process.kill()
        process.join()
        found: list[Commit] = []
        try:
            while reports.poll():
                found.append(reports.recv())
        except (EOFError, OSError):
            pass  # the last report was cut off
        reports.close()
        return found


def count(commits: list[Commit]) -> int:
    return sum(commit.packs for commit in commits)


def fill(engines: Engines, num_packs: int, kill_s: float) -> int:
    """Wait until the engines have committed so many packs, while one is killed every ``kill_s``
    seconds; return the number of packs."""
    done = 0
    next_kill = time.monotonic() + kill_s
    while done < num_packs:
        time.sleep(_POLL_S)
        done += count(engines.commits())
        if time.monotonic() > next_kill:
            next_kill += kill_s
            done += count(engines.kill_one())
    return done


class Rotation(NamedTuple):
    """The replacement of the key."""

    seconds: float
    """With the opening of the store."""
    before: list[Commit]
    """Commits in the seconds before it."""
    during: list[Commit]
    """Commits that ended meanwhile, or in the seconds after it."""


def rotate(engines: Engines, url: str, watch_s: float) -> Rotation:
    """Replace the key of the store while engines commit.

    :param watch_s: seconds before and after it in which commits are reported.
    :raises SystemExit: the engines did not run on, or the store opens with the old key.
    """
    # one that still opens the store would be refused after the rotation
    while not engines.all_commit():
        time.sleep(_POLL_S)
    engines.commits()
    time.sleep(watch_s)
    before = engines.commits()
    begin = time.perf_counter()
    with closing(open_backend(f"{url}&key_env={OLD}")) as backend:
        backend.rotate_key(StoreKey(os.environ[NEW].encode()))
    seconds = time.perf_counter() - begin
    during = engines.commits()
    time.sleep(watch_s)
    after = engines.commits()
    if not after:
        raise SystemExit("the engines do not run on")
    try:
        open_backend(f"{url}&key_env={OLD}", read_only=True).close()
    except ConfigurationError:
        return Rotation(seconds, before, during + after)
    raise SystemExit("the old key still opens the store")


def held_packs(url: str) -> int:
    """Return the number of packs that the store holds, opened with the new key."""
    with closing(open_backend(f"{url}&key_env={NEW}", read_only=True)) as backend:
        return backend.stats().packs


def longest(commits: list[Commit]) -> str:
    """Return the median and the maximum duration of commits."""
    if not commits:
        return "none"
    seconds = [commit.seconds for commit in commits]
    return f"{statistics.median(seconds):.3f}, {max(seconds):.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packs", type=int, default=1_000_000)
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--kill-s", type=float, default=1.0)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    os.environ[OLD] = "k" * 32
    os.environ[NEW] = "n" * 32
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        url = f"lmdb://{directory}/store?capacity=16GiB&placement=inline"
        records = Path(directory, "records")
        records.mkdir()
        begin = time.monotonic()
        engines = Engines(f"{url}&key_env={OLD}", records, arguments.engines)
        try:
            done = fill(engines, arguments.packs, arguments.kill_s)
            filled_s = time.monotonic() - begin
            rotation = rotate(engines, url, _WATCH_S)
        finally:
            last = engines.end()
        held = held_packs(url)
        encryptions, repeated = count_recorded(records)
    done += count(rotation.before) + count(rotation.during) + count(last)
    if held < done:
        raise SystemExit(f"{done - held} of {done} committed packs are missing")
    rows = [
        ["engines; kills", f"{arguments.engines}; {engines.num_kills}", ""],
        ["packs in the store", f"{held:,} after {filled_s:.0f} s", ""],
        ["encryptions", f"{encryptions:,}", ""],
        ["AES key and nonce repeated", str(repeated), "0"],
        ["replacement of the key", f"{rotation.seconds:.2f} s", f"{TARGET_S:g} s"],
        ["commits before: median, longest", longest(rotation.before), ""],
        ["commits meanwhile and after", longest(rotation.during), ""],
    ]
    show("One store with a key", ["", "", "target"], rows)


if __name__ == "__main__":
    main()
