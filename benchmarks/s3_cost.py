"""Number of requests to S3, counted by a proxy, and per 1,000 tokens compared with one object per
block.

    python -m benchmarks.s3_cost [--endpoint http://127.0.0.1:7480] [--packs 10000]

Without ``--endpoint``, a moto server runs in a process of its own. Credentials come from the
environment; the default is ``test``. The stored blocks are noise with the exponents of bfloat16
values, which gives the codecs some work.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmarks.rig import show
from benchmarks.s3_proxy import CountingProxy
from benchmarks.s3_rig import make_bucket, open_alone, pack_of, server
from benchmarks.store_rig import Rig, fresh_keys
from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.samples import sample_manifest
from persistkv_s3 import S3Backend

TOKENS_PER_BLOCK = 16
MOST_BESIDE_PACKS = 2
MOST_TO_OPEN = 50
OPENED = Identity.of({"benchmark": "open"})
IDLE_REFRESH_S = 1.0
# shortest time between two refreshes, as a share of the interval: refreshes have jitter
LEAST_PAUSE = 0.75


class Model(NamedTuple):
    """Name of a model, and size of its blocks."""

    name: str
    block_bytes: int


MODELS = (
    Model("demo: 8 layers of 512", 256 << 10),
    Model("8B: 32 layers, 8 KV heads of 128", 2 << 20),
)


CODECS = ("raw", "planes")


def sample_memory(num_bytes: int) -> memoryview:
    """Return ``num_bytes`` of normally distributed bfloat16 values, which repeat every 2 MiB."""
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    tile = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return memoryview(np.tile(tile, -(-num_bytes // len(tile)))[:num_bytes].data)


def count_request(
    url: str,
    proxy: CountingProxy,
    model: Model,
    codec: str,
    tokens: int,
) -> list[str]:
    """Store one request and promote it through another handle; return a row of the table."""
    blocks = tokens // TOKENS_PER_BLOCK
    layout = RowLayout(model.block_bytes, (GroupLayout(((0, model.block_bytes),)),))
    rows = Rows(sample_memory(blocks * model.block_bytes), layout)
    identity, options = (
        Identity.of({"benchmark": model.name, "codec": codec}),
        StoreOptions(codec=codec),
    )
    store = BlockingStore(open_alone(url), identity, rows, options, url=url)
    keys = fresh_keys(blocks)
    proxy.take()
    store.put("r", keys, range(blocks), range(blocks))
    store.end_request(RequestEnd("r", "manifest", (keys,), tokens, TOKENS_PER_BLOCK))
    store.flush()
    stored = proxy.take()
    assert store.counters.stored_blocks == blocks
    assert not any(store.contains(key) for key in fresh_keys(1000))
    missing = proxy.take()
    store.close()

    backend = open_alone(url)
    store = BlockingStore(backend, identity, rows, options, url=url)
    proxy.take()
    assert store.read(keys, range(blocks)) == []
    promoted, num_packs = (
        proxy.take(),
        len(list(backend.changes(store.namespace, None).added)),
    )
    store.close()
    held = (
        stored - num_packs <= MOST_BESIDE_PACKS
        and promoted == num_packs
        and not missing
    )
    per_1000, each = 1000 / tokens, 1000 / TOKENS_PER_BLOCK
    return [
        f"{model.name}, {codec}",
        f"{num_packs} packs + {stored - num_packs}",
        f"{promoted}",
        f"{missing}",
        "yes" if held else "NO",
        f"{stored * per_1000:.1f} / {each:.1f}",
        f"{promoted * per_1000:.1f} / {each:.1f}",
    ]


def fill(url: str, packs: int, per_commit: int, blocks: int) -> None:
    """Commit packs of ``blocks`` tiny blocks each; only the size of the index matters."""
    backend = S3Backend.open(StoreUrl.parse(url))
    namespace = backend.open_namespace(OPENED).id
    content = np.zeros((blocks, 8), dtype=np.uint8)
    for first in range(0, packs, per_commit):
        batch = [
            pack_of(namespace, content) for _ in range(min(per_commit, packs - first))
        ]
        backend.commit(namespace, CommitBatch(batch, [sample_manifest(f"r{first}")]))
    backend.close()


def count_open(url: str, proxy: CountingProxy, packs: int, name: str) -> list[str]:
    """Open a full bucket; return a row of the table."""
    proxy.take()
    begin = time.perf_counter()
    backend = S3Backend.open(StoreUrl.parse(url))
    backend.open_namespace(OPENED)
    found = len(list(backend.changes(OPENED.digest, None).added))
    seconds, opening = time.perf_counter() - begin, proxy.take()
    backend.close()
    assert found == packs
    held = "yes" if opening <= MOST_TO_OPEN else "NO"
    return [
        f"open {packs:,} packs{name}",
        f"{opening}",
        f"<= {MOST_TO_OPEN}: {held}",
        f"{seconds:.2f} s",
    ]


def count_idle(url: str, proxy: CountingProxy, refreshes: int) -> list[str]:
    """Count the requests of an idle store in its own process; return a row of the table."""
    rig = Rig(2, 4096)
    client = rig.client(f"{url}&refresh={IDLE_REFRESH_S:g}s")
    client.open()
    finish_opening = time.monotonic() + 2 * IDLE_REFRESH_S
    while time.monotonic() < finish_opening:
        client.poll()
        time.sleep(0.01)
    proxy.take()
    until = time.monotonic() + refreshes * IDLE_REFRESH_S
    while time.monotonic() < until:
        client.poll()
        time.sleep(0.01)
    idle = proxy.take()
    client.close()
    most = refreshes / LEAST_PAUSE + 1
    name = f"an idle engine, {refreshes} times its refresh"
    return [name, f"{idle}", f"<= 1 a refresh: {'yes' if idle <= most else 'NO'}", ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint")
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096,
        help="of the request that is stored and promoted",
    )
    parser.add_argument("--packs", type=int, default=10_000)
    parser.add_argument("--per-commit", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=128, help="of a pack of those")
    parser.add_argument(
        "--refreshes", type=int, default=20, help="how long an engine idles"
    )
    arguments = parser.parse_args()
    with (
        server(arguments.endpoint) as endpoint,
        tempfile.TemporaryDirectory() as directory,
    ):
        bucket, proxy = (
            make_bucket(endpoint),
            CountingProxy(urlsplit(endpoint).port or 80),
        )

        def url(prefix: str, cache: str = "no") -> str:
            return f"s3://{bucket}/{prefix}?endpoint_url=http://127.0.0.1:{proxy.port}&cache={cache}"

        pairs = [(model, codec) for model in MODELS for codec in CODECS]
        rows = [
            count_request(url("request"), proxy, model, codec, arguments.tokens)
            for model, codec in pairs
        ]
        columns = [
            "model, codec",
            "store",
            "promote",
            "1,000 misses",
            "packs + 2, ranges + 0, 0",
        ]
        columns += ["store, per 1,000 tokens / one object a block", "promote, the same"]
        show(f"Requests of one context of {arguments.tokens} tokens", columns, rows)
        packs, per_commit = arguments.packs, arguments.per_commit
        fill(url("open", directory), packs, per_commit, arguments.blocks)
        commits = -(-packs // per_commit)
        each = f"a commit without its packs: mean of {commits:,}, with merges"
        rows = [
            [each, f"{(proxy.take() - packs) / commits:.2f}", "", ""],
            count_open(url("open"), proxy, packs, ""),
            count_open(url("open", directory), proxy, packs, ", replica present"),
            count_idle(url("open"), proxy, arguments.refreshes),
        ]
        show("Requests of an engine", ["", "requests", "at most", ""], rows)
        proxy.close()


if __name__ == "__main__":
    main()
