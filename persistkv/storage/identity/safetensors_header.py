"""Parser for the header of a safetensors file: 8 bytes of length, little-endian, then JSON. The input is untrusted."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from persistkv.errors import ConfigurationError

_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
_LENGTH_BYTES = 8
_MAX_RANK = 64
_DTYPE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3": 8, "F8_E5M2": 8}
_DTYPE_BITS |= {"BOOL": 8, "U8": 8, "I8": 8, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
_DTYPE_BITS |= {"F32": 32, "I32": 32, "U32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64}


class TensorSpan(NamedTuple):
    """One tensor and the position of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """File offset of the first byte."""
    stop: int
    """File offset after the last byte."""


def read_header(path: Path, descriptor: int, size: int) -> list[TensorSpan]:
    """Return the tensors of an open file of ``size`` bytes, sorted by position. They cover the file without gaps.

    :raises ConfigurationError: the file is not a valid safetensors file.
    """
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise _invalid(path, f"its header cannot have {length} of {size} bytes")
    try:
        header = json.loads(os.pread(descriptor, length, _LENGTH_BYTES), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise _invalid(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    base = _LENGTH_BYTES + length
    tensors = sorted((_span(path, name, entry, base) for name, entry in header.items()), key=lambda span: span.start)
    _check_cover(path, tensors, base, size)
    return tensors


def _span(path: Path, name: str, entry: Any, base: int) -> TensorSpan:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            plain = len(shape) <= _MAX_RANK and all(type(size) is int and size >= 0 for size in shape)
            if plain and 0 <= begin <= end:
                _check_length(path, name, dtype, shape, end - begin)
                return TensorSpan(name, dtype, tuple(shape), base + begin, base + end)
    raise _invalid(path, f"tensor {name!r} has no dtype, shape and data_offsets")


def _check_length(path: Path, name: str, dtype: str, shape: list[int], length: int) -> None:
    """Check that a tensor's length fits its dtype and shape. A dtype unknown to this release is not checked: its bytes
    are hashed in any case.

    :raises ConfigurationError: the length does not fit.
    """
    bits = _DTYPE_BITS.get(dtype)
    if bits is not None and prod(shape) * bits != length * 8:
        raise _invalid(path, f"tensor {name!r} of {dtype} {shape} cannot have {length} bytes")


def _check_cover(path: Path, tensors: list[TensorSpan], base: int, size: int) -> None:
    end = base
    for span in sorted(tensors, key=lambda span: (span.start, span.stop)):
        if span.start != end:
            raise _invalid(path, f"tensor {span.name!r} begins at byte {span.start} instead of {end}")
        end = span.stop
    if end != size:
        raise _invalid(path, f"its tensors end at byte {end} of {size}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _invalid(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError("checkpoint", str(path), f"a valid safetensors file; {problem}")
