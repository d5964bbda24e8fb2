"""What S3 costs: requests, as boto3 sends them, and what they are for 1,000 tokens beside one object a block.

    python -m benchmarks.s3_cost [--endpoint http://127.0.0.1:7480] [--packs 10000]

Without ``--endpoint`` moto serves, in a process of its own. Credentials come from the environment, or are ``test``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import NamedTuple

import numpy as np

from benchmarks.rig import show
from benchmarks.s3_rig import connect, make_bucket, pack_of, server
from persistkv.config import GroupLayout, RowLayout
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.rows import Rows
from persistkv.storage.store import Store
from persistkv.testing.samples import sample_manifest
from persistkv_tools.rig import fresh_keys

TOKENS_PER_BLOCK = 16
MOST_BESIDE_PACKS = 2
MOST_TO_OPEN = 50


class Model(NamedTuple):
    """A block's size."""

    name: str
    block_bytes: int


MODELS = (Model("demo: 8 layers of 512", 256 << 10), Model("8B: 32 layers, 8 KV heads of 128", 2 << 20))


def count_request(url: str, model: Model, tokens: int) -> list[str]:
    """Store one request and promote it by another handle; a row of the table."""
    blocks = tokens // TOKENS_PER_BLOCK
    memory = memoryview(np.random.default_rng(0).integers(0, 256, blocks * model.block_bytes, dtype=np.uint8).data)
    rows = Rows(memory, RowLayout(model.block_bytes, (GroupLayout(((0, model.block_bytes),)),)))
    identity = Identity.of({"benchmark": model.name})
    backend, client = connect(url)
    store = Store(backend, identity, rows, StoreOptions(), url=url)
    keys = fresh_keys(blocks)
    client.take()
    store.put("r", keys, range(blocks), range(blocks))
    store.end_request(RequestEnd("r", "manifest", (keys,), tokens, TOKENS_PER_BLOCK))
    store.commit()
    stored = client.take()
    assert store.counters.stored_blocks == blocks
    assert not any(store.contains(key) for key in fresh_keys(1000))
    missing = client.take()
    store.close()

    backend, client = connect(url)
    store = Store(backend, identity, rows, StoreOptions(), url=url)
    client.take()
    assert store.read(keys, range(blocks)) == []
    promoted, num_packs = client.take(), len(backend.changes(store.namespace, None).added)
    store.close()
    held = stored - num_packs <= MOST_BESIDE_PACKS and promoted == num_packs and not missing
    per_1000, each = 1000 / tokens, 1000 / TOKENS_PER_BLOCK
    return [
        model.name,
        f"{num_packs} packs + {stored - num_packs}",
        f"{promoted}",
        f"{missing}",
        "yes" if held else "NO",
        f"{stored * per_1000:.1f} / {each:.1f}",
        f"{promoted * per_1000:.1f} / {each:.1f}",
    ]


def count_open(url: str, packs: int, per_commit: int, directory: str) -> list[list[str]]:
    """Fill a bucket, open it anew without and with what was kept on this machine, and idle."""
    identity = Identity.of({"benchmark": "open"})
    backend, client = connect(f"{url}&cache={directory}")
    namespace = backend.open_namespace(identity).id
    blocks = np.zeros((1, 4096), dtype=np.uint8)
    for first in range(0, packs, per_commit):
        batch = [pack_of(namespace, blocks) for _ in range(min(per_commit, packs - first))]
        backend.commit(namespace, CommitBatch(batch, [sample_manifest(f"r{first}")]))
    filling = client.take()
    backend.close()
    rows = []
    for name, cache in (("", "no"), (", index kept on this machine", directory)):
        backend, client = connect(f"{url}&refresh=100s&cache={cache}")
        begin = time.perf_counter()
        backend.open_namespace(identity)
        changes = backend.changes(namespace, None)
        seconds, opening = time.perf_counter() - begin, client.take()
        assert len(changes.added) == packs
        held = "yes" if opening <= MOST_TO_OPEN else "NO"
        rows.append([f"open {packs:,} packs{name}", f"{opening}", f"<= {MOST_TO_OPEN}: {held}", f"{seconds:.2f} s"])
        for _ in range(1000):
            changes = backend.changes(namespace, changes.cursor)
        between = client.take()
        backend._space(namespace).follower.refresh()
        idle = client.take()
        backend.close()
    commits = -(-packs // per_commit)
    each = f"a commit, beside its packs: mean of {commits:,}, snapshots included"
    return [
        *rows,
        ["1,000 looks between two refreshes", f"{between}", f"0: {'NO' if between else 'yes'}", ""],
        ["a refresh where nothing happened", f"{idle}", f"<= 1: {'yes' if idle <= 1 else 'NO'}", ""],
        [each, f"{(filling - packs) / commits:.2f}", "", ""],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint")
    parser.add_argument("--tokens", type=int, default=4096, help="of the request that is stored and promoted")
    parser.add_argument("--packs", type=int, default=10_000)
    parser.add_argument("--per-commit", type=int, default=5)
    arguments = parser.parse_args()
    with server(arguments.endpoint) as endpoint, tempfile.TemporaryDirectory() as directory:
        bucket = make_bucket(endpoint)

        def url(prefix: str) -> str:
            return f"s3://{bucket}/{prefix}?endpoint_url={endpoint}"

        rows = [count_request(f"{url('request')}&cache=no", model, arguments.tokens) for model in MODELS]
        columns = ["model", "store", "promote", "1,000 misses", "packs + 2, ranges + 0, 0"]
        columns += ["store, per 1,000 tokens / one object a block", "promote, the same"]
        show(f"Requests of one context of {arguments.tokens} tokens", columns, rows)
        rows = count_open(url("open"), arguments.packs, arguments.per_commit, directory)
        show("Requests of an engine", ["", "requests", "at most", ""], rows)


if __name__ == "__main__":
    main()
