"""Deleting a pack that many requests share, and returning free space: duration, and delay of other
writers.

``python -m benchmarks.maintenance`` prints both for growing stores. The expected duration is linear
in the size of the store. Another process, which commits all the while, should wait for single
transactions, not for the whole operation.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.rig import show
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest, sample_pack

IDENTITY = Identity.of({"benchmark": "maintenance"})
AT_ONCE = 100
OTHER = """
import sys, threading, time
from persistkv.storage.backend import CommitBatch
from persistkv.storage import open_backend
from benchmarks.maintenance import IDENTITY
backend = open_backend(sys.argv[1])
name = backend.open_namespace(IDENTITY).id
print("ready", flush=True)
longest, end = 0.0, float("inf")
def wait_for_end():
    global end
    sys.stdin.read()
    end = time.monotonic()
threading.Thread(target=wait_for_end, daemon=True).start()
while time.monotonic() < end:
    begin = time.perf_counter()
    backend.commit(name, CommitBatch(touches=[bytes(16)]))
    longest = max(longest, time.perf_counter() - begin)
    time.sleep(0.002)
print(longest, flush=True)
"""


def main() -> None:
    """Run the measurements and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1000, 2000, 4000],
        help="requests, or packs",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="where the stores are created; default: temporary",
    )
    arguments = parser.parse_args()
    for title, prepare, run in (
        ("Deleting a pack that so many requests share", share_pack, delete_shared),
        (
            "Returning free space after every other of so many packs of 16 KiB was deleted",
            scatter,
            release,
        ),
    ):
        rows = []
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                seconds, waited = measure(
                    f"lmdb://{directory}/store?capacity=1GiB", size, prepare, run
                )
            rows.append(
                [
                    str(size),
                    f"{seconds:.2f}",
                    f"{1e6 * seconds / size:.0f}",
                    f"{1e3 * waited:.0f}",
                ]
            )
        show(
            title,
            ["size", "seconds", "µs each", "longest commit of another process, ms"],
            rows,
        )


def measure(
    url: str,
    size: int,
    prepare: Callable[[Backend, bytes, int], None],
    run: Callable[[Backend, bytes], None],
) -> tuple[float, float]:
    """Return the seconds of the operation, and of the longest commit of another process
    meanwhile."""
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(IDENTITY).id
        prepare(backend, namespace, size)
        with other_process(url) as waited:
            begin = time.perf_counter()
            run(backend, namespace)
            seconds = time.perf_counter() - begin
        return seconds, waited[0]


@contextmanager
def other_process(url: str) -> Iterator[list[float]]:
    """Run another process that commits; after the block, the list has the seconds of its longest
    commit."""
    longest: list[float] = []
    command = [sys.executable, "-c", OTHER, url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        process.stdout.readline()
        yield longest
        process.stdin.close()
        longest.append(float(process.stdout.readline()))


def share_pack(backend: Backend, namespace: bytes, size: int) -> None:
    """Store requests of four packs each; all requests share three of the packs."""
    shared = [
        sample_pack(namespace, seed, blocks=1, block_bytes=4096, depth=seed)
        for seed in range(3)
    ]
    backend.commit(namespace, CommitBatch(shared))
    for start in range(0, size, AT_ONCE):
        packs = [
            sample_pack(namespace, 10 + seed, blocks=1, block_bytes=4096)
            for seed in range(start, start + AT_ONCE)
        ]
        chains = [
            [*(other.pack_id for other in shared), pack.pack_id] for pack in packs
        ]
        manifests = [
            sample_manifest(f"r{start + number}", packs=chain)
            for number, chain in enumerate(chains)
        ]
        backend.commit(namespace, CommitBatch(packs, manifests))


def delete_shared(backend: Backend, namespace: bytes) -> None:
    """Delete the first shared pack, and with it all requests."""
    first = sample_pack(namespace, 0, blocks=1, block_bytes=4096).pack_id
    backend.commit(namespace, CommitBatch(deletions=[first]))
    assert backend.stats().packs == 0


def scatter(backend: Backend, namespace: bytes, size: int) -> None:
    """Store packs and delete every other one."""
    for start in range(0, size, AT_ONCE):
        packs = [
            sample_pack(namespace, seed, blocks=1, block_bytes=16384)
            for seed in range(start, start + AT_ONCE)
        ]
        backend.commit(namespace, CommitBatch(packs))
        backend.commit(
            namespace, CommitBatch(deletions=[pack.pack_id for pack in packs[::2]])
        )


def release(backend: Backend, namespace: bytes) -> None:
    """Return all free space to the file system."""
    backend.release_free()


if __name__ == "__main__":
    main()
