"""One flipped bit in 1 % of the objects that LMCache's second level holds: how many wrong objects
are served, with persistkv and with LMCache's ``fs`` and ``fs_native`` adapters.

Run it with a Python that has LMCache (``make setup-lmcache``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.lmcache_l2 import adapters
from benchmarks.rig import show
from tests.integrations.lmcache.conftest import (
    Driver,
    Memory,
    descriptions,
    memories,
    object_keys,
)

MODEL = "bench-model"
SHAPE = (2, 4, 64, 256)  # 256 KiB in 16 bits
SHARE = 100  # every hundredth object


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=400)
    parser.add_argument("--directory", help="on the disk to be used")
    arguments = parser.parse_args()
    rows = []
    for name in ("persistkv", "fs", "fs_native"):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            rows.append(measure(name, Path(directory).resolve(), arguments.objects))
    show(
        f"One flipped bit in 1 % of {arguments.objects} objects",
        ["adapter", "damaged", "loaded", "of these wrong"],
        rows,
    )


def measure(name: str, directory: Path, num_objects: int) -> list[str]:
    """Store objects, damage some, and load all with a new adapter; return a row of the table."""
    keys = object_keys(range(num_objects), model=MODEL)
    objects = memories(num_objects, seed=1, shape=SHAPE)
    driver = open_adapter(name, directory)
    if not driver.store(keys, objects):
        raise SystemExit(f"{name}: not all objects were stored")
    driver.adapter.close()
    damaged = flip_bits(directory, objects[::SHARE])

    again = open_adapter(name, directory)
    again.lookup(keys, descriptions(SHAPE))
    targets = memories(num_objects, shape=SHAPE)
    is_loaded = again.load(keys, targets)
    again.adapter.close()
    wrong = 0
    for loaded, stored, target in zip(is_loaded, objects, targets, strict=True):
        if loaded and not np.array_equal(stored.bytes, target.bytes):
            wrong += 1
    return [name, f"{damaged}", f"{sum(is_loaded)}", f"{wrong}"]


def open_adapter(name: str, directory: Path) -> Driver:
    """Open an adapter as LMCache's server does."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import (
        parse_args_to_l2_adapters_config,
    )

    configuration = adapters(directory)[name]
    if "use_odirect" in configuration:
        # the objects are not aligned
        configuration["use_odirect"] = False
    parsed = argparse.Namespace(l2_adapter=[json.dumps(configuration)])
    (config,) = parse_args_to_l2_adapters_config(parsed).adapters
    return Driver(create_l2_adapter(config, l1_memory_desc=None))


def flip_bits(directory: Path, objects: list[Memory]) -> int:
    """Flip a bit of each object in the files that hold it; return how many were found."""
    wanted = [memory.bytes.tobytes() for memory in objects]
    flipped = 0
    for file in directory.rglob("*"):
        if not file.is_file():
            continue
        data = bytearray(file.read_bytes())
        places = [data.find(content) for content in wanted]
        found = [place for place in places if place >= 0]
        for place in found:
            data[place + 1000] ^= 16
        if found:
            file.write_bytes(data)
            flipped += len(found)
    return flipped


if __name__ == "__main__":
    main()
