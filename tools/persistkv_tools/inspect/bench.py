"""``persistkv bench``: a quick check of the medium of a store.

The store and the plain medium take turns. A store ends when its pack is durable, a load when its
bytes are read and verified.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import statistics
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import numpy as np

from persistkv.base import make_offload_key
from persistkv.config import MAX_PACK_BYTES, StoreUrl, parse_size
from persistkv.errors import ConfigurationError, StoreError
from persistkv.memory.rows import ByteArray, StagedBlocks
from persistkv.storage import BACKENDS, open_backend
from persistkv.storage.backend import Backend, CommitBatch, PlainMedium, ReadSpan
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.identity import Identity
from persistkv.storage.mounts import existing_parent
from persistkv_tools import render
from persistkv_tools.command import URL, Command, number
from persistkv_tools.inspect.plain_file import PlainFile
from persistkv_tools.packs import OnBytes, check_piece, pieces
from persistkv_tools.progress import byte_progress, counted

_BLOCK_BYTES = 64 << 10  # 64 KiB
_Times = defaultdict[str, list[float]]
"""Seconds of each round, by operation."""


class Figure(msgspec.Struct, frozen=True):
    """Speed of one operation: medians over the rounds."""

    name: str
    """``store`` or ``load``."""
    seconds: float
    bytes_per_s: float
    limit_seconds: float | None
    """Seconds that the plain medium takes for the same bytes; None: it cannot be used directly."""
    ratio: float | None
    """``limit_seconds`` divided by ``seconds``."""


_COLUMNS = render.columns(
    "operation=name time=seconds speed=bytes_per_s plain=limit_seconds ratio"
)


def bench(
    url: str,
    *,
    size: str,
    rounds: int,
    json: bool,
) -> None:
    """Compare a store with plain reads and writes of the same bytes on this disk or bucket.

    The measurement uses a temporary store next to the named one, which may be absent and is not
    changed. With the default sizes it writes 0.5 GiB.

    Example: persistkv bench lmdb:///var/cache/kv
    """
    job_bytes = parse_size(size, name="--size")
    if job_bytes % _BLOCK_BYTES or job_bytes > MAX_PACK_BYTES:
        limit = render.format_size(MAX_PACK_BYTES)
        raise ConfigurationError("--size", size, f"a multiple of 64KiB up to {limit}")
    with byte_progress() as progress, _scratch(url) as scratch:
        # add one round, which warms up
        on_bytes = counted(progress, "bench", (rounds + 1) * job_bytes)
        try:
            times = _measure(scratch, job_bytes, rounds, on_bytes)
        except OSError as error:
            problem = error.strerror or error
            raise StoreError(f"the plain file failed: {problem}") from error
    figures = [
        _figure("store", job_bytes, times),
        _figure("load", job_bytes, times),
    ]
    if json:
        report = {
            "url": url,
            "scratch_url": scratch,
            "job_bytes": job_bytes,
            "rounds": rounds,
            "figures": figures,
        }
        render.print_json(report)
        return
    pack_size = render.format_size(job_bytes)
    title = f"packs of {pack_size}, medians of {render.count(rounds, 'round')}"
    render.show_table(_COLUMNS, figures, title=title)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--size", metavar="SIZE", default="32MiB", help="Size of one pack."
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=number(least=1),
        default=7,
        help="Number of rounds.",
    )


COMMAND = Command(bench, (URL,), _add_options)


def _figure(
    name: str,
    job_bytes: int,
    times: _Times,
) -> Figure:
    """Return the medians of an operation and of plain transfers of the same bytes.

    :param name: ``store`` or ``load``.
    """
    seconds = round(statistics.median(times[name]), 6)
    plain_seconds = None
    ratio = None
    plain_times = times[f"plain {name}"]
    if plain_times:
        plain_seconds = round(statistics.median(plain_times), 6)
        ratio = round(plain_seconds / seconds, 3)
    speed = round(job_bytes / seconds)
    return Figure(
        name=name,
        seconds=seconds,
        bytes_per_s=speed,
        limit_seconds=plain_seconds,
        ratio=ratio,
    )


@contextmanager
def _scratch(url: str) -> Iterator[str]:
    """Create a temporary store next to that of the URL; yield its URL. At the end, remove it, or
    erase it if it is remote."""
    parsed = StoreUrl.parse(url)
    # a place next to the store is on the same disk, or in the same bucket
    suffix = f".bench-{secrets.token_hex(4)}"
    location = parsed.location.rstrip("/") + suffix
    path = Path(location)
    if path.is_absolute():
        # use the nearest existing directory, so that no parent directory is created and left behind
        location = str(existing_parent(path.parent) / path.name)
    scratch = f"{parsed.scheme}://{location}"
    if parsed.options:
        scratch += f"?{urlencode(parsed.options)}"
    # create the store before the ``try``, because there is nothing to remove if that fails
    open_backend(scratch).close()
    try:
        yield scratch
    finally:
        if Path(location).is_dir():
            shutil.rmtree(location)
        else:
            BACKENDS.get(parsed.scheme).erase(StoreUrl.parse(scratch))


def _measure(
    url: str,
    job_bytes: int,
    rounds: int,
    on_bytes: OnBytes,
) -> _Times:
    """Return the seconds of each operation in each round. They include operations of the plain
    medium, unless it cannot be used directly. Raise OSError if the plain file failed."""
    # memory of an mmap is aligned to pages, as O_DIRECT requires
    source = memoryview(mmap.mmap(-1, job_bytes))
    target = memoryview(mmap.mmap(-1, job_bytes))
    rng = np.random.default_rng(seed=0)
    source[:] = rng.bytes(job_bytes)
    content = np.frombuffer(source, dtype=np.uint8)
    rows = content.reshape(-1, _BLOCK_BYTES)
    times: _Times = defaultdict(list)
    identity = Identity.of({"benchmark": job_bytes})
    with closing(open_backend(url)) as backend, _plain_medium(url) as plain:
        namespace = backend.open_namespace(identity).id
        for number in range(rounds + 1):
            pack = _new_pack(backend, namespace, rows)
            batch = CommitBatch([pack])
            operations: dict[str, Callable[[], object]] = {
                "store": partial(backend.commit, namespace, batch),
                "load": partial(_load, backend, pack, target),
            }
            if plain is not None:
                operations["plain store"] = partial(plain.write, [source])
                operations["plain load"] = partial(plain.read, [target])
            # interleave the operations, so that other work of the disk slows all of them
            for name, operation in operations.items():
                begin = time.perf_counter()
                operation()
                seconds = time.perf_counter() - begin
                if number > 0:  # the first round warms up
                    times[name].append(seconds)
            on_bytes(job_bytes)
    return times


def _new_pack(
    backend: Backend,
    namespace: bytes,
    rows: ByteArray,
) -> PackWriter:
    """Return a pack of these blocks under new keys, because a store would not write blocks that it
    holds."""
    keys = [make_offload_key(os.urandom(32), 0) for _ in rows]
    section = Section(
        group=0,
        block_bytes=_BLOCK_BYTES,
        keys=keys,
        source=StagedBlocks([rows]),
    )
    return PackWriter(namespace, RawCodec(), [section], seal=backend.seal)


def _load(
    backend: Backend,
    pack: PackWriter,
    target: memoryview,
) -> None:
    """Read a pack and verify it; raise StoreError if it is gone or damaged."""
    span = ReadSpan(pack.pack_id, 0, [target])
    if backend.read(pack.namespace, [span]) != [True]:
        raise StoreError("a stored pack is gone: the capacity in the URL is too small")
    (whole_pack,) = pieces(pack.table, most_bytes=len(target))
    defects = check_piece(whole_pack, target, backend.seal)
    if any(defects):
        raise StoreError("a stored pack was read with wrong bytes")


@contextmanager
def _plain_medium(url: str) -> Iterator[PlainMedium | None]:
    """Yield the medium without a store; None: it cannot be used directly."""
    parsed = StoreUrl.parse(url)
    plain = BACKENDS.get(parsed.scheme).plain_medium(parsed)
    if plain is None and Path(parsed.location).is_dir():
        with suppress(OSError):  # raised by a file system without O_DIRECT
            plain = PlainFile(Path(parsed.location) / "plain")
    if plain is None:
        yield None
        return
    with closing(plain):
        yield plain
