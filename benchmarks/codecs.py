"""Compression ratio and speed of the codecs on real bfloat16 K/V, against the entropy bound and
zstd level 1.

    python -m benchmarks.codecs [--kv FILE] [--mib 48] [--rounds 9] [--write FILE]

FILE holds raw bfloat16 bytes. Without ``--kv`` the benchmark makes them, which needs the packages
that real_kv.py names; ``--write`` saves them for an environment without those packages. The bound
is the order-0 entropy of both bytes of the values, frame by frame.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.real_kv import make_kv, missing_packages
from benchmarks.rig import show
from persistkv.storage.format.codec import Codec, PlanesCodec, RawCodec, ZstdCodec
from persistkv.storage.format.pack import FRAME_BYTES, align

BOUND_TARGET = 0.98
DECODE_TARGET = 1.5


@dataclass
class Result:
    """Measurements of one codec over all frames."""

    codec: Codec
    stored: int = 0
    at_rest: int = 0
    """Bytes with each frame padded to 4 KiB."""
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


def measure(raw: bytes, codecs: list[Codec], rounds: int) -> list[Result]:
    """Encode and decode all frames with each codec in alternation, ``rounds`` times after a warm-up
    round."""
    frames = [
        memoryview(raw)[start : start + FRAME_BYTES]
        for start in range(0, len(raw), FRAME_BYTES)
    ]
    out = memoryview(bytearray(FRAME_BYTES))
    results = [Result(codec) for codec in codecs]
    for round_number in range(rounds + 1):
        for result in results:
            begin = time.perf_counter()
            stored = [result.codec.encode(frame) for frame in frames]
            middle = time.perf_counter()
            for frame, form in zip(frames, stored, strict=True):
                result.codec.decode_into(form, out[: len(frame)])
            end = time.perf_counter()
            if not round_number:  # the warm-up round checks the results
                _check(result.codec, frames, stored)
                result.stored = sum(map(len, stored))
                result.at_rest = sum(align(len(form)) for form in stored)
                continue
            result.encode_s.append(middle - begin)
            result.decode_s.append(end - middle)
    return results


def _check(
    codec: Codec,
    frames: list[memoryview],
    stored: list[bytes | bytearray | memoryview],
) -> None:
    for frame, form in zip(frames, stored, strict=True):
        out = bytearray(len(frame))
        codec.decode_into(form, memoryview(out))
        if out != frame:
            raise RuntimeError(f"{codec} does not give back what it was given")


def entropy_bound(raw: bytes) -> float:
    """Return the least bytes for order-0 codes of the low and the high bytes of the values, frame
    by frame."""
    values = np.frombuffer(raw, dtype=np.uint8)
    frames = [
        values[start : start + FRAME_BYTES]
        for start in range(0, len(values), FRAME_BYTES)
    ]
    return sum(_order0(frame[place::2]) for frame in frames for place in (0, 1))


def _order0(plane: npt.NDArray[np.uint8]) -> float:
    counts = np.bincount(plane)
    counts = counts[counts > 0]
    return float(counts @ np.log2(len(plane) / counts)) / 8


def report(raw: bytes, results: list[Result]) -> None:
    """Print the table and the verdicts."""
    bound = entropy_bound(raw)
    zstd, planes = (
        next(r for r in results if isinstance(r.codec, kind))
        for kind in (ZstdCodec, PlanesCodec)
    )
    rows = [_row(result, zstd, len(raw), bound) for result in results]
    title = (
        f"{len(raw) / (1 << 20):.0f} MiB of bfloat16 K/V in frames of 1 MiB; entropy bound "
        f"{len(raw) / bound:.3f}"
    )
    show(
        title,
        [
            "codec",
            "ratio",
            "of the bound",
            "padded",
            "encode, × zstd:1",
            "decode, × zstd:1",
        ],
        rows,
    )
    decode = _times(zstd.decode_s, planes.decode_s)
    near = bound / planes.stored
    print(
        f"{planes.codec}: {near:.3f} of the bound, at least {BOUND_TARGET}: "
        f"{_verdict(near >= BOUND_TARGET)}"
    )
    print(
        f"{planes.codec}: decodes {decode:.2f} × zstd:1, at least {DECODE_TARGET}: "
        f"{_verdict(decode >= DECODE_TARGET)}"
    )


def _row(result: Result, zstd: Result, raw_length: int, bound: float) -> list[str]:
    sizes = [
        raw_length / result.stored,
        bound / result.stored,
        raw_length / result.at_rest,
    ]
    speeds = [
        f"{raw_length / statistics.median(ours) / 1e9:.2f} GB/s, {_times(theirs, ours):.2f} ×"
        for ours, theirs in (
            (result.encode_s, zstd.encode_s),
            (result.decode_s, zstd.decode_s),
        )
    ]
    if isinstance(result.codec, RawCodec):
        speeds[0] = "-"  # encodes nothing
    return [str(result.codec), *(f"{size:.3f}" for size in sizes), *speeds]


def _times(slow: list[float], fast: list[float]) -> float:
    """Return the median, over the rounds, of how many times faster ``fast`` is than ``slow``."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def _verdict(met: bool) -> str:
    return "yes" if met else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kv", type=Path, help="a file of raw bfloat16 bytes")
    parser.add_argument("--mib", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--write", type=Path, help="keep the bytes that were made, and measure nothing"
    )
    arguments = parser.parse_args()
    size = arguments.mib << 20
    if arguments.kv is None and (missing := missing_packages()):
        sys.exit(
            f"there is no KV to compress: name a file with --kv, or pip install {' '.join(missing)}"
        )
    raw = (make_kv(size) if arguments.kv is None else arguments.kv.read_bytes())[:size]
    if arguments.write is not None:
        arguments.write.write_bytes(raw)
        return
    report(
        raw, measure(raw, [RawCodec(), ZstdCodec(1), PlanesCodec(2)], arguments.rounds)
    )


if __name__ == "__main__":
    main()
