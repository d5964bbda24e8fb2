"""Kill processes that store through the adapter, and check the store after each kill: ``python -m
tests.integrations.lmcache.kills --kills 100``.

1. The files of the store never take more than its capacity.
2. A new adapter finds the objects of the last task that was reported as stored, and serves no wrong
   byte of any object.
3. Its usage is that of the objects that it lists, for each salt.
4. When free space is returned to the file system, the payload files take as much as the usage says,
   within 1 %.

Processes are forked, so that LMCache and torch are imported once.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from persistkv.storage import open_backend
from tests.integrations.lmcache.conftest import (
    MODEL,
    Driver,
    Memory,
    memories,
    object_keys,
)
from tests.integrations.lmcache.stand_ins import ObjectKey

CAPACITY = 32 << 20  # 32 MiB: full after a few processes
SHAPE = (2, 4, 64, 256)  # 256 KiB
OBJECT_BYTES = 256 << 10
_TASK_NUMBERS = 100  # numbers of objects of one task
_LOADED_AT_ONCE = 32
_MOST_TASKS = 8  # that a process stores before it is killed
_MOST_S = 0.03  # seconds from its last stored task to the kill
_CLEANED = 5  # every fifth check returns free space
_TOLERANCE = 0.01


class Checked(NamedTuple):
    """What an adapter found in the store."""

    num_objects: int
    usage_bytes: int
    payload_bytes: int | None
    """Bytes of the payload files on disk without free space; None: it was not returned."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", help="on the disk to be used")
    arguments = parser.parse_args()
    # before the forks: it takes seconds
    import_module("persistkv.integrations.lmcache.adapter")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        store = Path(directory) / "store"
        for line in run(store, arguments.kills, arguments.seed):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def run(store: Path, kills: int, seed: int) -> Iterator[str]:
    """Kill processes and check the store. Yield a line for each check that returns free space, and
    a last one.

    :raises AssertionError: a promise is broken.
    """
    draw = random.Random(seed)
    first = largest = num_stored = 0
    largest_error = 0.0
    for kill in range(1, kills + 1):
        num_tasks = draw.randint(1, _MOST_TASKS)
        last, disk_bytes = _kill(store, first, num_tasks, draw.uniform(0.0, _MOST_S))
        largest = max(largest, disk_bytes)
        assert largest <= CAPACITY, f"{largest} bytes on disk"
        cleans = kill % _CLEANED == 0 or kill == kills
        checked = _in_child(_check, store, last, cleans)
        for task in range(first, last + 1):
            num_stored += len(_keys(task))
        # the task that was running at the kill may have been stored
        first = last + 2
        if checked.payload_bytes is not None:
            error = abs(checked.payload_bytes / checked.usage_bytes - 1)
            assert error <= _TOLERANCE, checked
            largest_error = max(largest_error, error)
            yield f"{kill} kills: {checked}"
    yield (
        f"{kills} kills: at most {largest / CAPACITY:.3f} of the capacity on disk; usage differs "
        f"from the payload files by at most {largest_error:.2%}; {checked.num_objects} of "
        f"{num_stored} objects are held"
    )


def _kill(store: Path, first: int, num_tasks: int, after_s: float) -> tuple[int, int]:
    """Start a process that stores, and kill it.

    :param first: its first task.
    :param num_tasks: tasks that it reports as stored before it is killed, ``after_s`` seconds
        later.
    :returns: the last task that it reported as stored, and the most bytes on disk meanwhile.
    """
    process, stored = _start(_store, store, first)
    last = largest = 0
    kill_at = None
    while kill_at is None or time.monotonic() < kill_at:
        largest = max(largest, _disk_bytes(store))
        assert process.is_alive(), "the process that stores has ended"
        if stored.poll(0.002):
            last = stored.recv()
            if last == first + num_tasks - 1:
                kill_at = time.monotonic() + after_s
    process.kill()
    process.join()
    # reported between the last look and the kill
    with suppress(EOFError):
        while stored.poll():
            last = stored.recv()
    return last, max(largest, _disk_bytes(store))


def _store(store: Path, first: int, stored: Connection) -> None:
    """Store tasks, and report the number of each one that is stored."""
    driver = _open(store)
    for task in itertools.count(first):
        keys = _keys(task)
        objects = [_object(key) for key in keys]
        assert driver.store(keys, objects)
        stored.send(task)


def _check(store: Path, last: int, cleans: bool, found: Connection) -> None:
    """Check the content of the store with a new adapter, and report it.

    :param last: task that was reported as stored last.
    :param cleans: whether to return free space to the file system.
    """
    driver = _open(store)
    keys = _listed(driver)
    assert set(_keys(last)) <= set(keys), f"objects of task {last} are lost"
    for start in range(0, len(keys), _LOADED_AT_ONCE):
        some = keys[start : start + _LOADED_AT_ONCE]
        targets = memories(len(some), shape=SHAPE)
        assert driver.load(some, targets) == [True] * len(some)
        for key, target in zip(some, targets, strict=True):
            assert np.array_equal(_object(key).bytes, target.bytes), key
    usage = driver.adapter.get_usage()
    expected = Counter(key.cache_salt for key in keys)
    for salt, num_objects in expected.items():
        assert usage.bytes_by_cache_salt[salt] == num_objects * OBJECT_BYTES
    assert len(usage.bytes_by_cache_salt) == len(expected)
    driver.adapter.close()
    payload_bytes = None
    if cleans:
        with closing(open_backend(_url(store))) as backend:
            backend.release_free()
        payload_bytes = _disk_bytes(store / "segments")
    found.send(Checked(len(keys), usage.total_bytes_used, payload_bytes))


def _open(store: Path) -> Driver:
    from persistkv.integrations.lmcache.adapter import PersistKVL2Adapter

    params = {
        "url": _url(store),
        "models": {MODEL: "name:weights"},
        "engine": "vllm 0.32 FLASH_ATTN",
    }
    return Driver(PersistKVL2Adapter(params, l1_memory_desc=None))


def _url(store: Path) -> str:
    return f"lmdb://{store}?capacity={CAPACITY}"


def _keys(task: int) -> list[ObjectKey]:
    """Return the keys of a task: 1, 4 or 7 MiB of one of three salts."""
    count = 4 + 12 * (task % 3)
    start = task * _TASK_NUMBERS
    return object_keys(range(start, start + count), salt=("", "a", "b")[task // 3 % 3])


def _object(key: ObjectKey) -> Memory:
    number = int.from_bytes(key.chunk_hash, "big")
    return memories(1, seed=number, shape=SHAPE)[0]


def _listed(driver: Driver) -> list[ObjectKey]:
    """Return all keys that an adapter lists."""
    keys: list[ObjectKey] = []
    cursor = None
    while True:
        page = driver.adapter.list_l2_keys(cursor=cursor)
        for entry in page.entries:
            assert entry.size_bytes == OBJECT_BYTES
            number = int(entry.key.chunk_hash_hex, 16)
            keys += object_keys([number], salt=entry.key.cache_salt)
        cursor = page.next_page_token
        if cursor is None:
            return keys


def _disk_bytes(path: Path) -> int:
    """Return the bytes that the files below a directory take on disk."""
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


def _start(
    work: Callable[..., None], *arguments: object
) -> tuple[ForkProcess, Connection]:
    """Start a forked process; return it, and the connection on which it reports."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(*arguments, sending), daemon=True)
    process.start()
    sending.close()
    return process, receiving


def _in_child(work: Callable[..., None], *arguments: object) -> Checked:
    """Run a function in a forked process; return what it reports."""
    process, reported = _start(work, *arguments)
    try:
        result: Checked = reported.recv()
    except EOFError:
        sys.exit("a check has failed")
    process.join()
    return result


if __name__ == "__main__":
    main()
