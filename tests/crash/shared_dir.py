"""Kill writers of one shared directory repeatedly: ``python -m tests.crash.shared_dir --kills 200
--seed 1``.

Four processes, two for each of two hosts, commit requests to a store in a directory, merge its
index and read what the others wrote. One after the other is killed and replaced. After every few
kills, a new reader must find every pack that was acknowledged, with its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_dir import DirBackend

IDENTITIES = [
    Identity.of({"test": "shared directory", "number": number}) for number in range(2)
]
WRITERS = 4
CHECK_EVERY = 10  # kills
_PATIENCE_S = 60.0


def url_of(directory: Path, host: int) -> str:
    return f"file://{directory}/store?refresh=1s&cache={directory}/host{host}"


def pack_of(namespace: bytes, seed: int) -> PackWriter:
    return sample_pack(namespace, seed, blocks=1 + seed % 4, block_bytes=4096)


def write(url: str, first: int) -> None:
    """Commit until the process is killed; report each acknowledged commit in one write."""
    backend = DirBackend.open(StoreUrl.parse(url))
    names = [backend.open_namespace(identity).id for identity in IDENTITIES]
    draw = random.Random(first)
    seed = first
    while True:
        name = draw.choice(names)
        packs = [pack_of(name, seed + number) for number in range(draw.randint(1, 3))]
        manifest = sample_manifest(f"r{seed}", packs=[pack.pack_id for pack in packs])
        backend.commit(name, CommitBatch(packs, [manifest]))
        line = {
            "namespace": names.index(name),
            "seeds": list(range(seed, seed + len(packs))),
        }
        os.write(1, json.dumps(line).encode() + b"\n")
        seed += len(packs)
        held = list(tables(backend, name).values())
        if held and draw.random() < 0.2:
            table = draw.choice(held)
            assert read_pack(backend, name, table) is not None, "a held pack is missing"


class Rig:
    """Writers, and what they have acknowledged."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.draw = random.Random(seed)
        self.acknowledged: list[tuple[int, int]] = []
        """(namespace, seed) of packs."""
        self.checked = 0
        self._numbers = 0
        self._writers: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self) -> None:
        number, self._numbers = self._numbers, self._numbers + 1
        output = self.directory / f"writer{number}.out"
        url = url_of(self.directory, number % 2)
        command = [
            sys.executable,
            "-m",
            "tests.crash.shared_dir",
            "--write",
            url,
            "--seed",
            str(number * 1_000_000),
        ]
        with (
            output.open("wb") as file,
            (self.directory / f"writer{number}.err").open("wb") as errors,
        ):
            self._writers.append(
                (subprocess.Popen(command, stdout=file, stderr=errors), output)
            )

    def kill(self) -> None:
        """Kill one writer, and collect what it has reported."""
        index = self.draw.randrange(len(self._writers))
        process, output = self._writers.pop(index)
        patience = time.monotonic() + _PATIENCE_S
        while (
            not output.stat().st_size
            and process.poll() is None
            and time.monotonic() < patience
        ):
            time.sleep(0.05)  # it has not committed yet
        if process.poll() is not None:
            raise AssertionError(
                f"a writer ended by itself: {output.with_suffix('.err').read_text()}"
            )
        process.kill()
        process.wait()
        for line in output.read_bytes().split(b"\n")[:-1]:
            found = json.loads(line)
            self.acknowledged += [(found["namespace"], seed) for seed in found["seeds"]]
        output.unlink()

    def check(self) -> None:
        """Find every acknowledged pack with a reader that knows nothing."""
        backend = DirBackend.open(
            StoreUrl.parse(f"file://{self.directory}/store?cache=no"), read_only=True
        )
        try:
            for number, identity in enumerate(IDENTITIES):
                name = backend.open_namespace(identity).id
                held = tables(backend, name)
                seeds = [
                    seed for namespace, seed in self.acknowledged if namespace == number
                ]
                lost = [
                    seed for seed in seeds if pack_of(name, seed).pack_id not in held
                ]
                assert not lost, (
                    f"{len(lost)} of {len(seeds)} acknowledged packs are lost"
                )
                for seed in seeds[self.checked :]:
                    pack = pack_of(name, seed)
                    payload = payload_of(pack)
                    assert read_pack(backend, name, held[pack.pack_id]) == payload, (
                        "wrong bytes"
                    )
        finally:
            backend.close()

    def stop(self) -> None:
        while self._writers:
            self.kill()


def run(kills: int, seed: int, directory: Path, seconds: float) -> tuple[int, int]:
    """Kill writers within the time limit; return the numbers of kills and of acknowledged packs.

    :raises AssertionError: content is lost or wrong.
    """
    rig = Rig(directory, seed)
    end = time.monotonic() + seconds
    for _ in range(WRITERS):
        rig.start()
    done = 0
    try:
        while done < kills and time.monotonic() < end:
            time.sleep(rig.draw.uniform(0.1, 1.5))
            rig.kill()
            rig.start()
            done += 1
            if done % CHECK_EVERY == 0:
                rig.check()
    finally:
        rig.stop()
    rig.check()
    return done, len(rig.acknowledged)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit")
    parser.add_argument("--write", help="URL: be one of the writers")
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write, arguments.seed)
        return
    with tempfile.TemporaryDirectory() as directory:
        kills, packs = run(
            arguments.kills, arguments.seed, Path(directory), arguments.seconds
        )
    print(f"{kills} kills, {packs} packs acknowledged: 0 lost, 0 wrong")


if __name__ == "__main__":
    main()
