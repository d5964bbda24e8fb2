from __future__ import annotations

import json
import lzma
import random
import subprocess
import sys
import time
from contextlib import closing

import pytest

from persistkv.storage import open_backend
from persistkv_tools.inspect.replay import distinct_blocks, read_trace
from tests.tools.signals import interrupt, obey_ctrl_c

BLOCK = 4096


def make_trace(seed: int = 0, count: int = 60) -> list[list[int]]:
    """Return the block hashes of conversations that grow and continue in random order."""
    draw, chains, turns = random.Random(seed), [], {}
    for _ in range(count):
        talk = draw.randrange(12)
        turns[talk] = turns.get(talk, 0) + draw.randint(1, 3)
        chains.append([1000 * talk + block for block in range(turns[talk])])
    return chains


@pytest.fixture
def trace(tmp_path):
    chains = make_trace()
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": n, "hash_ids": chain}) + "\n"
            for n, chain in enumerate(chains)
        )
    )
    return path, chains


def test_replay_ample_capacity_reaches_unbounded_hit_rate(run, trace, tmp_path):
    path, chains = trace
    done = run(
        "replay",
        f"lmdb://{tmp_path}/store?capacity=1GiB",
        str(path),
        "--block-size",
        "4KiB",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    asked = sum(map(len, chains))
    assert (found["requests"], found["blocks"], found["distinct_blocks"]) == (
        60,
        asked,
        distinct_blocks(chains),
    )
    (replayed,) = found["runs"]
    possible = asked - distinct_blocks(chains)
    assert replayed["hits"] == possible
    assert replayed["hit_rate"] == found["unbounded_hit_rate"]
    assert replayed["hit_rate"] == round(possible / asked, 4)
    assert (replayed["wrong_blocks"], replayed["evicted_blocks"]) == (0, 0)
    assert replayed["loaded_bytes"] == possible * BLOCK
    assert replayed["held_blocks"] <= found["distinct_blocks"]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ((), [3, 4, 5, 8, 8]),
        (("--pack-blocks", "16"), [3, 12, 13]),
        (("--pack-blocks", "0"), [13, 15]),
    ],
)
def test_replay_pack_blocks_cuts_packs_at_fixed_depths(run, tmp_path, options, sizes):
    lines = [
        json.dumps({"hash_ids": list(range(length))}) + "\n" for length in (13, 28)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    done = run(
        "replay",
        f"lmdb://{tmp_path}/store",
        "trace.jsonl",
        "--block-size",
        "4KiB",
        *options,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    with closing(open_backend(f"lmdb://{tmp_path}/store", read_only=True)) as backend:
        (namespace,) = backend.namespaces()
        found = [len(table.keys) for table in backend.changes(namespace.id, None).added]
    assert sorted(found) == sizes


def test_replay_each_share_uses_separate_store(run, trace, tmp_path):
    path, chains = trace
    packed = tmp_path / "trace.jsonl.xz"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    shares = ("--share", "0.5", "--share", "1", "--block-size", "64KiB")
    done = run("replay", f"lmdb://{tmp_path}/stores", str(packed), *shares, "--json")
    assert done.returncode == 0, done.stderr
    replayed = json.loads(done.stdout)
    unbounded, (half, whole) = replayed["unbounded_hit_rate"], replayed["runs"]
    assert (half["nominal_blocks"], whole["nominal_blocks"]) == (
        distinct_blocks(chains) // 2,
        distinct_blocks(chains),
    )
    assert half["capacity"] < whole["capacity"]
    assert 0 < half["hits"] <= whole["hits"]
    for found in (half, whole):
        assert found["requests_sent"] == {}
        assert found["wrong_blocks"] == 0
        assert found["hit_rate"] <= unbounded
        assert found["disk_bytes"] <= found["capacity"]
        assert run("verify", found["url"].partition("?")[0]).returncode == 0


def test_replay_text_has_rates(run, trace, tmp_path):
    shown = run(
        "replay", f"lmdb://{tmp_path}/new", str(trace[0]), "--requests", "5"
    ).stdout
    for part in ("held", "evicted", "5 requests", "hit rate"):
        assert part in shown


@pytest.mark.parametrize("seconds", [1.0, 1.5])
def test_replay_interrupted_ends_at_once(tmp_path, seconds):
    """Send Ctrl-C while the store, which runs in a thread of its own, writes."""
    lines = [
        json.dumps({"hash_ids": [100 * talk + block for block in range(50)]}) + "\n"
        for talk in range(5000)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    command = [
        sys.executable,
        "-m",
        "persistkv_tools",
        "replay",
        f"lmdb://{tmp_path}/store",
        "trace.jsonl",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=obey_ctrl_c
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "store").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    said, took_s = interrupt(process)
    assert (process.returncode, said) == (130, "persistkv: interrupted\n")
    assert took_s < 10


def test_replay_nonempty_store_exits_2_and_keeps_it(run, filled, trace):
    before = run("ls", filled, "--json").stdout
    done = run("replay", filled, str(trace[0]))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "a new or empty store" in done.stderr
    assert run("ls", filled, "--json").stdout == before


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("hello\n", "line 1"),
        ('{"hash_ids": [1]}\n{"ids": [1]}\n', "line 2"),
        ('{"hash_ids": ["a"]}\n', "line 1"),
        ('{"hash_ids": [1, 2]}\n{"hash_ids": [3, 2]}\n', "follows both 1 and 3"),
        ("", "at least one block"),
    ],
)
def test_replay_malformed_trace_exits_2(run, tmp_path, content, part):
    (tmp_path / "trace.jsonl").write_text(content)
    done = run("replay", f"lmdb://{tmp_path}/new", "trace.jsonl")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert part in done.stderr
    assert not (tmp_path / "new").exists()


def test_replay_unreadable_file_exits_2(run, tmp_path):
    (tmp_path / "broken.xz").write_text("hello")
    for name in ("absent.jsonl", "broken.xz"):
        done = run("replay", f"lmdb://{tmp_path}/new", name)
        assert done.returncode == 2
        assert name in done.stderr


@pytest.mark.parametrize(
    "options", [("--share", "0"), ("--share", "1.5"), ("--block-size", "1000")]
)
def test_replay_bad_option_exits_2(run, trace, tmp_path, options):
    done = run("replay", f"lmdb://{tmp_path}/new", str(trace[0]), *options)
    assert done.returncode == 2
    assert options[0] in done.stderr
    assert not (tmp_path / "new").exists()


def test_read_trace_stops_at_the_limit(trace):
    path, chains = trace
    assert read_trace(path, 7) == chains[:7]
