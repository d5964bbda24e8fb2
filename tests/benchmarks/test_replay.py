"""Replay of a trace on a store."""

from __future__ import annotations

import json
import lzma
import random
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.trace_replay import Replayed, distinct_blocks, read_trace, replay
from persistkv.storage import open_backend

BLOCK = 4096


def make_trace(seed: int = 0, count: int = 60) -> list[list[int]]:
    """Return the block hashes of conversations that grow and continue in random order."""
    draw = random.Random(seed)
    chains: list[list[int]] = []
    turns: dict[int, int] = {}  # number of blocks of each conversation
    for _ in range(count):
        talk = draw.randrange(12)
        turns[talk] = turns.get(talk, 0) + draw.randint(1, 3)
        chains.append([1000 * talk + block for block in range(turns[talk])])
    return chains


def lines_of(chains: list[list[int]]) -> str:
    return "".join(json.dumps({"hash_ids": chain}) + "\n" for chain in chains)


def test_replay_ample_capacity_reaches_unbounded_hit_rate(tmp_path: Path) -> None:
    chains = make_trace()
    asked, distinct = sum(map(len, chains)), distinct_blocks(chains)
    run = Replayed(f"lmdb://{tmp_path}/store?capacity=1GiB", 1 << 30, distinct)
    found = replay(chains, run, BLOCK)
    assert found.hits == asked - distinct
    assert (found.wrong_blocks, found.evicted_blocks) == (0, 0)
    assert found.loaded_bytes == found.hits * BLOCK
    assert found.held_blocks <= distinct


@pytest.mark.parametrize(
    ("pack_blocks", "sizes"), [(8, [3, 4, 5, 8, 8]), (16, [3, 12, 13]), (0, [13, 15])]
)
def test_replay_pack_blocks_cuts_packs_at_fixed_depths(
    tmp_path: Path, pack_blocks: int, sizes: list[int]
) -> None:
    url = f"lmdb://{tmp_path}/store"
    chains = [list(range(length)) for length in (13, 28)]
    replay(chains, Replayed(url, None, 28), BLOCK, pack_blocks=pack_blocks)
    with closing(open_backend(url, read_only=True)) as backend:
        (namespace,) = backend.namespaces()
        found = [len(table.keys) for table in backend.changes(namespace.id, None).added]
    assert sorted(found) == sizes


def test_replay_small_store_evicts_and_serves_right_bytes(tmp_path: Path) -> None:
    chains = make_trace()
    distinct = distinct_blocks(chains)
    capacity = distinct * (64 << 10) // 2
    run = Replayed(f"lmdb://{tmp_path}/store?capacity={capacity}", capacity, distinct)
    found = replay(chains, run, 64 << 10)
    assert 0 < found.hits <= sum(map(len, chains)) - distinct
    assert found.evicted_blocks > 0
    assert found.wrong_blocks == 0
    assert found.disk_bytes <= capacity


def test_read_trace_plain_or_packed_stops_at_the_limit(tmp_path: Path) -> None:
    chains = make_trace()
    (tmp_path / "trace.jsonl").write_text(lines_of(chains))
    (tmp_path / "trace.jsonl.xz").write_bytes(lzma.compress(lines_of(chains).encode()))
    assert read_trace(tmp_path / "trace.jsonl") == chains
    assert read_trace(tmp_path / "trace.jsonl.xz", 7) == chains[:7]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("hello\n", "malformed"),
        ('{"hash_ids": [1]}\n{"ids": [1]}\n', "hash_ids"),
        ('{"hash_ids": [1, 2]}\n{"hash_ids": [3, 2]}\n', "follows both 1 and 3"),
        ("", "no blocks"),
    ],
)
def test_read_trace_malformed_raises(tmp_path: Path, content: str, part: str) -> None:
    (tmp_path / "trace.jsonl").write_text(content)
    with pytest.raises(ValueError, match=part):
        read_trace(tmp_path / "trace.jsonl")
