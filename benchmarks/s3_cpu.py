"""CPU time of the client per GB of PUT and of GET with packs of 16 MiB, compared with plain boto3
on the same bytes.

    python -m benchmarks.s3_cpu [--endpoint http://127.0.0.1:7480] [--mib 1024] [--rounds 3]

Without ``--endpoint``, a moto server runs in a process of its own; its CPU time does not count, and
no figure here is a speed. The variants alternate, and their medians are shown. persistkv's
signatures exclude the bodies (``unsigned_payload``), as is the default over https.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.rig import show
from benchmarks.s3_rig import make_bucket, open_alone, pack_of, plain_client, server
from persistkv.memory.rows import ByteArray
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.identity import Identity
from persistkv.testing.samples import open_payload

PACK_BYTES = 16 << 20  # 16 MiB
BLOCK_BYTES = 256 << 10  # 256 KiB
PUT_TARGET, GET_TARGET = 0.6, 0.8  # CPU seconds per GB


def cpu_s() -> float:
    """Return the CPU seconds of this process in all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_per_gb(work: Callable[[], object], num_bytes: int) -> float:
    """Return the CPU seconds of ``work`` per GB."""
    before = cpu_s()
    work()
    return (cpu_s() - before) / (num_bytes / 1e9)


def ours(url: str, blocks: ByteArray, num_bytes: int, key: bool) -> tuple[float, float]:
    """Measure the store without its background work: commit packs one by one, and read and verify
    them in existing memory."""
    options = "&unsigned_payload=yes"
    if key:
        options += "&key_env=PERSISTKV_BENCHMARK_KEY"
    backend = open_alone(f"{url}{options}")
    namespace = backend.open_namespace(Identity.of({"benchmark": "cpu"})).id
    seal = backend.seal
    packs = [pack_of(namespace, blocks, seal) for _ in range(num_bytes // PACK_BYTES)]
    put = cpu_per_gb(
        lambda: [backend.commit(namespace, CommitBatch([pack])) for pack in packs],
        num_bytes,
    )
    into = memoryview(bytearray(PACK_BYTES))

    def read_all() -> None:
        for pack in packs:
            backend.read(namespace, [ReadSpan(pack.pack_id, 0, [into])])
            open_payload(seal, pack.table, into)

    got = cpu_per_gb(read_all, num_bytes)
    backend.close()
    return put, got


def plain(
    client: Any,
    bucket: str,
    blocks: ByteArray,
    length: int,
    num_bytes: int,
) -> tuple[float, float]:
    """Measure a loop over boto3 with its defaults."""
    body = bytes(blocks.reshape(-1)[:length])
    keys = [f"plain/{length}/{number}" for number in range(num_bytes // length)]
    put = cpu_per_gb(
        lambda: [client.put_object(Bucket=bucket, Key=key, Body=body) for key in keys],
        num_bytes,
    )
    got = cpu_per_gb(
        lambda: [
            client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys
        ],
        num_bytes,
    )
    client.delete_objects(
        Bucket=bucket,
        Delete={"Objects": [{"Key": key} for key in keys[:1000]], "Quiet": True},
    )
    return put, got


def row_of(
    name: str,
    figures: Sequence[tuple[float, float]],
    targets: tuple[float, float] | None,
) -> list[str]:
    """Return the table row: medians, and whether they meet the targets."""
    medians = [statistics.median(values) for values in zip(*figures, strict=True)]
    held = (
        ""
        if targets is None
        else "yes"
        if all(m <= t for m, t in zip(medians, targets, strict=True))
        else "NO"
    )
    return [name, *(f"{median:.2f}" for median in medians), held]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint")
    parser.add_argument(
        "--mib",
        type=int,
        default=1024,
        help="a round; of the 256 KiB objects a quarter",
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["PERSISTKV_BENCHMARK_KEY"] = "k" * 32
    num_bytes = max(PACK_BYTES, (arguments.mib << 20) // PACK_BYTES * PACK_BYTES)
    blocks = np.random.default_rng(1).integers(
        0, 256, (PACK_BYTES // BLOCK_BYTES, BLOCK_BYTES), dtype=np.uint8
    )
    figures: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with server(arguments.endpoint) as endpoint:
        for number in range(arguments.rounds):
            bucket = make_bucket(endpoint)
            url = f"s3://{bucket}/cpu{number}?endpoint_url={endpoint}&cache=no"
            client = plain_client(endpoint)
            figures["16 MiB packs, persistkv"].append(
                ours(url, blocks, num_bytes, key=False)
            )
            figures["the same, encrypted with a key"].append(
                ours(url, blocks, num_bytes, key=True)
            )
            figures["16 MiB objects, plain boto3"].append(
                plain(client, bucket, blocks, PACK_BYTES, num_bytes)
            )
            figures["256 KiB objects, plain boto3"].append(
                plain(client, bucket, blocks, BLOCK_BYTES, num_bytes // 4)
            )
            client.close()
    of = {"16 MiB packs, persistkv": (PUT_TARGET, GET_TARGET)}
    rows = [row_of(name, values, of.get(name)) for name, values in figures.items()]
    where = "moto" if arguments.endpoint is None else arguments.endpoint
    title = (
        f"Client CPU, seconds per GB, against {where}: medians of {arguments.rounds}"
    )
    show(title, ["", "put", "got", f"<= {PUT_TARGET} and {GET_TARGET}"], rows)


if __name__ == "__main__":
    main()
