"""Damage as data that a fuzzer generates, shrinks and prints."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

KINDS = ("flip", "number", "cut", "insert", "repeat", "truncate")
MAX_INDEX = (1 << 16) - 1
MAX_EDITS = 6
NUMBERS = (
    0,
    1,
    2,
    0x7F,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
"""Extreme values of counts and lengths."""


class Edit(NamedTuple):
    """One change to some bytes. All combinations of numbers are valid."""

    kind: str
    at: int
    value: int


def apply_edits(data: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the bytes after all edits, applied in order."""
    body = bytearray(data)
    for edit in edits:
        _apply(body, edit)
    return bytes(body)


def _apply(body: bytearray, edit: Edit) -> None:
    at, value = edit.at % (len(body) + 1), edit.value
    if edit.kind == "insert":
        body[at:at] = random.Random(value).randbytes(value % 64)
    elif edit.kind == "truncate":
        del body[at:]
    elif not body:
        return
    elif edit.kind == "flip":
        body[at % len(body)] ^= value % 255 + 1
    elif edit.kind == "number":
        width = (1, 2, 4, 8)[value % 4]
        at -= at % width
        number = NUMBERS[value // 4 % len(NUMBERS)]
        body[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(
            width, "little"
        )
    elif edit.kind == "cut":
        del body[at : at + value % 100]
    elif edit.kind == "repeat":
        body[at:at] = body[at : at + value % 1000] * (value % 7)
    else:
        raise ValueError(edit.kind)
