"""Rounding of integers to multiples."""

from __future__ import annotations


def divide_up(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded up to an integer; ``divisor`` must be positive."""
    # integers only: a float would be inexact above 2**53
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return divide_up(number, multiple) * multiple


def round_down(number: int, multiple: int) -> int:
    """Return the largest multiple of ``multiple`` that is at most ``number``."""
    return number // multiple * multiple
